"""Copies the simple values of a checkpoint, such as hyperparameters, into a JSON file.

Simple values are numbers, strings, booleans, None, and lists, tuples, sets and dicts of them. JSON has
no other keys than strings, no infinite numbers and no integers of any size, so these become strings.
"""

from __future__ import annotations

import math
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core import strict_json
from blobstore.core.escape import join_some, quote
from blobstore.sources.base import SourceFile
from blobstore.unpickler.values import Items, Number, Record, is_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Final

VALUES_FILE: Final = "checkpoint_values.json"
_MAX_SIZE = 8 * 2**20
"""Characters of all strings, keys and numbers, and ``_COST`` for each value."""
_COST = 8
_MAX_DEPTH = 64
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1
"""Other integers become strings, because most programs cannot read them from JSON."""
_SHOWN = 8
_NOTHING: Final = object()
"""Stands for a value that is left out."""
_SIMPLE_OBJECTS = ("Namespace", "AttributeDict")
"""Classes on the list of known globals whose objects are no more than their attributes or entries."""


class PlainValues(NamedTuple):
    """The simple values of a checkpoint."""

    kept: Any
    """The outermost list or dict, without tensors and other values; None if nothing is left."""
    notices: list[str]
    """Remarks about the values that are left out."""


class _TooLarge(Exception):
    """The values have more characters than are kept."""


def plain_values(value: Any) -> PlainValues:
    """Return the simple values next to the tensors of a checkpoint.

    A list or dict of which nothing is left is left out itself. In a list, None takes the place of what
    is left out, so that the others keep their positions.
    """
    copy = _Copy()
    kept = copy.of(value, 0)
    notices = []
    if others := +copy.others:
        count, keys = others.total(), join_some([*map(quote, others)], _SHOWN)
        noun = "values that are" if count > 1 else "value that is"
        notices.append(f"left out: {count} {noun} neither a tensor nor simple, in {keys}")
    if copy.too_large:
        keys = join_some([*map(quote, copy.too_large)], _SHOWN)
        notices.append(f"left out: the values in {keys}, over the limit of {_MAX_SIZE} characters")
    return PlainValues(None if kept is _NOTHING else kept, notices)


def with_values(
    files: Sequence[SourceFile], values: Mapping[str, Any], path: Path
) -> tuple[list[SourceFile], list[str]]:
    """Add a file with the values of some checkpoints to the files of a source, and return notices.

    The file has the values alone if they are the same in all checkpoints, otherwise an object with the
    names of the checkpoints as keys.

    Args:
        files: the other files of the source.
        values: what :func:`plain_values` kept of each checkpoint, by its name.
        path: the source.
    """
    found = {name: value for name, value in values.items() if value is not None}
    if not found:
        return [*files], []
    if any(file.name == VALUES_FILE for file in files):
        names = join_some([*map(quote, found)], _SHOWN)
        reason = f"because the folder has another {VALUES_FILE}"
        return [*files], [f"left out: the values in {names} that are not tensors, {reason}"]
    texts = {strict_json.dumps(value) for value in values.values()}
    text = texts.pop() if len(texts) == 1 else strict_json.dumps(found)
    made = SourceFile(VALUES_FILE, path, f"{text}\n".encode())
    return sorted([*files, made], key=attrgetter("name")), []


class _Copy:
    """A copy being made, with its remaining limits."""

    def __init__(self) -> None:
        self.others: Counter[str] = Counter()
        """Number of values that are left out, except tensors, by outermost key."""
        self.too_large: list[str] = []
        """The outermost keys whose values are left out because there are too many."""
        self._left = _MAX_SIZE
        self._key = ""
        """The outermost key being copied."""
        self._objects = 0
        """Depth in objects, where tensors are not looked for."""

    def of(self, value: Any, depth: int) -> Any:
        """Return a copy of a value; ``_NOTHING`` if it is left out."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return self._scalar(value)
        if self._is_elsewhere(value):
            return _NOTHING
        if depth < _MAX_DEPTH:
            if kind is dict:
                return self._dict(value, depth)
            if kind in (list, tuple, Items):
                return self._list(value.items if kind is Items else value, depth)
            if kind is Record and value.cls.name in _SIMPLE_OBJECTS and not value.arguments:
                return self._object(value, depth)
        return self._left_out()

    def _scalar(self, value: Any) -> Any:
        if type(value) is float and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        if type(value) is int and not _MIN_INTEGER <= value <= _MAX_INTEGER:
            value = str(value)
        if type(value) is str:
            self._spend(len(value))
            return value if _is_unicode(value) else self._left_out()
        return value

    def _is_elsewhere(self, value: Any) -> bool:
        """Return whether a value is a tensor or module, which are not looked for in objects."""
        if self._objects:
            return False
        return is_tensor(value) or (type(value) is Record and value.cls.use is None)

    def _object(self, record: Record, depth: int) -> Any:
        attributes = record.entries if record.state is None else record.state
        if type(attributes) is not dict or (record.entries and record.state):
            return self._left_out()
        self._objects += 1
        try:
            return self._dict(attributes, depth)
        finally:
            self._objects -= 1

    def _dict(self, value: Mapping[Any, Any], depth: int) -> Any:
        if depth:
            self._spend(_COST * len(value))
        copied: dict[str, Any] = {}
        for key, child in value.items():
            if self._is_elsewhere(child):
                continue
            name = str(key) if type(key) in (str, Number) else None
            if not depth:
                self._key = "?" if name is None else name
            if name is None or name in copied or not _is_unicode(name):  # 1 and "1" are the same
                self._left_out()
                continue
            found = self._child(name, child, depth)
            if found is not _NOTHING:
                copied[name] = found
        return copied if copied or not value else _NOTHING

    def _list(self, value: Sequence[Any], depth: int) -> Any:
        if depth:
            self._spend(_COST * len(value))
        copied = []
        for index, child in enumerate(value):
            if not depth:
                self._key = str(index)
            copied.append(self._child("", child, depth))
        if copied and all(found is _NOTHING for found in copied):
            return _NOTHING
        return [None if found is _NOTHING else found for found in copied]

    def _child(self, key: str, value: Any, depth: int) -> Any:
        if depth:
            self._spend(len(key))
            return self.of(value, depth + 1)
        before = self.others[self._key]
        try:
            self._spend(_COST + len(key))
            return self.of(value, 1)
        except _TooLarge:
            self.others[self._key] = before
            self.too_large.append(self._key)
            return _NOTHING

    def _left_out(self) -> Any:
        self.others[self._key] += 1
        return _NOTHING

    def _spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise _TooLarge


def _is_unicode(text: str) -> bool:
    """Return whether a string has no lone surrogates."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False

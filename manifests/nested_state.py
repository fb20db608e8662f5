"""A state of nested dicts, lists and tuples as tensors and the record of a step, and back.

Keys and paths are those of ``torch.distributed.checkpoint``, which knows lists, and dicts with texts as keys. The
record says of other containers what they are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, UsageError
from blobstore.manifests.plain_values import decode, encode
from blobstore.manifests.step_record import RECORD_FILE, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from blobstore.manifests.plain_values import Kind
    from blobstore.manifests.step_record import Path

    Kinds = Mapping[type, tuple[str, Kind]]

_DICTS: Final = (dict, OrderedDict, Counter)


class _Flattening:
    """A state being taken apart."""

    def __init__(self, is_tensor: Callable[[Any], bool], kinds: Kinds) -> None:
        self._is_tensor = is_tensor
        self._kinds = kinds
        self.tensors: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self.values: dict[str, tuple[Path, Any]] = {}
        self.containers: dict[Path, Any] = {}

    def visit(self, value: Any, path: Path = ()) -> None:
        key = ".".join(map(str, path))
        if path and (self._is_tensor(value) or self._is_whole(value)):
            if key in self.paths or key in self.values:
                raise UsageError(
                    f"two values of the state would have the key {quote(key)}",
                    advice="rename one of them",
                )
            if self._is_tensor(value):
                self.tensors[key], self.paths[key] = value, path
            else:
                self.values[key] = path, encode(value, key, self._kinds)
            return
        if type(value) in (list, tuple):
            shell: Any = type(value)([None] * len(value))
            is_plain = type(value) is list
            parts: list[tuple[str | int, Any]] = list(enumerate(value))
        else:
            shell = type(value)(dict.fromkeys(value))
            is_plain = type(value) is dict and all(type(name) is str for name in value)
            parts = [(str(name), one) for name, one in value.items()]
        if not is_plain or not parts:
            self.containers[path] = encode(shell, key, self._kinds)
        for name, one in parts:
            self.visit(one, (*path, name))

    def _is_whole(self, value: Any) -> bool:
        """Return whether a value is not taken apart: those that torch keeps whole, and have no tensors."""
        if type(value) is list:
            return all(not self._is_tensor(one) and self._is_whole(one) for one in value)
        return type(value) not in _DICTS and not (type(value) is tuple and self._has_tensor(value))

    def _has_tensor(self, value: Any) -> bool:
        if type(value) in (*_DICTS, list, tuple):
            parts = value if type(value) in (list, tuple) else value.values()
            return any(map(self._has_tensor, parts))
        return self._is_tensor(value)


def flatten(
    state: Mapping[Any, Any], model: str, is_tensor: Callable[[Any], bool], kinds: Kinds
) -> tuple[dict[str, Any], StepRecord]:
    """Return the tensors of a state by key, and the record of everything else.

    Args:
        state: the state.
        model: the part of it that is the model; may be empty.
        is_tensor: returns whether a value is a tensor.
        kinds: the types of libraries, as for :func:`encode`.

    Raises:
        UnsupportedSource: a value is not plain.
        UsageError: two values would have one key.
    """
    parts = _Flattening(is_tensor, kinds)
    parts.visit(state if type(state) in _DICTS else dict(state))
    record = StepRecord(
        model=model, tensors=parts.paths, values=parts.values, containers=parts.containers
    )
    return parts.tensors, record


class _Branch(dict["str | int", Any]):
    """What a container has, by the last items of paths."""

    shell: Any = None
    """The container with None for each value, if it is not one that torch knows."""


def join(record: StepRecord, tensors: Mapping[str, Any], kinds: Kinds) -> Any:
    """Return the state that :func:`flatten` took apart; the record is not trusted.

    Raises:
        BlobDamaged: the record does not fit the tensors, or itself.
    """
    root = _Branch()
    try:
        for path, shell in record.containers.items():
            _branch(root, path).shell = decode(shell, kinds)
        for key, path in record.tensors.items():
            _put(root, path, tensors[key])
        for path, value in record.values.values():
            _put(root, path, decode(value, kinds))
        return _joined(root)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BlobDamaged(f"{RECORD_FILE} does not describe a state: {quote(error)}") from None


def _branch(root: _Branch, path: Path) -> _Branch:
    for name in path:
        root = root.setdefault(name, _Branch())
        if type(root) is not _Branch:
            raise ValueError(f"{path} is in a value")
    return root


def _put(root: _Branch, path: Path, value: Any) -> None:
    if _branch(root, path[:-1]).setdefault(path[-1], value) is not value:
        raise ValueError(f"{path} occurs twice")


def _joined(value: Any) -> Any:
    if type(value) is not _Branch:
        return value
    parts = {name: _joined(one) for name, one in value.items()}
    shell = value.shell
    if shell is None and parts and all(type(name) is int for name in parts):
        shell = [None] * len(parts)
    if shell is None:
        return parts
    if len(shell) != len(parts):
        raise ValueError(f"{len(parts)} values where there are {len(shell)}")
    if type(shell) in (list, tuple):
        return type(shell)(parts[index] for index in range(len(shell)))
    return type(shell)({name: parts[str(name)] for name in shell})

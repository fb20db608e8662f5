"""The output of all commands: results as text or JSON, notes and errors.

The result of a command is on standard output; notes, errors and progress are on standard error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import stat
import sys
import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import click

from blobstore.cli.render import cell, is_terminal, printable_lines, table
from blobstore.core import interrupts
from blobstore.core.escape import escape
from blobstore.core.limits import gather
from blobstore.errors import BlobstoreError, Damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    from typing_extensions import Buffer

    Data: TypeAlias = Mapping[str, Any] | Sequence[Any]

_OUTPUT_PATIENCE = 1.0
"""Seconds that a result may take to be written after a request to stop."""
_ROWS_WAIT = 1.0
"""Seconds that rows may wait for others, with which they are aligned."""
BATCH: Final = 1000
"""So many rows or more are printed at once."""
SIGNATURE_FIELDS = "kind state signer key signed_as message created"
"""The fields of a signature, for :func:`records`."""
_ARGUMENT = re.compile(
    r"(?<![\w/'])"  # not in a path or a name that a message quotes
    r"(?:(anonymous|cold|force|mount|verify)=(True|False)|"
    r"(keep_last|mount_from|older_than|part_size|tls_cert|tls_key|token_file))\b"
)
"""Arguments of Python of which the command line has options, as messages of the library name them."""
VOLUME_KEYS = {"quiet": "blobstore.quiet", "verbose": "blobstore.verbose"}


class OutputClosed(Exception):
    """The reader of standard output has closed it, as ``head`` does."""


class Output:
    """The output of one command: text for people or, with ``--json``, JSON for programs."""

    def __init__(self, *, is_json: bool) -> None:
        self.is_json = is_json
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since the command began, rounded for JSON."""
        return round(time.monotonic() - self._begin, 3)

    def result(
        self,
        data: Data | Callable[[], Data],
        text: str | Iterable[str],
        *,
        names: Iterable[object] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        """Print the result of the command, in the form that the user wants. Raises as :func:`show`.

        Args:
            data: what ``--json`` prints, or a function that returns it and is called for JSON alone.
            text: what people read, or its lines. An iterator is read only if its lines are printed.
            names: what ``--quiet`` prints instead of the text, one per line. None prints the text.
            notes: what people read on standard error, because only the data has it.
        """
        if self.is_json:
            show_json(data() if callable(data) else data)
            return
        if names is not None and is_quiet():
            text = map(cell, names)
        show(text if isinstance(text, str) else "\n".join(text))
        show_note(*notes)

    def line(self, text: str) -> None:
        """Print a line for people before the result; JSON is one document. Raises as :func:`show`."""
        if not self.is_json:
            show(text)


class GrowingLines:
    """Lines that are printed while others are found. None waits long for others."""

    def __init__(self) -> None:
        self._waiting: list[Any] = []
        self._printed = time.monotonic()

    def add(self, items: Iterable[Any]) -> None:
        """Add lines, and print those that have waited for a while, or are many. Raises as :func:`show`."""
        self._waiting += items
        if len(self._waiting) >= BATCH or time.monotonic() - self._printed >= _ROWS_WAIT:
            self.print()

    def print(self) -> None:
        """Print what was not printed yet. Raises as :func:`show`."""
        if self._waiting:
            self._print(self._waiting)
            self._waiting = []
            self._printed = time.monotonic()

    def end(self, rest: Mapping[str, Any]) -> None:
        """Print what was not printed yet, and in JSON the rest of the document. Raises as :func:`show`."""
        del rest
        self.print()

    def _print(self, items: list[Any]) -> None:
        show("\n".join(items))


class GrowingJson(GrowingLines):
    """A JSON document that begins with a list, whose items are printed while others are found."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key
        self._comma = "," if is_terminal() else ", "
        self._has_items = False

    def end(self, rest: Mapping[str, Any]) -> None:
        """See :meth:`GrowingLines.end`."""
        self.print()
        if not self._has_items:
            show_json({self._key: [], **rest})
            return
        end = "\n  ]" if is_terminal() else "]"
        _print(f"{end}{self._comma}{_json(rest)[1:]}\n")

    def _print(self, items: list[Any]) -> None:
        text = _json({self._key: items})
        begin, end = text.index("[") + 1, text.rindex("]")
        start = self._comma if self._has_items else text[:begin]
        self._has_items = True
        _print(start + text[begin:end].rstrip())


class GrowingTable(GrowingLines):
    """A table that is printed while its rows are found. A column gets wider from the first row on that needs it."""

    def __init__(
        self, *headings: str, right: Collection[int] = (), alarming: Collection[str] = ()
    ) -> None:
        """Alarming are rows that have one of these cells."""
        super().__init__()
        self._headings = headings
        self._right = right
        self._alarming = alarming
        self._longest: list[tuple[str, ...]] = []
        """None or one row, of the longest cells so far."""

    def _print(self, items: list[tuple[str, ...]]) -> None:
        rows = [*self._longest, *items]
        alarming = [number for number, row in enumerate(rows) if {*row} & {*self._alarming}]
        text = table(self._headings, rows, right=self._right, alarming=alarming)
        show("\n".join(text.split("\n")[2:]) if self._longest else text)
        self._longest = [tuple(max(column, key=len) for column in zip(*rows, strict=True))]


def show(text: str) -> None:
    """Print a result.

    Raises:
        OutputClosed: the reader has closed standard output.
        BlobstoreError: standard output cannot be written, for example because a disk is full.
    """
    _print(text if text.endswith("\n") or not text else f"{text}\n")


def _print(text: str) -> None:
    with _output() as stream:
        _write(stream, text)


def show_bytes(data: bytes) -> None:
    """Print bytes exactly, or escaped on a terminal. Raises as :func:`show`."""
    if is_terminal():
        show(printable_lines(data.decode(errors="backslashreplace")))
        return
    with _output() as stream:
        _write(stream.buffer, data)


def show_pieces(pieces: Iterable[Buffer]) -> None:
    """Print bytes exactly as they come, or escaped on a terminal. Raises as :func:`show`."""
    if is_terminal():
        show_bytes(gather(pieces))
        return
    with _output() as stream:
        for piece in pieces:
            interrupts.check()
            _write(stream.buffer, piece)


def timestamp(moment: float) -> str:
    """Return a moment, given in seconds since the epoch, as ISO 8601 in UTC, for JSON."""
    from datetime import UTC, datetime

    latest = datetime.max.replace(tzinfo=UTC).timestamp() - 86400
    return datetime.fromtimestamp(min(max(moment, 0), latest), UTC).isoformat(timespec="seconds")


def show_json(value: Any) -> None:
    """Print ``value`` as one ASCII JSON document. Raises as :func:`show`.

    References, paths and errors become texts. Digests are tuples: :func:`record` converts them.
    """
    show(_json(value))


def _json(value: Any) -> str:
    from pathlib import PurePath

    from blobstore.manifests.reference import Reference

    def text_of(item: object) -> str:
        if isinstance(item, BlobstoreError):
            return with_options(str(item))
        if isinstance(item, Reference | PurePath):
            return str(item)
        raise TypeError(f"{type(item).__name__} has no JSON form")

    return json.dumps(value, indent=2 if is_terminal() else None, default=text_of)


def record(item: object, fields: str) -> dict[str, Any]:
    """Return fields of a result for :func:`show_json`. See :func:`records`."""
    return records([item], fields)[0]


def records(items: Iterable[object], fields: str) -> list[dict[str, Any]]:
    """Return fields of several results for :func:`show_json`.

    Args:
        items: results of one type.
        fields: two or more attributes, separated by spaces. ``bytes=size`` gives the attribute
            ``size`` the key ``bytes``. The keys in ``_JSON_FORMS`` have the form of that table.
    """
    keys, values_of, converted = _parse_fields(fields)
    found = [dict(zip(keys, values_of(item), strict=True)) for item in items]
    for key, convert in converted:
        for values in found:
            values[key] = convert(values[key])
    return found


@functools.cache
def _parse_fields(fields: str) -> tuple[list[str], Callable[[object], Any], list[Any]]:
    # Cached, because diff and compare show each tensor with parts of its own.
    pairs = [field.rpartition("=")[::2] for field in fields.split()]
    keys = [key or attribute for key, attribute in pairs]
    converted = [(key, _JSON_FORMS[key]) for key in keys if key in _JSON_FORMS]
    return keys, attrgetter(*(attribute for _, attribute in pairs)), converted


def _finite(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "Infinity" if value > 0 else "-Infinity"


_JSON_FORMS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("digest", "registry_digest", "blob", "base"), lambda digest: digest and str(digest)
    ),
    **dict.fromkeys(
        ("group_size", "base_group_size", "architecture", "model_type"), lambda value: value or None
    ),
    **dict.fromkeys(
        ("modified", "until", "removable", "created"),
        lambda moment: None if moment is None else timestamp(moment),
    ),
    **dict.fromkeys(("relative_error", "snr_db"), _finite),
    "remote": str,
    "seconds": lambda seconds: round(seconds, 3),
}
"""The keys whose values have another form in JSON. A digest is a tuple, so show_json cannot know it."""


def is_quiet() -> bool:
    """Return whether the user wants no notes and no progress."""
    return _has_option("quiet")


def is_verbose() -> bool:
    """Return whether the user wants more details."""
    return _has_option("verbose")


def _has_option(name: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and VOLUME_KEYS[name] in context.meta


def with_options(message: str) -> str:
    """Return a message of the library with the options of commands instead of arguments of Python."""

    def option(found: re.Match[str]) -> str:
        name = (found[1] or found[3]).replace("_", "-")
        return f"--{'no-' * (found[2] == 'False')}{name}"

    return _ARGUMENT.sub(option, message)


def show_note(*messages: str) -> None:
    """Print notes on standard error, unless the user wants none."""
    for message in () if is_quiet() else messages:
        show_line(f"note: {escape(with_options(message))}")


def show_error(message: str) -> None:
    """Print an error on standard error."""
    start = "blobstore: error:"
    if sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        start = click.style(start, fg="red", bold=True)
    show_line(f"{start} {escape(with_options(message))}")


def exit_with(errors: Iterable[object], exit_code: int = Damaged.exit_code) -> None:
    """Print errors, and exit if there are any."""
    listed = list(map(str, errors))
    for error in listed:
        show_error(error)
    if listed:
        click.get_current_context().exit(exit_code)


def show_line(line: str) -> None:
    """Print a line on standard error. It is lost if standard error cannot be written."""
    try:
        click.echo(line, err=True)
    except OSError:  # the message is lost, but the exit code must not change
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _write(stream: Any, data: str | Buffer) -> None:
    """Write and flush. A stalled reader delays the exit by a bounded time."""

    def write() -> None:
        stream.write(data)
        stream.flush()

    if _is_file(stream):  # which takes what is written at once
        write()
    else:
        interrupts.call(write, patience=_OUTPUT_PATIENCE)


def _is_file(stream: Any) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except OSError:  # it has no descriptor
        return False


@contextlib.contextmanager
def _output() -> Iterator[Any]:
    if sys.stdout is None:
        raise BlobstoreError("cannot write to standard output: it is closed")
    try:
        yield sys.stdout
    except OSError as error:
        # The interpreter flushes on exit and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise OutputClosed from None
        raise BlobstoreError(f"cannot write to standard output: {error.strerror}") from error

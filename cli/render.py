"""The output of all commands: tables, numbers, JSON and the progress bar.

Text from files goes through :func:`cell` on its way out. The results of a command are on standard
output; notes, errors and progress are on standard error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import stat
import sys
import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import click

from blobstore.core import interrupts
from blobstore.core.escape import MAX_SHOWN, escape
from blobstore.core.limits import gather
from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from blobstore.core.progress import Progress

_MAX_WIDTH = 80
"""A longer cell shifts the rest of its row; it does not widen its column."""
_STEP = 1000
_BYTES = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_COUNTS = ("", "k", "M", "B", "T")
_AGES = (
    (365 * 86400, "year"),
    (30 * 86400, "month"),
    (7 * 86400, "week"),
    (86400, "day"),
    (3600, "hour"),
    (60, "minute"),
)
_MIN_NAME = 16
"""The least characters to which a name is shortened, so that a table fits the terminal."""
_DROPPED_FIRST = ("DIGEST", "SHA256", "BITS", "BLOBS")
"""Columns that a table leaves out if the terminal is too narrow, in this order."""
_NARROW = 100
"""Columns of a terminal from which on the progress bar has a rate."""
_LINE_SECONDS = 10.0
"""Seconds between two lines of progress where there is no terminal."""
_OUTPUT_PATIENCE = 1.0
"""Seconds that a result may take to be written after a request to stop."""
VOLUME_KEYS = {"quiet": "blobstore.quiet", "verbose": "blobstore.verbose"}
_DUMB_TERMINALS = ("dumb", "unknown")


class OutputClosed(Exception):
    """The reader of standard output has closed it, as ``head`` does."""


def show(text: str) -> None:
    """Print a result.

    Raises:
        OutputClosed: the reader has closed standard output.
        BlobstoreError: standard output cannot be written, for example because a disk is full.
    """
    with _output() as stream:
        _write(stream, text if text.endswith("\n") or not text else f"{text}\n")


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


def since(begin: float) -> float:
    """Return the seconds since a moment of the monotonic clock, rounded for JSON."""
    return round(time.monotonic() - begin, 3)


def timestamp(moment: float) -> str:
    """Return a moment, given in seconds since the epoch, as ISO 8601 in UTC, for JSON."""
    from datetime import UTC, datetime

    latest = datetime.max.replace(tzinfo=UTC).timestamp() - 86400
    return datetime.fromtimestamp(min(max(moment, 0), latest), UTC).isoformat(timespec="seconds")


def show_json(value: Any) -> None:
    """Print ``value`` as one ASCII JSON document. Raises as :func:`show`.

    References, paths and errors become texts. Digests are tuples: :func:`record` converts them.
    """
    from pathlib import PurePath

    from blobstore.manifests.reference import Reference

    def text_of(item: object) -> str:
        if isinstance(item, Reference | PurePath | BlobstoreError):
            return str(item)
        raise TypeError(f"{type(item).__name__} has no JSON form")

    show(json.dumps(value, indent=2 if is_terminal() else None, default=text_of))


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
    **dict.fromkeys(("digest", "blob", "base"), lambda digest: digest and str(digest)),
    **dict.fromkeys(("group_size", "base_group_size"), lambda size: size or None),
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


def show_note(message: str) -> None:
    """Print a note on standard error, unless the user wants none."""
    if not is_quiet():
        _show_line(f"note: {escape(message)}")


def show_error(message: str) -> None:
    """Print an error on standard error."""
    start = "blobstore: error:"
    if sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        start = click.style(start, fg="red", bold=True)
    _show_line(f"{start} {escape(message)}")


def _show_line(line: str) -> None:
    try:
        click.echo(line, err=True)
    except OSError:  # the message is lost, but the exit code must not change
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def cell(text: object) -> str:
    """Return text from a file for a table: escaped, and shortened if it is very long."""
    return escape(str(text), MAX_SHOWN)


def printable_lines(text: str) -> str:
    """Return text with everything escaped except line feeds."""
    return "\n".join(map(escape, text.split("\n")))


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Iterable[int] = (),
    alarming: Iterable[int] = (),
) -> str:
    """Return rows as aligned columns. The texts must be escaped already.

    A table that is wider than the terminal leaves out digests, and shortens names in the middle.

    Args:
        headings: one per column.
        rows: one cell per column.
        right: columns of numbers.
        alarming: rows to print in red if the terminal has colours.
    """
    numbers = {headings[index] for index in right}
    columns = dict(zip(headings, zip(*[headings, *rows], strict=True), strict=True))
    if is_terminal():
        columns = _fitted(columns, numbers, shutil.get_terminal_size().columns)
    widths = {name: min(_MAX_WIDTH, max(map(len, column))) for name, column in columns.items()}
    aligned = [
        [
            text.rjust(widths[name]) if name in numbers else text.ljust(widths[name])
            for text in column
        ]
        for name, column in columns.items()
    ]
    texts = ["  ".join(line).rstrip() for line in zip(*aligned, strict=True)]
    if is_terminal() and not os.environ.get("NO_COLOR"):
        texts[0] = click.style(texts[0], bold=True)
        for row in alarming:
            texts[row + 1] = click.style(texts[row + 1], fg="red")
    return "\n".join(texts)


def _fitted(
    columns: dict[str, tuple[str, ...]], numbers: set[str], width: int
) -> dict[str, tuple[str, ...]]:
    """Return the columns of a table without digests and with shorter names, if it is too wide."""
    widths = {name: max(map(len, column)) for name, column in columns.items()}

    def excess() -> int:
        return sum(widths.values()) + 2 * (len(widths) - 1) - width

    for name in _DROPPED_FIRST:
        if excess() > 0:
            widths.pop(name, None)
    for name in sorted(widths.keys() - numbers, key=lambda name: -widths[name]):
        widths[name] = min(widths[name], max(widths[name] - max(excess(), 0), _MIN_NAME))
    return {
        name: tuple(shortened(text, limit) for text in columns[name])
        for name, limit in widths.items()
    }


def shortened(text: str, limit: int) -> str:
    """Return a text with an ellipsis in its middle, if it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    return f"{text[: limit - 1 - tail]}\u2026{text[len(text) - tail :]}"


def human_bytes(count: int) -> str:
    """Return a number of bytes in decimal units: ``768 B``, ``90.9 MB``."""
    return _scaled(count, _BYTES)


def human_count(count: int) -> str:
    """Return a count in short form: ``768``, ``22.7 M``, ``671 B``."""
    return _scaled(count, _COUNTS).rstrip()


def human_seconds(seconds: float) -> str:
    """Return a duration: ``0.05 s``, ``2 min 5 s``."""
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)} min {int(rest)} s" if minutes else f"{rest:.2f} s"


def human_wait(seconds: float) -> str:
    """Return how long something takes at most: ``52 minutes``."""
    for length, unit in _AGES:
        if seconds > length:
            return count_of(math.ceil(seconds / length), unit)
    return count_of(max(math.ceil(seconds), 0), "second")


def human_age(moment: float) -> str:
    """Return how long ago a moment was, given in seconds since the epoch."""
    age = time.time() - moment
    for length, unit in _AGES:
        if age >= length:
            return f"{count_of(int(age // length), unit)} ago"
    return "just now"


def count_of(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def without_base(count: int) -> str:
    """Return a line that reports blobs whose delta was given up."""
    return (
        f"  {count_of(count, 'blob')} compressed without a base: the base is damaged, or the delta "
        "could not be verified"
    )


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """Show progress on standard error: a bar on a terminal, else a line every ten seconds.

    Yields None if the user wants no progress.
    """
    if sys.stderr is None or is_quiet():
        yield None
        return
    if not sys.stderr.isatty() or os.environ.get("TERM", "") in _DUMB_TERMINALS:
        yield _progress_lines()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar
    from rich.table import Column

    def fixed() -> Column:
        return Column(no_wrap=True)

    console = Console(stderr=True)
    is_narrow = console.width < _NARROW
    columns: list[ProgressColumn] = [
        BarColumn(bar_width=max(10, min(40, console.width // 5)), table_column=fixed()),
        DownloadColumn(table_column=fixed()),
    ]
    if not is_narrow:
        columns += [
            TransferSpeedColumn(table_column=fixed()),
            TextColumn("ETA", table_column=fixed()),
            TimeRemainingColumn(table_column=fixed()),
        ]
    # The rest of the line, however long the name is.
    columns.append(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    )
    name_width = max(_MIN_NAME, console.width - console.width // 5 - (18 if is_narrow else 48))
    with Bar(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("starting", total=None)
        last_total = -1

        def advance(what: str, done: int, total: int) -> None:
            nonlocal last_total
            if total != last_total:  # a new phase, which has its own speed
                bar.reset(task, total=total or None)
                last_total = total
            is_done = done >= total > 0
            text = "finishing" if is_done else escape(shortened(what, name_width))
            bar.update(task, completed=done, description=text)

        yield advance


@contextlib.contextmanager
def resumable_progress() -> Iterator[Progress | None]:
    """Yield what :func:`progress_bar` does; say after an interrupt that the command can go on."""
    try:
        with progress_bar() as progress:
            yield progress
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C, or another request to end
            show_note("interrupted; the same command continues where this one stopped")
        raise


def _progress_lines() -> Progress:
    """Return a function that prints a line of progress now and then, for logs."""
    begin = shown = time.monotonic()
    last_total = first_done = 0

    def advance(what: str, done: int, total: int) -> None:
        nonlocal begin, shown, last_total, first_done
        now = time.monotonic()
        if total != last_total:  # a new phase, which has its own speed
            begin, last_total, first_done = now, total, done
        if now - shown < _LINE_SECONDS:
            return
        shown = now
        if not total:
            _show_line(f"progress: {escape(what, MAX_SHOWN)}")
            return
        rate = int((done - first_done) / max(now - begin, 1e-3))
        share = f" ({done / total:.0%})"
        _show_line(
            f"progress: {human_bytes(done)} of {human_bytes(total)}{share}, "
            f"{human_bytes(rate)}/s: {escape(what, MAX_SHOWN)}"
        )

    return advance


def _scaled(count: int, units: Sequence[str]) -> str:
    if count < _STEP:
        return f"{count} {units[0]}"
    number = float(count)
    for unit in units:
        digits = 1 if number < _STEP / 10 else 0
        shown = f"{number:.{digits}f}"
        if float(shown) < _STEP or unit == units[-1]:
            break
        number /= _STEP
    return f"{shown} {unit}"


def _write(stream: Any, data: str | Buffer) -> None:
    """Write and flush. A reader that does not read keeps a command from ending only for so long."""

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

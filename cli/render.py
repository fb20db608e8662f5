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
import sys
import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import click

from blobstore.core.escape import MAX_SHOWN, escape
from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
_BAR_NAME = 48
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
        stream.write(text if text.endswith("\n") or not text else f"{text}\n")


def show_bytes(data: bytes) -> None:
    """Print bytes exactly, or escaped on a terminal. Raises as :func:`show`."""
    if is_terminal():
        show(printable_lines(data.decode(errors="backslashreplace")))
        return
    with _output() as stream:
        stream.flush()
        stream.buffer.write(data)


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
    "seconds": lambda seconds: round(seconds, 3),
}
"""The keys whose values have another form in JSON. A digest is a tuple, so show_json cannot know it."""


def show_note(message: str) -> None:
    """Print a note on standard error."""
    _show_line(f"note: {escape(message)}")


def show_error(message: str) -> None:
    """Print an error on standard error."""
    _show_line(f"blobstore: error: {escape(message)}")


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

    Args:
        headings: one per column.
        rows: one cell per column.
        right: columns of numbers.
        alarming: rows to print in red if the terminal has colours.
    """
    lines = [headings, *rows]
    widths = [min(_MAX_WIDTH, max(map(len, column))) for column in zip(*lines, strict=True)]
    is_number = [index in set(right) for index in range(len(headings))]
    texts = [
        "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    ]
    if is_terminal() and not os.environ.get("NO_COLOR"):
        texts[0] = click.style(texts[0], bold=True)
        for row in alarming:
            texts[row + 1] = click.style(texts[row + 1], fg="red")
    return "\n".join(texts)


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


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """Show a progress bar on standard error. Yields None if that is not a terminal."""
    terminal = os.environ.get("TERM", "") not in _DUMB_TERMINALS
    if sys.stderr is None or not sys.stderr.isatty() or not terminal:
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar
    from rich.table import Column

    def fixed() -> Column:
        return Column(no_wrap=True)

    columns = (
        BarColumn(bar_width=20, table_column=fixed()),
        DownloadColumn(table_column=fixed()),
        TransferSpeedColumn(table_column=fixed()),
        TimeRemainingColumn(table_column=fixed()),
        # The rest of the line, however long the name is.
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
    )
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, expand=True) as bar:
        task = bar.add_task("starting", total=None)
        last_total = -1

        def advance(what: str, done: int, total: int) -> None:
            nonlocal last_total
            if total != last_total:  # a new phase, which has its own speed
                bar.reset(task, total=total)
                last_total = total
            text = escape(what, _BAR_NAME) if done < total else "finishing"
            bar.update(task, completed=done, description=text)

        yield advance


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


@contextlib.contextmanager
def _output() -> Iterator[Any]:
    if sys.stdout is None:
        raise BlobstoreError("cannot write to standard output: it is closed")
    try:
        yield sys.stdout
        sys.stdout.flush()
    except OSError as error:
        # The interpreter flushes on exit and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise OutputClosed from None
        raise BlobstoreError(f"cannot write to standard output: {error.strerror}") from error

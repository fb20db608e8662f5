"""The texts that commands print for people: tables, numbers, sizes and times.

Text from files goes through :func:`cell` on its way out.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

import click

from blobstore.core.escape import MAX_SHOWN, escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from blobstore.manifests.source_record import SourceRecord

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
MIN_NAME = 16
"""The least characters to which a name is shortened, so that a table fits the terminal."""
_DROPPED_FIRST = ("DIGEST", "SHA256", "BITS", "BLOBS")
"""Columns that a table leaves out if the terminal is too narrow, in this order."""


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
        widths[name] = min(widths[name], max(widths[name] - max(excess(), 0), MIN_NAME))
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


def published(scheme: str | None) -> str:
    """Return how the weights of a model are shown that is kept as published; empty without a scheme."""
    return f"{cell(scheme)}, kept as published" if scheme else ""


def count_of(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def origin(source: SourceRecord) -> str:
    """Return where a model was imported from."""
    if source.repository:
        return f"{source.repository} at {source.commit}"
    is_place = "://" in source.kind or source.kind == "memory"
    return source.kind if is_place else f"a {source.kind}"


def without_base(count: int) -> str:
    """Return a line that reports blobs whose delta was given up."""
    return (
        f"  {count_of(count, 'blob')} compressed without a base: the base is damaged, or the delta "
        "could not be verified"
    )


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


def metric(value: float) -> str:
    """Return a metric in up to six digits."""
    return f"{value:.6g}"


def metrics(values: Mapping[str, float]) -> str:
    """Return the metrics of a model on a line."""
    return ", ".join(f"{cell(name)} {metric(value)}" for name, value in values.items())

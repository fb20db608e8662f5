"""The progress of long commands on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

from blobstore.cli.output import is_quiet, show_line, show_note
from blobstore.cli.render import MIN_NAME, human_bytes, shortened
from blobstore.core.escape import MAX_SHOWN, escape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.core.progress import Progress

_NARROW = 64
"""Columns of a terminal from which on the progress bar has a rate and the time that is left."""
_WIDE = 100
_LINE_SECONDS = 10.0
"""Seconds between two lines of progress where there is no terminal."""
_DUMB_TERMINALS = ("dumb", "unknown")


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """Show progress on standard error: a bar on a terminal, else a line every ten seconds.

    Yields None if the user wants no progress.
    """
    if sys.stderr is None or is_quiet():
        yield None
        return
    if not sys.stderr.isatty() or os.environ.get("TERM", "") in _DUMB_TERMINALS:
        yield progress_lines()
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
        BarColumn(bar_width=_bar_width(console.width), table_column=fixed()),
        DownloadColumn(table_column=fixed()),
    ]
    if not is_narrow:
        columns += [
            TransferSpeedColumn(table_column=fixed()),
            *([TextColumn("ETA", table_column=fixed())] if console.width >= _WIDE else []),
            TimeRemainingColumn(compact=console.width < _WIDE, table_column=fixed()),
        ]
    # The rest of the line, however long the name is.
    columns.append(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    )
    bar_width = _bar_width(console.width)
    taken = 18 if is_narrow else 48 if console.width >= _WIDE else 38
    name_width = max(MIN_NAME, console.width - bar_width - taken)
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


def _bar_width(columns: int) -> int:
    return max(10, min(40, columns // 5 if columns >= _WIDE else columns // 8))


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


def progress_lines() -> Progress:
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
            show_line(f"progress: {escape(what, MAX_SHOWN)}")
            return
        rate = int((done - first_done) / max(now - begin, 1e-3))
        share = f" ({done / total:.0%})"
        show_line(
            f"progress: {human_bytes(done)} of {human_bytes(total)}{share}, "
            f"{human_bytes(rate)}/s: {escape(what, MAX_SHOWN)}"
        )

    return advance

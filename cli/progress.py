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
_REDRAW_SECONDS = 0.1
_DUMB_TERMINALS = ("dumb", "unknown")
_BAR = "\u2501"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_START_LINE, _END_LINE = "\r\x1b[?7l", "\x1b[K\x1b[?7h\r"
"""Around a line that the terminal must not wrap, as it would where a name has wide characters."""
_CLEAR_LINE = "\r\x1b[2K"


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
    _draw(_HIDE_CURSOR)
    try:
        yield _progress_on_a_line()
    finally:
        _draw(_SHOW_CURSOR + _CLEAR_LINE)


def _draw(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone, and the command goes on
        sys.stderr.write(text)
        sys.stderr.flush()


class _Phase:
    """The speed of a phase: each has a total of its own."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._total = self._first = 0

    def rate(self, done: int, total: int) -> int:
        """Return the bytes per second since the phase began; a new total begins one."""
        now = time.monotonic()
        if total != self._total:
            self._begin, self._total, self._first = now, total, done
        return int((done - self._first) / max(now - self._begin, 1e-3))


def _progress_on_a_line() -> Progress:
    """Return a function that draws a bar and what is done, all on one line of the terminal."""
    phase = _Phase()
    drawn = -_REDRAW_SECONDS
    was_done = False

    def advance(what: str, done: int, total: int) -> None:
        nonlocal drawn, was_done
        rate, now = phase.rate(done, total), time.monotonic()
        is_done = done >= total > 0
        if now - drawn < _REDRAW_SECONDS and is_done == was_done:
            return
        drawn, was_done = now, is_done
        columns = _columns()
        facts = _facts(done, total, rate, columns)
        name = shortened(what, max(MIN_NAME, columns - len(facts)))
        _draw(f"{_START_LINE}{facts}{'finishing' if is_done else escape(name)}{_END_LINE}")

    return advance


def _facts(done: int, total: int, rate: int, columns: int) -> str:
    """Return the start of the line, which is as long whatever is done: the bar and the figures."""
    width = max(10, min(40, columns // 5 if columns >= _WIDE else columns // 8))
    filled = min(width, width * done // total) if total else 0
    figures = f"{human_bytes(done)} of {human_bytes(total)}" if total else ""
    facts = f"{_BAR * filled:<{width}} {figures:<18} "
    if columns < _NARROW:
        return facts
    left = "-:--:--"
    if rate and total:
        minutes, seconds = divmod((total - done) // rate, 60)
        left = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    return f"{facts}{human_bytes(rate):>7}/s {'ETA ' if columns >= _WIDE else ''}{left} "


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _NARROW
    except OSError:
        return _NARROW


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
    phase = _Phase()
    shown = time.monotonic()

    def advance(what: str, done: int, total: int) -> None:
        nonlocal shown
        rate, now = phase.rate(done, total), time.monotonic()
        if now - shown < _LINE_SECONDS:
            return
        shown = now
        if not total:
            show_line(f"progress: {escape(what, MAX_SHOWN)}")
            return
        show_line(
            f"progress: {human_bytes(done)} of {human_bytes(total)} ({done / total:.0%}), "
            f"{human_bytes(rate)}/s: {escape(what, MAX_SHOWN)}"
        )

    return advance

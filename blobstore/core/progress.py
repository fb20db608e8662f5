"""Progress of long operations: the library calls a function, and never prints."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the current item, bytes done and total bytes; never by two threads at once.

The total is 0 as long as it is not known.
"""


def of_passes(progress: Progress | None, passes: int) -> Progress | None:
    """Return what reports bytes that are each processed several times as bytes that are done once."""
    if progress is None:
        return None
    return lambda what, done, total: progress(what, done // passes, total // passes)


class Meter:
    """Adds up the bytes that several threads have done, for one :data:`Progress` callback."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int, what: str) -> None:
        """Report ``count`` more bytes done."""
        if self._progress is None:
            return
        with self._lock:
            self._done += count
            self._progress(what, self._done, self._total)

"""How long work reports on itself: the library calls back, and never prints."""

from __future__ import annotations

import threading
from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all, never twice at once."""


class Meter:
    """Adds up the bytes that many threads have done, for one :data:`Progress` callback."""

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

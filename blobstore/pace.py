"""A limit on how many bytes a second all threads of some work do together."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_CREDIT = 0.1
"""Seconds that are made up for when the work was slower than allowed."""


class Pace:
    """Slows work down to ``rate`` bytes a second. Threads share it: the rate is that of all."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now.

        Raises:
            UsageError: ``rate`` is not above 0.
        """
        if not rate > 0:
            message = f"a rate must be above 0 bytes a second, got {rate:g}"
            raise UsageError(message)
        self._rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until = clock()

    def spend(self, count: int, wait: Callable[[float], object]) -> None:
        """Take ``count`` bytes, calling ``wait`` with the seconds until they are allowed, if any."""
        with self._lock:
            now = self._clock()
            begin = max(self._paid_until, now - _CREDIT)
            self._paid_until = begin + count / self._rate
            debt = self._paid_until - now
        if debt > 0:
            wait(debt)

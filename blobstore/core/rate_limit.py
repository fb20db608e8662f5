"""Limits the bytes per second of work that several threads do."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from blobstore.core.arguments import bytes_of
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_CREDIT = 0.1
"""Seconds of unused rate that may be made up for."""


class RateLimiter:
    """Limits work to ``rate`` bytes per second, over all threads that share the limiter."""

    def __init__(self, rate: float | str, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Raises:
            UsageError: ``rate`` is not above 0, or spells no size.
        """
        self._rate = bytes_of(rate)
        if self._rate <= 0:
            raise UsageError(f"rate must be at least 1 byte per second, got {rate}")
        self._clock = clock
        self._lock = threading.Lock()
        self._paid_until = clock()

    def spend(self, count: int, wait: Callable[[float], object]) -> None:
        """Use up ``count`` bytes; if they are over the rate, call ``wait`` with the seconds to wait."""
        with self._lock:
            now = self._clock()
            begin = max(self._paid_until, now - _MAX_CREDIT)
            self._paid_until = begin + count / self._rate
            debt = self._paid_until - now
        if debt > 0:
            wait(debt)

"""Threads that do a list of things in its order, report as one, and stop together."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypeVar

from blobstore.core.progress import Meter
from blobstore.errors import BlobstoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from blobstore.core.progress import Progress


Item = TypeVar("Item")
Done = TypeVar("Done")


class Cancelled(BlobstoreError):
    """What goes on is to end at once, for another thread has failed."""


class WorkerPool:
    """Threads for one piece of work of so many bytes."""

    def __init__(self, jobs: int | None, progress: Progress | None, total: int) -> None:
        """Begin nothing yet.

        Raises:
            UsageError: ``jobs`` is below 1.
        """
        check_jobs(jobs)
        self._jobs = jobs or os.cpu_count()
        self._meter = Meter(progress, total)
        self._stop = threading.Event()

    def tell(self, count: int, what: str) -> None:
        """Report bytes that are done, from any thread.

        Raises:
            Stopped: the work is to end.
        """
        if self._stop.is_set():
            raise Cancelled("stopped")
        self._meter.add(count, what)

    def run(
        self,
        items: Iterable[Item],
        work: Callable[[Item], Done],
        stopped: Callable[[], object] = lambda: None,
    ) -> list[Done]:
        """Return what ``work`` makes of each item; they are begun in order.

        ``stopped`` is called when the work is to end early, before it is waited for.

        Raises:
            Exception: what ``work`` raises first, when all threads have ended.
        """
        pool = ThreadPoolExecutor(self._jobs, thread_name_prefix="blobstore")
        futures: list[Future[Done]] = []
        try:
            futures += (pool.submit(work, item) for item in items)
            wait(futures, return_when=FIRST_EXCEPTION)
            if any(future.done() and future.exception() for future in futures):
                self._end(stopped)
        except BaseException:  # such as Ctrl-C
            self._end(stopped)
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        errors = [future.exception() for future in futures if not future.cancelled()]
        # What was only stopped says nothing of why, and may have ended before what has failed.
        for error in sorted(filter(None, errors), key=lambda found: isinstance(found, Cancelled)):
            raise error
        return [future.result() for future in futures]

    def _end(self, stopped: Callable[[], object]) -> None:
        self._stop.set()
        stopped()


def check_jobs(jobs: int | None) -> None:
    """Check a number of threads.

    Raises:
        UsageError: it is below 1.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs must be at least 1, got {jobs}")


_CREDIT = 0.1
"""Seconds that are made up for when the work was slower than allowed."""


class RateLimiter:
    """Slows work down to ``rate`` bytes a second. Threads share it: the rate is that of all."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now.

        Raises:
            UsageError: ``rate`` is not above 0.
        """
        if not rate > 0:
            raise UsageError(f"a rate must be above 0 bytes a second, got {rate:g}")
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

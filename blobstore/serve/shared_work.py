"""Work on threads that requests wait for. Equal work is shared, and not begun if no request waits for it any more."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from blobstore.core.capacity import JOBS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from concurrent.futures import Future

    from blobstore.core.capacity import Capacity


Result = TypeVar("Result")


class Busy(Exception):
    """Too much work is running or waiting to accept more."""


@dataclass(slots=True, eq=False)
class _Job:
    thread: Future[Any]
    result: asyncio.Future[Any]
    waiting: int = 0


class SharedWork:
    """The work of one kind. It belongs to one event loop."""

    def __init__(
        self, capacity: Capacity, most: int = JOBS.most, *, joins_begun: bool = True
    ) -> None:
        """Start no thread yet. At most ``most`` jobs are begun or wait.

        Without ``joins_begun``, work that is running is not shared, so no result is older than its request.
        """
        self._joins_begun = joins_begun
        self._executor = capacity.executor()
        self._most = most
        self._jobs: dict[Hashable, _Job] = {}

    @contextlib.contextmanager
    def joined(
        self, key: Hashable, function: Callable[..., Result], *arguments: Any
    ) -> Iterator[asyncio.Future[Result]]:
        """Yield the result of the work with this key, and start the work unless others wait for it.

        The block may read the result, and must not cancel it. Raises Busy.
        """
        job = self._jobs.get(key)
        if job is None or (job.thread.running() and not self._joins_begun):
            if len(self._jobs) >= self._most:
                raise Busy(f"{self._most} jobs wait already")
            thread = self._executor.submit(function, *arguments)
            job = self._jobs[key] = _Job(thread, asyncio.wrap_future(thread))
            job.result.add_done_callback(lambda done: self._forget(key, job, done))
        job.waiting += 1
        try:
            yield job.result
        finally:
            job.waiting -= 1
            if not job.waiting and job.thread.cancel():  # it was not begun yet
                self._remove(key, job)

    def has(self, key: Hashable) -> bool:
        """Return whether the work with this key is begun or waits."""
        return key in self._jobs

    async def result(
        self, key: Hashable, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Return the result of the work with this key. Raises Busy, and what the work raises."""
        with self.joined(key, function, *arguments) as result:
            return await asyncio.shield(result)

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return the result of work that nobody shares. Raises as :meth:`result`."""
        return await self.result(object(), function, *arguments)

    def close(self) -> None:
        """Begin no more work. Work that has begun is not waited for: it has nothing to save."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _forget(self, key: Hashable, job: _Job, done: asyncio.Future[Any]) -> None:
        self._remove(key, job)
        if not done.cancelled():
            done.exception()  # read it: maybe nobody waits for this work any more

    def _remove(self, key: Hashable, job: _Job) -> None:
        # Another job may have the key by now: one that is running is not always shared.
        if self._jobs.get(key) is job:
            del self._jobs[key]

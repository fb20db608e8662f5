"""Work on threads that requests wait for. Equal work is shared.

Work that no request waits for any more is not begun, and gives way if it has begun and other work waits for a thread.
Otherwise it goes on: a client that asks again after status 503 finds it done.

Work that reads many bytes takes turns, so that what is small never waits for terabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from blobstore.core import interrupts
from blobstore.core.capacity import JOBS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from concurrent.futures import Future

    from blobstore.core.capacity import Capacity

_TURN_SECONDS: Final = 0.25
Result = TypeVar("Result")


class Busy(Exception):
    """Too much work is running or waiting to accept more."""


@dataclass(slots=True, eq=False)
class _Job:
    key: Hashable
    work: Callable[[], Any]
    waiting: int = 0
    turn_begun: float = 0.0
    turning: threading.Lock = field(default_factory=threading.Lock)
    """Held by a thread of the job that waits for the next turn, for which the others wait, too."""
    thread: Future[Any] = field(init=False)
    result: asyncio.Future[Any] = field(init=False)


class SharedWork:
    """The work of one kind. It belongs to one event loop."""

    def __init__(
        self, capacity: Capacity, most: int = JOBS.most, *, joins_begun: bool = True
    ) -> None:
        """Start no thread yet. At most ``most`` jobs are begun or wait.

        Without ``joins_begun``, work that is running is not shared, so no result is older than its request.
        """
        self._joins_begun = joins_begun
        self._executor, self._threads = capacity.executor(), capacity.at_once or capacity.most
        self._most, self._turns = most, _Turns(self._threads)
        self._jobs: dict[Hashable, _Job] = {}
        self._lock = threading.Lock()
        """Held for moments while it is decided who waits for which job."""

    @contextlib.contextmanager
    def joined(
        self, key: Hashable, function: Callable[..., Result], *arguments: Any
    ) -> Iterator[asyncio.Future[Result]]:
        """Yield the result of the work with this key, and start the work unless others wait for it.

        The block may read the result, and must not cancel it. Raises Busy.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None or (job.thread.running() and not self._joins_begun):
                if len(self._jobs) >= self._most:
                    raise Busy(f"{self._most} jobs wait already")
                job = self._jobs[key] = _Job(key, partial(function, *arguments))
                job.thread = self._executor.submit(self._run, job)
                job.result = asyncio.wrap_future(job.thread)
                job.result.add_done_callback(lambda done: self._forget(job, done))
            job.waiting += 1
        try:
            yield job.result
        finally:
            with self._lock:
                job.waiting -= 1
                if not job.waiting and job.thread.cancel():  # it was not begun yet
                    self._remove(job)

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

    def _run(self, job: _Job) -> Any:
        look = partial(self._give_way, job, self._threads)
        self._begin_turn(job)
        try:
            self._give_way(job, 0)  # if all have left while it waited for its first turn
            with interrupts.looking(look, partial(self._take_turns, job)):
                return job.work()
        finally:
            self._turns.end()

    def _begin_turn(self, job: _Job) -> None:
        self._turns.begin()
        job.turn_begun = time.monotonic()

    def _take_turns(self, job: _Job) -> None:
        """Let others go on, if this job has had its turn. Called on its threads."""
        with job.turning:
            if self._turns.waiting and time.monotonic() - job.turn_begun >= _TURN_SECONDS:
                self._turns.end()
                self._begin_turn(job)

    def _give_way(self, job: _Job, most: int) -> None:
        """End a job for which nobody waits, if there are more than ``most`` jobs. Called on its threads."""
        # Each check comes here, so the lock is taken only if the answer seems to be yes.
        if job.waiting or len(self._jobs) <= most:
            return
        with self._lock:
            if job.waiting or len(self._jobs) <= most:
                return
            self._remove(job)  # who comes now begins it again
        raise interrupts.Unwanted

    def _forget(self, job: _Job, done: asyncio.Future[Any]) -> None:
        with self._lock:
            self._remove(job)
        if not done.cancelled():
            done.exception()  # read it: maybe nobody waits for this work any more

    def _remove(self, job: _Job) -> None:
        # Another job may have the key by now: one that is running is not always shared.
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]


class _Turns:
    """Lets some threads compute at once, and others after them, in the order in which they ask for a turn."""

    def __init__(self, at_once: int) -> None:
        self._free, self._lock = at_once, threading.Lock()
        self.waiting: deque[threading.Event] = deque()

    def begin(self) -> None:
        """Wait for a turn."""
        with self._lock:
            if self._free:
                self._free -= 1
                return
            mine = threading.Event()
            self.waiting.append(mine)
        mine.wait()

    def end(self) -> None:
        """Give a turn to the next thread."""
        with self._lock:
            if self.waiting:
                self.waiting.popleft().set()
            else:
                self._free += 1

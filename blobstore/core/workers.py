"""Jobs on threads or other executors: run in order, reported together, stopped together."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from blobstore.core import interrupts
from blobstore.core.progress import Meter
from blobstore.errors import BlobstoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from blobstore.core.progress import Progress


Item = TypeVar("Item")
Result = TypeVar("Result")


class Cancelled(BlobstoreError):
    """A job ended early because another one failed or the caller was interrupted."""


class WorkerPool:
    """Runs one job per item, on threads of its own or on a given executor.

    The first error, or an interrupt of the caller, stops all jobs. Jobs on threads learn of it from
    :meth:`report` or :attr:`stopping`. Jobs in other processes have neither: their caller reports
    each item that :meth:`completed` yields, and stops the jobs with ``on_stop``.
    """

    def __init__(
        self,
        jobs: int | None,
        progress: Progress | None,
        total: int,
        *,
        executor: Executor | None = None,
    ) -> None:
        """Start no threads yet.

        Args:
            jobs: number of threads; by default one per processor.
            progress: called with every report.
            total: bytes of all items.
            executor: runs the jobs instead of threads, and stays open. If its workers are other
                processes, jobs, items and results must be picklable.

        Raises:
            UsageError: ``jobs`` is below 1, or given together with an executor.
        """
        check_jobs(jobs, executor)
        self.stopping = threading.Event()
        """Set when the jobs must end at once."""
        self._jobs = jobs or os.cpu_count()
        self._meter = Meter(progress, total)
        self._executor = executor

    def report(self, count: int, what: str) -> None:
        """Add ``count`` bytes to the progress, from any thread of this process.

        Raises:
            Cancelled: the jobs must end.
        """
        if self.stopping.is_set():
            raise Cancelled("stopped")
        interrupts.take_turns()
        self._meter.add(count, what)

    def run(
        self,
        items: Iterable[Item],
        job: Callable[[Item], Result],
        on_stop: Callable[[], object] = lambda: None,
    ) -> list[Result]:
        """Run ``job`` on each item; return the results. Both are in the order of the items.

        If the jobs must end early, ``on_stop`` is called before they are waited for.

        Raises:
            BlobstoreError: the executor lost a worker, or cancelled a job.
            Exception: the first error of a job; all jobs have ended by then.
        """
        with self._running(items, job, on_stop) as futures:
            all(map(_has_succeeded, _in_order_of_end(futures)))  # up to the first error
        return [future.result() for future in futures]

    def completed(
        self,
        items: Sequence[Item],
        job: Callable[[Item], Result],
        on_stop: Callable[[], object] = lambda: None,
    ) -> Generator[tuple[Item, Result], None, None]:
        """Run jobs as :meth:`run` does, and yield each item with its result as its job ends.

        Closing the iterator stops the other jobs and waits for them.
        """
        with self._running(items, job, on_stop) as futures:
            item_of = dict(zip(futures, items, strict=True))
            for future in _in_order_of_end(futures):
                if not _has_succeeded(future):
                    break
                yield item_of[future], future.result()

    @contextlib.contextmanager
    def _running(
        self, items: Iterable[Item], job: Callable[[Item], Result], on_stop: Callable[[], object]
    ) -> Iterator[list[Future[Result]]]:
        """Submit all jobs; at the end of the block wait for them, and raise the first error.

        It is raised before the other jobs are waited for, so that a request to stop that comes then is
        known to be later.
        """
        executor = self._executor or ThreadPoolExecutor(
            self._jobs, "blobstore", *interrupts.inherited()
        )
        futures: list[Future[Result]] = []
        is_success = False
        try:
            try:
                futures += (_submitted(executor, job, item) for item in items)
            except BrokenExecutor:
                raise
            except (RuntimeError, OSError) as refusal:  # it is shut down, or lost its connection
                if self._executor is None:
                    raise
                raise BlobstoreError(f"the executor refused a job: {refusal}") from refusal
            yield futures
            for error in _errors(futures):
                if not isinstance(error, Cancelled):
                    raise error
            is_success = all(map(_has_succeeded, futures))
        except BrokenExecutor as lost:
            raise BlobstoreError(f"the executor lost a worker: {lost}") from lost
        finally:  # also after a request to stop
            try:
                if not is_success:
                    self.stopping.set()
                    on_stop()
            finally:  # no job may outlive what its caller closes
                if self._executor is None:
                    executor.shutdown(cancel_futures=True)
                else:
                    wait([future for future in futures if not future.cancel()])
        if not is_success:  # a job that another one has ended may have ended before that
            raise next(iter(_errors(futures)), BlobstoreError("the executor cancelled the jobs"))


class Steps:
    """Workers for one step of some work after the other, whose progress only grows."""

    def __init__(self, streams: int, progress: Progress | None) -> None:
        self._streams = streams
        self._progress = progress
        self._done = 0

    def begin(self, size: int, later: int = 0, jobs: int | None = None) -> WorkerPool:
        """Return the workers of the next step, for ``size`` bytes; later steps have ``later`` bytes.

        There are as many threads as streams, unless ``jobs`` says how many.
        """
        before, progress = self._done, self._progress
        self._done += size
        total = self._done + later

        def report(what: str, done: int, _: int) -> None:
            if progress is not None:
                progress(what, before + done, total)

        return WorkerPool(jobs or self._streams, report, size)


def _submitted(executor: Executor, job: Callable[[Item], Result], item: Item) -> Future[Result]:
    interrupts.check()
    return executor.submit(job, item)


def _in_order_of_end(futures: Sequence[Future[Result]]) -> Iterator[Future[Result]]:
    """Yield futures as they end."""
    ended: SimpleQueue[Future[Result]] = SimpleQueue()
    for future in futures:
        future.add_done_callback(ended.put)
    for _ in futures:
        while True:
            interrupts.check()
            with contextlib.suppress(Empty):
                yield ended.get(timeout=interrupts.POLL)
                break


def _errors(futures: Iterable[Future[Any]]) -> list[BaseException]:
    """Return the errors of the jobs that have ended."""
    ended = (future for future in futures if future.done() and not future.cancelled())
    errors = filter(None, (future.exception() for future in ended))
    # A job that ended because of another does not say why, and may have ended before that.
    return sorted(errors, key=lambda found: isinstance(found, Cancelled))


def _has_succeeded(future: Future[Result]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def check_jobs(jobs: int | None, executor: Executor | None = None) -> None:
    """Check a number of threads.

    Raises:
        UsageError: it is below 1, or given together with an executor.
    """
    if jobs is not None and not jobs >= 1:
        raise UsageError(f"jobs must be at least 1, got {jobs}")
    if jobs is not None and executor is not None:
        raise UsageError("jobs cannot be combined with an executor, which has its own workers")

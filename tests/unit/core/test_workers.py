from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest

from blobstore.core.workers import Cancelled, WorkerPool, check_jobs
from blobstore.errors import BlobstoreError, DamagedSource, UsageError


def square(item: int) -> int:
    return item * item


def process_id(_: int) -> int:
    return os.getpid()


def kill_own_process(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_at_3(item: int) -> int:
    if item == 3:
        raise DamagedSource("item 3 is damaged")
    return item


@pytest.fixture(params=["own threads", "threads", "spawn", "fork"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor | None]:
    if request.param == "own threads":
        yield None
    elif request.param == "threads":
        with ThreadPoolExecutor(2) as pool:
            yield pool
    else:
        with ProcessPoolExecutor(2, get_context(request.param)) as pool:
            yield pool


def test_returns_results_in_the_order_of_the_items(executor: Executor | None) -> None:
    pool = WorkerPool(None, None, 0, executor=executor)
    assert pool.run(range(20), square) == [item * item for item in range(20)]
    assert pool.run([], square) == []


def test_yields_each_item_with_its_result(executor: Executor | None) -> None:
    pool = WorkerPool(None, None, 0, executor=executor)
    assert dict(pool.completed(range(20), square)) == {item: item * item for item in range(20)}


def test_raises_the_error_of_a_job(executor: Executor | None) -> None:
    pool = WorkerPool(None, None, 0, executor=executor)
    with pytest.raises(DamagedSource, match="^item 3 is damaged$"):
        pool.run(range(5), fail_at_3)
    found: list[int] = []
    with pytest.raises(DamagedSource, match="^item 3 is damaged$"):
        found.extend(item for item, _ in pool.completed(range(5), fail_at_3))
    assert set(found) <= {0, 1, 2, 4}
    assert pool.stopping.is_set()


def test_leaves_a_given_executor_open() -> None:
    with ProcessPoolExecutor(1, get_context("fork")) as executor:
        (first,) = WorkerPool(None, None, 0, executor=executor).run([0], process_id)
        (second,) = WorkerPool(None, None, 0, executor=executor).run([0], process_id)
    assert first == second != os.getpid()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_reports_a_killed_worker_process(method: str) -> None:
    executor = ProcessPoolExecutor(1, get_context(method))
    pool = WorkerPool(None, None, 0, executor=executor)
    with executor, pytest.raises(BlobstoreError, match="the executor lost a worker"):
        pool.run(range(3), kill_own_process)


def test_starts_jobs_in_the_order_of_the_items() -> None:
    started: list[int] = []
    WorkerPool(1, None, 0).run(range(10), started.append)
    assert started == list(range(10))


def test_reports_the_progress_of_all_jobs() -> None:
    reports: list[tuple[str, int, int]] = []
    pool = WorkerPool(1, lambda *report: reports.append(report), 6)
    pool.run([1, 2, 3], lambda item: pool.report(item, f"item {item}"))
    assert reports == [("item 1", 1, 6), ("item 2", 3, 6), ("item 3", 6, 6)]


def test_an_error_stops_all_jobs_before_it_is_raised() -> None:
    pool = WorkerPool(2, None, 0)
    running, ended = threading.Event(), threading.Event()

    def job(item: int) -> None:
        if item == 0:
            running.set()
            try:
                while True:
                    pool.report(0, "")
            finally:
                ended.set()
        running.wait()
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 1"):
        pool.run(range(100), job)
    assert ended.is_set()


def test_raises_the_error_of_the_job_that_failed_and_not_of_one_that_was_stopped() -> None:
    pool = WorkerPool(2, None, 0)
    is_woken = threading.Event()

    def job(item: int) -> None:
        if item == 0:
            is_woken.wait()
            raise Cancelled
        try:
            raise ValueError
        finally:
            is_woken.set()  # the other job may end before this one

    with pytest.raises(ValueError):  # noqa: PT011 - it has no message
        pool.run(range(2), job, is_woken.set)


def interrupted() -> Iterator[int]:
    yield 1
    raise KeyboardInterrupt


def test_an_interrupt_stops_the_jobs(executor: Executor | None) -> None:
    pool = WorkerPool(None, None, 0, executor=executor)
    calls: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        pool.run(interrupted(), square, lambda: calls.append("stopped"))
    assert calls == ["stopped"]
    with pytest.raises(Cancelled):
        pool.report(1, "")


def wait_for(is_stopped: threading.Event) -> Callable[[int], int]:
    def job(item: int) -> int:
        if item:
            is_stopped.wait()
        return item

    return job


@pytest.mark.parametrize("method", ["run", "completed"])
def test_a_signal_that_does_not_wake_the_waiting_thread_stops_the_jobs(
    method: str,
) -> None:
    """A signal that comes just before a thread waits sets a flag, as one of another thread does."""
    pool = WorkerPool(1, None, 0)

    def interrupted(_: int) -> None:
        time.sleep(0.2)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        pool.stopping.wait()

    def stop(*_: object) -> None:
        raise InterruptedError("stop")

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(InterruptedError, match="stop"):
            list(getattr(pool, method)([1], interrupted))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_closing_the_iterator_stops_the_jobs() -> None:
    pool = WorkerPool(2, None, 0)
    results = pool.completed(range(100), wait_for(pool.stopping))
    assert next(results) == (0, 0)
    results.close()  # type: ignore[attr-defined]
    assert pool.stopping.is_set()


def test_waits_for_running_jobs_of_a_given_executor() -> None:
    ended: list[int] = []
    with ThreadPoolExecutor(1) as executor:
        pool = WorkerPool(None, None, 0, executor=executor)

        def job(item: int) -> None:
            pool.stopping.wait()
            ended.append(item)

        def items() -> Iterator[int]:
            yield 1
            yield 2
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pool.run(items(), job)
        assert ended in ([], [1])
        assert executor.submit(square, 3).result() == 9
    assert ended in ([], [1])


def test_reports_that_an_executor_cancelled_jobs() -> None:
    class Cancelling(ThreadPoolExecutor):
        def submit(self, *_: object, **__: object) -> Future[object]:  # type: ignore[override]
            future: Future[object] = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    with Cancelling() as executor, pytest.raises(BlobstoreError, match="cancelled the jobs"):
        WorkerPool(None, None, 0, executor=executor).run([1], square)


def test_rejects_a_number_of_threads_below_1() -> None:
    with pytest.raises(UsageError, match="jobs must be at least 1, got 0"):
        WorkerPool(0, None, 0)
    check_jobs(1)
    check_jobs(None)


def test_rejects_a_number_of_threads_for_an_executor() -> None:
    with ThreadPoolExecutor() as executor, pytest.raises(UsageError, match="cannot be combined"):
        WorkerPool(1, None, 0, executor=executor)


def test_an_executor_that_was_shut_down_is_reported() -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    pool = WorkerPool(None, None, 0, executor=executor)
    with pytest.raises(BlobstoreError, match="^the executor refused a job: cannot schedule new"):
        pool.run([1], str)


def test_jobs_have_ended_even_if_stopping_them_fails() -> None:
    started, ended = threading.Event(), threading.Event()

    def job(item: int) -> None:
        if item:
            started.set()
            pool.stopping.wait()
            ended.set()
            return
        started.wait()
        raise DamagedSource("the first")

    def fail() -> None:
        raise RuntimeError("cannot stop")

    pool = WorkerPool(2, None, 0)
    with pytest.raises(RuntimeError, match="cannot stop"):
        pool.run([0, 1], job, fail)
    assert ended.is_set()

from __future__ import annotations

import threading

import pytest

from blobstore.core.workers import Cancelled, RateLimiter, WorkerPool, check_jobs
from blobstore.errors import UsageError


def test_results_are_in_the_order_of_the_items() -> None:
    assert WorkerPool(3, None, 0).run(range(20), lambda item: item * item) == [
        item * item for item in range(20)
    ]
    assert WorkerPool(None, None, 0).run([], lambda item: item) == []


def test_items_are_begun_in_order() -> None:
    begun: list[int] = []
    WorkerPool(1, None, 0).run(range(10), begun.append)
    assert begun == list(range(10))


def test_reports_what_all_have_done() -> None:
    told: list[tuple[str, int, int]] = []
    crew = WorkerPool(1, lambda *report: told.append(report), 6)
    crew.run([1, 2, 3], lambda item: crew.tell(item, f"item {item}"))
    assert told == [("item 1", 1, 6), ("item 2", 3, 6), ("item 3", 6, 6)]


def test_an_error_ends_all_and_is_raised_when_all_have_ended() -> None:
    crew = WorkerPool(2, None, 0)
    running, ended = threading.Event(), threading.Event()

    def work(item: int) -> None:
        if item == 0:
            running.set()
            try:
                while True:
                    crew.tell(0, "")
            finally:
                ended.set()
        running.wait()
        message = f"item {item}"
        raise ValueError(message)

    with pytest.raises(ValueError, match="item 1"):
        crew.run(range(100), work)
    assert ended.is_set()


def test_who_waits_is_woken_and_what_has_failed_is_told_and_not_who_was_stopped() -> None:
    crew = WorkerPool(2, None, 0)
    woken = threading.Event()

    def work(item: int) -> None:
        if item == 0:
            woken.wait()
            raise Cancelled
        try:
            raise ValueError
        finally:
            woken.set()  # the other may end before this one has

    with pytest.raises(ValueError):  # noqa: PT011 - it says nothing
        crew.run(range(2), work, woken.set)


def test_an_interrupt_stops_the_threads() -> None:
    crew = WorkerPool(1, None, 0)
    stopped: list[str] = []

    def items() -> object:
        yield 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        crew.run(items(), lambda _: None, lambda: stopped.append("stopped"))  # type: ignore[arg-type]
    assert stopped == ["stopped"]
    with pytest.raises(Cancelled):
        crew.tell(1, "")


def test_rejects_no_threads() -> None:
    with pytest.raises(UsageError, match="jobs must be at least 1, got 0"):
        WorkerPool(0, None, 0)
    check_jobs(1)
    check_jobs(None)


class Clock:
    """A clock that goes on when somebody waits, or works."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def test_keeps_to_the_rate_over_time() -> None:
    clock = Clock()
    pace = RateLimiter(1000, clock)
    for _ in range(50):
        pace.spend(200, clock.wait)
    assert clock.now == pytest.approx(110)


def test_does_not_wait_when_the_work_is_slower_than_allowed() -> None:
    clock = Clock()
    pace = RateLimiter(1000, clock)
    for _ in range(5):
        clock.now += 1
        pace.spend(900, clock.wait)
    assert sum(clock.waits) == pytest.approx(5 * 0.8)  # all but the credit of a tenth


def test_does_not_catch_up_on_a_long_pause() -> None:
    clock = Clock()
    pace = RateLimiter(1000, clock)
    clock.now += 3600
    for _ in range(10):
        pace.spend(1000, clock.wait)
    assert sum(clock.waits) == pytest.approx(9.9)


def test_threads_share_the_rate() -> None:
    clock = Clock()
    pace = RateLimiter(1000, clock)
    waits: list[float] = []
    threads = [threading.Thread(target=pace.spend, args=(500, waits.append)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Each gets its turn after the others, the first of them a little at once.
    assert sorted(waits) == pytest.approx([0.5 * turn for turn in range(1, 9)])


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_refuses_a_rate_that_is_not_above_zero(rate: float) -> None:
    with pytest.raises(UsageError, match="a rate must be above 0"):
        RateLimiter(rate)

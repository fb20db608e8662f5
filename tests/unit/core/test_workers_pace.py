from __future__ import annotations

import threading

import pytest

from blobstore.core.workers import Pace
from blobstore.errors import UsageError


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
    pace = Pace(1000, clock)
    for _ in range(50):
        pace.spend(200, clock.wait)
    assert clock.now == pytest.approx(110)


def test_does_not_wait_when_the_work_is_slower_than_allowed() -> None:
    clock = Clock()
    pace = Pace(1000, clock)
    for _ in range(5):
        clock.now += 1
        pace.spend(900, clock.wait)
    assert sum(clock.waits) == pytest.approx(5 * 0.8)  # all but the credit of a tenth


def test_does_not_catch_up_on_a_long_pause() -> None:
    clock = Clock()
    pace = Pace(1000, clock)
    clock.now += 3600
    for _ in range(10):
        pace.spend(1000, clock.wait)
    assert sum(clock.waits) == pytest.approx(9.9)


def test_threads_share_the_rate() -> None:
    clock = Clock()
    pace = Pace(1000, clock)
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
        Pace(rate)

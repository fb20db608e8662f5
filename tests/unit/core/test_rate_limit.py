from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from blobstore.core.rate_limit import RateLimiter
from blobstore.errors import UsageError


class Clock:
    """A clock that advances only when a test waits or works."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def test_keeps_the_rate_over_time() -> None:
    clock = Clock()
    limiter = RateLimiter(1000, clock)
    for _ in range(50):
        limiter.spend(200, clock.wait)
    assert clock.now == pytest.approx(110)


def test_does_not_wait_for_work_that_is_slower_than_the_rate() -> None:
    clock = Clock()
    limiter = RateLimiter(1000, clock)
    for _ in range(5):
        clock.now += 1
        limiter.spend(900, clock.wait)
    assert sum(clock.waits) == pytest.approx(5 * 0.8)  # all but the credit of 0.1 s


def test_does_not_catch_up_after_a_long_pause() -> None:
    clock = Clock()
    limiter = RateLimiter(1000, clock)
    clock.now += 3600
    for _ in range(10):
        limiter.spend(1000, clock.wait)
    assert sum(clock.waits) == pytest.approx(9.9)


def test_threads_share_the_rate() -> None:
    clock = Clock()
    limiter = RateLimiter(1000, clock)
    waits: list[float] = []
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(limiter.spend, 500, waits.append)
    # Each waits for those before it.
    assert sorted(waits) == pytest.approx([0.5 * turn for turn in range(1, 9)])


@pytest.mark.parametrize("rate", [0, -1, float("nan"), "0", "fast"])
def test_rejects_a_rate_that_is_not_above_0(rate: float | str) -> None:
    with pytest.raises(
        UsageError, match="rate must be at least 1 byte|not a number of bytes|not a size"
    ):
        RateLimiter(rate)

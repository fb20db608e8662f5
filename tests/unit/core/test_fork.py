from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from blobstore.core.fork import cached_property

SECONDS = 120


class Squares:
    def __init__(self, work: Callable[[], int]) -> None:
        self.work = work

    @cached_property
    def value(self) -> int:
        return self.work()


def test_a_value_is_computed_once() -> None:
    numbers = iter(range(2))
    one = Squares(lambda: next(numbers))
    assert (one.value, one.value, next(numbers)) == (0, 0, 1)
    assert isinstance(Squares.value, cached_property)


def test_computing_a_value_holds_no_lock_that_others_wait_for() -> None:
    with ThreadPoolExecutor(1) as pool:
        other = Squares(lambda: 2)
        one = Squares(lambda: pool.submit(lambda: other.value).result(SECONDS))
        assert one.value == 2

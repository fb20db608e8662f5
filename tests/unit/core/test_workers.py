from __future__ import annotations

import threading

import pytest

from blobstore.core.workers import Crew, Stopped, check_jobs
from blobstore.errors import UsageError


def test_results_are_in_the_order_of_the_items() -> None:
    assert Crew(3, None, 0).run(range(20), lambda item: item * item) == [
        item * item for item in range(20)
    ]
    assert Crew(None, None, 0).run([], lambda item: item) == []


def test_items_are_begun_in_order() -> None:
    begun: list[int] = []
    Crew(1, None, 0).run(range(10), begun.append)
    assert begun == list(range(10))


def test_reports_what_all_have_done() -> None:
    told: list[tuple[str, int, int]] = []
    crew = Crew(1, lambda *report: told.append(report), 6)
    crew.run([1, 2, 3], lambda item: crew.tell(item, f"item {item}"))
    assert told == [("item 1", 1, 6), ("item 2", 3, 6), ("item 3", 6, 6)]


def test_an_error_ends_all_and_is_raised_when_all_have_ended() -> None:
    crew = Crew(2, None, 0)
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
    crew = Crew(2, None, 0)
    woken = threading.Event()

    def work(item: int) -> None:
        if item == 0:
            woken.wait()
            raise Stopped
        try:
            raise ValueError
        finally:
            woken.set()  # the other may end before this one has

    with pytest.raises(ValueError):  # noqa: PT011 - it says nothing
        crew.run(range(2), work, woken.set)


def test_an_interrupt_stops_the_threads() -> None:
    crew = Crew(1, None, 0)
    stopped: list[str] = []

    def items() -> object:
        yield 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        crew.run(items(), lambda _: None, lambda: stopped.append("stopped"))  # type: ignore[arg-type]
    assert stopped == ["stopped"]
    with pytest.raises(Stopped):
        crew.tell(1, "")


def test_rejects_no_threads() -> None:
    with pytest.raises(UsageError, match="jobs must be at least 1, got 0"):
        Crew(0, None, 0)
    check_jobs(1)
    check_jobs(None)

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from blobstore.core import progress as progress_module
from blobstore.core.progress import Meter, Progress, listen, of_passes, reporting


def test_adds_up_bytes_and_passes_the_item_on() -> None:
    steps: list[tuple[str, int, int]] = []
    meter = Meter(lambda *step: steps.append(step), 10)
    meter.add(3, "a")
    meter.add(7, "b")
    assert steps == [("a", 3, 10), ("b", 10, 10)]


def test_is_silent_without_a_callback() -> None:
    Meter(None, 10).add(3, "a")


@pytest.mark.slow
def test_calls_back_from_one_thread_at_a_time_and_loses_no_bytes() -> None:
    done: list[int] = []
    inside = threading.Lock()

    def progress(_: str, count: int, __: int) -> None:
        assert inside.acquire(blocking=False), "called from two threads at once"
        time.sleep(0)  # lets the other threads run
        done.append(count)
        inside.release()

    meter = Meter(progress, 8000)

    def work() -> None:
        for _ in range(1000):
            meter.add(1, "x")

    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(work)
    assert done == list(range(1, 8001))


def test_bytes_that_are_processed_twice_are_done_once() -> None:
    seen: list[tuple[str, int, int]] = []
    report = of_passes(lambda *call: seen.append(call), 2)
    assert report is not None
    report("x", 3, 10)
    assert seen == [("x", 1, 5)]
    assert of_passes(None, 2) is None


def test_a_program_shows_how_many_of_very_many_items_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[tuple[str, int, int]] = []

    @contextlib.contextmanager
    def shows() -> Iterator[Progress]:
        yield lambda *step: steps.append(step)

    monkeypatch.setattr(progress_module._Program, "shows", None)
    assert list(reporting("items", range(1000))) == list(range(1000))
    listen(shows)
    assert list(reporting("items", range(10))) == list(range(10))
    assert steps == []
    assert list(reporting("items", range(1000))) == list(range(1000))
    assert steps[1] == ("items: 1 of 1,000", 0, 0)

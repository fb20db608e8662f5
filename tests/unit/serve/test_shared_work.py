"""Work that requests share, with more of it than there are threads, and with clients that leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from functools import partial

import pytest

from blobstore.core import capacity, interrupts
from blobstore.core.capacity import Capacity
from blobstore.core.workers import WorkerPool
from blobstore.serve import shared_work
from blobstore.serve.shared_work import Busy, SharedWork
from tests.faults.processes import wait_for

ROWS = (
    "ANSWER",
    "SEND",
    "DECODE",
    "VERIFY",
    "PREPARE",
    "HASH",
    "FETCH",
    "ASK",
    "TRY",
    "WATCH",
    "LIST",
    "LIST_ALL",
)
SECONDS = 120.0


def run(test: Coroutine[None, None, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(SECONDS):
            await test

    asyncio.run(limited())


async def begun(tasks: Sequence[object]) -> None:
    """Let tasks run until they wait."""
    for _ in tasks:
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("more", [1, 40])
def test_work_beyond_the_threads_is_done_in_its_turn(name: str, more: int) -> None:
    row = capacity.ALL[name]

    async def test() -> None:
        work, go_on = SharedWork(row), threading.Event()

        def job(number: int) -> int:
            assert go_on.wait(SECONDS)
            return number

        numbers = range(row.most + more)
        tasks = [asyncio.create_task(work.result(one, job, one)) for one in numbers]
        await begun(tasks)
        go_on.set()
        assert await asyncio.gather(*tasks) == list(numbers)
        work.close()

    run(test())


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("more", [1, 40])
def test_work_is_not_begun_for_clients_that_have_left(name: str, more: int) -> None:
    row = capacity.ALL[name]

    async def test() -> None:
        work, go_on, done = SharedWork(row), threading.Event(), list[int]()
        busy = row.at_once or row.most
        all_run = threading.Barrier(busy + 1)

        def job(number: int) -> int:
            all_run.wait(SECONDS)
            assert go_on.wait(SECONDS)
            done.append(number)
            return number

        numbers = range(row.most + more)
        tasks = [asyncio.create_task(work.result(one, job, one)) for one in numbers]
        await begun(tasks)
        await asyncio.to_thread(all_run.wait, SECONDS)  # all threads are busy
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        # Those that have a thread and wait for their first turn are ended then.
        assert all(work.has(one) == (one < row.most) for one in numbers)
        go_on.set()
        assert await work.call(lambda: 7) == 7  # the threads serve others
        while any(map(work.has, numbers)):  # noqa: ASYNC110 - nothing else reports it
            await asyncio.sleep(0)
        assert sorted(done) == list(range(busy))
        work.close()

    run(test())


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("more", [1, 40])
def test_work_that_nobody_waits_for_any_more_gives_way(name: str, more: int) -> None:
    row = capacity.ALL[name]

    async def test() -> None:
        work, stop = SharedWork(row), threading.Event()
        busy = row.at_once or row.most
        all_run = threading.Barrier(busy + 1)

        def long(number: int) -> int:
            all_run.wait(SECONDS)
            while not stop.wait(0.001):
                interrupts.check()
            return number

        numbers = range(busy)
        tasks = [asyncio.create_task(work.result(one, long, one)) for one in numbers]
        await asyncio.to_thread(all_run.wait, SECONDS)
        others = [asyncio.create_task(work.call(int)) for _ in range(more)]
        await begun(others)
        assert all(map(work.has, numbers)), "all are waited for"
        for task in tasks[1:] or tasks:
            task.cancel()
        assert await asyncio.gather(*others) == [0] * more
        if len(tasks) > 1:
            assert work.has(0), "it is waited for"
            assert more > 1 or sum(map(work.has, numbers)) == busy - 1
        stop.set()
        await asyncio.wait(tasks)
        assert tasks[0].cancelled() or await tasks[0] == 0
        work.close()

    run(test())


TURNS = Capacity(4, "queued", "tests", at_once=1)


@pytest.mark.parametrize("is_pool", [False, True])
def test_work_that_takes_turns_lets_all_others_go_first(
    monkeypatch: pytest.MonkeyPatch, is_pool: bool
) -> None:
    monkeypatch.setattr(shared_work, "_TURN_SECONDS", 0.0)

    async def test() -> None:
        work, stop = SharedWork(TURNS), threading.Event()

        def long(_: int) -> None:
            while not stop.wait(0.001):
                interrupts.take_turns()

        def long_in_threads(_: int) -> None:
            pool = WorkerPool(2, None, 0)

            def read(_: int) -> None:
                while not stop.wait(0.001):
                    pool.report(1, "")

            pool.run(range(2), read)

        job = long_in_threads if is_pool else long
        tasks = [asyncio.create_task(work.result(one, job, one)) for one in range(3)]
        await begun(tasks)
        for number in range(3):
            assert await work.call(int, number) == number
        assert not any(task.done() for task in tasks)
        stop.set()
        await asyncio.gather(*tasks)
        assert await work.call(int) == 0, "no turn is lost"
        work.close()

    run(test())


def test_nobody_passes_work_that_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise clients that leave and come again would keep it waiting for ever."""
    monkeypatch.setattr(shared_work, "_TURN_SECONDS", 0.0)

    async def test() -> None:
        work, done = SharedWork(TURNS), list[str]()
        is_begun, go_on = threading.Event(), threading.Event()

        def job(name: str) -> None:
            is_begun.set()
            assert go_on.wait(SECONDS)
            interrupts.take_turns()
            done.append(name)

        def is_waiting(number: int) -> bool:
            return len(work._turns.waiting) >= number

        tasks = []
        for number, name in enumerate(("first", "second", "third")):
            tasks.append(asyncio.create_task(work.result(name, job, name)))
            await asyncio.sleep(0)
            assert await asyncio.to_thread(is_begun.wait, SECONDS)
            await asyncio.to_thread(wait_for, partial(is_waiting, number))
        go_on.set()
        await asyncio.gather(*tasks)
        assert done == ["first", "second", "third"]
        work.close()

    run(test())


def test_work_that_has_given_way_is_begun_again_for_who_comes_then() -> None:
    async def test() -> None:
        work, stop = SharedWork(Capacity(1, "queued", "tests")), threading.Event()
        is_begun = threading.Event()

        def job() -> str:
            is_begun.set()
            while not stop.wait(0.001):
                interrupts.check()
            return "done"

        with work.joined("key", job):
            await asyncio.to_thread(is_begun.wait, SECONDS)
        assert work.has("key"), "nobody needs its thread"
        assert await work.call(int) == 0
        assert not work.has("key")
        with work.joined("key", job) as again:
            stop.set()
            assert await again == "done"
        work.close()

    run(test())


def test_work_of_one_key_is_done_once_for_all_who_wait_for_it() -> None:
    async def test() -> None:
        work, go_on, calls = SharedWork(Capacity(1, "queued", "tests")), threading.Event(), []

        def job() -> int:
            calls.append(1)
            assert go_on.wait(SECONDS)
            return len(calls)

        tasks = [asyncio.create_task(work.result("key", job)) for _ in range(5)]
        await begun(tasks)
        tasks[0].cancel()  # the others still wait
        go_on.set()
        assert await asyncio.gather(*tasks[1:]) == [1, 1, 1, 1]
        assert await work.result("key", job) == 2
        work.close()

    run(test())


def test_who_comes_after_all_others_have_left_gets_the_work_all_the_same() -> None:
    async def test() -> None:
        work, go_on = SharedWork(Capacity(1, "queued", "tests")), threading.Event()
        first = asyncio.create_task(work.result("first", go_on.wait, SECONDS))
        second = asyncio.create_task(work.result("second", lambda: 2))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        again = asyncio.create_task(work.result("second", lambda: 3))
        await asyncio.sleep(0)
        go_on.set()
        assert (await first, await again) == (True, 3)
        work.close()

    run(test())


def test_work_that_must_not_be_old_is_shared_until_it_is_begun() -> None:
    async def test() -> None:
        work = SharedWork(Capacity(1, "queued", "tests"), joins_begun=False)
        go_on, is_begun, calls = threading.Event(), threading.Event(), list[int]()

        def job() -> int:
            calls.append(1)
            is_begun.set()
            assert go_on.wait(SECONDS)
            return len(calls)

        first = asyncio.create_task(work.result("key", job))
        await asyncio.sleep(0)
        await asyncio.to_thread(is_begun.wait, SECONDS)
        later = [asyncio.create_task(work.result("key", job)) for _ in range(40)]
        await begun(later)
        go_on.set()
        assert await first == 1
        assert await asyncio.gather(*later) == [2] * 40
        assert not work.has("key")
        work.close()

    run(test())


def test_newer_work_is_still_shared_after_older_work_has_ended() -> None:
    async def test() -> None:
        work = SharedWork(Capacity(1, "queued", "tests"), joins_begun=False)
        is_begun, go_on = threading.Event(), [threading.Event(), threading.Event()]

        def job(number: int) -> int:
            is_begun.set()
            assert go_on[number].wait(SECONDS)
            return number

        with work.joined("key", job, 0) as older:
            await asyncio.to_thread(is_begun.wait, SECONDS)
            with work.joined("key", job, 1) as newer:
                go_on[0].set()
                assert await older == 0
                assert work.has("key")
                go_on[1].set()
                assert await newer == 1
        work.close()

    run(test())


def test_who_leaves_takes_no_waiting_work_from_the_others() -> None:
    async def test() -> None:
        work, go_on = SharedWork(Capacity(1, "queued", "tests")), threading.Event()
        with work.joined("busy", go_on.wait, SECONDS), work.joined("key", lambda: 7) as result:
            with work.joined("key", lambda: 8):
                pass
            assert work.has("key")
            go_on.set()
            assert await result == 7
        work.close()

    run(test())


def test_work_that_all_have_left_is_forgotten_at_once() -> None:
    async def test() -> None:
        work, go_on = SharedWork(Capacity(1, "queued", "tests")), threading.Event()
        with work.joined("busy", go_on.wait, SECONDS):
            with work.joined("key", lambda: 1):
                pass
            with work.joined("key", lambda: 2) as again:
                go_on.set()
                assert await again == 2
        work.close()

    run(test())


def test_work_that_waits_is_not_begun_after_the_end() -> None:
    async def test() -> None:
        work, go_on = SharedWork(Capacity(1, "queued", "tests")), threading.Event()
        with work.joined("busy", go_on.wait, SECONDS) as busy, work.joined("key", int) as result:
            work.close()
            go_on.set()
            assert await busy
            await asyncio.wait([result])
            assert result.cancelled()

    run(test())


def test_an_error_reaches_all_who_wait() -> None:
    async def test() -> None:
        work = SharedWork(Capacity(1, "queued", "tests"))

        def fail() -> None:
            raise OSError("no disk")

        tasks = [asyncio.create_task(work.result("key", fail)) for _ in range(2)]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in errors] == ["no disk", "no disk"]
        work.close()

    run(test())


@pytest.mark.parametrize("more", [1, 40])
def test_work_beyond_the_limit_of_jobs_is_refused(more: int) -> None:
    most = capacity.JOBS.most

    async def test() -> None:
        work, go_on = SharedWork(Capacity(1, "queued", "tests")), threading.Event()

        def job() -> bool:
            return go_on.wait(SECONDS)

        tasks = [asyncio.create_task(work.result(number, job)) for number in range(most + more)]
        await begun(tasks)
        await asyncio.sleep(0)
        refused = [task for task in tasks if task.done() and isinstance(task.exception(), Busy)]
        assert refused == tasks[most:]
        joined = asyncio.create_task(work.result(most - 1, job))  # it waits already
        await asyncio.sleep(0)
        go_on.set()
        assert await joined
        await asyncio.gather(*tasks[:most])
        work.close()

    run(test())

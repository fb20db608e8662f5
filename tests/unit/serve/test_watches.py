"""Clients that wait for a change."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field

import pytest

from blobstore.errors import StoreError
from blobstore.serve import watches
from blobstore.serve.watches import Watches

SECONDS = 120.0


@dataclass(frozen=True)
class Watch:
    """What a client waits for: the same thing if it has the same name."""

    name: str
    state: dict[str, list[bool]] = field(compare=False)

    def __call__(self) -> bool:
        return self.state[self.name].pop(0)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look again at once."""
    monkeypatch.setattr(watches, "_SECONDS", 0.0)


def run(test: Coroutine[None, None, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(SECONDS):
            await test

    asyncio.run(limited())


def test_one_look_serves_all_who_wait_for_the_same() -> None:
    state = {"a": [False, False, True], "b": [False, True]}

    async def test() -> None:
        waits = Watches()
        names = ["a"] * 300 + ["b"] * 300
        found = await asyncio.gather(*(waits.wait(Watch(one, state), SECONDS) for one in names))
        assert found == [True] * 600
        assert state == {"a": [], "b": []}  # else a look would have failed
        waits.close()

    run(test())


def test_who_has_waited_long_enough_or_left_is_forgotten() -> None:
    async def test() -> None:
        waits, looks = Watches(), list[int]()

        def never() -> bool:
            looks.append(1)
            return False

        assert not await waits.wait(never, 0.0)
        leaving = asyncio.create_task(waits.wait(never, SECONDS))
        while not looks:  # noqa: ASYNC110 - a thread adds to it
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        while waits._looks is not None:  # noqa: ASYNC110 - nothing else reports it
            await asyncio.sleep(0)
        assert not waits._waiting
        assert not await waits.wait(never, 0.0)  # it begins again
        waits.close()

    run(test())


@pytest.mark.parametrize("error", [StoreError, OSError])
def test_an_error_of_a_look_lets_the_answer_say_what_is_wrong(error: type[Exception]) -> None:
    def fail() -> bool:
        raise error("the store cannot be read")

    async def test() -> None:
        waits = Watches()
        assert await waits.wait(fail, SECONDS)
        waits.close()

    run(test())


def test_all_waits_end_with_the_server() -> None:
    async def test() -> None:
        waits = Watches()
        waiting = [asyncio.create_task(waits.wait(lambda: False, SECONDS)) for _ in range(3)]
        await asyncio.sleep(0)
        waits.close()
        assert await asyncio.gather(*waiting) == [False] * 3
        assert not await waits.wait(lambda: True, SECONDS)

    run(test())

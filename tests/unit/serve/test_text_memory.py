"""The memory of forms and answers, with one connection more than it has, and with forty more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from blobstore.core import capacity
from blobstore.core.limits import Crowded
from blobstore.serve import text_memory
from blobstore.serve.text_memory import TextMemory

MOST = capacity.TEXTS.most


class Client:
    """A connection that may be ended."""

    is_ended = False

    def abort(self) -> None:
        self.is_ended = True


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that sets the time in which a client has to move a byte."""
    return lambda seconds: monkeypatch.setattr(text_memory, "GRACE_SECONDS", seconds)


def run(test: Callable[[TextMemory, Callable[[int], list[Any]]], None]) -> None:
    async def body() -> None:
        test(TextMemory(MOST), lambda count: [Client() for _ in range(count)])

    asyncio.run(body())


@pytest.mark.parametrize("more", [1, 40])
def test_texts_beyond_the_memory_are_refused_while_all_move(
    more: int, patience: Callable[[float], None]
) -> None:
    def test(memory: TextMemory, clients: Callable[[int], list[Any]]) -> None:
        patience(math.inf)
        held, others = clients(4), clients(more)
        for one in held:
            memory.take(one, MOST // 4)
        for one in others:
            with pytest.raises(Crowded):
                memory.take(one, MOST // 4)
        assert not any(one.is_ended for one in held + others)
        assert memory.give(held[0]) == MOST // 4  # it has left, or has all of its answer
        memory.take(others[0], MOST // 4)

    run(test)


@pytest.mark.parametrize("more", [1, 40])
def test_small_texts_take_the_memory_of_the_largest(
    more: int, patience: Callable[[float], None]
) -> None:
    def test(memory: TextMemory, clients: Callable[[int], list[Any]]) -> None:
        patience(math.inf)
        held, others = clients(3), clients(more)
        for one, size in zip(held, (MOST // 4, MOST // 2, MOST // 4), strict=True):
            memory.take(one, size)
        for one in others:
            memory.take(one, 200)
        assert [one.is_ended for one in held] == [False, True, False]
        assert not any(one.is_ended for one in others)

    run(test)


def test_who_has_moved_no_byte_for_the_longest_time_is_ended(
    patience: Callable[[float], None],
) -> None:
    def test(memory: TextMemory, clients: Callable[[int], list[Any]]) -> None:
        patience(0)
        first, second, third, fourth = clients(4)
        for one in (first, second, third):
            memory.take(one, MOST // 3)
        memory.moved(first)
        memory.moved(fourth)  # it has no text
        memory.take(fourth, MOST // 3)
        assert [one.is_ended for one in (first, second, third)] == [False, True, False]
        assert memory.give(second) == 0

    run(test)


def test_a_text_that_grows_is_one_text(patience: Callable[[float], None]) -> None:
    def test(memory: TextMemory, clients: Callable[[int], list[Any]]) -> None:
        patience(math.inf)
        (client,) = clients(1)
        for _ in range(4):
            memory.take(client, MOST // 4)
        with pytest.raises(Crowded):
            memory.take(client, 1)
        assert memory.give(client) == 0
        memory.take(client, MOST)

    run(test)

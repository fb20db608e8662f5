"""Who shares a decoded piece of a frozen model, and which client loses its memory to another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from blobstore.errors import BlobDamaged
from blobstore.serve import decoded_pieces
from blobstore.serve.decoded_pieces import DecodedPieces

SECONDS = 60


class Decoder:
    """Decodes as soon as it may, and counts."""

    def __init__(self) -> None:
        self.count, self.may = 0, asyncio.Event()

    async def __call__(self) -> bytearray:
        await self.may.wait()
        self.count += 1
        return bytearray(b"decoded")


class Client:
    """A client that takes nothing until it is aborted, or told to."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.ended, self.has_piece = asyncio.Event(), asyncio.Event()
        self.is_aborted = False
        self._group = group

    def abort(self) -> None:
        self.is_aborted = True
        self.ended.set()

    def ask(
        self, pieces: DecodedPieces, key: object, decode: Callable[[], Awaitable[bytearray]]
    ) -> asyncio.Task[None]:
        async def take() -> None:
            async with pieces.one(cast("Any", self), key, decode) as data:
                assert data == b"decoded"
                self.has_piece.set()
                await self.ended.wait()

        return self._group.create_task(take())


async def turns() -> None:
    """Let all tasks run until they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded_pieces, "_DECODED", 1)


def test_clients_that_need_the_same_piece_share_it() -> None:
    async def run() -> None:
        pieces, decode = DecodedPieces(), Decoder()
        async with asyncio.TaskGroup() as group:
            first, second, third = (Client(group) for _ in range(3))
            first.ask(pieces, "a", decode)
            leaving = second.ask(pieces, "a", decode)
            await turns()
            leaving.cancel()  # the others still need it
            decode.may.set()
            await asyncio.wait_for(first.has_piece.wait(), SECONDS)
            third.ask(pieces, "a", decode)
            first.ended.set()
            await asyncio.wait_for(third.has_piece.wait(), SECONDS)
            third.ended.set()
        assert decode.count == 1
        async with asyncio.TaskGroup() as group:  # nobody has it any more
            again = Client(group)
            again.ended.set()
            again.ask(pieces, "a", decode)
        assert decode.count == 2

    asyncio.run(run())


@pytest.mark.parametrize("when", ["decoded", "decoding", "waiting", "fails"])
def test_the_memory_of_clients_that_are_gone_is_for_the_next(when: str) -> None:
    async def broken() -> bytearray:
        raise BlobDamaged("it is damaged")

    async def run() -> None:
        pieces, decode = DecodedPieces(), Decoder()
        async with asyncio.TaskGroup() as group:
            first, second, other = (Client(group) for _ in range(3))
            if when == "fails":
                for _ in range(2):
                    with pytest.raises(BlobDamaged):
                        async with pieces.one(cast("Any", first), "a", broken):
                            pass
            else:
                asked = first.ask(pieces, "a", decode)
                if when == "decoded":
                    decode.may.set()
                    await asyncio.wait_for(first.has_piece.wait(), SECONDS)
                await turns()
                if when == "waiting":
                    waiting = second.ask(pieces, "b", decode)
                    await turns()
                    assert not second.has_piece.is_set()
                    waiting.cancel()
                    await turns()
                asked.cancel()
            decode.may.set()
            other.ask(pieces, "c", decode)
            await asyncio.wait_for(other.has_piece.wait(), SECONDS)
            assert pieces._free.locked()
            other.ended.set()
        assert not pieces._free.locked()
        assert not pieces._pieces
        assert not pieces._sending

    asyncio.run(run())


def test_clients_that_take_nothing_are_let_go_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoded_pieces, "_GRACE_SECONDS", 0.01)

    async def run() -> None:
        pieces, decode = DecodedPieces(), Decoder()
        decode.may.set()
        async with asyncio.TaskGroup() as group:
            first, second, other = (Client(group) for _ in range(3))
            first.ask(pieces, "a", decode)
            second.ask(pieces, "a", decode)
            await asyncio.wait_for(second.has_piece.wait(), SECONDS)
            other.ask(pieces, "b", decode)
            await asyncio.wait_for(other.has_piece.wait(), SECONDS)
            assert (first.is_aborted, second.is_aborted, other.is_aborted) == (True, True, False)
            other.ended.set()

    asyncio.run(run())


def test_only_those_with_the_piece_that_was_not_taken_for_the_longest_time_are_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoded_pieces, "_GRACE_SECONDS", 0.01)
    monkeypatch.setattr(decoded_pieces, "_DECODED", 2)

    async def run() -> None:
        pieces, decode = DecodedPieces(), Decoder()
        decode.may.set()
        async with asyncio.TaskGroup() as group:
            first, second, other = (Client(group) for _ in range(3))
            for client, key in ((first, "a"), (second, "b"), (other, "c")):
                client.ask(pieces, key, decode)
                await asyncio.wait_for(client.has_piece.wait(), SECONDS)
            assert (first.is_aborted, second.is_aborted) == (True, False)
            second.ended.set()
            other.ended.set()

    asyncio.run(run())


def test_a_client_whose_piece_is_not_ready_is_not_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded_pieces, "_GRACE_SECONDS", 0)

    async def run() -> None:
        pieces, decode = DecodedPieces(), Decoder()
        async with asyncio.TaskGroup() as group:
            first, other = Client(group), Client(group)
            first.ask(pieces, "a", decode)
            await turns()
            waiting = other.ask(pieces, "b", decode)
            await turns()
            assert not first.is_aborted
            waiting.cancel()
            decode.may.set()
            await asyncio.wait_for(first.has_piece.wait(), SECONDS)
            first.ended.set()

    asyncio.run(run())

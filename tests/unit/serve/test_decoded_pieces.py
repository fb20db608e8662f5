"""Which client of a frozen model loses its memory to another one."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from blobstore.serve import decoded_pieces
from blobstore.serve.decoded_pieces import DecodedPieces


class Connection:
    """A connection whose client takes nothing, until it is aborted."""

    def __init__(self) -> None:
        self.aborted = asyncio.Event()
        self.has_piece = asyncio.Event()

    def abort(self) -> None:
        self.aborted.set()

    async def take(self, pieces: DecodedPieces, *, sends: bool) -> None:
        async with pieces.one(cast("Any", self)) as wrote:
            if sends:
                wrote()
            self.has_piece.set()
            await self.aborted.wait()


@pytest.fixture
def one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded_pieces, "_DECODED", 1)
    monkeypatch.setattr(decoded_pieces, "_GRACE_SECONDS", 0.01)


@pytest.mark.usefixtures("one_piece")
def test_a_client_that_takes_nothing_is_let_go_for_the_next() -> None:
    async def run() -> None:
        pieces, first, second = DecodedPieces(), Connection(), Connection()
        async with asyncio.TaskGroup() as group:
            group.create_task(first.take(pieces, sends=True))
            await first.has_piece.wait()
            group.create_task(second.take(pieces, sends=True))
            await asyncio.wait_for(second.has_piece.wait(), 60)
            assert first.aborted.is_set()
            assert not second.aborted.is_set()
            second.abort()

    asyncio.run(run())


@pytest.mark.usefixtures("one_piece")
def test_a_client_whose_piece_is_not_ready_keeps_its_memory() -> None:
    async def run() -> None:
        pieces, first, second = DecodedPieces(), Connection(), Connection()
        async with asyncio.TaskGroup() as group:
            group.create_task(first.take(pieces, sends=False))
            await first.has_piece.wait()
            waiting = group.create_task(second.take(pieces, sends=True))
            for _ in range(5):  # as long as it takes if nothing is in the way
                await asyncio.sleep(0)
            assert not second.has_piece.is_set()
            assert not first.aborted.is_set()
            waiting.cancel()
            first.abort()

    asyncio.run(run())

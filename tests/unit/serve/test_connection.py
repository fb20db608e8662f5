"""How much a client may send before it is answered."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from blobstore.serve.connection import MAX_AHEAD, Connection


class Transport:
    """The part of a connection that reads."""

    def __init__(self) -> None:
        self._reads = True

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        self._reads = True

    def reads(self) -> bool:
        return self._reads


class Handler(asyncio.Protocol):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.received = 0

    def data_received(self, data: bytes) -> None:
        self.received += len(data)


def connected() -> tuple[Connection, Transport, Handler]:
    handler, transport = Handler(), Transport()
    connection = Connection(handler)
    connection.connection_made(cast("Any", transport))
    return connection, transport, handler


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_a_client_that_sends_much_ahead_is_not_read_until_all_is_answered() -> None:
    async def run() -> None:
        connection, transport, handler = connected()
        connection.data_received(b"a" * MAX_AHEAD)
        assert transport.reads()
        with connection.answering():
            connection.data_received(b"a")
            assert not transport.reads()
            assert handler.received == MAX_AHEAD + 1, "what was read is passed on"
        with connection.answering():  # the next one had arrived, too
            await turns()
            assert not transport.reads()
        await turns()
        assert transport.reads()
        connection.data_received(b"a" * MAX_AHEAD)
        assert transport.reads(), "it begins again"

    asyncio.run(run())


def test_a_head_without_an_end_is_not_read_on() -> None:
    connection, transport, _ = connected()
    for _ in range(3):
        connection.data_received(b"a" * (MAX_AHEAD // 2))
    assert not transport.reads()


def test_a_form_does_not_count_once_it_is_held_elsewhere() -> None:
    async def run() -> None:
        connection, transport, _ = connected()
        with connection.answering():
            for _ in range(10):
                connection.data_received(b"a" * MAX_AHEAD)
                connection.taken(MAX_AHEAD)
                assert transport.reads()
            connection.data_received(b"a" * MAX_AHEAD * 2)
            assert not transport.reads()
            connection.taken(MAX_AHEAD)
            assert transport.reads()

    asyncio.run(run())

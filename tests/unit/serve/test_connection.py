"""How many connections there may be, and how much a client may send before it is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from blobstore.serve.connection import MAX_AHEAD, Connection, Connections, Refusal


class Body:
    """The body of a request."""

    def __init__(self, *, is_complete: bool) -> None:
        self.is_complete = is_complete

    def is_eof(self) -> bool:
        return self.is_complete


NOTHING = Body(is_complete=True)


class Transport:
    """The part of a connection that reads."""

    def __init__(self) -> None:
        self._reads, self.is_aborted = True, False

    def abort(self) -> None:
        self.is_aborted = True

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


def connected(host: Connections | None = None) -> tuple[Connection, Transport, Handler]:
    handler, transport = Handler(), Transport()
    host = Connections(1) if host is None else host
    connection = host.accepted(lambda: handler)
    assert isinstance(connection, Connection)
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
        with connection.answering(NOTHING):
            connection.data_received(b"a")
            assert not transport.reads()
            assert handler.received == MAX_AHEAD + 1, "what was read is passed on"
        with connection.answering(NOTHING):  # the next one had arrived, too
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


def test_a_body_does_not_count() -> None:
    async def run() -> None:
        connection, transport, handler = connected()
        body = Body(is_complete=False)
        connection.data_received(b"a" * MAX_AHEAD * 2)  # its beginning came with the head
        assert not transport.reads()
        with connection.answering(body):
            assert transport.reads()
            connection.data_received(b"a" * MAX_AHEAD * 10)
            assert transport.reads()
        connection.data_received(b"a" * MAX_AHEAD * 10)  # of a body that nobody wants
        body.is_complete = True
        await turns()
        assert transport.reads()
        connection.data_received(b"a" * (MAX_AHEAD + 1))
        assert not transport.reads()
        assert handler.received == 23 * MAX_AHEAD + 1

    asyncio.run(run())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        yield now


@pytest.mark.parametrize("more", [1, 40])
def test_who_has_moved_nothing_for_longest_makes_place_for_the_next(
    clock: list[float], more: int
) -> None:
    host = Connections(3)
    first = [connected(host) for _ in range(3)]
    clock[0] = 1.0
    assert isinstance(host.accepted(Handler), Refusal), "they may move a byte at any moment"
    first[0][0].data_received(b"a")
    first[2][0].sent()
    clock[0] = 2.5
    connected(host)
    assert [transport.is_aborted for _, transport, _ in first] == [False, True, False]
    assert isinstance(host.accepted(Handler), Refusal)
    for _ in range(more):
        clock[0] += 3
        connected(host)
    assert len(host) == 3
    assert first[0][1].is_aborted


def test_who_sends_a_request_byte_by_byte_makes_place(clock: list[float]) -> None:
    async def run() -> None:
        host, body = Connections(2), Body(is_complete=False)
        (head, first, _), (form, second, _) = connected(host), connected(host)
        head.data_received(b"G")
        form.data_received(b"POST")
        with form.answering(body):
            for clock[0] in (1.0, 2.0, 3.0):
                head.data_received(b"E")
                form.data_received(b"a")
            connected(host)
            assert (first.is_aborted, second.is_aborted) == (True, False)
            clock[0] = 4.0
            connected(host)
            assert second.is_aborted

    asyncio.run(run())


def test_who_waits_for_no_answer_makes_place_before_others(clock: list[float]) -> None:
    async def run() -> None:
        host = Connections(2)
        (one, first, _), (_, second, _) = connected(host), connected(host)
        with one.answering(NOTHING):
            clock[0] = 3.0
            connected(host)
            assert (first.is_aborted, second.is_aborted) == (False, True)
            connected(host)  # the other one has just come
            assert first.is_aborted

    asyncio.run(run())


def test_who_has_left_has_no_place() -> None:
    host = Connections(1)
    connection, transport, _ = connected(host)
    connection.connection_lost(None)
    connected(host)
    assert not transport.is_aborted

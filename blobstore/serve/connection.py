"""Connections of clients: how much a client may send before it is answered, and the end of those beyond the limit.

aiohttp limits the lines of a head, and how many requests of a client wait for their turn. Both together are over 60 MiB
for each connection, and more in some versions. So a connection is not read any more when its client has sent
:data:`MAX_AHEAD`, until all that has arrived is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_AHEAD: Final = 64 << 10
"""Bytes of heads, or of requests that wait. One read of a socket may exceed it. Forms that are read do not count."""


class Connection(asyncio.Protocol):
    """Passes what a client sends to another protocol."""

    def __init__(self, handler: asyncio.Protocol) -> None:
        """Read nothing yet."""
        self._handler = handler
        self._ahead = 0
        """Bytes that have arrived since the client had nothing to wait for."""
        self._is_answering = self._is_paused = False

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Answer a request within the block. If it is the last one that has arrived, the client may go on after it."""
        self._is_answering = True
        try:
            yield
        finally:
            self._is_answering = False
            loop = asyncio.get_running_loop()
            # If another one has arrived, it is answered when the loop gets to it.
            loop.call_soon(loop.call_soon, self._answered)

    def _answered(self) -> None:
        if not self._is_answering:
            self.taken(self._ahead)

    def taken(self, size: int) -> None:
        """Count bytes no longer, because they were answered, or are held elsewhere."""
        self._ahead -= min(size, self._ahead)
        if self._is_paused and self._ahead <= MAX_AHEAD:
            self._is_paused = False
            self._transport.resume_reading()

    # What the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        self._ahead += len(data)
        if self._ahead > MAX_AHEAD:
            self._is_paused = True
            self._transport.pause_reading()
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        """See :class:`asyncio.Protocol`."""
        return self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self._handler.connection_lost(exc)

    def pause_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self._handler.resume_writing()


class Refusal(asyncio.Protocol):
    """Ends a connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        stream = cast("asyncio.Transport", transport)
        stream.write(
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\n"
            b"Connection: close\r\n\r\n"
        )
        stream.close()

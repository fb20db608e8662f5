"""Connections of clients: how many there may be, and how much a client may send before it is answered.

If all are taken, one is ended for the next: the one that has moved no byte for the longest time, those that wait for no
answer before others. Of what a client sends, the first byte of a request counts, and the rest does not. So clients that
say nothing, send a byte now and then, or read nothing, do not keep others out. Fewer may be in the handshake of TLS, and
each of these has :data:`HANDSHAKE_SECONDS`.

aiohttp limits the lines of a head, and how many requests of a client wait for their turn. Both together are over 60 MiB
for each connection, and more in some versions. So a connection is not read any more when its client has sent
:data:`MAX_AHEAD`, until all that has arrived is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio.sslproto import SSLProtocol
from typing import TYPE_CHECKING, Final, cast

from blobstore.core import capacity

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Iterator
    from typing import Protocol

    class Body(Protocol):
        """The body of a request."""

        def is_eof(self) -> bool:
            """Return whether no more of it will arrive."""
            ...


MAX_AHEAD: Final = 64 << 10
"""Bytes of heads, or of requests that wait. One read of a socket may exceed it. Bodies do not count: aiohttp holds little of them."""
GRACE_SECONDS: Final = 2.0
"""How long a connection may move no byte if another one needs its place."""
MAX_HANDSHAKES: Final = capacity.HANDSHAKES.most
HANDSHAKE_SECONDS: Final = 10
"""How long the handshake of TLS may take."""
_HANDSHAKE_GRACE_SECONDS: Final = 0.5
"""How long it may take if another one needs its place."""
_GOODBYE_SECONDS: Final = 2
"""How long the end of TLS may take."""


class Connections:
    """The connections of a server."""

    def __init__(self, most: int) -> None:
        """Start without connections, and allow ``most`` of them."""
        self._most = most
        self._moved: dict[Connection, float] = {}
        """When each has last moved a byte that counts. The one that has done so last is the last one."""
        self.handshakes: dict[Connection, None] = {}
        """Those in the handshake of TLS. The one that has come last is the last one."""

    def __len__(self) -> int:
        return len(self._moved)

    def accepted(
        self, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None = None
    ) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection, which passes what it reads to that of ``make``, or refuses it."""
        full: Iterable[Connection] = self._moved if len(self) >= self._most else ()
        grace = GRACE_SECONDS
        if tls is not None and len(self.handshakes) >= MAX_HANDSHAKES:
            full, grace = self.handshakes, _HANDSHAKE_GRACE_SECONDS
        if full and not self._ends_one(full, grace):
            return Refusal(is_plain=tls is None)
        connection = Connection(make(), self)
        self.moved(connection)
        if tls is None:
            return connection
        self.handshakes[connection] = None
        return _Encrypted(connection, tls)

    def _ends_one(self, among: Iterable[Connection], grace: float) -> bool:
        """End a connection that has moved no byte for ``grace`` seconds; return whether one had."""
        oldest = next(iter(among))
        idle = next((one for one in among if not one.is_answering), oldest)
        for one in (idle, oldest):
            if time.monotonic() - self._moved[one] >= grace:
                one.abort()
                return True
        return False

    def moved(self, connection: Connection) -> None:
        """Note that a connection has moved a byte now."""
        self._moved.pop(connection, None)
        self._moved[connection] = time.monotonic()

    def left(self, connection: Connection) -> None:
        """Forget a connection."""
        self._moved.pop(connection, None)
        self.handshakes.pop(connection, None)


class Connection(asyncio.Protocol):
    """Passes what a client sends to another protocol."""

    def __init__(self, handler: asyncio.Protocol, host: Connections) -> None:
        """Read nothing yet."""
        self._handler, self._host = handler, host
        self._transport: asyncio.Transport | None = None
        self._body: Body | None = None
        self._ahead = 0
        """Bytes that have arrived since the client had nothing to wait for."""
        self.is_answering = self._is_paused = False

    @contextlib.contextmanager
    def answering(self, body: Body) -> Iterator[None]:
        """Answer a request within the block. If it is the last one that has arrived, the client may go on after it."""
        self.is_answering, self._body = True, body
        if not body.is_eof():  # so it is the last one
            self._go_on()
        try:
            yield
        finally:
            self.is_answering = False
            loop = asyncio.get_running_loop()
            # If another one has arrived, it is answered when the loop gets to it.
            loop.call_soon(loop.call_soon, self._answered)

    def _answered(self) -> None:
        if not self.is_answering:
            self._go_on()

    def _go_on(self) -> None:
        self._ahead = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def sent(self) -> None:
        """Note that the client has taken a byte."""
        self._host.moved(self)

    def accepted(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport of a connection whose handshake begins."""
        self._transport = cast("asyncio.Transport", transport)

    def abort(self) -> None:
        """End the connection now."""
        self.left()
        if self._transport is not None:
            self._transport.abort()

    def left(self) -> None:
        """Note that the connection has ended."""
        self._host.left(self)

    # What the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self.accepted(transport)
        self._host.handshakes.pop(self, None)
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        if self._body is None or self._body.is_eof():
            if not self._ahead:
                self._host.moved(self)
            self._ahead += len(data)
        if self._ahead > MAX_AHEAD and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        """See :class:`asyncio.Protocol`."""
        return self._handler.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self.left()
        self._handler.connection_lost(exc)

    def pause_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self._handler.resume_writing()


class _Encrypted(SSLProtocol):
    """TLS below a connection, which can be ended during the handshake, too."""

    max_size = 16 << 10
    """Bytes of its buffer, which has 256 KiB by default. Clients send little."""

    def __init__(self, connection: Connection, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        unwanted: asyncio.Future[None] = loop.create_future()  # of the end of the handshake
        unwanted.cancel()
        super().__init__(
            loop,
            connection,
            context,
            unwanted,
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=_GOODBYE_SECONDS,
        )
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        cast("asyncio.Transport", transport).set_write_buffer_limits(0)
        self._connection.accepted(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See :class:`asyncio.Protocol`. The connection is not told if the handshake has not ended."""
        super().connection_lost(exc)
        self._connection.left()


class Refusal(asyncio.Protocol):
    """Ends a connection beyond the limit."""

    def __init__(self, *, is_plain: bool) -> None:
        """Say why if the connection ``is_plain``: with TLS, that would need a handshake."""
        self._is_plain = is_plain

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        stream = cast("asyncio.Transport", transport)
        if self._is_plain:
            stream.write(
                b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\n"
                b"Connection: close\r\n\r\n"
            )
        stream.close()

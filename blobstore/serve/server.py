"""The server: sockets, threads and time around :func:`~blobstore.serve.routes.answer`.

This is the only module that imports aiohttp, whose low-level server parses requests and keeps connections. When
it is asked to stop, it finishes the responses that are being sent, if they end in time.

A request has two ends besides its own: aiohttp cancels its task when the client leaves, and so does a deadline
that only bytes which are sent move. All that is done for a client is awaited in that task, so nothing here or
below waits for a client, a thread or another server for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from blobstore.core import capacity, interrupts, limits
from blobstore.core.gc_pause import OldGarbage
from blobstore.core.libraries import optional_libraries
from blobstore.errors import BlobstoreError, Damaged, DamagedSource
from blobstore.serve.arriving_file import max_files
from blobstore.serve.blob_reader import BlobReader
from blobstore.serve.body import WRITTEN, BodySender, is_encrypted
from blobstore.serve.connection import Connection, Connections
from blobstore.serve.listener import listening
from blobstore.serve.log import ErrorLog, Log
from blobstore.serve.messages import PEER, FilePart, Request, Response, failure, without_body
from blobstore.serve.metrics import Metrics
from blobstore.serve.shared_work import Busy, SharedWork
from blobstore.serve.store_sizes import StoreSizes
from blobstore.serve.targets import logged_path
from blobstore.serve.text_memory import TextMemory
from blobstore.serve.unprepared import BodyNeeded, List, NotFetched, NotPrepared, OnlyHere
from blobstore.serve.watches import Watches

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Iterator, Mapping

    from aiohttp import web

    from blobstore.store.local import LocalStore

    Answer = Callable[[Request, Callable[[], str]], Response]
    """Returns the response to a request; raises BodyNeeded, NotPrepared or BlobstoreError.

    The function that it gets returns the server's metrics.
    """

MAX_CONNECTIONS = capacity.CONNECTIONS.most
_OTHER_FILES = 64
"""Files that are always open."""
_FILES = 3
"""Files of a connection: its socket, the blob that is sent, and a descriptor to wait for the client with."""
MAX_HEAD = 16 << 10
"""Bytes of a line of a request's head."""
MAX_BODY = 1 << 20
"""Bytes of a form. Its paths are those of one model."""
MAX_TEXTS = capacity.TEXTS.most
IDLE_SECONDS = 75.0
"""Seconds that a connection may be silent, also before its first request."""
BODY_SECONDS = 30.0
STALL_SECONDS = 120.0
"""Seconds that a request may take without a byte being sent. :mod:`blobstore.serve.body` sends a window at once."""
DRAIN_SECONDS = 30.0
"""Seconds that a server that is asked to stop may take."""
_CLEANUP_SECONDS = 2.0
"""The part of that which remains after the responses have ended or were aborted."""
_BREAK_SECONDS = 0.2
PREPARE_SECONDS = 50.0
"""Seconds that a client waits for preparations. The Hub's client does not request a file again after status 503."""
PATIENCE_SECONDS = 8.0
"""Seconds that a client waits for an answer of another server, which may never come."""
_RETRY_AFTER = "5"
_CLIENT_LEFT = 499
"""The status, as in nginx's log, of a response whose client has left."""
_TURN_SECONDS = 0.0005
"""How long a thread computes while another one waits for its turn. The loop needs a turn after each call to the system."""
_LOG_SECONDS = 0.25
_LOOK_SECONDS = 1.0
_MEASURE_SECONDS = 10.0
_TIDY_SECONDS = 30.0
_HEADERS = (
    *("range", "if-range", "if-none-match", "host", "authorization", "accept"),
    *("sec-fetch-site", "x-forwarded-proto", "user-agent", "prefer", PEER),
    "content-type",
)
"""The headers that are used."""


@dataclass(slots=True)
class _Exchange:
    """A request, and its progress."""

    request: Request
    status: int = 0
    sent: int = 0
    """Bytes of the body."""
    begun: float = field(default_factory=time.monotonic)
    deadline: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(STALL_SECONDS))

    def add(self, size: int) -> None:
        """Note that bytes of the body were sent, which gives the client time for the next ones."""
        self.sent += size
        when = asyncio.get_running_loop().time() + STALL_SECONDS
        if when - (self.deadline.when() or 0) > STALL_SECONDS / 100:  # a timer costs time
            self.deadline.reschedule(when)


class Server:
    """A server while it runs."""

    def __init__(
        self,
        store: LocalStore,
        log: Log | None = None,
        *,
        in_threads: bool = False,
        heals: bool = False,
        drain: float = DRAIN_SECONDS,
        identify: Callable[[Request], str] = lambda _: "",
    ) -> None:
        """Send blobs of ``store``, and add a line to ``log`` for each request.

        With ``in_threads``, requests are answered on threads, because answers are slow; those with a body always are.
        With ``heals``, a request whose response is damaged is answered once more. When the server is asked to stop,
        responses that take longer than ``drain`` seconds from then are aborted. ``identify`` returns the name of the
        token of a request.
        """
        self._in_threads, self._heals, self._drain = in_threads, heals, max(drain, 0)
        self._identify = identify
        self.metrics = Metrics()
        self._answers = SharedWork(capacity.ANSWER)
        works = (capacity.PREPARE, capacity.HASH, capacity.FETCH, capacity.ASK, capacity.TRY)
        self._works = {one: SharedWork(one) for one in works}
        for one in (capacity.LIST, capacity.LIST_ALL):
            self._works[one] = SharedWork(one, joins_begun=False)
        self._texts = TextMemory(MAX_TEXTS)
        self._watches = Watches()
        self._garbage = OldGarbage()
        self._sizes = StoreSizes(store)
        self._blobs = BlobReader(store, self._count_verified)
        self._sender = BodySender(self._blobs)
        self._log = log or Log(None)
        self._connections: Callable[[], int] = lambda: 0

    async def run(
        self,
        answer: Answer,
        listener: socket.socket,
        *,
        on_ready: Callable[[], object],
        stop: Callable[[], bool],
        tidy: Callable[[], object],
        look: Callable[[], object],
        tls: Callable[[], ssl.SSLContext | None],
    ) -> None:
        """Serve until the process is asked to stop or ``stop`` is true, and then finish responses that end in time.

        ``tidy`` is called from time to time on a thread, ``look`` each second, and ``tls`` for each connection.
        """
        from aiohttp import web

        async def handle(raw: web.BaseRequest) -> web.StreamResponse:
            with _connection(raw.transport).answering(raw.content):
                return await self._handle(raw, answer)

        manager = web.Server(
            handle,
            handler_cancellation=True,
            access_log=None,
            logger=ErrorLog(self._log),
            keepalive_timeout=IDLE_SECONDS,
            max_line_size=MAX_HEAD,
            max_field_size=MAX_HEAD,
            auto_decompress=False,
        )
        connections = Connections(max_connections(fetches=self._heals))
        self._connections = connections.__len__
        listening = await asyncio.get_running_loop().create_server(
            lambda: connections.accepted(manager, tls()), sock=listener, backlog=1024
        )
        chores = [
            asyncio.create_task(self._repeat(_LOG_SECONDS, self._log.flush)),
            asyncio.create_task(self._repeat(_LOOK_SECONDS, look)),
            asyncio.create_task(self._repeat(_MEASURE_SECONDS, self._sizes.measure)),
            asyncio.create_task(self._repeat(_TIDY_SECONDS, tidy)),
            asyncio.create_task(self._repeat(_TIDY_SECONDS, self._collect)),
        ]
        # Even if a thread is blocked by then, by a disk or by a log that is not read.
        interrupts.exit_after(self._drain)
        try:
            on_ready()
            await _until(lambda: interrupts.is_requested() or stop())
        finally:
            if request := interrupts.signal_name():
                self._log.note(stopping=request, open_requests=self.metrics.open_requests)
            # In this order: no new connections, no more waits, then the end of responses.
            listening.close()
            manager.pre_shutdown()  # closes what is idle, and the others after their response
            self._watches.close()
            await self._idle(self._drain - _CLEANUP_SECONDS)
            await manager.shutdown(_BREAK_SECONDS)  # breaks off the others
            await self._idle(_BREAK_SECONDS)
            for chore in chores:
                chore.cancel()
            self._sender.close()
            for work in (self._answers, *self._works.values()):
                work.close()
            self._blobs.save()
            self._log.flush()

    async def _idle(self, seconds: float) -> None:
        """Wait until no request is being answered, at most for this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0)):
                await _until(lambda: not self.metrics.open_requests)

    async def _handle(self, raw: web.BaseRequest, answer: Answer) -> web.StreamResponse:
        """Answer a request, and log the result. Raises ConnectionError if the client did not get the whole response."""
        exchange = _Exchange(Request(raw.method, raw.raw_path, _headers_of(raw)))
        transport = raw.transport
        self.metrics.open_requests += 1
        is_sent = False
        try:
            async with exchange.deadline:
                response = await self._answer(raw, exchange, answer)
                await response.write_eof()
                is_sent = True
                return response
        except Exception as error:
            if exchange.deadline.expired() and transport is not None:
                transport.abort()
            # The library, the loop and the system each say in another way that a connection has ended.
            elif not (transport is None or transport.is_closing()):
                raise
            raise ConnectionResetError("the client has left, or is too slow") from error
        finally:
            if transport is not None:
                self._texts.give(transport)
            if not is_sent:
                self.metrics.broken += 1
                exchange.status = exchange.status or _CLIENT_LEFT
            self.metrics.open_requests -= 1
            self.metrics.bytes_sent += exchange.sent
            # Any other method would make a metric of its own.
            method = raw.method if raw.method in ("GET", "HEAD", "POST") else "other"
            self.metrics.requests[method, exchange.status] += 1
            self.metrics.note_seconds(time.monotonic() - exchange.begun)
            self._note_exchange(raw, exchange)

    async def _answer(
        self, raw: web.BaseRequest, exchange: _Exchange, answer: Answer
    ) -> web.StreamResponse:
        from aiohttp import web

        transport = raw.transport
        if transport is None:
            raise ConnectionResetError("the client has left")
        # What is written has left this process. With TLS and 0, asyncio would pause a writer that has nothing left.
        transport.set_write_buffer_limits(1)
        response = await self._judged(raw, transport, exchange.request, answer)
        response = without_body(exchange.request, response)
        exchange.status, texts = response.status, response.texts
        if texts is not None and sum(map(len, texts)) <= WRITTEN:
            data = b"".join(texts)
            exchange.sent = len(data)
            headers = _named(response)
            return await _begun(
                raw, web.Response(status=response.status, headers=headers, body=data or None)
            )
        is_arriving = any(isinstance(part, FilePart) for part in response.parts)
        self.metrics.hits += not is_arriving
        self.metrics.misses += is_arriving
        stream = await _begun(
            raw, web.StreamResponse(status=response.status, headers=_named(response))
        )
        await self._send(exchange, answer, response, stream, transport)
        return stream

    async def _send(
        self,
        exchange: _Exchange,
        answer: Answer,
        response: Response,
        stream: web.StreamResponse,
        transport: asyncio.Transport,
    ) -> None:
        """Send the body of a response, or end the connection."""
        connection = _connection(transport)

        def count(size: int) -> None:
            exchange.add(size)
            self._texts.moved(transport)
            connection.sent()
            response.in_use()

        try:
            await self._sender.send(response.parts, stream, transport, count)
        except (ConnectionError, TimeoutError):
            raise
        except (BlobstoreError, Busy, OSError) as error:
            if transport.is_closing():
                raise
            # The bytes so far are right, so the client may continue there when the blob is repaired.
            self._note_error(exchange.request, error)
            if self._heals and _is_damage(error):  # it is fetched for the next request
                with contextlib.suppress(BlobstoreError, Busy):
                    await self._response(_again(exchange.request), answer)
            transport.close()
            raise

    async def _judged(
        self,
        raw: web.BaseRequest,
        transport: asyncio.Transport,
        request: Request,
        answer: Answer,
    ) -> Response:
        """Return the response to the head of a request, or to its body too if the head allows that.

        The memory of its texts is held.
        """
        try:
            try:
                response = await self._sound(request, answer)
            except BodyNeeded:
                body = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BODY_SECONDS):
                        body = await self._texts.read(raw.content, transport, MAX_BODY)
                if body is None:
                    return Response(413)
                response = await self._sound(replace(request, body=body), answer)
                self._texts.give(transport)
            self._texts.take(transport, sum(map(len, response.texts or ())))
        except limits.Crowded:
            return _busy("too many texts are sent and read now")
        return response

    async def _sound(self, request: Request, answer: Answer) -> Response:
        """Return a response whose first blob is right, or that of an error.

        If something is damaged, the request is answered once more: another server may have it.
        """
        noted, asked = "", request
        while True:
            try:
                response = await self._response(asked, answer)
                if response.wait is not None:
                    response = await self._awaited(asked, response, answer)
                if any(not isinstance(part, bytes) for part in response.parts):
                    await self._sender.first(response.parts)
            except (Busy, limits.Crowded):
                return _busy()
            except (BlobstoreError, OSError) as error:
                if str(error) != noted and not isinstance(error, OnlyHere):
                    noted = str(error)
                    self._note_error(request, error)
                if asked.damaged or not (self._heals and _is_damage(error)):
                    break
                asked = _again(request)
            else:
                self.metrics.healed += bool(asked.damaged)
                return response
        message = "the model cannot be read; the log of the server says why"
        return failure(message, 500)

    async def _awaited(self, request: Request, response: Response, answer: Answer) -> Response:
        """Return another response as soon as there is one, or this one when the client's wait ends."""
        end = None
        while (wait := response.wait) is not None:
            end = end or time.monotonic() + wait.seconds
            if not await self._watches.wait(wait.is_over, end - time.monotonic()):
                return response
            response = await self._response(request, answer)
        return response

    async def _response(self, request: Request, answer: Answer) -> Response:
        """Return the response to a request, after preparing what it needs. Raises BlobstoreError."""
        needed = set()
        with contextlib.suppress(Busy, TimeoutError):
            async with asyncio.timeout(PREPARE_SECONDS):
                while True:
                    try:
                        if not (self._in_threads or request.body):
                            return answer(request, self._metrics_text)
                        return await self._answers.call(answer, request, self._metrics_text)
                    except NotPrepared as first:
                        if first.key in needed:
                            await asyncio.sleep(first.pause)
                        made = await self._prepare(first, is_new=first.key not in needed)
                        needed.add(first.key)
                        if isinstance(first, List):
                            return cast("Response", made)
        return _busy()

    async def _prepare(self, first: NotPrepared, *, is_new: bool) -> object:
        """Wait for work that requests share. Raises Busy, TimeoutError, or the errors of the work."""
        is_fetch, work = isinstance(first, NotFetched), self._works[first.threads]
        self.metrics.prepared += is_new and first.is_counted and not work.has(first.key)
        async with asyncio.timeout(PATIENCE_SECONDS if is_fetch else None):
            return await work.result(first.key, first.prepare)

    # The log

    def _note_exchange(self, raw: web.BaseRequest, exchange: _Exchange) -> None:
        if self._log.write is None:
            return
        request = exchange.request
        # Without the query and the headers, which may have tokens.
        self._log.note(
            client=raw.remote or "",
            token=self._identify(request),
            method=request.method,
            path=logged_path(request.target),
            status=exchange.status,
            bytes=exchange.sent,
            seconds=round(time.monotonic() - exchange.begun, 4),
            range=request.headers.get("range", ""),
            agent=request.headers.get("user-agent", ""),
        )

    def _note_error(self, request: Request, error: Exception) -> None:
        self.metrics.damaged += 1
        self.metrics.damaged_blobs += _is_damage(error)
        text = "" if isinstance(error, BlobstoreError) else "a file cannot be read: "
        self._log.note(error=f"{text}{error}", path=logged_path(request.target))

    async def _repeat(self, seconds: float, act: Callable[[], object]) -> None:
        """Call ``act`` repeatedly on a thread. A failure is logged, and does not end the calls."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(None, act)
            except Exception as error:  # noqa: BLE001 - of a disk or of a thread that cannot be started
                self._log.note(error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(seconds)

    def _collect(self) -> None:
        self._garbage.collect(is_idle=not self.metrics.open_requests)

    def _metrics_text(self) -> str:
        return self.metrics.text(self._connections()) + self._sizes.text()

    def _count_verified(self, size: int) -> None:
        self.metrics.bytes_verified += size


def max_connections(*, fetches: bool) -> int:
    """Return how many connections may be open, after asking the system for as many files as they need.

    A server that ``fetches`` models has their files open, too.
    """
    import resource

    arriving = max_files if fetches else lambda _: 0
    needed = _FILES * MAX_CONNECTIONS + _OTHER_FILES + 2 * arriving(-1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, (soft - _OTHER_FILES - 2 * arriving(soft)) // _FILES)
    return MAX_CONNECTIONS


@contextlib.contextmanager
def _turns() -> Iterator[None]:
    """Let the loop wait for a short time within the block until threads that compute let it run."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


async def _until(is_reached: Callable[[], bool]) -> None:
    """Wait until a condition holds. It is polled, because a signal's handler must not touch the loop."""
    while not is_reached():  # noqa: ASYNC110 - see above
        await asyncio.sleep(interrupts.POLL)


async def _begun(raw: web.BaseRequest, response: web.StreamResponse) -> web.StreamResponse:
    """Return a response whose head is on its way, or waits for the beginning of the body."""
    await response.prepare(raw)
    return response


def _connection(transport: asyncio.Transport | None) -> Connection:
    if transport is None:
        raise ConnectionResetError("the client has left")
    return cast("Connection", transport.get_protocol())


def _headers_of(raw: web.BaseRequest) -> Mapping[str, str]:
    found = {name: value for name in _HEADERS if (value := raw.headers.get(name)) is not None}
    if raw.transport is not None and is_encrypted(raw.transport):
        found["x-forwarded-proto"] = "https"
    if "accept" in found:  # some clients send a line for each type
        found["accept"] = ", ".join(raw.headers.getall("accept"))
    # aiohttp gives bytes that are not UTF-8 as lone surrogates, which nothing can encode.
    return {
        name: value.encode(errors="surrogateescape").decode(errors="replace")
        for name, value in found.items()
    }


def _is_damage(error: Exception) -> bool:
    """Return whether the store is damaged, and not an arriving file."""
    return isinstance(error, Damaged) and not isinstance(error, DamagedSource)


def _again(request: Request) -> Request:
    return replace(request, damaged=time.monotonic())


def _busy(why: str = "the model is being prepared") -> Response:
    return failure(f"{why}; ask again in a moment", 503, {"Retry-After": _RETRY_AFTER})


def _named(response: Response) -> dict[str, str]:
    """Return the headers of a response, with our name instead of that of the library and its version."""
    return {"Server": "blobstore", **response.headers}


def run_server(
    answer: Answer,
    store: LocalStore,
    *,
    host: str,
    port: int,
    on_ready: Callable[[str], object],
    stop: Callable[[], bool] = lambda: False,
    tidy: Callable[[], object] = lambda: None,
    look: Callable[[], object] = lambda: None,
    tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    log: Log | None = None,
    in_threads: bool = False,
    heals: bool = False,
    drain: float = DRAIN_SECONDS,
    identify: Callable[[Request], str] = lambda _: "",
) -> None:
    """Serve until the process is asked to stop.

    Args:
        answer: returns the response to a request.
        store: has the blobs of the responses.
        host: the address to listen on.
        port: 0 for any free one.
        on_ready: called with the address, once the port is open.
        stop: called from time to time; True ends the server as a signal does.
        tidy: called from time to time on a thread.
        look: called on a thread each second.
        tls: returns the settings of TLS of the next connection; None for none.
        log: called with lines of JSON; None for no log.
        in_threads: call ``answer`` on threads, because it is slow.
        heals: answer a request once more if its response is damaged: with :attr:`Request.damaged`, ``answer``
            looks for another source.
        drain: seconds that responses may take after that.
        identify: returns the name of the token of a request, for the log.

    Raises:
        MissingLibrary: aiohttp is not installed.
        BlobstoreError: the port is taken.
    """
    with optional_libraries():
        import aiohttp

        del aiohttp

    async def run(listener: socket.socket) -> None:
        name, number = listener.getsockname()[:2]
        scheme = "http" if tls() is None else "https"
        url = f"{scheme}://[{name}]:{number}" if ":" in name else f"{scheme}://{name}:{number}"
        server = Server(
            store, log, in_threads=in_threads, heals=heals, drain=drain, identify=identify
        )
        await server.run(
            answer,
            listener,
            on_ready=lambda: on_ready(url),
            stop=stop,
            tidy=tidy,
            look=look,
            tls=tls,
        )

    # The loop looks for a request to stop itself. Raised while a response is sent, it would end them all.
    with listening(host, port) as listener, interrupts.deferred(), OldGarbage.kept(), _turns():
        asyncio.run(run(listener))
    interrupts.check()

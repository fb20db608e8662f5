"""One registry over HTTP: single requests and retried ones, with redirects followed by hand.

The rules, which ``protocol`` decides:

- A redirect is followed five times at most, and never from https to http. With a body, it must keep the method
  and stay within the registry. What authorizes a request goes to the registry alone.
- A response is streamed. Callers read only as much as they ask for. It must not be compressed.
- Lost connections, stalls, overloaded servers and gateways that fail raise TransientError, which
  :meth:`Transport.retry` counts. Every other failure is final, that of a certificate too.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import httpx2

from blobstore.core import interrupts, limits
from blobstore.core.escape import cli_command, quote
from blobstore.errors import BlobDamaged, BlobstoreError, RemoteError, RemoteRefused
from blobstore.http import protocol
from blobstore.http.certificates import certificates_in_use, speaks_tls, tls_context
from blobstore.http.protocol import Login, Reply, Request, TransientError
from blobstore.http.retry import HINT_ATTEMPTS, Patience, Retry
from blobstore.http.rules import KEEPS_METHOD
from blobstore.http.tokens import Authorizer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from blobstore.core.rate_limit import RateLimiter

_MAX_REDIRECTS: Final = 5
_MAX_CHALLENGES: Final = 3
"""Attempts to authorize one request: without a token, with one that has expired, with a new one."""
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_READ: Final = 2**19
"""Bytes that one call may receive: fewer cost time, and more cost memory, several copies per stream."""
_ALERT: Final = "_ALERT_"
"""In the reasons of errors that a server reports, such as ``TLSV13_ALERT_CERTIFICATE_REQUIRED``."""
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
"""The reasons of OpenSSL if a server answers to a handshake in another protocol."""
_PROBE_SECONDS: Final = 5.0
_LOOPBACK: Final = ("all://localhost", "all://127.0.0.0/8", "all://[::1]")


class Transport:
    """Sends requests to one registry. Any number of threads may share it."""

    def __init__(
        self,
        host: str,
        *,
        plain_http: bool,
        find_login: Callable[[str], Login | None],
        limiter: RateLimiter | None,
        patience: Patience,
        headers: Mapping[str, str] | None = None,
        authorization: str | None = None,
    ) -> None:
        """Connect to nothing yet.

        ``headers`` are more headers of each request. ``authorization`` is the header of all requests to the host,
        which is asked for no challenge then; empty for none.
        """
        self._fixed = authorization
        self.base = f"{'http' if plain_http else 'https'}://{host}"
        self.patience = patience
        self._headers = headers or {}
        self._limiter = limiter
        self._closed = threading.Event()
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._sockets_lock = threading.Lock()
        self.has_answered = False
        """Whether the server has answered anything."""
        self._may_be_tls = plain_http
        """Whether a server that has not answered well may expect TLS. It is asked once."""
        self._peer: tuple[str, int] | None = None
        """The address that the last connection before the first answer was made to."""
        self._waiting = threading.local()
        self._authorizer = Authorizer(self.base, find_login, self.fetch)
        self._trusted = tls_context(host)
        self._clients: list[httpx2.Client] = []
        """All clients. Each sends one request at a time: a shared one makes threads wait for each other."""
        self._idle = [self._new_client()]
        """Clients that are idle now."""

    def has_login(self) -> bool:
        """Return whether the registry asked for credentials, and there are some for all of it."""
        return self._authorizer.has_login(frozenset())

    def close(self) -> None:
        """Close the connections, and wake threads that wait for the next attempt."""
        self._closed.set()
        for client in self._clients:
            client.close()

    def abort(self) -> None:
        """End all requests now, from any thread: they raise Cancelled.

        Closing a socket would not wake a thread that waits for its server; shutting it down does.
        """
        self._closed.set()
        with self._sockets_lock:
            connections = list(self._sockets)
        for connection in connections:
            # The method of an encrypted socket would remove what another thread reads with.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def ask(
        self,
        request: Request,
        limit: int = 0,
        on_error: Callable[[RemoteError], object] = lambda _: None,
    ) -> Reply | None:
        """Send a request, again if it fails; None if there is no such thing, or a hint is refused.

        ``on_error`` is called with the error that keeps a hint from being answered.

        Raises:
            RemoteError: the registry cannot be reached; or the request is not a hint, and the registry refuses it,
                fails or sends more.
        """
        rule = request.rule
        try:
            reply = self._repeated(request, limit, HINT_ATTEMPTS if rule.is_hint else None)
        except RemoteError as error:
            # If the registry has never answered, the address may be wrong, which must not look like
            # a refused hint.
            if not (rule.is_hint and self.has_answered):
                raise
            on_error(error)
            return None
        return reply if reply.status in rule.success else None

    def fetch(self, request: Request, limit: int = 0) -> Reply:
        """Send a request, again if it fails, and return its response with ``limit`` bytes at most.

        Raises:
            RemoteError: the registry cannot be reached, refuses, or sends more.
        """
        return self._repeated(request, limit, None)

    def _repeated(self, request: Request, limit: int, attempts: int | None) -> Reply:
        """Send a request until it succeeds; the main thread stops waiting if the process is to end."""

        def exchange() -> Reply:
            for attempt in self.retry(attempts):
                with attempt:
                    return self.exchange(request, limit)
            raise AssertionError("unreachable")

        return interrupts.call(exchange)

    def exchange(self, request: Request, limit: int = 0) -> Reply:
        """Send a request once, and return its response with ``limit`` bytes at most, or the beginning of an error.

        Raises:
            TransientError: it may succeed if it is sent again.
            RemoteError: it will not.
        """
        with self.send(request) as response:
            is_success = response.status_code in request.rule.success
            body = self._read(request, response, limit if is_success else 0)
            return Reply(response.status_code, response.headers, body, str(response.url))

    @contextlib.contextmanager
    def send(self, request: Request) -> Iterator[httpx2.Response]:
        """Send a request once; the response is open until the block ends.

        Errors of the network inside the block are raised as TransientError too.

        Raises:
            TransientError: it may succeed if it is sent again.
            RemoteError: it will not.
        """
        url = request.url
        with self._network_errors(request), self._one_client() as client:
            for _ in range(_MAX_REDIRECTS + 1):
                with contextlib.closing(self._send_authorized(client, request, url)) as response:
                    with _placed(request):
                        protocol.check_encoding(response.headers)
                    if response.status_code in request.rule.answers:
                        self._may_be_tls = False
                        yield response
                        return
                    # A request for a token carries the login, which must not follow a redirect.
                    if response.status_code not in _REDIRECTS or request.is_for_token:
                        raise self._failure(request, response)
                    target = response.headers.get("location")
                    if request.body is None:
                        url = protocol.resolve(target, url)
                    elif response.status_code in KEEPS_METHOD:
                        url = protocol.resolve_upload(target, url)
                    else:
                        raise self._failure(request, response)
                    self._read(request, response, 0)  # so that its connection can be used again
            raise RemoteError(f"{request.what}: {quote(self.base)} redirects too often")

    def pieces(self, response: httpx2.Response) -> Iterator[bytes]:
        """Yield the body of a response as it arrives, no faster than the limiter allows.

        Raises:
            TransientError: it arrives too slowly.
        """
        waited, count = 0.0, 0
        body = response.iter_raw()
        while True:
            # Only the time that the server takes counts, and not that of the caller between two
            # pieces.
            began = time.monotonic()
            self._waiting.until = None
            piece = next(body, None)
            if piece is None:
                return
            waited += time.monotonic() - began
            count += len(piece)
            if waited > self.patience.stall:
                if count < waited * self.patience.slowest:
                    raise TransientError(f"{quote(self.base)} sends too slowly")
                waited, count = 0.0, 0
            self.limit(len(piece))
            yield piece

    def span(
        self, request: Request, response: httpx2.Response, begin: int, end: int, size: int | None
    ) -> Generator[bytes, None, None]:
        """Yield the bytes from ``begin`` to before ``end`` of what has ``size`` bytes, if that is known.

        Raises:
            BlobDamaged: it has another size, or more bytes than it says.
            TransientError: the response ends early.
            RemoteError: it does not fit the request.
        """
        status, headers = response.status_code, response.headers
        with _placed(request):
            skip, length = protocol.span_of(status, headers, begin, end, size)
        # A server may ignore the range and send all of the blob; reading then stops at the end of the range.
        is_cut = status == HTTPStatus.OK and end != size
        for piece in self.pieces(response):
            skipped = min(skip, len(piece))
            part = piece[skipped:][:length]
            skip -= skipped
            length -= len(part)
            if part:
                yield part
            if is_cut and not length:
                return
            # Otherwise the response is read to its end, so that its connection can be used again.
            if skipped + len(part) < len(piece):
                raise BlobDamaged(f"{request.what}: has more bytes than expected")
        if length:
            raise TransientError(f"{request.what}: the response ends {length} bytes early")

    def limit(self, count: int) -> None:
        """Wait for as long as the limiter asks to, for ``count`` bytes."""
        if self._limiter is not None:
            self._limiter.spend(count, self._closed.wait)

    def retry(self, attempts: int | None = None) -> Retry:
        """Return an iterator over attempts, so many at most; see :class:`Retry`."""
        most = min(attempts or self.patience.attempts, self.patience.attempts)
        return Retry(replace(self.patience, attempts=most), self._closed)

    @contextlib.contextmanager
    def _one_client(self) -> Iterator[httpx2.Client]:
        """Yield a client that no other thread uses, with an open connection if there is one."""
        try:
            # No lock is needed: `pop` and `append` of a list are atomic.
            client = self._idle.pop()
        except IndexError:
            client = self._new_client()
        try:
            yield client
        finally:
            self._idle.append(client)

    def _new_client(self) -> httpx2.Client:
        try:
            client = httpx2.Client(
                verify=self._trusted,
                # As curl does, this takes proxies and certificates from the environment. A connection within
                # this machine has no proxy: it may carry credentials without TLS.
                mounts=dict.fromkeys(_LOOPBACK),
                # Digests and ranges are about the bytes as they are stored.
                headers={
                    "accept-encoding": "identity",
                    "user-agent": "blobstore",
                    **self._headers,
                },
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
                timeout=httpx2.Timeout(self.patience.stall, pool=None),
                # The registry, and where it redirects to.
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=2),
            )
        except (ValueError, ImportError, httpx2.InvalidURL) as error:  # its messages hide passwords
            raise RemoteError(
                f"the proxy of the environment cannot be used: {quote(error)}",
                advice="correct the variables https_proxy, http_proxy and all_proxy",
            ) from None
        self._clients.append(client)
        return client

    def _send_authorized(
        self, client: httpx2.Client, request: Request, url: str
    ) -> httpx2.Response:
        """Send a request, with authorization if it goes to the registry and that asks for it."""
        if request.is_for_token or not protocol.has_same_origin(url, self.base):
            return self._send(client, request, url, None)
        if self._fixed is not None:
            return self._send(client, request, url, self._fixed or None)
        for _ in range(_MAX_CHALLENGES):
            with self._authorizer.authorized(request.scopes) as authorization:
                response = self._send(client, request, url, authorization)
                self._authorizer.judge(authorization, response.status_code)
            text = ", ".join(response.headers.get_list("www-authenticate"))
            challenge = protocol.challenge_of(text) if text else None
            if response.status_code != HTTPStatus.UNAUTHORIZED or challenge is None:
                return response
            with contextlib.closing(response):
                failure = self._failure(request, response)
            if not self._authorizer.learn(challenge, request.scopes, authorization):
                break
        raise failure

    def _send(
        self, client: httpx2.Client, request: Request, url: str, authorization: str | None
    ) -> httpx2.Response:
        headers = dict(request.headers)
        if authorization is not None:
            headers["authorization"] = authorization
        # No limit for the pool: no other thread uses this client.
        timeout = httpx2.Timeout(max(self.patience.stall, request.timeout), pool=None)
        content = request.body() if request.body is not None else None
        if content is not None:
            # Otherwise httpx2 would send an iterable without its length.
            headers["content-length"] = str(request.size)
        built = client.build_request(
            request.method,
            url,
            headers=headers,
            content=content,
            timeout=timeout,
            extensions={"trace": self._trace},
        )
        self._waiting.until = None
        response = client.send(built, stream=True)
        self.has_answered = True
        return response

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        """Note a new connection, and limit the time that it may take for headers of a response, or a chunk.

        httpx2 limits the time between two bytes only, so that a server could take days.
        """
        if not event.endswith(("connect_tcp.complete", "start_tls.complete")):
            return
        stream = info["return_value"]
        with self._sockets_lock:
            self._sockets.add(stream.get_extra_info("socket"))
        if not self.has_answered:
            # The server has left already, which the next step reports.
            with contextlib.suppress(OSError):
                self._peer = stream.get_extra_info("server_addr")[:2]
        # `abort` may have taken its list of sockets just before this one was added.
        if self._closed.is_set():
            self.abort()
        read = stream.read

        def read_in_time(max_bytes: int, timeout: float) -> bytes:
            now = time.monotonic()
            if self._waiting.until is None:
                self._waiting.until = now + timeout
            left = self._waiting.until - now
            if left <= 0:
                raise TransientError(f"{quote(self.base)} sends too slowly")
            data: bytes = read(max(max_bytes, _READ), left)
            return data

        stream.read = read_in_time

    def _read(self, request: Request, response: httpx2.Response, limit: int) -> bytes:
        """Return the body, of ``limit`` bytes at most; without a limit, its beginning.

        Raises TransientError if other documents take the memory: the next attempt holds nothing until it begins.
        """
        if not limit:
            body = bytearray()
            for piece in self.pieces(response):
                body += piece
                # More is not read, even if the connection is lost by that.
                if len(body) > protocol.MAX_ERROR:
                    break
            return bytes(body)
        try:
            return limits.read_document(
                self.pieces(response), limit, f"{request.what}: the response"
            )
        except limits.Crowded as error:
            raise TransientError(error.message, status=HTTPStatus.SERVICE_UNAVAILABLE) from None

    def _failure(self, request: Request, response: httpx2.Response) -> BlobstoreError:
        """Return the error for a response that was not expected."""
        status, body = response.status_code, b""
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and "range" in request.headers:
            # The body may be shorter than announced; see protocol.range_of.
            return BlobDamaged(f"{request.what}: has fewer bytes than expected")
        with contextlib.suppress(httpx2.TransportError, TransientError):
            body = self._read(request, response, 0)
        # So do servers in Go and nginx. The text alone may be anybody's, and HEAD gets none.
        may_be_tls = b"HTTPS" in body or request.method == "HEAD"
        if status == HTTPStatus.BAD_REQUEST and may_be_tls and self._is_tls_server():
            return self._tls_expected(request)
        now = datetime.now(UTC)
        error = protocol.failure(request.what, status, response.headers, body, now)
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            host = protocol.address_of(self.base)
            advice = (
                f"the credentials for {host} give no access to it"
                if self._authorizer.has_login(request.scopes)
                else f"{cli_command('login', host)} may be needed"
            )
            if problem := self._authorizer.problem:
                advice = f"{advice}; credentials were not read: {problem}"
            return RemoteRefused(error.message, advice=advice, status=status, code=error.code)
        return error

    @contextlib.contextmanager
    def _network_errors(self, request: Request) -> Iterator[None]:
        try:
            yield
        except httpx2.ConnectError as error:
            raise self._connect_error(request, error) from error
        except httpx2.TimeoutException as error:
            if isinstance(error, httpx2.ConnectTimeout) and not self.has_answered:
                raise RemoteError(
                    f"{request.what}: cannot connect to {quote(self.base)}: timed out"
                ) from error
            raise TransientError(
                f"{request.what}: timed out waiting for {quote(self.base)}"
            ) from error
        except httpx2.TransportError as error:
            if isinstance(error, httpx2.ProxyError) and str(error).startswith("407"):
                raise RemoteRefused(
                    f"{request.what}: the proxy asks for a login",
                    advice="name it in the address of the proxy: http://USER:PASSWORD@HOST:PORT",
                ) from None
            # With TLS 1.3, a server refuses the certificate of a client only after the handshake.
            if _ALERT in (getattr(_tls_error(error), "reason", None) or ""):
                raise RemoteRefused(
                    f"{request.what}: {quote(self.base)} refuses the certificate of this machine, or that "
                    f"there is none: {quote(error)}",
                    advice="put NAME.cert and NAME.key into ~/.config/containers/certs.d/"
                    f"{self.base.partition('://')[2]}",
                ) from error
            if self._is_tls_server():
                raise self._tls_expected(request) from error
            raise TransientError(
                f"{request.what}: lost the connection to {quote(self.base)}: {quote(error)}"
            ) from error
        except httpx2.InvalidURL as error:
            raise RemoteError(f"{request.what}: {quote(error)}") from error

    def _connect_error(self, request: Request, error: httpx2.ConnectError) -> RemoteError:
        message = f"{request.what}: cannot connect to {quote(self.base)}: {quote(error)}"
        if (refused := _tls_error(error)) is not None:
            is_plain = refused.reason in _NOT_TLS
            advice = self._other_scheme("http") if is_plain else certificates_in_use()
            return RemoteError(message, advice=advice)
        if not self.has_answered:  # rather a mistyped address than a server that restarts
            return RemoteError(message)
        return TransientError(message)

    def _is_tls_server(self) -> bool:
        """Return whether a server that has not answered plain HTTP, or not well, answers to TLS."""
        if not self._may_be_tls or self._peer is None or self._closed.is_set():
            return False
        self._may_be_tls = False
        return speaks_tls(self._peer, min(self.patience.stall, _PROBE_SECONDS))

    def _tls_expected(self, request: Request) -> RemoteError:
        return RemoteError(
            f"{request.what}: {quote(self.base)} speaks TLS, and was asked without it",
            advice=self._other_scheme("https"),
        )

    def _other_scheme(self, scheme: str) -> str:
        return f"the address may have to begin with {scheme}://{self.base.partition('://')[2]}"


@contextlib.contextmanager
def _placed(request: Request) -> Iterator[None]:
    """Begin errors about a response with what was asked for."""
    try:
        yield
    except (BlobDamaged, RemoteError) as error:
        raise error.at(request.what) from None


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return the error of TLS that caused one of httpx2, which has no class for them."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause

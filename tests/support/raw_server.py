"""A loopback server that sends any bytes that tests want, however malformed."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Received:
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = bytes | Iterable[bytes]


def reply(status: int, body: bytes = b"", /, **headers: object) -> bytes:
    """Return a response; an underscore in the name of a header stands for a hyphen."""
    headers = {"content_length": len(body), "connection": "close"} | headers
    lines = [
        f"{name.replace('_', '-')}: {text}" for name, text in headers.items() if text is not None
    ]
    return "\r\n".join([f"HTTP/1.1 {status} x", *lines, "", ""]).encode() + body


class RawServer:
    """Answers each connection once and closes it. ``answer`` is called by one thread per connection."""

    def __init__(
        self, answer: Callable[[Received], Answer], tls: ssl.SSLContext | None = None
    ) -> None:
        self.answer = answer
        self.tls = tls
        self.requests: list[Received] = []
        self.plain_answer = b""
        """What clients get that begin with TLS at a server without it, or without TLS at one with it."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept)
        self._connections: list[threading.Thread] = []
        self._last: tuple[str, int] | None = None
        self.closing = threading.Event()
        """Set at the end; answers that block wait for it."""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def connections(self) -> int:
        return len(self._connections)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.closing.set()
        # Connections are accepted in their order: those of clients that have given up already, too.
        with socket.socket() as last:
            last.bind(("127.0.0.1", 0))
            self._last = last.getsockname()
            last.connect(self._listener.getsockname())
            self._thread.join()
        self._listener.close()
        for connection in self._connections:
            connection.join()

    def _accept(self) -> None:
        while True:
            connection, client = self._listener.accept()
            if client == self._last:
                connection.close()
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._connections.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, ValueError):
            stack.enter_context(connection)
            if self.plain_answer:
                is_tls = connection.recv(1, socket.MSG_PEEK) == b"\x16"
                if is_tls != (self.tls is not None):
                    connection.recv(1 << 16)
                    connection.sendall(self.plain_answer)
                    return
            if self.tls is not None:
                connection = stack.enter_context(_secured(connection, self.tls))
            received = self._receive(connection)
            self.requests.append(received)
            answer = self.answer(received)
            for part in [answer] if isinstance(answer, bytes) else answer:
                connection.sendall(part)
                if self.closing.is_set():
                    break

    @staticmethod
    def _receive(connection: socket.socket) -> Received:
        def read() -> bytes:
            if not (data := connection.recv(65536)):
                raise ValueError("the request ends early")
            return data

        data = b""
        while b"\r\n\r\n" not in data:
            data += read()
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        headers = {
            name.lower(): text
            for name, text in (re.split(r":\s*", line, maxsplit=1) for line in lines)
        }
        while len(body) < int(headers.get("content-length", 0)):
            body += read()
        return Received(method, path, headers, body)


def _secured(connection: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
    secured = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    try:
        secured.do_handshake()
    except OSError:
        # With TLS 1.3, the client may have sent its request. If that were left unread, the system would drop the
        # connection, and with it the reason of the refusal.
        with secured, contextlib.suppress(OSError):
            secured.shutdown(socket.SHUT_WR)
            while secured.recv(1 << 16):
                pass
        raise
    return secured

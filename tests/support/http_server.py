"""A thread that runs an HTTP server of the standard library, as a context manager."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler
    from types import TracebackType


class HttpServer:
    """A server on loopback that runs while the block does; subclasses say what it answers."""

    def __init__(
        self,
        handler: type[BaseHTTPRequestHandler],
        kind: type[ThreadingHTTPServer] = ThreadingHTTPServer,
    ) -> None:
        self._server = kind(("127.0.0.1", 0), handler)
        # A connection that a client keeps open must not hold up the end.
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

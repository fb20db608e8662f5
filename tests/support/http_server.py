"""A thread that runs an HTTP server of the standard library, as a context manager."""

from __future__ import annotations

import sys
import threading
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from http.server import BaseHTTPRequestHandler
    from types import TracebackType


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a connection that a client keeps open must not hold up the end
    request_queue_size = 128  # all clients of a test may connect before one is accepted

    def handle_error(self, *request: Any) -> None:
        """Print what a handler raises, but not of clients that leave: tests look at standard error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*request)


class HttpServer:
    """A server on loopback that runs while the block does; subclasses say what it answers."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self.lock = threading.Lock()
        """For what the threads of handlers count."""
        self.closing = threading.Event()
        """Set at the end; answers that block wait for it."""
        self._server = _Server(("127.0.0.1", 0), handler)
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
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

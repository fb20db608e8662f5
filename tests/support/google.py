"""A server that answers as Google Cloud Storage does: it compares generations, and no ETags.

No package has such a server. What it does is documented in "XML API overview" and "Request preconditions" of
Google's documentation.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_DATE = "Wed, 25 Nov 2026 22:00:00 GMT"


class GoogleStorage(ThreadingHTTPServer):
    """The objects of all buckets, by path, with their generations."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.lock = threading.Lock()
        self.generation = 0

    def write_account(self, path: Path) -> None:
        """Write the file that ``$GOOGLE_SERVICE_ACCOUNT`` names."""
        account = {
            "gcs_base_url": f"http://127.0.0.1:{self.server_port}",
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        path.write_text(json.dumps(account))


@contextlib.contextmanager
def running_google_storage() -> Iterator[GoogleStorage]:
    """Run a server until the block ends."""
    with GoogleStorage() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: GoogleStorage

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing."""

    def _reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        wanted = self.headers.get("x-goog-if-generation-match")
        with self.server.lock:
            _, current = self.server.objects.get(self._key, (b"", 0))
            if wanted is None or int(wanted) == current:
                self.server.generation += 1
                self.server.objects[self._key] = body, self.server.generation
                current = self.server.generation
                wanted = str(current)
        status = 200 if wanted == str(current) else 412
        self._reply(status, ETag='"same"', x_goog_generation=str(current))

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0])
            return
        found = self.server.objects.get(self._key)
        if found is None:
            self._reply(404)
            return
        data, generation = found
        headers = {
            "ETag": '"same"',
            "x_goog_generation": str(generation),
            "Last_Modified": _DATE,
        }
        wanted = self.headers.get("Range", "")
        if not wanted:
            self._reply(200, data, **headers)
            return
        begin, _, end = wanted.removeprefix("bytes=").partition("-")
        part = data[int(begin) : int(end) + 1]
        place = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(data)}"
        self._reply(206, part, Content_Range=place, **headers)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        self.server.objects.pop(self._key, None)
        self._reply(204)

    def _list(self, prefix: str) -> None:
        bucket = f"{self._key.rstrip('/')}/"
        entries = "".join(
            f"<Contents><Key>{path.removeprefix(bucket)}</Key><Size>{len(data)}</Size>"
            '<LastModified>2026-11-25T22:00:00Z</LastModified><ETag>"same"</ETag></Contents>'
            for path, (data, _) in sorted(self.server.objects.items())
            if path.startswith(bucket + prefix)
        )
        self._reply(200, f"<ListBucketResult>{entries}</ListBucketResult>".encode())

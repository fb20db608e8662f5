"""A loopback registry for pulls: it counts the bytes that it sends, and can be configured to misbehave."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import ClassVar

from blobstore.core.digest import Digest
from blobstore.registry.layouts.plan import RemotePlan
from blobstore.registry.manifest import OCI_INDEX, RemoteManifest
from blobstore.store.local import LocalStore
from tests.support.http_server import HttpServer

_PATH = re.compile(
    r"/v2/(?P<repository>.+?)/(?P<kind>manifests|blobs|tags|referrers)/(?P<reference>[^/?]+)"
)
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
PIECE = 16 * 2**10


class StubRegistry(HttpServer):
    """The server, with what it has and what it sent."""

    def __init__(self) -> None:
        self.manifests: dict[tuple[str, str], RemoteManifest] = {}
        """By repository, and by tag or digest."""
        self.blobs: dict[str, bytes] = {}
        self.referrers: dict[str, bytes] = {}
        """Lists of what refers to manifests, by their digests; without one there is no such API."""
        self.sent: Counter[str] = Counter()
        """Bytes of blobs that went out."""
        self.requests: list[str] = []
        self.connections: set[object] = set()
        """The addresses that requests came from."""
        self.alter: Callable[[str, int, bytes], bytes] = lambda digest, begin, data: data
        """Changes the bytes of a blob on their way, given its digest, their offset and the bytes."""
        self.cut_after: Counter[str] = Counter()
        """Bytes of a blob after which its connection breaks, once."""
        self.refused: set[tuple[str, str]] = set()
        """Manifests that this client may not read, by repository, and by tag or digest."""
        self.pause = 0.0
        """Seconds before each 16 KiB."""
        super().__init__(type("Handler", (_Handler,), {"registry": self}))

    def put(self, store: LocalStore, plan: RemotePlan, repository: str, tag: str) -> str:
        """Take what a push would send; return the address of the model."""
        for blob in plan.blobs:
            self.blobs[str(blob.digest)] = b"".join(map(bytes, store.read_pieces(*blob.id)))
        self.blobs |= {str(digest): data for digest, data in plan.made.items()}
        for manifest in plan.manifests:
            self.manifests[repository, str(manifest.digest)] = manifest
        self.manifests[repository, tag] = plan.root
        return f"{self.host}/{repository}:{tag}"

    def put_manifest(self, repository: str, tag: str, media_type: str, data: bytes) -> str:
        """Take a manifest without any check; return its address."""
        manifest = RemoteManifest(media_type, data, Digest.of(data))
        self.manifests[repository, tag] = manifest
        return f"{self.host}/{repository}:{tag}"


class _Handler(BaseHTTPRequestHandler):
    registry: ClassVar[StubRegistry]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.registry.requests.append(f"{self.command} {self.path}")
        self.registry.connections.add(self.client_address)
        match = _PATH.match(self.path)
        if self.path.partition("?")[0] == "/v2/_catalog":
            names = sorted({repository for repository, _ in self.registry.manifests})
            self._answer(HTTPStatus.OK, json.dumps({"repositories": names}).encode())
        elif match is None:
            self._answer(HTTPStatus.OK if self.path == "/v2/" else HTTPStatus.NOT_FOUND, b"{}")
        elif match["kind"] == "tags":
            tags = sorted(
                tag
                for repository, tag in self.registry.manifests
                if repository == match["repository"] and ":" not in tag
            )
            body = json.dumps({"name": match["repository"], "tags": tags}).encode()
            self._answer(HTTPStatus.OK if tags else HTTPStatus.NOT_FOUND, body)
        elif match["kind"] == "manifests":
            manifest = self.registry.manifests.get((match["repository"], match["reference"]))
            if (match["repository"], match["reference"]) in self.registry.refused:
                self._answer(HTTPStatus.FORBIDDEN, b"{}")
            elif manifest is None:
                self._answer(HTTPStatus.NOT_FOUND, b"{}")
            else:
                self._answer(
                    HTTPStatus.OK,
                    manifest.data,
                    manifest.media_type,
                    {"Docker-Content-Digest": str(manifest.digest)},
                )
        elif match["kind"] == "referrers":
            listed = self.registry.referrers.get(match["reference"])
            status = HTTPStatus.NOT_FOUND if listed is None else HTTPStatus.OK
            self._answer(status, listed or b"{}", OCI_INDEX)
        else:
            self._send_blob(match["reference"])

    def _answer(
        self,
        status: HTTPStatus,
        body: bytes,
        media_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_blob(self, digest: str) -> None:
        data = self.registry.blobs.get(digest)
        if data is None:
            self._answer(HTTPStatus.NOT_FOUND, b"{}")
            return
        begin, end = 0, len(data)
        headers = {}
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match:
            begin, end = int(match[1]), min(int(match[2]) + 1, len(data))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self.send_response(HTTPStatus.PARTIAL_CONTENT if match else HTTPStatus.OK)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - begin))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for offset in range(begin, end, PIECE):
            piece = self.registry.alter(digest, offset, data[offset : min(offset + PIECE, end)])
            time.sleep(self.registry.pause)
            # Counted first: the client may look at the number as soon as it has the bytes.
            if not self._count(digest, len(piece)):
                self.close_connection = True
                self.connection.close()
                return
            try:
                self.wfile.write(piece)
            except OSError:  # the client is gone
                self._count(digest, -len(piece))
                self.close_connection = True
                return

    def _count(self, digest: str, size: int) -> bool:
        """Count bytes of a blob; return False if its connection is to break instead."""
        with self.registry.lock:
            limit = self.registry.cut_after.get(digest)
            if size > 0 and limit is not None and self.registry.sent[digest] >= limit:
                del self.registry.cut_after[digest]
                return False
            self.registry.sent[digest] += size
            return True

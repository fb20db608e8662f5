"""A server on loopback that speaks the part of the Hub's HTTP API that its client uses.

It serves folders as repositories, counts what it is asked, and can be told to misbehave.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

LARGE = 1000
"""Bytes from which a file is listed as a large one, with its sha256."""


@dataclass
class Repo:
    """A repository: its folder, and how it misbehaves."""

    folder: Path
    commit: str
    token: str = ""
    """What a client must show; empty for a public repository."""
    gated: bool = False
    corrupt: set[str] = field(default_factory=set)
    """Files whose bytes are changed on the way, their length kept."""
    cut: set[str] = field(default_factory=set)
    """Files whose connection breaks in the middle."""
    gone: set[str] = field(default_factory=set)
    """Files that are listed and answered with 404."""
    status: int = 0
    """What every request of the API is answered with, if not 0."""

    def files(self) -> list[str]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [str(path.relative_to(self.folder)) for path in paths]

    def tree(self) -> list[dict[str, Any]]:
        return [self._listed(name) for name in self.files()]

    def _listed(self, name: str) -> dict[str, Any]:
        data = (self.folder / name).read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry = {"type": "file", "path": name, "size": len(data), "oid": git}
        if len(data) >= LARGE:
            sha256 = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 130}
        return entry


class HubServer:
    """The server as a context manager; ``url`` is for ``HF_ENDPOINT``."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: Counter[str] = Counter()
        """How often each path was asked for, with its method in front."""
        server = self

        class Handler(_Handler):
            hub = server

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, name: str, folder: Path, **options: Any) -> Repo:
        commit = hashlib.sha1(name.encode()).hexdigest()
        self.repos[name] = Repo(folder, commit, **options)
        return self.repos[name]

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
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests[f"{self.command} {path}"] += 1
        found = re.fullmatch(
            r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<rev>[^/]+))?", path
        ) or re.fullmatch(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+)", path)
        repo = self.hub.repos.get(found["repo"]) if found else None
        if found is None or repo is None:
            self._error(HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        elif repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}":
            kind = "GatedRepo" if repo.gated else "RepoNotFound"
            status = HTTPStatus.FORBIDDEN if repo.gated else HTTPStatus.UNAUTHORIZED
            self._error(status, kind)
        elif repo.status:
            self._error(HTTPStatus(repo.status), "")
        elif found["rev"] not in (None, "main", repo.commit):
            self._error(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        elif "file" in found.groupdict():
            self._file(repo, found["file"], body=body)
        elif found["what"] == "tree":
            self._json(repo.tree())
        else:
            siblings = [{"rfilename": name} for name in repo.files()]
            self._json({"id": found["repo"], "sha": repo.commit, "siblings": siblings})

    def _file(self, repo: Repo, name: str, *, body: bool) -> None:
        path = repo.folder / name
        if name in repo.gone or not path.is_file():
            self._error(HTTPStatus.NOT_FOUND, "EntryNotFound")
            return
        data = path.read_bytes()
        entry = next(item for item in repo.tree() if item["path"] == name)
        if name in repo.corrupt:
            data = bytes([data[0] ^ 1]) + data[1:]
        start = 0
        if span := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(span[1])
        self.send_response(HTTPStatus.PARTIAL_CONTENT if start else HTTPStatus.OK)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("X-Repo-Commit", repo.commit)
        self.send_header("ETag", f'"{entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]}"')
        self.send_header("X-Linked-Size", str(entry["size"]))
        self.end_headers()
        if not body:
            return
        if name in repo.cut:
            self.wfile.write(data[start : len(data) // 2])
            self.close_connection = True
        else:
            self.wfile.write(data[start:])

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _error(self, status: HTTPStatus, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

"""A loopback server with the part of the Hub's HTTP API that the client uses.

It serves folders as repositories, counts requests, and can be configured to misbehave.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.http_server import HttpServer

_PIECE = 64 << 10
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
    is_listed: bool = False
    """Whether revisions and names of files are for everyone, as those of gated models at the Hub."""
    open_files: set[str] = field(default_factory=set)
    """Files that are for everyone, as the card of a gated model is at the Hub."""
    corrupt: set[str] = field(default_factory=set)
    """Files whose bytes are changed on the way, their length kept."""
    short: set[str] = field(default_factory=set)
    """Files that end early in a sound answer."""
    cut: dict[str, int] = field(default_factory=dict)
    """Files whose connection breaks in the middle, and how many more times it does."""
    unending: set[str] = field(default_factory=set)
    """Files whose bytes come again and again, in chunks."""
    gone: set[str] = field(default_factory=set)
    """Files that are listed and answered with 404."""
    status: int = 0
    """What every request is answered with, if not 0."""
    statuses: dict[str, list[int]] = field(default_factory=dict)
    """What the next requests for ``info``, ``tree`` or a file are answered with."""
    headers: dict[str, str] = field(default_factory=dict)
    """What responses for files say instead of the truth."""
    retry_after: str = ""
    """What failed requests are answered with as ``Retry-After``."""
    raw: dict[str, bytes] = field(default_factory=dict)
    """What ``info`` or ``tree`` is answered with, whatever the client makes of it."""
    is_silent: bool = False
    """Whether the server answers nothing until it ends."""
    page: int = 0
    """Entries of a listing in one answer; 0 for all."""
    moves: bool = False
    """Whether the next page of a listing is at another host."""
    pause: float = 0
    """Seconds before each piece of a file."""
    gates: dict[str, tuple[int, threading.Event]] = field(default_factory=dict)
    """Files of which so many bytes are sent until the event is set."""
    branches: dict[str, Repo] = field(default_factory=dict)
    """Other revisions, with their own folder, commit and misbehaviour."""

    def at(self, revision: str | None) -> Repo | None:
        if revision in (None, "main", self.commit):
            return self
        for name, branch in self.branches.items():
            if revision in (name, branch.commit):
                return branch
        return None

    def files(self) -> list[str]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [str(path.relative_to(self.folder)) for path in paths]

    def tree(self) -> list[dict[str, Any]]:
        folders = sorted(path for path in self.folder.rglob("*") if path.is_dir())
        listed = [
            {"type": "directory", "path": str(path.relative_to(self.folder)), "oid": "0" * 40}
            for path in folders
        ]
        return listed + [self._listed(name) for name in self.files()]

    def entry(self, name: str) -> dict[str, Any]:
        return next(item for item in self.tree() if item["path"] == name)

    def _listed(self, name: str) -> dict[str, Any]:
        data = (self.folder / name).read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git}
        if len(data) >= LARGE:
            sha256 = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 130}
            # The blob of git is a pointer, as on the Hub.
            entry["oid"] = hashlib.sha1(f"pointer to {sha256}".encode()).hexdigest()
        return entry


class HubServer(HttpServer):
    """The server as a context manager; ``url`` is for ``HF_ENDPOINT``."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.renamed: dict[str, str] = {}
        """Names of repositories that have another one: requests are redirected, as the Hub does."""
        self.ids: dict[str, object] = {}
        """What repositories are called in their infos, if not as they were asked for."""
        self.requests: Counter[str] = Counter()
        """How often each path was asked for, with its method in front."""
        server = self

        class Handler(_Handler):
            hub = server

        super().__init__(Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.store = f"http://localhost:{self._server.server_port}/store"
        """Where large files are: for the client another host, which must not see the token."""
        self.sent = 0
        """Bytes of files."""
        self.tokens: list[str] = []
        """The tokens that were shown."""
        self.leaks: list[str] = []
        """Requests to the other host that showed a token."""

    def add(self, name: str, folder: Path, **options: Any) -> Repo:
        commit = hashlib.sha1(name.encode()).hexdigest()
        self.repos[name] = Repo(folder, commit, **options)
        return self.repos[name]

    def branch(self, name: str, revision: str, folder: Path, **options: Any) -> Repo:
        commit = hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()
        branch = Repo(folder, commit, **options)
        self.repos[name].branches[revision] = branch
        return branch


_ID = r"(?:[^/]+/)?[^/]+?"
_ROUTE = re.compile(
    rf"/api/models/(?P<repo>{_ID})(?:/(?P<what>revision|tree)/(?P<rev>[^/]+))?"
    rf"|(?P<store>/store)?/(?P<owner>{_ID})/resolve/(?P<commit>[^/]+)/(?P<file>.+)"
)


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
        url = urlsplit(self.path)
        with self.hub.lock:
            self.hub.requests[f"{self.command} {unquote(url.path)}"] += 1
        # Matched before unquoting: the slashes of a revision come quoted.
        found = _ROUTE.fullmatch(url.path)
        parts = {key: unquote(part) for key, part in found.groupdict("").items()} if found else {}
        asked = parts.get("repo", "") or parts.get("owner", "")
        if name := self.hub.renamed.get(asked):
            self._send(
                HTTPStatus.TEMPORARY_REDIRECT, {"Location": self.path.replace(asked, name, 1)}
            )
            return
        known = self.hub.repos.get(asked)
        if known is None:
            self._error(HTTPStatus.UNAUTHORIZED, "RepoNotFound")
            return
        if known.is_silent:
            self.hub.closing.wait()
            return
        repo = known.at(parts["rev"] or parts["commit"] or None)
        if token := self.headers.get("Authorization", ""):
            self.hub.tokens.append(token.removeprefix("Bearer "))
        if self.headers["Host"].startswith("localhost") and "Authorization" in self.headers:
            self.hub.leaks.append(self.path)
        if (
            known.token
            and not parts["store"]
            and (parts["file"] or not known.is_listed)
            and parts["file"] not in known.open_files
            and self.headers.get("Authorization") != f"Bearer {known.token}"
        ):
            kind = "GatedRepo" if known.gated else "RepoNotFound"
            status = HTTPStatus.FORBIDDEN if known.gated else HTTPStatus.UNAUTHORIZED
            self._error(status, kind)
        elif repo is None:
            self._error(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        elif failure := self._misbehaviour(repo, parts):
            self._error(HTTPStatus(failure), "", repo.retry_after)
        elif name := parts["file"]:
            self._file(repo, name, is_store=parts["store"] != "", body=body)
        else:
            self._api(repo, parts, parse_qs(url.query))

    def _misbehaviour(self, repo: Repo, parts: Mapping[str, str]) -> int:
        what = parts["file"] or ("tree" if parts["what"] == "tree" else "info")
        statuses = repo.statuses.get(what)
        return statuses.pop(0) if statuses else repo.status

    def _api(self, repo: Repo, parts: Mapping[str, str], query: Mapping[str, list[str]]) -> None:
        what = "tree" if parts["what"] == "tree" else "info"
        headers = {}
        if what == "tree":
            value: Any = repo.tree()
            if repo.page:
                start = int(query.get("cursor", ["0"])[0])
                if start + repo.page < len(value):
                    path = urlsplit(self.path).path
                    host = urlsplit(self.hub.store if repo.moves else self.hub.url)
                    url = f"http://{host.netloc}{path}"
                    following = f"{url}?recursive=true&cursor={start + repo.page}"
                    headers["Link"] = f'<{following}>; rel="next"'
                value = value[start : start + repo.page]
        else:
            siblings = [{"rfilename": name} for name in repo.files()]
            name = self.hub.ids.get(parts["repo"], parts["repo"])
            value = {"id": name, "sha": repo.commit, "siblings": siblings}
        headers["Content-Type"] = "application/json"
        self._send(HTTPStatus.OK, headers, repo.raw.get(what, json.dumps(value).encode()))

    def _file(self, repo: Repo, name: str, *, is_store: bool, body: bool) -> None:
        path = repo.folder / name
        if name in repo.gone or not path.is_file():
            self._error(HTTPStatus.NOT_FOUND, "EntryNotFound")
            return
        entry = repo.entry(name)
        headers = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if "lfs" not in entry:
            headers["ETag"] = f'"{entry["oid"]}"'
        elif not is_store:  # as the Hub does, send the client elsewhere for a large file
            headers["X-Linked-ETag"] = f'"{entry["lfs"]["oid"]}"'
            headers["X-Linked-Size"] = str(entry["size"])
            headers["Location"] = f"{self.hub.store}{urlsplit(self.path).path}"
            self._send(HTTPStatus.FOUND, headers | repo.headers)
            return
        data = path.read_bytes()
        if name in repo.corrupt:
            data = bytes([data[0] ^ 1]) + data[1:]
        if name in repo.short:
            data = data[: len(data) // 2]
        headers |= repo.headers
        status, start = HTTPStatus.OK, 0
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            status, start, size = HTTPStatus.PARTIAL_CONTENT, int(span[1]), len(data)
            data = data[: int(span[2]) + 1] if span[2] else data
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{size}"
        if body and name in repo.unending:
            self._send_again_and_again(headers, data)
            return
        is_cut = body and repo.cut.get(name, 0) > 0
        if is_cut:
            repo.cut[name] -= 1
        gate = repo.gates.get(name) if body else None
        pieces = _paced(data[start:], repo.pause, gate, self.hub)
        self._send(status, headers, data[start:], body=body, is_cut=is_cut, pieces=pieces)

    def _send_again_and_again(self, headers: dict[str, str], data: bytes) -> None:
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        for name, value in (headers | {"Transfer-Encoding": "chunked"}).items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # the client leaves
            while not self.hub.closing.is_set():
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send(
        self,
        status: HTTPStatus,
        headers: Mapping[str, str],
        data: bytes = b"",
        *,
        body: bool = True,
        is_cut: bool = False,
        pieces: Iterable[bytes] = (),
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if is_cut:
            data = data[: len(data) // 2]
            self.close_connection = True
        if not is_cut and pieces and body:
            for piece in pieces:
                self.wfile.write(piece)
            return
        if body:
            self.wfile.write(data)

    def _error(self, status: HTTPStatus, code: str, retry_after: str = "") -> None:
        headers = {"X-Error-Code": code, "Retry-After": retry_after}
        self._send(status, {name: value for name, value in headers.items() if value})


def _paced(
    data: bytes, pause: float, gate: tuple[int, threading.Event] | None, hub: HubServer
) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces, and count those that are sent."""
    begin = 0
    while begin < len(data):
        end = min(begin + _PIECE, len(data))
        if gate is not None and begin < gate[0]:
            end = min(end, gate[0])
        elif gate is not None and begin == gate[0]:
            gate[1].wait(60)
        time.sleep(pause)
        with hub.lock:  # first: the client may look at the number as soon as it has the bytes
            hub.sent += end - begin
        yield data[begin:end]
        begin = end

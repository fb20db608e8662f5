"""A server on loopback that speaks enough of S3, and lies where a test wants it to.

Each connection is answered once and closed. Signatures are not checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import pytest

from blobstore.objects.address import StoreAddress
from tests.support.raw_server import Answer, RawServer, Received, reply

BUCKET = "models"
KEY, SECRET, TOKEN = "key-of-the-tests", "secret-of-the-tests", "token-of-the-tests"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": TOKEN,
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
DATE = "Wed, 12 Aug 2026 10:00:00 GMT"

Disturb = Callable[[Received], Answer | None]


def failure(status: int, code: str = "", **headers: object) -> bytes:
    """Return a response with an error in S3's form."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>m</Message></Error>"
    return reply(status, body.encode(), content_type="application/xml", **headers)


def listing(keys: dict[str, int], token: str = "") -> bytes:
    """Return a page of a list; the next page has the token."""
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-08-12T10:00:00.000Z</LastModified>"
        f"<ETag>&quot;x&quot;</ETag><Size>{size}</Size></Contents>"
        for key, size in keys.items()
    )
    more = f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>"
    if token:
        more += f"<NextContinuationToken>{escape(token)}</NextContinuationToken>"
    body = f"<?xml version='1.0'?><ListBucketResult>{more}{entries}</ListBucketResult>"
    return reply(200, body.encode(), content_type="application/xml")


def action_of(request: Received) -> str:
    """Return the right that a request takes."""
    url = urlsplit(request.path)
    if request.method == "POST" and url.query == "delete":
        return "s3:DeleteObject"
    if request.method in {"PUT", "POST"}:
        return "s3:PutObject"
    return "s3:ListBucket" if "list-type" in url.query else "s3:GetObject"


class HostileS3:
    """A bucket in memory."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        """By key, without the bucket."""
        self.disturb: Disturb = lambda _: None
        """Called first; what it returns is sent instead of the right answer."""
        self.honours_conditions = True
        self._lock = threading.Lock()
        self.server = RawServer(self.answer, tls)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that let clients find the server."""
        return ENVIRONMENT | {"AWS_ENDPOINT_URL": f"http://{self.server.host}"}

    def set_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let clients in this process find the server, whatever the environment says."""
        for name in ("AWS_PROFILE", "AWS_CA_BUNDLE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    @property
    def address(self) -> StoreAddress:
        """A store in the bucket."""
        return StoreAddress("s3", BUCKET, "p")

    def answer(self, request: Received) -> Answer:
        """Answer a request."""
        answer = self.disturb(request)
        if answer is None:
            with self._lock:
                answer = self.right_answer(request)
        if request.method == "HEAD" and isinstance(answer, bytes):
            return answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        return answer

    def allow(self, *actions: str) -> None:
        """Deny everything else. Without the right to list, an object that is absent is denied too."""

        def deny(request: Received) -> Answer | None:
            action = action_of(request)
            key = unquote(urlsplit(request.path).path).removeprefix(f"/{BUCKET}/")
            is_hidden = (
                action == "s3:GetObject"
                and key not in self.objects
                and "s3:ListBucket" not in actions
            )
            is_denied = action not in actions or is_hidden
            return failure(403, "AccessDenied") if is_denied else None

        self.disturb = deny

    def right_answer(self, request: Received) -> bytes:
        """Return what S3 would answer."""
        url = urlsplit(request.path)
        key = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        if request.method == "PUT":
            return self._put(key, request)
        if request.method == "POST" and url.query == "delete":
            names = re.findall(r"<Key>(.*?)</Key>", request.body.decode())
            for name in names:
                self.objects.pop(unescape(name), None)
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return reply(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        if not key:
            prefix = parse_qs(url.query).get("prefix", [""])[0]
            found = {at: len(data) for at, data in self.objects.items() if at.startswith(prefix)}
            return listing(found)
        return self._get(key, request)

    def _put(self, key: str, request: Received) -> bytes:
        former = self.objects.get(key)
        expected = request.headers.get("if-match")
        if self.honours_conditions:
            is_refused = former is not None and "if-none-match" in request.headers
            if is_refused or (expected is not None and expected != _tag(former)):
                return failure(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
        self.objects[key] = request.body
        return reply(200, etag=_tag(request.body))

    def _get(self, key: str, request: Received) -> bytes:
        data = self.objects.get(key)
        if data is None:
            return failure(404, "NoSuchKey")
        headers = {"etag": _tag(data), "last_modified": DATE}
        asked = request.headers.get("range")
        if asked is None:
            return reply(200, data, **headers)
        begin, end = map(int, asked.removeprefix("bytes=").split("-"))
        if begin >= len(data):
            return failure(416, "InvalidRange")
        part = data[begin : end + 1]
        last = begin + len(part) - 1
        return reply(206, part, content_range=f"bytes {begin}-{last}/{len(data)}", **headers)


@contextlib.contextmanager
def hostile_s3(tls: ssl.SSLContext | None = None) -> Iterator[HostileS3]:
    """Run a server."""
    bucket = HostileS3(tls)
    with bucket.server:
        yield bucket


def _tag(data: bytes | None) -> str:
    return f'"{hashlib.md5(data or b"", usedforsecurity=False).hexdigest()}"'

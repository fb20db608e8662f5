"""Uploads to registries that lose, forget, refuse or misreport what they were sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobMissing, ModelNotFound, RemoteError, RemoteRefused
from blobstore.http.retry import Patience
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.registry import upload
from blobstore.registry.client import RegistryClient
from blobstore.registry.credentials import GivenLogin
from blobstore.registry.upload import UploadSession
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob
from tests.support.raw_server import RawServer, Received, reply

DATA = bytes(range(256)) * 100
DIGEST = Digest.of(DATA)
PART = 10_000
QUICK = Patience(attempts=3, first=0.001, longest=5)


class Uploads:
    """A registry with one blob, whose answers to uploads are changed one by one."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.blob: bytes | None = None
        self.state = 0
        self.has_one_location = False
        self.planned: dict[str, list[bytes]] = {}
        """What the next requests of a method are answered with, although they are acted on."""

    def __call__(self, request: Received) -> Iterator[bytes]:
        answer = self.act(request)
        planned = self.planned.get(request.method)
        yield planned.pop(0) if planned else answer

    def act(self, request: Received) -> bytes:
        if request.method == "HEAD":
            if self.blob is None:
                return reply(404)
            return reply(200, content_length=len(self.blob))
        if request.method == "POST":
            self.data.clear()
            return self.accepted(202)
        if not request.path.startswith(f"/upload?state={self.state}"):
            return reply(404)
        if request.method == "GET":
            return self.accepted(204)
        self.data += request.body
        if request.method == "PATCH":
            return self.accepted(202)
        if bytes(self.data) != DATA or f"digest={DIGEST}" not in request.path:
            return reply(400, b'{"errors": [{"code": "DIGEST_INVALID"}]}')
        self.blob = bytes(self.data)
        return reply(201)

    def accepted(self, status: int) -> bytes:
        self.state = 1 if self.has_one_location else self.state + 1
        last = max(len(self.data) - 1, 0)
        return reply(status, location=f"/upload?state={self.state}", range=f"0-{last}")


@pytest.fixture
def uploads() -> Uploads:
    return Uploads()


@pytest.fixture
def server(uploads: Uploads) -> Iterator[RawServer]:
    with RawServer(uploads) as server:
        yield server


@pytest.fixture
def client(server: RawServer) -> Iterator[RegistryClient]:
    with RegistryClient(server.host, credentials=GivenLogin(None), patience=QUICK) as client:
        yield client


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PART", PART)


def send(client: RegistryClient, session: UploadSession | None = None) -> list[UploadSession]:
    sessions: list[UploadSession] = []
    client.upload_blob(
        "a",
        DIGEST,
        len(DATA),
        lambda offset: [DATA[offset:][at : at + 3000] for at in range(0, len(DATA) - offset, 3000)],
        session=session,
        on_session=sessions.append,
    )
    return sessions


def methods(server: RawServer) -> list[str]:
    return [request.method for request in server.requests]


def test_small_blob_is_one_request_after_its_start(
    uploads: Uploads, server: RawServer, client: RegistryClient
) -> None:
    assert send(client) == []

    assert uploads.blob == DATA
    assert methods(server) == ["POST", "PUT"]


def test_newest_location_is_used_for_each_part(
    in_parts: None, uploads: Uploads, server: RawServer, client: RegistryClient
) -> None:
    offsets = [session.offset for session in send(client)]

    assert uploads.blob == DATA
    assert offsets == [10_000, 20_000, len(DATA)]
    assert methods(server) == ["POST", "PATCH", "PATCH", "PATCH", "PUT"]
    ranges = [request.headers.get("content-range") for request in server.requests]
    assert ranges == [None, "0-9999", "10000-19999", "20000-25599", None]


def test_lost_answer_to_a_part_is_not_sent_twice(
    in_parts: None, uploads: Uploads, server: RawServer, client: RegistryClient
) -> None:
    uploads.planned["PATCH"] = [b""]
    uploads.has_one_location = True

    send(client)

    assert uploads.blob == DATA
    assert methods(server) == ["POST", "PATCH", "GET", "PATCH", "PATCH", "PUT"]


def test_upload_that_the_server_forgot_begins_again(
    in_parts: None, uploads: Uploads, server: RawServer, client: RegistryClient
) -> None:
    uploads.planned["PATCH"] = [b""]

    send(client)  # the location that is known is no longer valid

    assert uploads.blob == DATA
    assert methods(server).count("POST") == 2


def test_blob_that_arrived_although_the_answer_was_lost_is_not_sent_again(
    uploads: Uploads, server: RawServer, client: RegistryClient
) -> None:
    uploads.planned["PUT"] = [b""]
    uploads.planned["GET"] = [reply(404)]

    send(client)

    assert methods(server) == ["POST", "PUT", "GET", "HEAD"]


@pytest.mark.parametrize("code", ["", "BLOB_UPLOAD_UNKNOWN", "BLOB_UPLOAD_INVALID"])
def test_small_blob_whose_upload_is_gone_is_sent_once_more(
    uploads: Uploads, server: RawServer, client: RegistryClient, code: str
) -> None:
    error = json.dumps({"errors": [{"code": code}]}).encode() if code else b""
    uploads.planned["PUT"] = [reply(404, error)]

    send(client)

    assert uploads.blob == DATA
    assert methods(server) == ["POST", "PUT", "POST", "PUT"]


def test_server_that_takes_no_parts_gets_one_request(
    in_parts: None, uploads: Uploads, server: RawServer, client: RegistryClient
) -> None:
    uploads.planned["PATCH"] = [reply(405)]

    send(client)

    assert uploads.blob == DATA
    assert methods(server) == ["POST", "PATCH", "POST", "PUT"]


def test_wrong_digest_after_a_resumed_upload_is_sent_once_more_in_one_piece(
    uploads: Uploads, server: RawServer, client: RegistryClient
) -> None:
    url = f"http://{server.host}/upload?state=0"
    uploads.data += b"x" * 5000  # of another blob

    send(client, UploadSession(url, 5000))

    assert uploads.blob == DATA
    assert methods(server) == ["GET", "PUT", "POST", "PUT"]


def test_refusal_of_a_complete_blob_is_final(
    uploads: Uploads, server: RawServer, client: RegistryClient
) -> None:
    uploads.planned["PUT"] = [reply(403, b'{"errors": [{"code": "QUOTA"}]}')]

    with pytest.raises(RemoteRefused, match=f"upload of blob {DIGEST.short}: status 403: 'QUOTA'"):
        send(client)
    assert methods(server) == ["POST", "PUT"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_overloaded_server_is_asked_where_the_upload_is(
    in_parts: None, uploads: Uploads, server: RawServer, client: RegistryClient, status: int
) -> None:
    uploads.planned["POST"] = [reply(status)]
    uploads.planned["PUT"] = [reply(status, retry_after=0)]

    send(client)

    assert uploads.blob is not None
    assert methods(server)[:2] == ["POST", "POST"]


@pytest.mark.parametrize("received", ["0-99999", "5-9", "x", "0-0", "\x1b"])
def test_server_that_misreports_what_it_has_is_refused(
    in_parts: None, uploads: Uploads, server: RawServer, client: RegistryClient, received: str
) -> None:
    uploads.planned["PATCH"] = [reply(202, location="/upload?state=1", range=received)] * 10

    with pytest.raises(RemoteError, match="bytes|malformed Range|lost the connection"):
        send(client)
    assert methods(server).count("PATCH") <= QUICK.attempts


@pytest.mark.parametrize(
    "location",
    [None, "http://127.0.0.1:1/upload", "https://evil.example/", "//evil.example/", "ftp://x/"],
)
def test_location_elsewhere_is_refused(
    uploads: Uploads, server: RawServer, client: RegistryClient, location: str | None
) -> None:
    uploads.planned["POST"] = [reply(202, location=location)]

    with pytest.raises(RemoteError, match="to another server|without a Location|malformed URL"):
        send(client)
    assert methods(server) == ["POST"]


def test_stored_session_of_another_server_is_not_used(
    uploads: Uploads, server: RawServer, client: RegistryClient
) -> None:
    other = Uploads()
    with RawServer(other) as elsewhere:
        send(client, UploadSession(f"http://{elsewhere.host}/upload", 5000))
        assert elsewhere.requests == []

    assert uploads.blob == DATA
    assert methods(server) == ["HEAD", "POST", "PUT"]


def test_server_that_always_fails_is_given_up(
    uploads: Uploads, server: RawServer, client: RegistryClient
) -> None:
    uploads.planned["PUT"] = [reply(500)] * 50

    with pytest.raises(RemoteError, match="status 500"):
        send(client)
    assert methods(server).count("PUT") <= QUICK.attempts


@pytest.mark.parametrize("retry_after", [10**9, 10**30, -1, "x"])
def test_server_that_asks_for_years_is_not_waited_for(
    uploads: Uploads, server: RawServer, client: RegistryClient, retry_after: object
) -> None:
    uploads.planned["PUT"] = [reply(429, retry_after=retry_after)] * 50

    with pytest.raises(RemoteError, match="status 429"):
        send(client)
    assert methods(server).count("PUT") <= QUICK.attempts


@pytest.mark.parametrize("status", [202, 302, 401, 413])
def test_server_that_never_takes_the_last_byte_is_given_up(
    in_parts: None, uploads: Uploads, server: RawServer, client: RegistryClient, status: int
) -> None:
    uploads.planned["PUT"] = [reply(status, location="/upload?state=1")] * 50

    with pytest.raises(RemoteError, match=f"status {status}"):
        send(client)
    assert methods(server).count("PUT") <= QUICK.attempts


def test_status_without_end_is_given_up(
    in_parts: None, uploads: Uploads, server: RawServer, client: RegistryClient
) -> None:
    uploads.planned["PATCH"] = [b""] * 50
    uploads.planned["GET"] = [reply(204, location="/upload?state=1", range="0-9999")] * 50

    with pytest.raises(RemoteError):
        send(client)
    assert methods(server).count("PATCH") <= QUICK.attempts


def test_upload_that_fails_twice_begins_again(in_parts: None, uploads: Uploads) -> None:
    """As after a full disk, which leaves the state of an upload damaged."""
    begun = 0

    def serve(request: Received) -> Iterator[bytes]:
        nonlocal begun
        begun += request.method == "POST"
        yield from [reply(500)] if request.method == "PATCH" and begun < 2 else uploads(request)

    with (
        RawServer(serve) as registry,
        RegistryClient(registry.host, credentials=GivenLogin(None), patience=QUICK) as client,
    ):
        send(client)

    assert uploads.blob == DATA
    assert begun == 2


def test_blob_that_a_server_cannot_look_at_is_uploaded_again(tmp_path: Path) -> None:
    """Distribution answers with status 500 if a full disk has left a part of a blob empty."""
    store = LocalStore(tmp_path)
    add_blobs(store, "m", {"x": blob(("x", "U8", (3,), b"abc"))})

    def serve(request: Received) -> Iterator[bytes]:
        if request.method == "HEAD" and "/blobs/" in request.path:
            yield reply(500)
        elif request.method == "POST":
            yield reply(202, location="/upload?state=1")
        else:
            yield reply(201 if request.method == "PUT" else 404)

    with RawServer(serve) as registry:
        pushed = blobstore.push(
            "m", f"{registry.host}/a", store=store, registry=RegistryOptions(layout="ollama")
        )

    assert pushed.bytes_sent == sum(item.size for item in store.resolve("m").blobs)


@pytest.mark.parametrize("expiring", ["POST", "PATCH", "PUT"])
def test_token_that_expires_during_an_upload_is_replaced(
    in_parts: None, uploads: Uploads, expiring: str
) -> None:
    issued = ["token-0"]

    def serve(request: Received) -> Iterator[bytes]:
        if request.path.startswith("/token"):
            issued.append(f"token-{len(issued)}")
            yield reply(200, f'{{"token": "{issued[-1]}", "expires_in": 300}}'.encode())
            return
        if request.method == expiring and len(issued) == 2:
            issued.append("expired")
        if request.headers.get("authorization") == f"Bearer {issued[-1]}":
            yield from uploads(request)
        else:
            realm = (
                f'Bearer realm="http://{registry.host}/token",service="s",scope="repository:a:push"'
            )
            yield reply(401, www_authenticate=realm)

    with (
        RawServer(serve) as registry,
        RegistryClient(registry.host, credentials=GivenLogin(None), patience=QUICK) as client,
    ):
        send(client)

    assert uploads.blob == DATA
    assert issued == ["token-0", "token-1", "expired", "token-3"]


def test_blob_that_a_server_takes_but_does_not_store_is_found_by_verify(
    tmp_path: Path, uploads: Uploads
) -> None:
    """Reading back is the only proof, so a push that is not verified trusts the answer."""
    store = LocalStore(tmp_path)
    add_blobs(store, "m", {"x": blob(("x", "U8", (3,), b"abc"))})

    def forget(request: Received) -> Iterator[bytes]:
        if request.method == "PUT":
            yield reply(201)
        elif request.method == "POST":
            yield reply(202, location="/upload?state=1")
        else:
            yield reply(404)

    with RawServer(forget) as server:
        blobstore.push("m", f"{server.host}/a", store=store)
        with pytest.raises((BlobMissing, ModelNotFound)):
            blobstore.push("m", f"{server.host}/a", store=store, verify=True)

"""Registries that send what they must not. The worst that they may cause is an error, soon."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import socket
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from blobstore.core.digest import Digest
from blobstore.core.rate_limit import RateLimiter
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    InvalidManifest,
    ModelNotFound,
    RemoteError,
    RemoteRefused,
)
from blobstore.http.protocol import Login
from blobstore.http.retry import Patience
from blobstore.registry.client import RegistryClient
from blobstore.registry.credentials import GivenLogin
from blobstore.registry.manifest import DOCKER_MANIFEST, OCI_INDEX, RemoteManifest
from tests.support.ports import free_port
from tests.support.raw_server import Answer, RawServer, Received, reply

DATA = bytes(range(256)) * 400
SIZE = len(DATA)
DIGEST = Digest.of(DATA)
MANIFEST = RemoteManifest.of(DOCKER_MANIFEST, b'{"schemaVersion":2}')
QUICK = Patience(attempts=3, first=0.001, longest=5)
IMPATIENT = Patience(stall=0.3, slowest=10**6, attempts=3, first=0.001, longest=5)
"""For servers that stall; others might be taken for one of them on a busy machine."""
SECRET = Login("alice", "the-password")


@contextlib.contextmanager
def registry(
    answer: Callable[[Received], Answer],
    *,
    login: Login | None = SECRET,
    limiter: RateLimiter | None = None,
) -> Iterator[tuple[RawServer, RegistryClient]]:
    with (
        RawServer(answer) as server,
        RegistryClient(
            server.host, credentials=GivenLogin(login), patience=QUICK, limiter=limiter
        ) as client,
    ):
        yield server, client


def read(client: RegistryClient, begin: int = 0, end: int = SIZE, size: int | None = SIZE) -> bytes:
    return b"".join(client.read_blob("a", DIGEST, begin, end, size=size))


def ranged(request: Received, data: bytes = DATA) -> bytes:
    """Answer a request for a blob or a range of it, as a registry does."""
    asked = request.headers.get("range")
    if asked is None:
        return reply(200, data)
    begin, end = map(int, asked.removeprefix("bytes=").split("-"))
    part = data[begin : end + 1]
    return reply(206, part, content_range=f"bytes {begin}-{begin + len(part) - 1}/{len(data)}")


def sent(answer: bytes, request: Received) -> bytes:
    """Give one answer to every request."""
    del request
    return answer


def refused(
    answer: Callable[[Received], Answer],
    action: Callable[[RegistryClient], object],
    kind: type[BlobstoreError],
    message: str,
) -> RawServer:
    """Check that an action fails with one kind of error, in one printable line of fair length."""
    with registry(answer) as (server, client):
        with pytest.raises(kind, match=message) as caught:
            action(client)
        text = str(caught.value)
        assert text.isprintable()
        assert len(text) < 1000
        assert SECRET.password not in text
    return server


class Cut:
    """Breaks the connection after some bytes of each answer."""

    def __init__(self, count: int, times: int) -> None:
        self.count = count
        self.left = times

    def __call__(self, request: Received) -> bytes:
        answer = ranged(request)
        if self.left == 0:
            return answer
        self.left -= 1
        return answer[: answer.index(b"\r\n\r\n") + 4 + self.count]


def test_blob_goes_on_with_the_byte_after_the_last_one() -> None:
    with registry(Cut(30_000, 2)) as (server, client):
        assert read(client) == DATA

    ranges = [request.headers.get("range") for request in server.requests]
    assert ranges == [None, f"bytes=30000-{SIZE - 1}", f"bytes=60000-{SIZE - 1}"]


def test_range_goes_on_with_the_byte_after_the_last_one() -> None:
    with registry(Cut(1000, 2)) as (server, client):
        assert read(client, 500, 50_000, None) == DATA[500:50_000]

    ranges = [request.headers["range"] for request in server.requests]
    assert ranges == ["bytes=500-49999", "bytes=1500-49999", "bytes=2500-49999"]


def test_failures_are_counted_again_after_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blobstore.http.retry._ADVANCE", 5000)
    with registry(Cut(10_000, 8)) as (server, client):
        assert read(client) == DATA

    assert len(server.requests) == 9


def test_server_that_sends_a_byte_per_connection_is_given_up() -> None:
    server = refused(Cut(1, 10**6), read, RemoteError, "lost the connection")

    assert len(server.requests) == IMPATIENT.attempts


def test_server_that_ignores_ranges_is_read_to_the_right_bytes() -> None:
    with registry(lambda _: reply(200, DATA)) as (_, client):
        assert read(client, 500, 50_000, None) == DATA[500:50_000]
        assert read(client, 500, 50_000) == DATA[500:50_000]


@pytest.mark.parametrize(
    "headers", [{"content_length": None}, {"content_length": None, "transfer_encoding": "chunked"}]
)
def test_body_without_end_is_cut_off(headers: dict[str, object]) -> None:
    piece = b"x" * 60_000
    if "transfer_encoding" in headers:
        piece = b"%x\r\n%s\r\n" % (len(piece), piece)
    answers = []

    def answer(_: Received) -> Iterator[bytes]:
        answers.append(1)
        yield reply(200, **headers)
        yield from itertools.repeat(piece)

    refused(answer, read, BlobDamaged, "has more bytes than expected")
    assert answers == [1]


def test_list_and_manifest_without_end_are_cut_off() -> None:
    def answer(_: Received) -> Iterator[bytes]:
        yield reply(200, content_length=None, content_type=DOCKER_MANIFEST)
        yield from itertools.repeat(b" " * 60_000)

    refused(answer, lambda client: client.get_manifest("a", "b"), RemoteError, "more than 4194304")
    refused(answer, lambda client: list(client.tags("a")), RemoteError, "more than 4194304 bytes")
    refused(answer, lambda client: client.referrers("a", DIGEST), RemoteError, "more than 4194304")


def test_blob_of_another_length_is_refused_before_its_bytes() -> None:
    for data in (DATA[:-1], DATA + b"x"):
        answer = partial(ranged, data=data)
        server = refused(answer, read, BlobDamaged, "^blob .* bytes, expected")
        assert len(server.requests) == 1


def test_response_that_ends_early_without_a_length_is_not_taken_for_complete() -> None:
    def answer(_: Received) -> bytes:
        return reply(200, content_length=None) + DATA[:50]

    refused(answer, read, RemoteError, "bytes early")


@pytest.mark.parametrize(
    "content_range",
    [
        None,
        "bytes 0-49499/102400",
        "bytes 501-50000/102400",
        "bytes 500-50000/102400",
        "bytes 500-49999/50",
        "bytes 500-49999/x",
        "x" * 50_000,
        "bytes \x1b[2J",
    ],
)
def test_wrong_range_is_refused(content_range: str | None) -> None:
    def answer(_: Received) -> bytes:
        return reply(206, DATA[500:50_000], content_range=content_range)

    server = refused(
        answer,
        lambda client: read(client, 500, 50_000, None),
        BlobstoreError,
        "^blob .*(Content-Range|bytes, expected)",
    )
    assert len(server.requests) == 1


def test_status_416_is_an_error_although_its_body_never_comes() -> None:
    def answer(_: Received) -> Iterator[bytes]:
        yield reply(416, content_length=SIZE) + b"x" * 33
        server.closing.wait(60)

    with (
        RawServer(answer) as server,
        RegistryClient(server.host, patience=IMPATIENT) as client,
        pytest.raises(BlobDamaged, match="has fewer bytes than expected"),
    ):
        read(client, 500, 50_000, None)


def test_empty_range_is_never_asked_for() -> None:
    with registry(ranged) as (server, client):
        assert read(client, SIZE, SIZE) == b""

    assert server.requests == []


def test_silent_server_is_asked_again_and_given_up() -> None:
    def answer(_: Received) -> Iterator[bytes]:
        yield reply(200, content_length=SIZE) + DATA[:1000]
        server.closing.wait(60)

    with (
        RawServer(answer) as server,
        RegistryClient(server.host, patience=IMPATIENT) as client,
        pytest.raises(RemoteError, match="timed out waiting for"),
    ):
        read(client)
    assert len(server.requests) == IMPATIENT.attempts


def test_slow_drip_is_taken_for_a_lost_connection() -> None:
    def answer(_: Received) -> Iterator[bytes]:
        yield reply(200, content_length=SIZE)
        for byte in DATA:
            yield bytes([byte])
            server.closing.wait(0.02)

    with (
        RawServer(answer) as server,
        RegistryClient(server.host, patience=IMPATIENT) as client,
        pytest.raises(RemoteError, match="timed out|too slowly"),
    ):
        read(client)
    assert len(server.requests) == IMPATIENT.attempts


def test_slow_drip_of_headers_is_taken_for_a_lost_connection() -> None:
    def answer(_: Received) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nx: "
        while not server.closing.wait(0.02):
            yield b"x"

    with (
        RawServer(answer) as server,
        RegistryClient(server.host, patience=IMPATIENT) as client,
        pytest.raises(RemoteError, match="timed out|too slowly"),
    ):
        read(client)


def test_interim_responses_without_end_are_given_up() -> None:
    def answer(_: Received) -> Iterator[bytes]:
        yield from itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)

    with (
        RawServer(answer) as server,
        RegistryClient(server.host, patience=IMPATIENT) as client,
        pytest.raises(RemoteError, match="timed out|too slowly"),
    ):
        read(client)


def test_bombs_of_headers_are_refused() -> None:
    for head in (b"x: " + b"x" * 10**6, b"x: y\r\n" * 100_000):
        answer = partial(sent, b"HTTP/1.1 200 OK\r\n" + head)
        refused(answer, read, RemoteError, "lost the connection")


def test_compressed_body_is_refused_unread() -> None:
    bomb = gzip.compress(bytes(10**7))

    def answer(_: Received) -> bytes:
        return reply(200, bomb, content_encoding="gzip", content_type=DOCKER_MANIFEST)

    server = refused(answer, read, RemoteError, "^blob .*'gzip', which was not accepted")
    refused(answer, lambda client: client.get_manifest("a", "b"), RemoteError, "^manifest .*gzip")
    assert server.requests[0].headers["accept-encoding"] == "identity"


def test_huge_or_foreign_manifest_is_refused() -> None:
    def huge(_: Received) -> bytes:
        return reply(200, b" " * (4 * 2**20 + 1), content_type=DOCKER_MANIFEST)

    def foreign(_: Received) -> bytes:
        return reply(200, b"<html>", content_type="text/html; charset=\x1b[2J")

    get = lambda client: client.get_manifest("a", "b")  # noqa: E731
    refused(huge, get, RemoteError, "more than 4194304 bytes; .*check the address")
    refused(foreign, get, InvalidManifest, "sends it as 'text/html'")


def test_manifest_with_another_digest_is_damaged() -> None:
    def answer(_: Received) -> bytes:
        return reply(200, MANIFEST.data + b" ", content_type=DOCKER_MANIFEST)

    def lying(_: Received) -> bytes:
        return reply(
            200, b"{}", content_type=DOCKER_MANIFEST, docker_content_digest=MANIFEST.digest
        )

    get = lambda client: client.get_manifest("a", str(MANIFEST.digest))  # noqa: E731
    refused(answer, get, BlobDamaged, "has the digest sha256:")
    refused(lying, lambda client: client.get_manifest("a", "b"), BlobDamaged, "has the digest")


def test_authorization_never_goes_to_another_host() -> None:
    def elsewhere(request: Received) -> bytes:
        return ranged(request)

    with RawServer(elsewhere) as other:

        def answer(request: Received) -> bytes:
            if "authorization" not in request.headers:
                return reply(401, www_authenticate='Basic realm="x"')
            return reply(307, location=f"http://{other.host}/blob?signature=x")

        with registry(answer) as (server, client):
            assert read(client) == DATA
            assert read(client, 5, 500, None) == DATA[5:500]

    assert "authorization" in server.requests[1].headers
    assert [set(request.headers) & {"authorization", "cookie"} for request in other.requests] == [
        set(),
        set(),
    ]
    assert other.requests[1].headers["range"] == "bytes=5-499"


def test_other_host_cannot_ask_for_the_credentials() -> None:
    with RawServer(lambda _: reply(401, www_authenticate='Basic realm="x"')) as other:
        refused(
            lambda _: reply(307, location=f"http://{other.host}/"),
            read,
            RemoteRefused,
            "status 401",
        )

    assert all("authorization" not in request.headers for request in other.requests)
    assert len(other.requests) == 1


def test_redirects_without_end_are_given_up() -> None:
    server = refused(
        lambda _: reply(302, location="/again"), read, RemoteError, "redirects too often"
    )

    assert len(server.requests) == 6


@pytest.mark.parametrize(
    "location",
    [None, "ftp://x/", "file:///etc/passwd", "http://a:b@127.0.0.1/", "http://[", "\x1b"],
)
def test_redirect_to_a_wrong_place_is_refused(location: str | None) -> None:
    server = refused(
        lambda _: reply(302, location=location), read, RemoteError, "redirects without|malformed"
    )

    assert len(server.requests) == 1


def test_upload_is_not_redirected() -> None:
    with RawServer(lambda _: reply(201)) as other:

        def answer(request: Received) -> bytes:
            if request.method == "POST":
                return reply(202, location="/v2/a/blobs/uploads/1")
            return reply(307, location=f"http://{other.host}/")

        refused(answer, upload, RemoteError, "wants an upload to go to another server")
        refused(
            lambda _: reply(202, location=f"http://{other.host}/upload"),
            upload,
            RemoteError,
            "wants an upload to go to another server",
        )
    assert other.requests == []


def upload(client: RegistryClient) -> None:
    client.upload_blob("a", DIGEST, SIZE, lambda offset: [DATA[offset:]])


def test_status_401_without_end_is_given_up() -> None:
    for challenge in ('Basic realm="x"', 'Bearer realm="http://{host}/token"', None, "Negotiate"):

        def answer(request: Received, challenge: str | None = challenge) -> bytes:
            if request.path.startswith("/token"):
                return reply(200, b'{"token": "t"}')
            text = challenge and challenge.replace("{host}", request.headers["host"])
            return reply(401, www_authenticate=text)

        server = refused(answer, read, RemoteRefused, "status 401")
        assert len(server.requests) <= 6


def test_realm_that_redirects_gets_no_second_request() -> None:
    with RawServer(lambda _: reply(200, b'{"token": "t"}')) as other:

        def answer(request: Received) -> bytes:
            if request.path.startswith("/token"):
                return reply(302, location=f"http://{other.host}/")
            return reply(
                401, www_authenticate=f'Bearer realm="http://{request.headers["host"]}/token"'
            )

        refused(answer, read, RemoteError, "token for '127.0.0.1': status 302")
    assert other.requests == []


def test_token_of_megabytes_is_refused() -> None:
    def answer(request: Received) -> bytes:
        if request.path.startswith("/token"):
            return reply(200, b'{"token": "%s"}' % (b"t" * 10**7))
        return reply(401, www_authenticate=f'Bearer realm="http://{request.headers["host"]}/token"')

    refused(answer, read, RemoteError, "more than 65536 bytes")


def test_huge_challenge_is_refused() -> None:
    refused(
        lambda _: reply(401, www_authenticate="Bearer " + 'x="y",' * 5000),
        read,
        RemoteError,
        "a challenge of .* characters",
    )


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_overloaded_server_is_asked_again(status: int) -> None:
    answers = iter([reply(status, retry_after=0), reply(status)])

    with registry(lambda request: next(answers, None) or ranged(request)) as (server, client):
        assert read(client) == DATA
    assert len(server.requests) == 3


def test_server_that_asks_for_an_hour_is_not_waited_for() -> None:
    server = refused(lambda _: reply(503, retry_after=3600), read, RemoteError, "status 503")

    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "kind"), [(400, RemoteRefused), (403, RemoteRefused), (404, BlobMissing)]
)
def test_permanent_error_is_not_tried_again(status: int, kind: type[BlobstoreError]) -> None:
    server = refused(lambda _: reply(status), read, kind, "blob")

    assert len(server.requests) == 1


def test_text_of_a_server_is_escaped() -> None:
    document = b'{"errors": [{"code": "\\u001b[2J", "message": "a\\nblobstore: done\\u202e"}]}'

    for status in (400, 403, 500):
        refused(partial(sent, reply(status, document)), read, RemoteError, r"\\x1b\[2J")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"tags": {"a": 1}}',
        b'{"tags": [1]}',
        b'{"tags": ["../../etc/passwd"]}',
        b'{"tags": ["a\\u001b[2J"]}',
        b'{"tags": "' + b"a" * 1000 + b'"}',
        b"[" * 10**6,
    ],
)
def test_malformed_list_of_tags_is_refused(body: bytes) -> None:
    refused(
        lambda _: reply(200, body),
        lambda client: list(client.tags("a")),
        RemoteError,
        "sent no list of tags",
    )


def test_list_of_pages_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blobstore.registry.client._MAX_PAGES", 5)
    numbers = itertools.count()

    def answer(_: Received) -> bytes:
        return reply(
            200, b'{"tags": ["a"]}', link=f'</v2/a/tags/list?last={next(numbers)}>; rel="next"'
        )

    refused(answer, lambda client: list(client.tags("a")), RemoteError, "more than 5 pages")


def test_list_that_goes_on_at_another_host_is_refused() -> None:
    def answer(_: Received) -> bytes:
        return reply(200, b'{"tags": ["a"]}', link='<http://127.0.0.1:1/>; rel="next"')

    refused(answer, lambda client: list(client.tags("a")), RemoteError, "lists its next page at")


def test_malformed_referrers_are_refused() -> None:
    refused(
        lambda _: reply(
            200,
            b'{"schemaVersion": 2, "manifests": [{"digest": "sha256:../x"}]}',
            content_type=OCI_INDEX,
        ),
        lambda client: client.referrers("a", DIGEST),
        InvalidManifest,
        r"\$.manifests\[0\]",
    )
    refused(
        lambda request: reply(
            404 if "referrers" in request.path else 200,
            MANIFEST.data,
            content_type=DOCKER_MANIFEST,
        ),
        lambda client: client.referrers("a", DIGEST),
        InvalidManifest,
        r"\$.config",
    )


def test_missing_size_of_a_blob_is_an_error() -> None:
    def answer(_: Received) -> bytes:
        return reply(200, content_length=None)

    refused(answer, lambda client: client.blob_size("a", DIGEST), RemoteError, "state its size")


def test_digest_of_a_tag_that_is_malformed_is_computed() -> None:
    def answer(request: Received) -> bytes:
        stated = "sha256:../x" if request.method == "HEAD" else None
        return reply(200, MANIFEST.data, content_type=DOCKER_MANIFEST, docker_content_digest=stated)

    with registry(answer) as (_, client):
        assert client.head_manifest("a", "b") == MANIFEST.digest


def test_cookies_are_not_kept() -> None:
    def answer(_: Received) -> bytes:
        return reply(404, set_cookie="a=b; Path=/")

    with registry(answer) as (server, client):
        for _ in range(2):
            with pytest.raises(ModelNotFound):
                client.get_manifest("a", "b")
    assert "cookie" not in server.requests[1].headers


@pytest.mark.parametrize(
    "name", ["..", "a/../b", "a/..", "/a", "a//b", "A", "a b", "a?b", "a#", "%2e"]
)
def test_name_with_dots_reaches_no_server(name: str) -> None:
    with registry(ranged) as (server, client):
        for action in (
            lambda: client.get_manifest(name, "b"),
            lambda: client.get_manifest("a", f"{name}/../x"),
            lambda: client.blob_size(name, DIGEST),
            lambda: client.mount_blob("a", DIGEST, name),
            lambda: list(client.tags(name)),
        ):
            with pytest.raises(BlobstoreError, match="not the name of a repository|neither a tag"):
                action()
    assert server.requests == []


def test_connection_that_nobody_takes_at_first_is_not_tried_again() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # what the listener does not accept fills its queue
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        client = stack.enter_context(
            RegistryClient(host, patience=Patience(first=60, longest=60, stall=0.2))
        )
        with pytest.raises(RemoteError, match=f"cannot connect to 'http://{host}': timed out"):
            read(client)


def test_connection_that_is_refused_at_first_is_not_tried_again() -> None:
    host = f"127.0.0.1:{free_port()}"
    with (
        RegistryClient(host, patience=Patience(first=60, longest=60)) as client,
        pytest.raises(RemoteError, match=f"cannot connect to 'http://{host}'"),
    ):
        read(client)


def test_an_upload_whose_end_always_fails_is_not_sent_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blobstore.registry.upload.PART", len(DATA) // 2 + 1)
    sizes: dict[str, int] = {}

    def answer(request: Received) -> bytes:
        place = f"/v2/r/blobs/uploads/{len(sizes) if request.method == 'POST' else 0}"
        if request.method == "POST":
            sizes[place] = 0
            return reply(202, location=place)
        if request.method == "PATCH":
            sizes[request.path] += len(request.body)
            return reply(202, location=request.path, range=f"0-{sizes[request.path] - 1}")
        if request.method == "GET" and sizes.get(request.path):
            return reply(204, location=request.path, range=f"0-{sizes[request.path] - 1}")
        return reply(504 if request.method == "PUT" else 404)

    def upload(client: RegistryClient) -> None:
        client.upload_blob("r", Digest.of(DATA), len(DATA), lambda offset: [DATA[offset:]])

    server = refused(answer, upload, RemoteError, "504")
    assert sum(len(request.body) for request in server.requests) <= 3 * len(DATA)

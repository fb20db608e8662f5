"""Servers behind ``http://`` addresses that send what they must not, to ``pull`` and to ``open``.

Their client is that of registries, which ``test_registries`` attacks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, RemoteError
from blobstore.http.protocol import Login
from blobstore.http.retry import Patience
from blobstore.operations.transfer.pull import pull_model
from blobstore.registry.credentials import LoginFiles
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.altered_server import Change, altered
from tests.support.raw_server import Answer, RawServer, Received, reply

TOKEN = "a-token-of-the-tests"
Use = Callable[[str, LocalStore], object]


def pull(address: str, store: LocalStore) -> None:
    pull_model(address, "one", store=store)


def read(address: str, store: LocalStore) -> None:
    with blobstore.open(address, store=store) as model:
        model.tensors()


both = pytest.mark.parametrize("use", [pull, read])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = partial(Patience, attempts=2, first=0.001)
    monkeypatch.setattr("blobstore.registry.client.Patience", quick)


@pytest.fixture
def other(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "other")


@contextlib.contextmanager
def changed(store: LocalStore, change: Change) -> Iterator[RawServer]:
    """Run a server that has the model ``one``."""
    frozen.put(store, "one", {"a": 1})
    with altered(store, change) as server:
        yield server


def is_blob(request: Received, store: LocalStore) -> bool:
    return request.path.endswith(f"/blobs/{frozen.layers(store, 'one')['a'].digest}")


@both
def test_an_honest_server_is_believed(store: LocalStore, other: LocalStore, use: Use) -> None:
    with changed(store, lambda _, answer: answer) as server:
        use(f"http://{server.host}/one", other)
    layer = frozen.layers(store, "one")["a"]
    assert other.read_blob(*layer.id) == store.read_blob(*layer.id)


@both
def test_other_bytes_are_damaged_and_not_kept(
    store: LocalStore, other: LocalStore, use: Use
) -> None:
    def flip(request: Received, answer: bytes) -> bytes:
        if not is_blob(request, store) or request.method == "HEAD":
            return answer
        return answer[:-1] + bytes([answer[-1] ^ 1])

    with changed(store, flip) as server, pytest.raises(BlobDamaged):
        use(f"http://{server.host}/one", other)
    assert not other.has(frozen.layers(store, "one")["a"].digest)


@both
@pytest.mark.parametrize("size", ["1", "999999999999", "18446744073709551617"])
def test_a_size_that_is_a_lie_takes_no_memory_and_ends(
    store: LocalStore, other: LocalStore, use: Use, size: str
) -> None:
    def lie(request: Received, answer: bytes) -> bytes:
        if not is_blob(request, store):
            return answer
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-")]
        return b"\r\n".join([*lines, f"Content-Length: {size}".encode(), b"", b""]) + body

    with changed(store, lie) as server, pytest.raises(BlobstoreError):
        use(f"http://{server.host}/one", other)
    assert not other.has(frozen.layers(store, "one")["a"].digest)


@both
def test_a_body_without_end_is_left(store: LocalStore, other: LocalStore, use: Use) -> None:
    sent = []

    def unending(request: Received, answer: bytes) -> Answer:
        if "/manifests/" not in request.path:
            return answer

        def pieces() -> Iterator[bytes]:
            yield (
                answer.partition(b"\r\n\r\n")[0].replace(b"content-length", b"x-was") + b"\r\n\r\n"
            )
            while True:
                sent.append(1 << 16)
                yield bytes(1 << 16)

        return pieces()

    with changed(store, unending) as server, pytest.raises(BlobstoreError):
        use(f"http://{server.host}/one", other)
    assert sum(sent) < 64 << 20


@both
def test_a_token_does_not_follow_to_another_host(
    store: LocalStore,
    other: LocalStore,
    use: Use,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))

    def first(request: Received, answer: bytes) -> bytes:
        if "authorization" not in request.headers:
            return reply(401, b"{}", www_authenticate='Basic realm="x"')
        if "/blobs/" in request.path:
            return reply(307, b"", location=f"http://{second.host}{request.path}")
        return answer

    with (
        changed(store, lambda _, answer: answer) as second,
        changed(store, first) as server,
    ):
        LoginFiles().store(server.host, Login("node", TOKEN))
        use(f"http://{server.host}/one", other)
        assert any("authorization" in request.headers for request in server.requests)
        assert second.requests
        assert not any("authorization" in request.headers for request in second.requests)


@both
@pytest.mark.parametrize("location", ["file:///etc/passwd", "http://user:word@127.0.0.1/x", "//"])
def test_a_redirect_to_a_wrong_place_is_not_followed(
    store: LocalStore, other: LocalStore, use: Use, location: str
) -> None:
    def away(request: Received, answer: bytes) -> bytes:
        return reply(302, b"", location=location) if is_blob(request, store) else answer

    with changed(store, away) as server, pytest.raises(RemoteError):
        use(f"http://{server.host}/one", other)


@both
def test_blobs_that_are_gone_are_missing(store: LocalStore, other: LocalStore, use: Use) -> None:
    def gone(request: Received, answer: bytes) -> bytes:
        return reply(404, b"{}") if is_blob(request, store) else answer

    with changed(store, gone) as server, pytest.raises(BlobMissing):
        use(f"http://{server.host}/one", other)


@both
def test_a_list_of_compressed_forms_that_lies_is_not_used(
    store: LocalStore, other: LocalStore, use: Use
) -> None:
    wrong = Digest.of(b"wrong")

    def lie(request: Received, answer: bytes) -> bytes:
        if "/referrers/" in request.path:
            listed = [
                {
                    "mediaType": "application/vnd.oci.image.manifest.v1+json",
                    "artifactType": "application/vnd.blobstore.cold.v1",
                    "digest": str(wrong),
                    "size": 5,
                }
            ]
            value = {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.index.v1+json",
                "manifests": listed,
            }
            return reply(200, json.dumps(value).encode())
        if str(wrong) in request.path:
            return reply(200, b"wrong", content_type="application/json")
        return answer

    with changed(store, lie) as server:
        use(f"http://{server.host}/one", other)
    assert other.has(frozen.layers(store, "one")["a"].digest)

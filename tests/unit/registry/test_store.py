from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, ModelNotFound, NotFound, RemoteError, RemoteRefused
from blobstore.manifests.reference import Reference
from blobstore.registry.client import RegistryClient
from blobstore.registry.layouts.oci import plan_oci
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.registry.layouts.plan import ModelMetadata
from blobstore.registry.reference import RemoteReference
from blobstore.registry.store import RemoteSource, list_tags
from blobstore.remotes.model_reader import RemoteReader
from blobstore.safetensors.header import Header
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.raw_server import RawServer, Received, reply
from tests.support.store_suite import NAMES, ModelReaderSuite
from tests.support.stub_registry import StubRegistry


class TestRemoteReader(ModelReaderSuite):
    @pytest.fixture(params=["ollama", "oci"])
    def reader(
        self, origin: LocalStore, registry: StubRegistry, request: pytest.FixtureRequest
    ) -> Iterator[RemoteReader]:
        with RegistryClient(registry.host) as client:
            sources = {}
            for number, name in enumerate(NAMES):
                data = origin.read_manifest(name)
                is_oci = request.param == "oci"
                plan = plan_oci(data, ModelMetadata()) if is_oci else plan_ollama(data)
                address = registry.put(origin, plan, f"team/m{number}", "latest")
                source = RemoteSource.resolve(client, RemoteReference.parse(address))
                sources[Reference.parse(name)] = source
            yield RemoteReader(sources)


@contextlib.contextmanager
def reader_of(
    registry: StubRegistry, origin: LocalStore, local: LocalStore | None = None
) -> Iterator[RemoteReader]:
    plan = plan_ollama(origin.read_manifest("a"))
    address = RemoteReference.parse(registry.put(origin, plan, "team/a", "latest"))
    with RegistryClient(registry.host) as client:
        source = RemoteSource.resolve(client, address)
        yield RemoteReader({Reference.parse("a"): source}, local)


@pytest.fixture
def origin(store: LocalStore) -> LocalStore:
    origin = LocalStore(store.root.parent / "origin")
    frozen.put(origin, "a", {"x": 1, "y": 2})
    return origin


def headers(reader: RemoteReader) -> list[object]:
    layers = reader.resolve("a").layers
    return list(reader.read_headers([layer.id for layer in layers]))


def expected(origin: LocalStore) -> list[object]:
    return [origin.read_blob_header(*layer.id) for layer in origin.resolve("a").layers]


def test_one_request_of_64_kib_reads_a_header(registry: StubRegistry, origin: LocalStore) -> None:
    with reader_of(registry, origin) as reader:
        registry.requests.clear()
        assert headers(reader) == expected(origin)
        assert len(registry.requests) == 2
        assert registry.sent.total() == 2 * 2**16


def test_a_larger_header_takes_a_second_request(
    registry: StubRegistry, origin: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.remotes.model_reader.HEADER_REQUEST", 20)
    with reader_of(registry, origin) as reader:
        assert headers(reader) == expected(origin)


def test_headers_are_cached_in_the_local_store(
    registry: StubRegistry, origin: LocalStore, store: LocalStore
) -> None:
    frozen.put(store, "other", {"z": 3})
    for _ in range(2):
        with reader_of(registry, origin, store) as reader:
            assert headers(reader) == expected(origin)
    assert registry.sent.total() == 2 * 2**16
    (cache,) = store.folder("headers").iterdir()
    cache.write_bytes(cache.read_bytes()[:-1] + b"x")
    with reader_of(registry, origin, store) as reader:
        assert headers(reader) == expected(origin)
    assert registry.sent.total() == 4 * 2**16


def test_blobs_of_the_local_store_are_not_fetched(
    registry: StubRegistry, origin: LocalStore, store: LocalStore
) -> None:
    frozen.put(store, "other", {"x": 1})
    layer = frozen.layers(origin, "a")["x"]
    with reader_of(registry, origin, store) as reader:
        assert headers(reader) == expected(origin)
        assert registry.sent.keys() == {str(frozen.layers(origin, "a")["y"].digest)}
        assert Digest.of_pieces(reader.read_pieces(*layer.id)) == layer.digest


def test_a_broken_header_is_reported_for_its_blob(
    registry: StubRegistry, origin: LocalStore
) -> None:
    with reader_of(registry, origin) as reader:
        digest = str(frozen.layers(origin, "a")["x"].digest)
        registry.blobs[digest] = b"\xff" * len(registry.blobs[digest])
        found = headers(reader)
    assert [type(item) for item in found] == [BlobDamaged, Header]


def test_a_small_blob_is_hashed(registry: StubRegistry, origin: LocalStore) -> None:
    config = origin.resolve("a").config
    with reader_of(registry, origin) as reader:
        assert Digest.of(reader.read_blob(*config.id)) == config.digest
        registry.blobs[str(config.digest)] = bytes(config.size)
        with pytest.raises(BlobDamaged, match="the remote sent bytes with digest"):
            reader.read_blob(*config.id)


def test_tags_are_listed_with_digests(registry: StubRegistry, origin: LocalStore) -> None:
    plan = plan_ollama(origin.read_manifest("a"))
    for tag in ("v2", "v1"):
        registry.put(origin, plan, "team/a", tag)
    found = list_tags(f"oci://{registry.host}/team/a")
    assert [(item.tag, digest) for item, digest in found] == [
        ("v1", plan.root.digest),
        ("v2", plan.root.digest),
    ]
    with pytest.raises(ModelNotFound):
        list_tags(f"oci://{registry.host}/team/none")


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (reply(404), NotFound, "does not list them"),
        (reply(405), NotFound, "does not list them"),
        (reply(403), RemoteRefused, "403"),
        (reply(200, b'{"repositories": ["../a"]}'), RemoteError, "no list of repositories"),
        (reply(200, b'{"repositories": "a"}'), RemoteError, "no list of repositories"),
        (reply(200, b"["), RemoteError, "no list of repositories"),
    ],
)
def test_a_registry_need_not_list_its_repositories(
    response: bytes, error: type[Exception], message: str
) -> None:
    def answer(request: Received) -> bytes:
        return response if "_catalog" in request.path else reply(404)

    with RawServer(answer) as server:
        with pytest.raises(error, match=message):
            list_tags(f"oci://{server.host}")
        with pytest.raises(ModelNotFound, match="no such repository"):
            list_tags(f"oci://{server.host}/team")


def test_many_tags_are_listed_by_one_request_for_a_page_and_one_for_a_tag() -> None:
    def answer(request: Received) -> bytes:
        if request.method == "HEAD":
            return reply(200, docker_content_digest=f"sha256:{'0' * 64}")
        first = int(parse_qs(urlsplit(request.path).query).get("last", ["0"])[0])
        tags = json.dumps({"tags": [f"v{number:04}" for number in range(first, first + 100)]})
        link = f'</v2/a/tags/list?last={first + 100}>; rel="next"' if first < 300 else ""
        return reply(200, tags.encode(), link=link)

    with RawServer(answer) as server:
        found = list_tags(f"oci://{server.host}/a")
        methods = Counter(request.method for request in server.requests)
    assert [item.tag for item, _ in found] == [f"v{number:04}" for number in range(400)]
    assert methods == {"GET": 4, "HEAD": 400}

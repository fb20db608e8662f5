"""Documents of remotes that are huge, many, or claim to be: memory follows the bytes that arrive, up to a limit."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest

import blobstore
from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.core.limits import Limit
from blobstore.errors import BlobMissing, BlobstoreError, InvalidManifest, NotTrusted, RemoteError
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import say_the_same
from blobstore.manifests.media_types import LOCAL_MANIFEST
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.models.source_layers import read_stacks
from blobstore.objects.address import StoreAddress
from blobstore.objects.leases import Collection
from blobstore.objects.store import COLD_INDEXES, HEADERS, ObjectStore, manifest_key
from blobstore.operations.describe.show import describe_model
from blobstore.operations.sign.require_trust import check_trust
from blobstore.registry.layouts import image, tar
from blobstore.registry.layouts.read import read_model
from blobstore.registry.manifest import OCI_INDEX, OCI_MANIFEST, RemoteManifest
from blobstore.remotes.cold_layers import parse_cold_layers
from blobstore.remotes.model_reader import RemoteReader, pack_headers, unpack_headers
from blobstore.signatures.bundle import parse_statement, statement, write_bundle
from blobstore.signatures.cosign import read_envelope
from blobstore.signatures.signature import Envelope
from blobstore.sources.sharded import read_weight_map
from blobstore.store.local import LocalStore
from tests.support.hostile_s3 import hostile_s3, listing
from tests.support.http_server import HttpServer
from tests.support.models import add_blob, dense_tensors, replace_file, write_folder
from tests.support.raw_server import RawServer, Received, reply
from tests.support.signing import key_files, policy

MIB = 2**20
reads_proc = pytest.mark.skipif(
    sys.platform != "linux", reason="peaks of memory are read from /proc"
)
CHILD = """
import sys
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
{imports}
before = peak()
try:
    {action}
    print("done")
except Exception as error:
    print(type(error).__name__, error)
print((peak() - before) // 1024)
"""


def run_child(imports: str, action: str, *arguments: str, **environment: str) -> tuple[str, int]:
    """Return what an action in another process says, and by how many MiB its memory grew at its peak."""
    code = CHILD.format(imports=imports, action=action)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    said, grown = done.stdout.splitlines()
    return said, int(grown)


def traced(action: Callable[[], object], kind: type[Exception], message: str) -> int:
    """Check that an action fails, and return the bytes of Python's memory at its peak."""
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=message) as caught:
            action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500


def read_leases(store: ObjectStore) -> object:
    with Collection(store.client) as collection:
        return collection.leased()


def read_lease(data: bytes, folder: Path) -> object:
    store = ObjectStore(StoreAddress.parse(f"file://{folder}"))
    store.client.put(".blobstore/leases/x", data)
    return read_leases(store)


def read_stacked(data: bytes, folder: Path) -> object:
    store = LocalStore(folder)
    digest, size = add_blob(store, data)
    layer = Descriptor(media_types.STACKS, digest, size, "")
    return read_stacks(store, Manifest(config=layer, layers=(layer,)))


def read_config(data: bytes, folder: Path) -> object:
    store = LocalStore(folder / "store")
    blobstore.create(write_folder(folder / "model", dense_tensors()), "m", store=store)
    replace_file(store, "m", "config.json", data)
    assert describe_model("m", store=store).architecture == ""
    with blobstore.open("m", store=store) as model:
        return model.config


def import_config(data: bytes, folder: Path) -> object:
    source = write_folder(folder / "model", dense_tensors())
    (source / "config.json").write_bytes(data)
    return blobstore.create(source, "m", store=folder / "store")


def read_weights(data: bytes, folder: Path) -> object:
    (folder / "index.json").write_bytes(data)
    return read_weight_map(folder / "index.json")


def read_places(data: bytes, _: Path) -> object:
    files = {image._MANIFEST: b"{}", image._PLACES: data}
    return image.read_catalog(image._catalog(files, ()))


def read_bundle(data: bytes, _: Path) -> object:
    return parse_statement(
        Envelope(kind="oms", signed=b"a b c d " + data, signature=b"", data=data)
    )


OF_MANY_VALUES: dict[str, Callable[[bytes, Path], object]] = {
    "manifest": lambda data, _: Manifest.from_bytes(data),
    "config of a manifest": lambda data, _: say_the_same(data, b"{}"),
    "config in a store": read_config,
    "config of a checkpoint": import_config,
    "list of stacked tensors": read_stacked,
    "list of compressed forms": lambda data, _: parse_cold_layers(data),
    "index of a checkpoint": read_weights,
    "lease": read_lease,
    "manifest of a registry": lambda data, _: RemoteManifest.of(OCI_MANIFEST, data).parse(),
    "places in an image": read_places,
    "signature": lambda data, _: read_envelope(data),
    "statement of a signature": read_bundle,
}


@pytest.mark.parametrize("kind", OF_MANY_VALUES)
def test_a_document_of_many_small_values_is_not_parsed(kind: str, tmp_path: Path) -> None:
    """An empty list takes 3 bytes as text, and 64 in memory."""
    data = b'{"x":[' + b"[]," * 5_000_000 + b"0]}"
    tracemalloc.start()
    try:
        with contextlib.suppress(BlobstoreError):
            assert not OF_MANY_VALUES[kind](data, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(data)
    finally:
        tracemalloc.stop()


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """Return the folder of a store in object storage that has the model ``m``."""
    store = LocalStore(tmp_path / "store")
    blobstore.create(write_folder(tmp_path / "model", dense_tensors()), "m", store=store)
    folder = tmp_path / "bucket"
    folder.mkdir()
    blobstore.push("m", f"file://{folder}", store=store)
    return folder


def change_manifest(bucket: Path, change: Callable[[dict[str, Any]], object]) -> Digest:
    path = bucket / manifest_key(Reference.parse("m"))
    value = json.loads(path.read_bytes())
    change(value)
    path.unlink()
    path.write_bytes(json.dumps(value).encode())
    return Digest.of(path.read_bytes())


@reads_proc
def test_small_files_that_a_manifest_claims_take_no_memory(bucket: Path, tmp_path: Path) -> None:
    def claim(value: dict[str, Any]) -> None:
        sample = next(one for one in value["layers"] if one["mediaType"].endswith("json"))
        value["layers"] += [
            sample | {"name": f"{n}.json", "digest": str(Digest.of(b"%d" % n)), "size": 256 * MIB}
            for n in range(400)
        ]

    change_manifest(bucket, claim)
    said, grown = run_child(
        "import blobstore",
        "blobstore.open(sys.argv[1], store=sys.argv[2])",
        f"file://{bucket}/m:latest",
        str(tmp_path / "reader"),
    )
    assert said.startswith("BlobMissing")
    assert grown < 64


def test_small_files_beyond_the_limit_of_all_are_read_when_they_are_asked_for(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SMALL_FILES", Limit(256 * MIB, 10, 1))
    with blobstore.open(f"file://{bucket}/m:latest", store=tmp_path / "reader") as model:
        assert model.config["model_type"]


class OneRequest:
    """A remote model that answers the first request for a blob and no other."""

    def __init__(self, sizes: list[int], header: int) -> None:
        self.blobs = [Descriptor("x", Digest.of(b"%d" % n), size) for n, size in enumerate(sizes)]
        self._start = header.to_bytes(8, "little")
        self.client = self
        self.address = "anywhere"

    def abort(self) -> None:
        """No request is slow."""

    def read(self, digest: Digest, size: int, begin: int, end: int) -> Iterator[bytes]:
        if begin:
            raise BlobMissing(f"{digest} of {size} bytes")
        yield self._start + bytes(end - 8)

    def headers(self) -> None:
        return None


def test_headers_that_blobs_claim_take_no_memory() -> None:
    source: Any = OneRequest([200 * MIB] * 20, 99_000_000)
    with pytest.raises(RemoteError, match="headers of blobs: more than"):
        list(
            RemoteReader({Reference.parse("m"): source}).read_headers([b.id for b in source.blobs])
        )
    few: Any = OneRequest([200 * MIB] * 4, 99_000_000)
    reader = RemoteReader({Reference.parse("m"): few})

    def read() -> None:
        for found in reader.read_headers([blob.id for blob in few.blobs]):
            assert isinstance(found, BlobMissing)
        raise BlobMissing("all")

    assert traced(read, BlobMissing, "all") < 8 * MIB


class Pages(BaseHTTPRequestHandler):
    """A registry whose lists have many large pages."""

    bodies: ClassVar[dict[str, bytes]] = {
        "tags": json.dumps({"tags": ["t" * 128] * 8000}).encode(),
        "referrers": json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": OCI_INDEX,
                "manifests": [
                    {
                        "mediaType": OCI_MANIFEST,
                        "digest": f"sha256:{'0' * 64}",
                        "size": 2,
                        "artifactType": "x" * MIB,
                        "annotations": {"k": "v" * (2 * MIB)},
                    }
                ],
            }
        ).encode(),
    }
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        body = self.bodies["tags" if "/tags/" in self.path else "referrers"]
        path, _, page = self.path.partition("?p=")
        self.send_response(200)
        self.send_header("Content-Type", OCI_INDEX)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Link", f'<{path.partition("?")[0]}?p={int(page or 0) + 1}>; rel="next"')
        self.end_headers()
        self.wfile.write(body)


@reads_proc
@pytest.mark.parametrize(
    ("action", "allowed"),
    [
        ("for _ in client.tags('team/m'): pass", 64),
        ("client.referrers('team/m', Digest.of(b'x'))", 64),
    ],
    ids=["tags", "referrers"],
)
def test_lists_with_large_pages_end_at_the_limit_of_all(action: str, allowed: int) -> None:
    with HttpServer(Pages) as server:
        said, grown = run_child(
            "from blobstore.core.digest import Digest\n"
            "from blobstore.registry.client import RegistryClient\n"
            "client = RegistryClient(sys.argv[1])",
            action,
            server.host,
        )
    assert re.search(r"RemoteError .*: more than 67108864 bytes", said)
    assert grown < allowed


def test_lists_end_at_the_limit_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = limits.Budget(Limit(10, 100, 3), "tags of 'team/m'", "ask for a tag by its name")
    budget.spend(0, 3)
    with pytest.raises(RemoteError, match="tags of 'team/m': more than 3 entries; ask for a tag"):
        budget.spend(0)


def test_parts_of_an_index_are_held_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part has annotations of almost 4 MiB, and there are more of them than the limit of all allows."""
    monkeypatch.setattr(limits, "REGISTRY_MANIFEST", Limit(4 * MIB, 40 * MIB, 1024))
    parts = {}

    def part(number: int) -> RemoteManifest:
        empty = {"mediaType": "application/x", "digest": str(Digest.of(b"")), "size": 0}
        value = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": empty,
            "layers": [empty | {"annotations": {"n": f"{number:04}" + "v" * (4 * MIB - 900)}}],
        }
        return RemoteManifest.of(OCI_MANIFEST, json.dumps(value).encode())

    for number in range(limits.REGISTRY_MANIFEST.all // (4 * MIB) + 2):
        parts[part(number).digest] = number
    entries = [
        {"mediaType": OCI_MANIFEST, "digest": str(digest), "size": 4 * MIB} for digest in parts
    ]
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": entries,
        "annotations": {LOCAL_MANIFEST: str(Digest.of(b"x"))},
    }
    root = RemoteManifest.of(OCI_INDEX, json.dumps(value).encode())

    def read() -> None:
        read_model(root, lambda digest: part(parts[digest]), lambda *_: b"")

    assert traced(read, RemoteError, "the parts of the index: more than") < 32 * MIB


def test_entries_of_a_tar_are_not_kept() -> None:
    headers = [tar.tar_header(f"{number:06}", 0) for number in range(3000)]
    catalog = b"".join([*headers, tar.TAR_END])
    assert traced(lambda: image.read_catalog(catalog), InvalidManifest, "no file") < MIB


IN_A_BUCKET: dict[str, tuple[str, Limit, Callable[[ObjectStore], object]]] = {
    "manifest": (
        manifest_key(Reference.parse("n")),
        limits.MANIFEST,
        lambda store: store.read_manifest(Reference.parse("n")),
    ),
    "list of compressed forms": (
        f"{COLD_INDEXES}/{Digest.of(b'm').hex}",
        limits.COLD_INDEX,
        lambda store: store.read_for_manifest(COLD_INDEXES, Digest.of(b"m")),
    ),
    "packed headers": (
        f"{HEADERS}/{Digest.of(b'm').hex}",
        limits.PACKED_HEADERS,
        lambda store: store.read_for_manifest(HEADERS, Digest.of(b"m")),
    ),
    "lease": (".blobstore/leases/x", limits.LEASE, read_leases),
}


@pytest.mark.parametrize("kind", IN_A_BUCKET)
def test_a_document_in_a_bucket_that_is_too_large_is_refused_before_it_is_read(
    bucket: Path, kind: str
) -> None:
    key, limit, read = IN_A_BUCKET[kind]
    path = bucket / key
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(limit.one + 1)
    store = ObjectStore(StoreAddress.parse(f"file://{bucket}"))
    message = f"{limit.one + 1} bytes, expected at most {limit.one}; .*check the address"
    assert traced(lambda: read(store), RemoteError, message) < MIB


def test_signatures_in_a_bucket_are_read_one_at_a_time_and_up_to_the_limits(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(StoreAddress.parse(f"file://{bucket}"))
    digest = Digest.of(b"m")
    for number in range(6):
        store.keep_signature(digest, bytes([number]) * 10)
    found = store.read_signatures(digest)
    assert len(next(found)) == 10
    for limit, count in ((Limit(10, 35, 100), 3), (Limit(10, 100, 4), 4), (Limit(9, 100, 100), 0)):
        monkeypatch.setattr(limits, "SIGNATURES", limit)
        assert len(list(store.read_signatures(digest))) == count


def test_leases_in_a_bucket_have_a_limit_of_all(
    bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEASE", Limit(MIB, 100, 10))
    store = ObjectStore(StoreAddress.parse(f"file://{bucket}"))
    for number in range(3):
        store.client.put(f".blobstore/leases/{number}", b"[" + b" " * 50 + b"]")
    with (
        Collection(store.client) as collection,
        pytest.raises(RemoteError, match="leases in .*: more than 100 bytes"),
    ):
        collection.leased()


def test_a_list_of_compressed_forms_keeps_what_it_describes_alone() -> None:
    assert parse_cold_layers(b"[" + b"[]," * 1000 + b"{}]") == {}


def test_headers_of_other_blobs_that_a_bucket_packs_take_no_memory() -> None:
    """An entry without a header has 36 bytes, and a digest takes about 300 in memory."""
    wanted = Digest.of(b"x")
    data = b"".join(hashlib.sha256(b"%d" % n).digest() + bytes(4) for n in range(50_000))
    packed = pack_headers({wanted: b"header"})[32:] + data
    packed = hashlib.sha256(packed).digest() + packed
    tracemalloc.start()
    try:
        assert unpack_headers(packed, [wanted]) == {wanted: b"header"}
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_large_signatures_of_strangers_are_held_one_at_a_time(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    blobstore.create(write_folder(tmp_path / "model", dense_tensors()), "m", store=store)
    data = store.read_manifest("m")
    files = {f"{n}.bin": Digest.of(b"%d" % n) for n in range(6_000)}
    for number in range(20):
        forged = write_bundle(statement(f"{number}", files, Digest.of(data)), b"x" * 70, "")
        store.keep_signature(Digest.of(data), forged, is_verified=True)
    size = len(forged)
    assert size > MIB // 2
    policy(store, key_files(tmp_path))

    def check() -> None:
        check_trust(store, Reference.parse("m"), data)

    assert traced(check, NotTrusted, r"none of its signatures \(20\)") < 8 * size


@reads_proc
def test_a_list_of_objects_keeps_one_page_and_ends_at_its_limit() -> None:
    """Each page has keys of 1 MB. The server ends after 200 pages, so that the test would."""
    keys = {f"p/manifests/{n:04}{'k' * 900}": 1 for n in range(1000)}
    left = iter(range(200))

    def page(_: Received) -> bytes:
        number = next(left, None)
        keys_now = {f"{key}{number}": size for key, size in keys.items()}
        return listing(keys_now, "" if number is None else f"t{number}")

    with hostile_s3() as server:
        server.disturb = page
        said, grown = run_child(
            "from blobstore.core import limits\n"
            "limits.LISTED = 60_000\n"
            "from blobstore.objects.address import StoreAddress\n"
            "from blobstore.objects.store import ObjectStore\n"
            "store = ObjectStore(StoreAddress('s3', 'models', 'p'))",
            "for _ in store.client.list('manifests'): pass",
            **server.environment,
        )
    assert re.search("RemoteError .*a list without end", said)
    assert grown < 40


HUB = """
import os
from functools import partial
from blobstore.core import limits
limits.HUB_LISTING = limits.Limit(4 << 20, 20 << 20, 1000)
from blobstore.http.retry import Patience
from blobstore.sources.hub_client import HubClient
client = HubClient(os.environ["HF_ENDPOINT"], "", Patience())
"""


@reads_proc
@pytest.mark.parametrize(
    ("kind", "message", "allowed"),
    [
        ("a page without end", "RemoteError .*more than 4194304 bytes", 24),
        ("pages without end", "RemoteError .*the list of files of the Hub: more than 20971520", 40),
        ("values", "RemoteError .*it would take more than 768 MiB of memory", 24),
        ("entries", "RemoteError the list of files of the Hub: more than 10 entries", 64),
    ],
)
def test_lists_of_the_hub_end_at_their_limits(kind: str, message: str, allowed: int) -> None:
    entry = {"type": "directory", "path": "v" * (3 * MIB)}
    numbers = itertools.count()

    def answer(request: Received) -> Any:
        if kind == "values":
            return reply(200, b"[" + b"[]," * 5_000_000 + b"0]")
        if kind == "entries":
            return reply(200, b"[" + b'{"type":"directory"},' * 500_000 + b"0]")
        if kind == "pages without end":
            link = f'<{request.path}&cursor={next(numbers)}>; rel="next"'
            return reply(200, json.dumps([entry]).encode(), link=link)
        start = reply(200, content_length=None)
        return itertools.chain([start], itertools.repeat(b" " * MIB, 300))

    size = "64 << 20, 64 << 20"
    limits_of = {"values": f"{size}, 10_000_000", "entries": f"{size}, 10"}
    limit = f"limits.HUB_LISTING = limits.Limit({limits_of[kind]})" if kind in limits_of else ""
    with RawServer(answer) as server:
        said, grown = run_child(
            HUB + limit,
            "client.entries('org/m', '0' * 40)",
            HF_ENDPOINT=f"http://{server.host}",
        )
    assert re.search(message, said)
    assert grown < allowed


@reads_proc
def test_a_header_that_a_web_server_claims_takes_no_memory() -> None:
    """The file is said to have 200 MB, and a header of 99 MB, of which 1 KiB arrive."""
    start = (99_000_000).to_bytes(8, "little") + b"{"

    def answer(request: Received) -> bytes:
        begin, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
        return reply(
            206,
            start.ljust(last + 1) if begin == 0 else b" " * 1024,
            content_length=last + 1 - begin,
            content_range=f"bytes {begin}-{last}/200000000",
        )

    with RawServer(answer) as server:
        said, grown = run_child(
            "from blobstore.safetensors import safe_open, sources\nsources._PAUSE = 0",
            "safe_open(sys.argv[1], 'np')",
            f"http://{server.host}/model.safetensors",
        )
    assert re.search("OSError .* 98[0-9]{6} more expected", said)
    assert grown < 32

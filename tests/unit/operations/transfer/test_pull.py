from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import blobstore
from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.core.files import copy_bytes
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    InvalidManifest,
    InvalidReference,
    ModelNotFound,
    NameConflict,
    NameTaken,
    StoreError,
    UnsupportedSource,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.transfer.pull import Pulled
from blobstore.registry.client import RegistryClient
from blobstore.registry.layouts.oci import plan_oci
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.registry.layouts.plan import ModelMetadata
from blobstore.remotes.download import Download
from blobstore.store import partial
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.models import dense_tensors, write_folder
from tests.support.stub_registry import StubRegistry

A = Reference.parse("a")


@pytest.fixture
def origin(tmp_path: Path) -> LocalStore:
    """A store with a model of three blobs of 80 kB, two of them shared with another model."""
    store = LocalStore(tmp_path / "origin")
    frozen.put(store, "a", {"x": 1, "y": 2, "z": 3})
    frozen.put(store, "b", {"x": 1, "y": 2, "z": 4})
    return store


@pytest.fixture
def remote(origin: LocalStore, registry: StubRegistry) -> str:
    return offer(origin, registry, "a")


def offer(origin: LocalStore, registry: StubRegistry, name: str) -> str:
    """Give the registry a model; return its address."""
    return registry.put(origin, plan_ollama(origin.read_manifest(name)), f"team/{name}", "latest")


def pull(remote: str, store: LocalStore, name: str | None = "a", **options: Any) -> Pulled:
    return blobstore.pull(remote, name, store=store, **options)


def assert_equal(store: LocalStore, origin: LocalStore, name: str = "a") -> None:
    assert store.read_manifest(name) == origin.read_manifest(name)
    for blob in store.resolve(name).blobs:
        store.check_digest(blob.digest, blob.size)


def layer_digest(origin: LocalStore, name: str) -> str:
    return str(frozen.layers(origin, "a")[name].digest)


def total(origin: LocalStore, name: str = "a") -> int:
    return sum(blob.size for blob in origin.resolve(name).blobs)


# What arrives


@pytest.mark.parametrize("streams", [1, 3, 8])
def test_a_pulled_model_is_the_model_that_was_pushed(
    remote: str, store: LocalStore, origin: LocalStore, streams: int
) -> None:
    pulled = pull(remote, store, streams=streams)
    assert_equal(store, origin)
    assert (pulled.reference, pulled.layout) == (A, "ollama")
    assert pulled.digest == Digest.of(origin.read_manifest("a"))
    assert pulled.blobs == pulled.blobs_fetched == len(origin.resolve("a").blobs)
    assert pulled.bytes_fetched == total(origin)
    assert (pulled.bytes_resumed, pulled.bytes_present) == (0, 0)
    assert list(store.folder("partial").iterdir()) == []


@pytest.mark.parametrize("max_layers", [400, 2])
def test_a_model_in_the_shape_of_modelpack_keeps_its_manifest(
    registry: StubRegistry, store: LocalStore, origin: LocalStore, max_layers: int
) -> None:
    plan = plan_oci(origin.read_manifest("a"), ModelMetadata(), max_layers=max_layers)
    pulled = pull(registry.put(origin, plan, "team/a", "v1"), store)
    assert_equal(store, origin)
    assert pulled.layout == "oci"


def test_without_a_name_the_address_is_the_name(
    remote: str, store: LocalStore, registry: StubRegistry
) -> None:
    assert pull(remote, store, None).reference == Reference(registry.host, "team", "a", "latest")


def test_an_address_without_a_name_needs_one(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    by_digest = f"{registry.host}/team/a@{Digest.of(origin.read_manifest('a'))}"
    with pytest.raises(InvalidReference, match="give a NAME"):
        pull(by_digest, store, None)
    pull(f"oci://{by_digest}", store)
    assert_equal(store, origin)


def test_large_blobs_are_fetched_in_parts(
    remote: str, store: LocalStore, origin: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "PART", 7001)
    pull(remote, store)
    assert_equal(store, origin)


def test_pulling_again_transfers_nothing(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    pull(remote, store)
    registry.sent.clear()
    path = store.manifest_path("a")
    before = path.stat()
    pulled = pull(remote, store)
    assert (pulled.blobs_fetched, pulled.bytes_fetched) == (0, 0)
    assert pulled.bytes_present == total(origin)
    assert registry.sent.total() == 0
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_blobs_of_other_models_are_not_transferred(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    pull(remote, store)
    registry.sent.clear()
    other = offer(origin, registry, "b")
    pulled = pull(other, store, "b")
    assert pulled.bytes_fetched == registry.sent.total() < total(origin) / 2
    assert_equal(store, origin, "b")


def test_a_damaged_blob_of_the_store_is_replaced(
    remote: str, store: LocalStore, origin: LocalStore
) -> None:
    pull(remote, store)
    blob = frozen.layers(origin, "a")["x"]
    path = Path(store.blob_path(blob.digest))
    path.chmod(0o644)
    path.write_bytes(bytes(blob.size))
    pulled = pull(remote, store)
    assert list(pulled.repaired) == [blob.digest]
    assert pulled.blobs_fetched == 1
    assert_equal(store, origin)


def test_a_dry_run_fetches_no_blob_and_writes_nothing(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    pulled = pull(remote, store, dry_run=True)
    assert pulled.bytes_fetched == total(origin)
    assert registry.sent.total() == 0
    assert not store.root.exists()


def test_progress_never_runs_backwards_and_ends_at_the_total(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    spoil_once(registry, layer_digest(origin, "y"))
    seen: list[tuple[int, int]] = []
    pull(remote, store, progress=lambda _, done, size: seen.append((done, size)))
    done = [item for item, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == (total(origin), total(origin))


# Names


def test_a_name_that_is_taken_is_refused_before_anything_is_fetched(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    frozen.put(store, "a", {"other": 9})
    with pytest.raises(NameTaken, match="another model has the name 'a:latest'"):
        pull(remote, store)
    assert registry.sent.total() == 0
    pull(remote, store, force=True)
    assert_equal(store, origin)


def move_tag(registry: StubRegistry, origin: LocalStore) -> None:
    frozen.put(origin, "a", {"x": 1, "z": 3})
    registry.put(origin, plan_ollama(origin.read_manifest("a")), "team/a", "latest")


def test_a_tag_that_moved_replaces_what_was_pulled_from_there(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    pull(remote, store)
    former = store.read_manifest("a")
    move_tag(registry, origin)
    pulled = pull(remote, store)
    assert pulled.replaced
    assert_equal(store, origin)
    restored = blobstore.restore("a", store=store)
    assert restored.digest == Digest.of(former)


@pytest.mark.parametrize(
    "change", ["other model", "other address", "no note", "forged note", "note of another user"]
)
def test_a_tag_that_moved_replaces_nothing_else(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore, change: str
) -> None:
    pull(remote, store)
    move_tag(registry, origin)
    if change == "other model":
        frozen.put(store, "a", {"mine": 9})
    elif change == "other address":
        registry.put(origin, plan_ollama(origin.read_manifest("a")), "team/a", "v2")
        remote = remote.replace(":latest", ":v2")
    elif change == "forged note":
        (note,) = store.folder("remotes").glob("pulled-*")
        note.write_text(json.dumps({"remote": [remote], "digest": None, "manifest": {}}))
    elif change == "note of another user":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        (note,) = store.folder("remotes").glob("pulled-*")
        os.chown(note, 12_345, -1)
    else:
        shutil.rmtree(store.folder("remotes"))
    before = store.read_manifest("a")
    with pytest.raises(NameTaken):
        pull(remote, store)
    assert store.read_manifest("a") == before


def test_a_name_that_is_taken_in_the_meantime_is_refused(
    remote: str, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = Download.run

    def run(transfer: Download, streams: int) -> None:
        fetch(transfer, streams)
        frozen.put(store, "a", {"other": 9})

    monkeypatch.setattr(Download, "run", run)
    with pytest.raises(NameTaken):
        pull(remote, store)
    assert [layer.name for layer in store.resolve("a").layers] == ["other"]


def test_a_name_that_differs_in_case_is_refused(remote: str, store: LocalStore) -> None:
    frozen.put(store, "A", {"other": 9})
    with pytest.raises(NameConflict):
        pull(remote, store, force=True)


# What registries do


def spoil_once(registry: StubRegistry, digest: str) -> None:
    """Let the registry send one wrong byte in the middle of a blob, once."""
    left = [1]

    def alter(name: str, begin: int, data: bytes) -> bytes:
        if name == digest and begin and left:
            left.pop()
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    registry.alter = alter


def test_wrong_bytes_are_fetched_once_more(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    digest = layer_digest(origin, "y")
    spoil_once(registry, digest)
    pull(remote, store)
    assert_equal(store, origin)
    assert registry.sent[digest] == 2 * len(registry.blobs[digest])


def test_bytes_that_are_wrong_twice_are_refused_by_name(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    digest = layer_digest(origin, "y")
    data = registry.blobs[digest]
    registry.blobs[digest] = data[:500] + bytes([data[500] ^ 4]) + data[501:]
    with pytest.raises(BlobDamaged, match=f"'y': the registry sent other bytes.*{digest}, twice"):
        pull(remote, store)
    assert not store.has_model("a")
    assert registry.sent[digest] == 2 * len(data)
    registry.blobs[digest] = data
    registry.sent.clear()
    pull(remote, store)
    assert_equal(store, origin)
    assert registry.sent.total() <= len(data) + 2 * 80_000  # what the others had fetched stays


def test_a_lost_connection_is_continued_at_the_next_byte(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    for name in "xyz":
        registry.cut_after[layer_digest(origin, name)] = 30_000
    pull(remote, store)
    assert_equal(store, origin)
    assert registry.sent.total() < total(origin) + 3 * 2**16


def test_a_blob_that_is_gone_is_named(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    del registry.blobs[layer_digest(origin, "z")]
    with pytest.raises(BlobMissing, match="'z'"):
        pull(remote, store)
    assert not store.has_model("a")


@pytest.mark.parametrize("change", [-1, 1, 5000])
def test_a_blob_of_another_length_is_refused(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore, change: int
) -> None:
    digest = layer_digest(origin, "z")
    data = registry.blobs[digest]
    registry.blobs[digest] = data[:change] if change < 0 else data + bytes(change)
    with pytest.raises(BlobDamaged, match="'z'"):
        pull(remote, store)
    assert not store.has_model("a")


def test_an_unknown_model_is_not_found(
    remote: str, store: LocalStore, registry: StubRegistry
) -> None:
    with pytest.raises(ModelNotFound):
        pull(f"{registry.host}/team/none", store)
    assert not store.root.exists()


def test_a_container_image_is_refused(store: LocalStore, registry: StubRegistry) -> None:
    digest = str(Digest.of(b""))
    layer = {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "digest": digest}
    value = {
        "schemaVersion": 2,
        "mediaType": media_types.MANIFEST,
        "config": {"mediaType": media_types.CONFIG, "digest": digest, "size": 0},
        "layers": [layer | {"size": 0}],
    }
    data = json.dumps(value).encode()
    remote = registry.put_manifest("library/alpine", "latest", media_types.MANIFEST, data)
    with pytest.raises(UnsupportedSource, match="not a model"):
        pull(remote, store)


def test_two_sizes_of_one_blob_are_refused(store: LocalStore, registry: StubRegistry) -> None:
    digest = str(Digest.of(b""))
    layers = [
        {"mediaType": media_types.TENSOR, "digest": digest, "size": size, "name": f"t{size}"}
        for size in (0, 8)
    ]
    value = {
        "schemaVersion": 2,
        "mediaType": media_types.MANIFEST,
        "config": {"mediaType": media_types.CONFIG, "digest": digest, "size": 0},
        "layers": layers,
    }
    data = json.dumps(value).encode()
    remote = registry.put_manifest("team/a", "latest", media_types.MANIFEST, data)
    with pytest.raises(InvalidManifest, match=r"\$\.layers\[1\]\.size"):
        pull(remote, store)


def test_a_manifest_that_its_config_contradicts_is_refused(
    store: LocalStore, registry: StubRegistry, origin: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(write_folder(tmp_path / "source", dense_tensors()), "c", store=origin)
    offer(origin, registry, "c")
    data = origin.read_manifest("c").replace(b"config.json", b"confog.json")
    changed = registry.put_manifest("team/c", "changed", media_types.MANIFEST, data)
    with pytest.raises(InvalidManifest, match="changed since it was written"):
        pull(changed, store)
    assert not store.has_model("a")


# Where it stops, and goes on


def test_a_pull_that_failed_continues_where_it_stopped(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    digest = layer_digest(origin, "z")
    data = registry.blobs.pop(digest)
    with pytest.raises(BlobMissing):
        pull(remote, store, streams=1)
    registry.blobs[digest] = data
    before = registry.sent.copy()
    planned = pull(remote, store, dry_run=True)
    pulled = pull(remote, store)
    assert_equal(store, origin)
    assert planned.bytes_resumed == pulled.bytes_resumed > 0
    assert planned.bytes_fetched == pulled.bytes_fetched == (registry.sent - before).total()
    assert registry.sent.total() == total(origin)


def test_a_request_to_stop_ends_the_copy_of_an_earlier_partial_file(
    remote: str, store: LocalStore, origin: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = frozen.layers(origin, "a")["z"]
    with store.ingest() as ingest:
        file = ingest.open_partial(layer.id)
        assert file is not None
        with file:
            file.write(0, Path(origin.blob_path(layer.digest)).read_bytes()[:1000])
    stopped, copies = threading.Event(), list[int]()
    abort = RegistryClient.abort

    def copied(source: int, begin: int, _: int, target: int, offset: int) -> int:
        copies.append(offset)
        monkeypatch.setattr(interrupts._State, "number", signal.SIGTERM)
        stopped.wait(60)
        return copy_bytes(source, begin, 100, target, offset)

    def aborted(client: RegistryClient) -> None:
        abort(client)
        stopped.set()

    monkeypatch.setattr(interrupts, "_thread", interrupts._Thread())
    monkeypatch.setattr(partial, "copy_bytes", copied)
    monkeypatch.setattr(RegistryClient, "abort", aborted)
    with pytest.raises(interrupts.Stopped):
        pull(remote, store, streams=1)
    assert copies == [0]


def test_a_lack_of_space_is_found_before_anything_is_fetched(
    remote: str, store: LocalStore, registry: StubRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(StoreError, match="not enough space for the store"):
        pull(remote, store)
    assert registry.sent.total() == 0


def test_two_pulls_at_once_fetch_each_blob_once(
    remote: str, store: LocalStore, registry: StubRegistry, origin: LocalStore
) -> None:
    registry.pause = 0.002
    with ThreadPoolExecutor(2) as threads:
        pulls = [
            threads.submit(pull, remote, LocalStore(store.root), name, streams=2) for name in "cd"
        ]
    assert sum(item.result().bytes_fetched for item in pulls) == total(origin)
    assert registry.sent.total() == total(origin)
    for name in "cd":
        assert store.read_manifest(name) == origin.read_manifest("a")


@pytest.mark.parametrize("options", [{"streams": 0}, {"limit_rate": 0}, {"jobs": 0}])
def test_arguments_are_checked(remote: str, store: LocalStore, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        pull(remote, store, **options)

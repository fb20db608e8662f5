"""Models pulled from a real registry, which knows nothing of them: Debian's ``docker-registry``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial as partial_of
from pathlib import Path

import pytest

import blobstore
from blobstore.errors import BlobDamaged, RemoteError
from blobstore.operations.transfer.verify_remote import verify_remote
from blobstore.registry.client import RegistryClient
from blobstore.registry.layouts.oci import plan_oci
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.registry.layouts.plan import ModelMetadata, RemotePlan
from blobstore.store import partial
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.registry import Server, running_registry


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with running_registry(tmp_path / "server") as server:
        yield server


@pytest.fixture
def origin(tmp_path: Path) -> LocalStore:
    origin = LocalStore(tmp_path / "origin")
    frozen.put(origin, "a", {"x": 1, "y": 2, "z": 3})
    return origin


def rest(data: bytes, begin: int) -> list[bytes]:
    return [data[begin:]]


def upload(server: Server, origin: LocalStore, plan: RemotePlan, tag: str) -> str:
    """Send a registry what a push would send; return the address."""
    with RegistryClient(server.host) as client:
        for blob in plan.blobs:
            data = b"".join(map(bytes, origin.read_pieces(*blob.id)))
            client.upload_blob("team/a", blob.digest, blob.size, partial_of(rest, data))
        for digest, data in plan.made.items():
            client.upload_blob("team/a", digest, len(data), partial_of(rest, data))
        for manifest in plan.manifests:
            client.put_manifest("team/a", str(manifest.digest), manifest)
        client.put_manifest("team/a", tag, plan.root)
    return f"{server.host}/team/a:{tag}"


def plans(origin: LocalStore) -> dict[str, RemotePlan]:
    data = origin.read_manifest("a")
    return {
        "ollama": plan_ollama(data),
        "oci": plan_oci(data, ModelMetadata()),
        "parts": plan_oci(data, ModelMetadata(), max_layers=2),
    }


@pytest.mark.parametrize("shape", ["ollama", "oci", "parts"])
def test_a_model_comes_back_as_it_was_pushed(
    server: Server,
    origin: LocalStore,
    tmp_path: Path,
    shape: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partial, "PART", 30_000)
    remote = upload(server, origin, plans(origin)[shape], "v1")
    store = LocalStore(tmp_path / "store")
    blobstore.pull(remote, "a", store=store)
    assert store.read_manifest("a") == origin.read_manifest("a")
    assert blobstore.verify("a", store=store).faults == ()
    assert blobstore.pull(remote, "a", store=store).bytes_fetched == 0
    assert verify_remote(remote).faults == ()
    shown = blobstore.show(f"oci://{remote}", store=tmp_path / "none")
    assert shown.tensors == blobstore.show("a", store=origin).tensors


def test_bits_that_flipped_on_the_disk_of_the_registry_are_found(
    server: Server, origin: LocalStore, tmp_path: Path
) -> None:
    remote = upload(server, origin, plans(origin)["ollama"], "v1")
    digest = frozen.layers(origin, "a")["y"].digest
    path = server.blob(str(digest))
    data = bytearray(path.read_bytes())
    data[40_000] ^= 16
    path.write_bytes(data)
    store = LocalStore(tmp_path / "store")
    with pytest.raises(BlobDamaged, match="'y': the registry sent other bytes"):
        blobstore.pull(remote, "a", store=store)
    (fault,) = verify_remote(remote).faults
    assert fault.layer == "y"
    data[40_000] ^= 16
    path.write_bytes(data)
    resumed = blobstore.pull(remote, "a", store=store)
    assert resumed.bytes_resumed > 0
    assert store.read_manifest("a") == origin.read_manifest("a")


@pytest.mark.parametrize("way", ["truncated", "removed"])
def test_a_blob_that_the_registry_lost_is_named(
    server: Server, origin: LocalStore, tmp_path: Path, way: str
) -> None:
    remote = upload(server, origin, plans(origin)["ollama"], "v1")
    path = server.blob(str(frozen.layers(origin, "a")["y"].digest))
    if way == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        shutil.rmtree(path.parent)
    store = LocalStore(tmp_path / "store")
    with pytest.raises((BlobDamaged, RemoteError, blobstore.errors.BlobMissing)):
        blobstore.pull(remote, "a", store=store)
    assert not store.has_model("a")

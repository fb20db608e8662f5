"""Compressed transfer: models pushed with their cold forms, and what pulls make of these."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.core.digest import BlobId, Digest
from blobstore.operations.transfer.cold import (
    ColdLayer,
    fetch_cold_layers,
    send_cold_manifests,
)
from blobstore.registry.client import RegistryClient
from blobstore.registry.reference import RemoteReference
from blobstore.store.local import LocalStore
from tests.support.frozen import layer, put, tuned
from tests.support.models import add_blobs
from tests.support.registry import Server


@pytest.fixture
def origin(tmp_path: Path) -> LocalStore:
    """A store with a base model and a fine-tune."""
    store = LocalStore(tmp_path / "origin")
    put(store, "base", {"a": 1, "b": 2})
    add_blobs(store, "tune", {"a": layer("a", tuned(5, 1)), "b": layer("b", tuned(6, 2))})
    return store


def _rest(content: bytes, offset: int) -> tuple[bytes]:
    return (content[offset:],)


def manifest(store: LocalStore, name: str) -> bytes:
    return store.read_manifest(name)


def check(store: LocalStore, origin: LocalStore, name: str) -> None:
    assert manifest(store, name) == manifest(origin, name)
    for blob in store.resolve(name).blobs:
        store.check_digest(*blob.id)


@pytest.mark.parametrize("shape", ["oci", "ollama", "image"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_client_with_the_base_pulls_only_deltas(
    origin: LocalStore, remote: str, tmp_path: Path, shape: Any, is_frozen: bool
) -> None:
    if is_frozen:
        blobstore.freeze("tune", base="base", store=origin)
    pushed = blobstore.push(
        "tune", remote, store=origin, shape=shape, cold=True, base="base", verify=True
    )
    assert pushed.cold_blobs == 2
    size = sum(blob.size for blob in origin.resolve("tune").layers)
    assert 0 < pushed.bytes_cold < size / 2
    target = LocalStore(tmp_path / "target")
    put(target, "base", {"a": 1, "b": 2})
    pulled = blobstore.pull(remote, "tune", store=target)
    check(target, origin, "tune")
    small = sum(blob.size for blob in origin.resolve("tune").blobs if blob.size < 5000)
    assert pulled.bytes_fetched <= 1.01 * (pushed.bytes_cold + small)
    assert not pulled.notices


def test_a_client_without_the_base_pulls_the_blobs(
    origin: LocalStore, remote: str, tmp_path: Path
) -> None:
    blobstore.push("tune", remote, store=origin, cold=True, base="base")
    target = LocalStore(tmp_path / "target")
    pulled = blobstore.pull(remote, "tune", store=target)
    check(target, origin, "tune")
    assert not pulled.bytes_saved


def test_a_push_leaves_the_model_uncompressed(origin: LocalStore, remote: str) -> None:
    blobstore.push("tune", remote, store=origin, cold=True, base="base")
    assert not origin.cold_files()
    assert not list(origin.folder("temporary").iterdir())


def test_damaged_cold_layers_are_replaced_by_the_blobs(
    origin: LocalStore, remote: str, tmp_path: Path, server: Server
) -> None:
    blobstore.push("tune", remote, store=origin, cold=True, base="base")
    address = RemoteReference.parse(remote)
    with RegistryClient(address.host) as client:
        root = client.get_manifest(address.repository, address.tag)
        layers = fetch_cold_layers(client, address.repository, root)
    for one in layers.values():
        path = server.blob(str(one.stored.digest))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    target = LocalStore(tmp_path / "target")
    put(target, "base", {"a": 1, "b": 2})
    pulled = blobstore.pull(remote, "tune", store=target)
    check(target, origin, "tune")
    assert len(pulled.notices) == 2
    assert not pulled.bytes_saved


@pytest.mark.parametrize("attack", ["another blob", "another base", "another size", "no cold blob"])
def test_forged_cold_layers_are_replaced_by_the_blobs(
    origin: LocalStore, remote: str, tmp_path: Path, attack: str
) -> None:
    blobstore.freeze("tune", base="base", store=origin)
    blobstore.push("tune", remote, store=origin)
    first, second = origin.resolve("tune").layers
    data = Path(origin.cold_path(second.digest)).read_bytes()
    base = origin.open_cold(*second.id).container.table.base
    assert base is not None
    forged = {
        "another blob": ColdLayer(first.id, BlobId(Digest.of(data), len(data)), base),
        "another base": ColdLayer(second.id, BlobId(Digest.of(data), len(data))),
        "another size": ColdLayer(second.id, BlobId(Digest.of(data), len(data) + 1), base),
        "no cold blob": ColdLayer(first.id, BlobId(Digest.of(b"no"), 2)),
    }[attack]
    address = RemoteReference.parse(remote)
    with RegistryClient(address.host) as client:
        for content in (data, b"no"):
            digest = Digest.of(content)
            pieces = partial(_rest, content)
            client.upload_blob(address.repository, digest, len(content), pieces)
        root = client.get_manifest(address.repository, address.tag)
        send_cold_manifests(client, address.repository, root, [forged])
    target = LocalStore(tmp_path / "target")
    put(target, "base", {"a": 1, "b": 2})
    pulled = blobstore.pull(remote, "tune", store=target)
    check(target, origin, "tune")
    assert len(pulled.notices) == 1
    assert not pulled.bytes_saved
    assert not list(target.folder("partial").iterdir())

"""Compressed transfer: models pushed with their cold layers, and what pulls make of these."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.cold_blobs.blob_encoder import BlobEncoder
from blobstore.core.digest import BlobId, Digest
from blobstore.errors import StoreError, UsageError
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.registry.client import RegistryClient
from blobstore.registry.reference import RemoteReference
from blobstore.remotes.cold_layers import ColdLayer
from blobstore.remotes.cold_manifests import fetch_cold_layers
from blobstore.remotes.referrers import fetch_referrers
from blobstore.remotes.send_cold import ColdBlobs, send_cold_manifests
from blobstore.store.local import LocalStore
from tests.support.frozen import flip_in_place, layer, put, steps, tuned
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


@pytest.mark.parametrize("layout", ["oci", "ollama", "image"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_client_with_the_base_pulls_only_deltas(
    origin: LocalStore, remote: str, tmp_path: Path, layout: Any, is_frozen: bool
) -> None:
    if is_frozen:
        blobstore.freeze("tune", base="base", store=origin)
    pushed = blobstore.push(
        "tune",
        remote,
        store=origin,
        registry=RegistryOptions(layout=layout),
        cold=True,
        base="base",
        verify=True,
    )
    assert pushed.cold_blobs == 2
    size = sum(blob.size for blob in origin.resolve("tune").layers)
    assert 0 < pushed.bytes_cold < size / 2
    target = LocalStore(tmp_path / "target")
    put(target, "base", {"a": 1, "b": 2})
    pulled = blobstore.pull(remote, "tune", store=target)
    check(target, origin, "tune")
    assert pulled.bytes_fetched == pushed.bytes_cold
    assert pulled.bytes_saved == size - pushed.bytes_cold
    assert not pulled.notices
    assert not list(target.folder("partial").iterdir())


def test_a_client_without_the_base_pulls_the_blobs(
    origin: LocalStore, remote: str, tmp_path: Path
) -> None:
    blobstore.push("tune", remote, store=origin, cold=True, base="base")
    target = LocalStore(tmp_path / "target")
    planned = blobstore.pull(remote, "tune", store=target, dry_run=True)
    pulled = blobstore.pull(remote, "tune", store=target)
    check(target, origin, "tune")
    assert not pulled.bytes_saved
    assert len(pulled.notices) == 1
    assert "bases are not here: 2" in pulled.notices[0]
    assert planned.notices == pulled.notices


@pytest.mark.parametrize("is_pushed_frozen", [False, True])
def test_a_base_may_be_a_delta_itself(
    origin: LocalStore, remote: str, tmp_path: Path, is_pushed_frozen: bool
) -> None:
    run = steps(5, 1, 3)
    for number, data in enumerate(run):
        add_blobs(origin, f"run:{number}", {"a": layer("a", data)})
    if is_pushed_frozen:
        blobstore.freeze("run:1", base="run:0", store=origin)
    pushed = blobstore.push("run:2", remote, store=origin, cold=True)
    target = LocalStore(tmp_path / "target")
    for number in range(2):
        add_blobs(target, f"run:{number}", {"a": layer("a", run[number])})
    blobstore.freeze("run:1", base="run:0", store=target)
    (stored,) = cold_layers(origin, remote, "run:2")
    assert stored.base == origin.resolve("run:1").layers[0].id
    pulled = blobstore.pull(remote, "run:2", store=target)
    check(target, origin, "run:2")
    assert pulled.bytes_saved > 0.9 * len(run[2])
    assert pulled.bytes_fetched == pushed.bytes_cold
    assert not pulled.notices
    # What is kept needs one base.
    assert target.cold_bases() == {
        target.resolve("run:1").layers[0].digest: target.resolve("run:0").layers[0].digest
    }


def test_a_push_leaves_the_model_uncompressed(origin: LocalStore, remote: str) -> None:
    blobstore.push("tune", remote, store=origin, cold=True, base="base")
    assert not origin.cold_files()
    assert not list(origin.folder("temporary").iterdir())


def cold_layers(origin: LocalStore, remote: str, name: str = "tune") -> list[ColdLayer]:
    address = RemoteReference.parse(remote)
    with RegistryClient(address.host) as client:
        root = client.get_manifest(address.repository, address.tag)
        referrers = fetch_referrers(client, address.repository, root)
        blobs = [blob.id for blob in origin.resolve(name).blobs]
        return list(fetch_cold_layers(client, address.repository, referrers, blobs).values())


def test_damaged_cold_layers_are_replaced_by_the_blobs(
    origin: LocalStore, remote: str, tmp_path: Path, server: Server
) -> None:
    blobstore.push("tune", remote, store=origin, cold=True, base="base")
    layers = cold_layers(origin, remote)
    paths = [server.blob(str(one.stored.digest)) for one in layers]
    intact = [path.read_bytes() for path in paths]
    for path in paths:
        flip_in_place(str(path))
    target = LocalStore(tmp_path / "target")
    put(target, "base", {"a": 1, "b": 2})
    pulled = blobstore.pull(remote, "tune", store=target)
    for path, data in zip(paths, intact, strict=True):  # other tests have the same blobs
        path.write_bytes(data)
    check(target, origin, "tune")
    assert len(pulled.notices) == 2
    assert not pulled.bytes_saved
    wasted = sum(one.stored.size for one in layers)
    assert pulled.bytes_fetched == wasted + sum(blob.size for blob in origin.resolve("tune").layers)


def test_blobs_come_as_they_are_if_that_is_wanted(
    origin: LocalStore, remote: str, tmp_path: Path
) -> None:
    blobstore.push("tune", remote, store=origin, cold=True, base="base")
    target = LocalStore(tmp_path / "target")
    put(target, "base", {"a": 1, "b": 2})
    pulled = blobstore.pull(remote, "tune", store=target, cold=False)
    check(target, origin, "tune")
    assert not pulled.bytes_saved


def test_a_second_push_encodes_and_sends_nothing(
    origin: LocalStore, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = blobstore.push("tune", remote, store=origin, cold=True, base="base")
    assert not first.is_unchanged
    with monkeypatch.context() as patch:
        patch.setattr(BlobEncoder, "write", None)
        second = blobstore.push("tune", remote, store=origin, cold=True, base="base")
    assert second.is_unchanged
    size = sum(blob.size for blob in origin.resolve("tune").blobs)
    assert second.bytes_cold == first.bytes_cold
    assert second.bytes_present >= first.bytes_cold + size  # with the configs of the registry


def test_a_smaller_frozen_form_is_sent_too(origin: LocalStore, remote: str, tmp_path: Path) -> None:
    first = blobstore.push(
        "tune", remote, store=origin, cold=True
    )  # alone: nothing says what its base is
    blobstore.freeze("tune", base="base", level="small", store=origin)
    second = blobstore.push("tune", remote, store=origin, cold=True)
    assert not second.is_unchanged
    assert second.bytes_cold < first.bytes_cold
    target = LocalStore(tmp_path / "target")
    put(target, "base", {"a": 1, "b": 2})
    assert blobstore.pull(remote, "tune", store=target).bytes_fetched < first.bytes_cold
    check(target, origin, "tune")


def test_a_damaged_frozen_form_is_encoded_again_from_the_blob(
    origin: LocalStore, remote: str, tmp_path: Path
) -> None:
    blobstore.freeze("tune", base="base", store=origin, keep_hot=True)
    for blob in origin.resolve("tune").layers:
        Path(origin.cold_path(blob.digest)).chmod(0o600)
        Path(origin.cold_path(blob.digest)).write_bytes(b"damaged")
    pushed = blobstore.push("tune", remote, store=origin, cold=True, base="base")
    assert pushed.cold_blobs == 2
    target = LocalStore(tmp_path / "target")
    put(target, "base", {"a": 1, "b": 2})
    pulled = blobstore.pull(remote, "tune", store=target)
    check(target, origin, "tune")
    assert pulled.bytes_saved
    assert not pulled.notices


def test_verify_sends_again_what_the_registry_has_lost(
    origin: LocalStore, remote: str, server: Server
) -> None:
    first = blobstore.push("tune", remote, store=origin, cold=True, base="base")
    lost = cold_layers(origin, remote)[0].stored
    server.blob(str(lost.digest)).unlink()
    again = blobstore.push("tune", remote, store=origin, cold=True, base="base", verify=True)
    assert again.bytes_sent == lost.size
    assert again.bytes_verified >= first.bytes_cold + sum(
        blob.size for blob in origin.resolve("tune").blobs
    )


def test_dry_runs_estimate_what_is_transferred(
    origin: LocalStore, remote: str, tmp_path: Path
) -> None:
    planned = blobstore.push("tune", remote, store=origin, cold=True, base="base", dry_run=True)
    pushed = blobstore.push("tune", remote, store=origin, cold=True, base="base")
    assert planned.cold_blobs == pushed.cold_blobs == 2
    assert planned.bytes_cold == pytest.approx(pushed.bytes_cold, rel=0.1)
    assert planned.bytes_sent - planned.bytes_cold == pushed.bytes_sent - pushed.bytes_cold
    target = LocalStore(tmp_path / "target")
    put(target, "base", {"a": 1, "b": 2})
    expected = blobstore.pull(remote, "tune", store=target, dry_run=True)
    pulled = blobstore.pull(remote, "tune", store=target)
    assert expected.bytes_saved > 0
    assert (expected.bytes_fetched, expected.bytes_saved, expected.bytes_present) == (
        pulled.bytes_fetched,
        pulled.bytes_saved,
        pulled.bytes_present,
    )


def test_progress_counts_compression_apart_and_each_total_is_the_true_one(
    origin: LocalStore, remote: str, tmp_path: Path
) -> None:
    reports: list[tuple[int, int]] = []
    compressed: list[tuple[int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        (compressed if what.startswith("compressing ") else reports).append((done, total))

    blobstore.push(
        "tune", remote, store=origin, cold=True, base="base", verify=True, progress=progress
    )
    size = sum(blob.size for blob in origin.resolve("tune").blobs)
    for counted in (reports, compressed):
        assert [done for done, _ in counted] == sorted(done for done, _ in counted)
        assert {total for _, total in counted} == {counted[-1][0]}
    assert compressed[-1][0] <= size <= reports[-1][0] // 2
    reports.clear()
    target = LocalStore(tmp_path / "target")
    put(target, "base", {"a": 1, "b": 2})
    blobstore.pull(remote, "tune", store=target, progress=progress)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert {total for _, total in reports} == {reports[-1][0]}


def test_a_pull_asks_once_what_refers_to_the_model(
    origin: LocalStore, remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobstore.push("tune", remote, store=origin, cold=True, base="base")
    asked: list[Digest] = []
    referrers = RegistryClient.referrers

    def count(self: RegistryClient, repository: str, digest: Digest, *others: Any) -> Any:
        asked.append(digest)
        return referrers(self, repository, digest, *others)

    monkeypatch.setattr(RegistryClient, "referrers", count)
    blobstore.pull(remote, "tune", store=tmp_path / "target")
    assert len(asked) == 1


def test_encoded_blobs_are_removed_as_soon_as_they_are_sent(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "store")
    put(store, "m", {f"x{number}": number for number in range(8)})
    encoded, most = ColdBlobs.encoded, 0

    @contextlib.contextmanager
    def counted(self: ColdBlobs, blob: Any, report: Any) -> Iterator[Any]:
        nonlocal most
        with encoded(self, blob, report) as file:
            most = max(most, len(list(store.folder("temporary").iterdir())))
            yield file

    monkeypatch.setattr(ColdBlobs, "encoded", counted)
    assert blobstore.push("m", remote, store=store, cold=True, streams=1).cold_blobs == 8
    assert most == 1


def test_a_push_needs_space_for_what_it_encodes(
    origin: LocalStore, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(origin.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StoreError, match="not enough space"):
        blobstore.push("tune", remote, store=origin, cold=True)


def test_rejects_invalid_arguments(origin: LocalStore, remote: str) -> None:
    level: Any = "tiny"
    with pytest.raises(UsageError, match="level must be fast or small, got 'tiny'"):
        blobstore.push("tune", remote, store=origin, cold=True, level=level)
    with pytest.raises(UsageError, match="cold=True"):
        blobstore.push("tune", remote, store=origin, base="base")


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

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import StoreBusy, StoreError
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest, ModelConfig, layers_digest
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance import repair_manifests as restoring
from blobstore.operations.maintenance.repair_manifests import Restored, restore_manifests
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path
from tests.support.models import dense_tensors, moe_tensors, with_layers, write_folder
from tests.support.ollama_store import add_gguf_model

NAME = Reference.parse("m")


@pytest.fixture
def stores(tmp_path: Path) -> tuple[LocalStore, LocalStore]:
    """Return two stores that have the same model, in the second one under another name too."""
    folder = write_folder(tmp_path / "source", dense_tensors())
    store, other = (LocalStore(tmp_path / name, lock_timeout=0.01) for name in ("store", "other"))
    create(folder, "m", store=store)
    for name in ("m", "another"):
        create(folder, name, store=other)
    return store, other


def restored(store: LocalStore, other: LocalStore, *, is_dry: bool = False) -> tuple[Restored, ...]:
    return tuple(restore_manifests(store, other, store.references(), is_dry=is_dry))


def change(store: LocalStore, old: bytes, new: bytes) -> bytes:
    path = store.manifest_path(NAME)
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    return path.read_bytes()


def publish(
    store: LocalStore, name: str, config: ModelConfig, layers: tuple[Descriptor, ...]
) -> None:
    data = config.to_bytes()
    with store.ingest() as ingest:
        added = ingest.add(len(data), lambda: [data])
        ingest.publish()
        described = Descriptor(media_types.CONFIG, added.digest, added.size)
        store.publish(Reference.parse(name), Manifest(config=described, layers=layers))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"name":"mask"', b'"name":"masl"'),
        (b"image.tensor", b"image.tenror"),
        (b'{"schema', b'{"scheMa'),
        (b"sha256:", b"sha257:"),
        (b'"layers"', b'"laye\xf2s"'),
    ],
)
def test_a_damaged_manifest_is_put_back(
    old: bytes, new: bytes, stores: tuple[LocalStore, LocalStore]
) -> None:
    store, other = stores
    whole = store.read_manifest(NAME)
    wrong = change(store, old, new)
    (found,) = restored(*stores)
    assert (found.reference, found.manifest) == (NAME, other.resolve(NAME))
    assert store.read_manifest(NAME) == whole
    assert found.quarantined is not None
    assert list(store.folder("quarantine").iterdir()) == [found.quarantined]
    assert found.quarantined.read_bytes() == wrong
    assert restored(*stores) == ()


def test_one_that_names_another_config_is_put_back(stores: tuple[LocalStore, LocalStore]) -> None:
    store = stores[0]
    whole = store.read_manifest(NAME)
    digest = store.resolve(NAME).config.digest.hex.encode()
    change(store, digest, digest[::-1])
    assert len(restored(*stores)) == 1
    assert store.read_manifest(NAME) == whole


def test_the_other_store_may_have_it_under_another_name(
    stores: tuple[LocalStore, LocalStore],
) -> None:
    store, other = stores
    whole = store.read_manifest(NAME)
    with other.exclusive_lock():
        other.remove(NAME)
    change(store, b"image.tensor", b"image.tenror")
    assert len(restored(*stores)) == 1
    assert store.read_manifest(NAME) == whole


def test_one_that_cannot_be_read_there_hinders_no_other(
    stores: tuple[LocalStore, LocalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = stores
    read_blob = other.read_blob
    failed: list[bool] = []

    def reading(*arguments: Any) -> bytes:
        if not failed:
            failed.append(True)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_blob(*arguments)

    monkeypatch.setattr(other, "read_blob", reading)
    change(store, b"image.tensor", b"image.tenror")
    assert len(restored(*stores)) == 1
    assert failed


def test_another_model_of_the_name_is_not_taken(
    stores: tuple[LocalStore, LocalStore], tmp_path: Path
) -> None:
    store, other = stores
    folder = write_folder(tmp_path / "moe", moe_tensors())
    for name in ("m", "another"):
        create(folder, name, store=other)
    wrong = change(store, b"image.tensor", b"image.tenror")
    assert restored(*stores) == ()
    assert store.read_manifest(NAME) == wrong


def test_does_not_use_a_manifest_that_is_damaged_too(stores: tuple[LocalStore, LocalStore]) -> None:
    store, other = stores
    for either in stores:
        change(either, b"image.tensor", b"image.tenror")
    with other.exclusive_lock():
        other.remove(Reference.parse("another"))
    assert restored(*stores) == ()
    change(store, b"image.json", b"image.jsoo")
    assert restored(*stores) == ()


def test_does_not_use_a_manifest_that_no_config_confirms(tmp_path: Path) -> None:
    store, other = LocalStore(tmp_path / "store"), LocalStore(tmp_path / "other")
    for either in (store, other):
        add_gguf_model(either, "m")
    change(store, b'{"schema', b'{"scheMa')
    assert restored(store, other) == ()


def test_whole_and_missing_manifests_are_left(stores: tuple[LocalStore, LocalStore]) -> None:
    store, other = stores
    change(store, b"}\n", b"}")  # as Ollama pulls it
    manifest = store.resolve(NAME)
    store.publish(Reference.parse("less"), with_layers(store, manifest, manifest.layers[1:]))
    assert restored(*stores) == ()
    names = [Reference.parse("gone")]
    assert tuple(restore_manifests(store, other, names, is_dry=False)) == ()


def test_a_whole_manifest_whose_config_is_lost_is_left(
    stores: tuple[LocalStore, LocalStore],
) -> None:
    blob_path(stores[0], "").unlink()
    assert restored(*stores) == ()


def test_then_no_other_model_of_the_same_layers_is_taken(
    stores: tuple[LocalStore, LocalStore],
) -> None:
    store, other = stores
    manifest = other.resolve(NAME)
    config = ModelConfig(file_type="another", layers_digest=layers_digest(manifest.layers))
    publish(other, "another", config, manifest.layers)
    blob_path(store, "").unlink()
    assert restored(*stores) == ()


def test_a_model_without_layers_is_like_no_other(stores: tuple[LocalStore, LocalStore]) -> None:
    store, other = stores
    with other.exclusive_lock():
        other.remove(NAME)
    publish(other, "another", ModelConfig(layers_digest=layers_digest([])), ())
    wrong = change(store, b'"name":"mask"', b'"name":"ma[]"')
    assert restored(*stores) == ()
    assert store.read_manifest(NAME) == wrong


def test_at_no_moment_is_the_name_gone(
    stores: tuple[LocalStore, LocalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not where a file can have no second name."""
    store = stores[0]
    change(store, b"image.tensor", b"image.tenror")
    monkeypatch.setattr(os, "link", forbidden)
    monkeypatch.setattr(restoring, "write_file", forbidden)
    wrong = store.read_manifest(NAME)
    with pytest.raises(StoreError):
        restored(*stores)
    assert store.read_manifest(NAME) == wrong


def forbidden(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_name_that_differs_in_case_does_not_matter(
    stores: tuple[LocalStore, LocalStore],
) -> None:
    store = stores[0]
    whole = store.read_manifest(NAME)
    path = store.manifest_path(Reference.parse("M"))
    path.parent.mkdir()
    path.write_bytes(whole)
    change(store, b"image.tensor", b"image.tenror")
    assert [found.reference for found in restored(*stores)] == [NAME]
    assert store.read_manifest(NAME) == whole


def test_a_dry_run_changes_nothing(stores: tuple[LocalStore, LocalStore]) -> None:
    store = stores[0]
    wrong = change(store, b"image.tensor", b"image.tenror")
    (found,) = restored(*stores, is_dry=True)
    assert found.quarantined is None
    assert store.read_manifest(NAME) == wrong
    assert not store.folder("quarantine").exists()


def test_the_lock_is_needed(stores: tuple[LocalStore, LocalStore]) -> None:
    store = stores[0]
    wrong = change(store, b"image.tensor", b"image.tenror")
    with store.shared_lock(), pytest.raises(StoreBusy):
        restored(*stores)
    assert store.read_manifest(NAME) == wrong


def test_leaves_a_manifest_that_is_replaced_during_the_repair(
    stores: tuple[LocalStore, LocalStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores[0]
    manifest = store.resolve(NAME)
    less = with_layers(store, manifest, manifest.layers[1:]).to_bytes()
    change(store, b"image.tensor", b"image.tenror")
    references = stores[1].references

    def publishing() -> object:
        store.manifest_path(NAME).write_bytes(less)
        return references()

    monkeypatch.setattr(stores[1], "references", publishing)
    assert restored(*stores) == ()
    assert store.read_manifest(NAME) == less

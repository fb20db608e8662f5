from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import StoreBusy, StoreError
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.model import Manifest, ModelConfig
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.repair_manifests import Restored, restore_manifests
from blobstore.store import names
from blobstore.store.fetched import brought_name, mark_of
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.damage import blob_path
from tests.support.models import add_blob, dense_tensors, moe_tensors, with_layers, write_folder
from tests.support.ollama_store import add_gguf_model

NAME = Reference.parse("m")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with a model."""
    store = LocalStore(tmp_path / "store", lock_timeout=0.01)
    create(write_folder(tmp_path / "source", dense_tensors()), "m", store=store)
    return store


@pytest.fixture
def other(store: LocalStore, tmp_path: Path) -> LocalStore:
    """Another store with the same model, under a second name too."""
    other = LocalStore(tmp_path / "other", lock_timeout=0.01)
    for name in ("m", "another"):
        create(tmp_path / "source", name, store=other)
    return other


def restored(store: LocalStore, other: LocalStore, *, is_dry: bool = False) -> tuple[Restored, ...]:
    return tuple(restore_manifests(store, other, (), is_dry=is_dry))


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
    described = Descriptor(media_types.CONFIG, *add_blob(store, data))
    store.names.publish(replace_any(name), Manifest(config=described, layers=layers))


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
def test_restores_a_damaged_manifest(
    old: bytes, new: bytes, store: LocalStore, other: LocalStore
) -> None:
    whole = store.read_manifest(NAME)
    wrong = change(store, old, new)
    (found,) = restored(store, other)
    assert (found.reference, found.manifest) == (NAME, other.resolve(NAME))
    assert store.read_manifest(NAME) == whole
    assert found.quarantined is not None
    assert list(store.folder("quarantine").iterdir()) == [found.quarantined]
    assert found.quarantined.read_bytes() == wrong
    assert restored(store, other) == ()


def test_restores_a_manifest_that_names_another_config(
    store: LocalStore, other: LocalStore
) -> None:
    whole = store.read_manifest(NAME)
    digest = store.resolve(NAME).config.digest.hex.encode()
    change(store, digest, digest[::-1])
    assert len(restored(store, other)) == 1
    assert store.read_manifest(NAME) == whole


def test_finds_the_model_under_another_name(store: LocalStore, other: LocalStore) -> None:
    whole = store.read_manifest(NAME)
    with other.exclusive_lock():
        other.names.remove(NAME)
    change(store, b"image.tensor", b"image.tenror")
    assert len(restored(store, other)) == 1
    assert store.read_manifest(NAME) == whole


def test_skips_models_of_the_other_store_that_cannot_be_read(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_blob = other.read_blob
    failed: list[bool] = []

    def reading(*arguments: Any) -> bytes:
        if not failed:
            failed.append(True)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_blob(*arguments)

    monkeypatch.setattr(other, "read_blob", reading)
    change(store, b"image.tensor", b"image.tenror")
    assert len(restored(store, other)) == 1
    assert failed


def test_does_not_use_another_model_of_the_same_name(
    store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "moe", moe_tensors())
    for name in ("m", "another"):
        create(folder, name, store=other)
    wrong = change(store, b"image.tensor", b"image.tenror")
    assert restored(store, other) == ()
    assert store.read_manifest(NAME) == wrong


def test_does_not_use_a_manifest_that_is_damaged_too(store: LocalStore, other: LocalStore) -> None:
    for either in (store, other):
        change(either, b"image.tensor", b"image.tenror")
    with other.exclusive_lock():
        other.names.remove(Reference.parse("another"))
    assert restored(store, other) == ()
    change(store, b"image.json", b"image.jsoo")
    assert restored(store, other) == ()


def test_does_not_use_a_manifest_that_no_config_confirms(tmp_path: Path) -> None:
    store, other = LocalStore(tmp_path / "store"), LocalStore(tmp_path / "other")
    for either in (store, other):
        add_gguf_model(either, "m")
    change(store, b'{"schema', b'{"scheMa')
    assert restored(store, other) == ()


def test_leaves_intact_and_missing_manifests(store: LocalStore, other: LocalStore) -> None:
    change(store, b"}\n", b"}")  # as Ollama pulls it
    manifest = store.resolve(NAME)
    store.names.publish(replace_any("less"), with_layers(store, manifest, manifest.layers[1:]))
    assert restored(store, other) == ()
    names = [Reference.parse("gone")]
    assert tuple(restore_manifests(store, other, names, is_dry=False)) == ()


def test_a_name_that_is_new_here_needs_all_of_its_blobs(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Reference.parse("another")
    path = blob_path(store, store.resolve(NAME).layers_of(media_types.TENSOR)[0].name)
    data = path.read_bytes()
    path.unlink()
    assert tuple(restore_manifests(store, other, [new], is_dry=False)) == ()
    with monkeypatch.context() as patched:  # gc removes it after the look
        patched.setattr(LocalStore, "has_blobs", lambda *_: True)
        assert tuple(restore_manifests(store, other, [new], is_dry=False)) == ()
    assert not store.has_model(new)
    store.manifest_path(NAME).unlink()  # which was complete once
    assert [found.reference for found in restored(store, other)] == [NAME]
    path.write_bytes(data)
    assert len(tuple(restore_manifests(store, other, [new], is_dry=False))) == 1


@pytest.mark.parametrize("is_own", [True, False])
def test_what_another_place_has_was_not_fetched_by_the_server_of_this_store(
    store: LocalStore, other: LocalStore, is_own: bool
) -> None:
    new = Reference.parse("fetched")
    manifest = store.resolve(NAME)
    mark = mark_of(("org/m", "0" * 40))
    source = manifest.layers[0]._replace(media_type=media_types.SOURCE, name=mark)
    for one in (store, other):
        marked = with_layers(one, manifest, [source, *manifest.layers])
        if is_own or one is other:
            one.names.publish(replace_any(new), marked)
    store.manifest_path(new).unlink(missing_ok=True)
    assert len(tuple(restore_manifests(store, other, [new], is_dry=False))) == 1
    note = store.folder("pulled") / brought_name(Digest.of(store.read_manifest(new)))
    assert note.exists() is not is_own


def test_leaves_an_intact_manifest_whose_config_is_missing(
    store: LocalStore, other: LocalStore
) -> None:
    blob_path(store, "").unlink()
    assert restored(store, other) == ()


def test_does_not_use_another_model_of_the_same_layers(
    store: LocalStore, other: LocalStore
) -> None:
    manifest = other.resolve(NAME)
    config = ModelConfig(file_type="another", layers_digest=layers_digest(manifest.layers))
    publish(other, "another", config, manifest.layers)
    blob_path(store, "").unlink()
    assert restored(store, other) == ()


def test_does_not_use_a_model_without_layers(store: LocalStore, other: LocalStore) -> None:
    with other.exclusive_lock():
        other.names.remove(NAME)
    publish(other, "another", ModelConfig(layers_digest=layers_digest([])), ())
    wrong = change(store, b'"name":"mask"', b'"name":"ma[]"')
    assert restored(store, other) == ()
    assert store.read_manifest(NAME) == wrong


def test_the_name_exists_at_every_moment(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on file systems without hard links."""
    change(store, b"image.tensor", b"image.tenror")
    monkeypatch.setattr(os, "link", forbidden)
    monkeypatch.setattr(names, "write_file", forbidden)
    wrong = store.read_manifest(NAME)
    with pytest.raises(StoreError):
        restored(store, other)
    assert store.read_manifest(NAME) == wrong


def forbidden(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_ignores_a_name_that_differs_only_in_case(store: LocalStore, other: LocalStore) -> None:
    whole = store.read_manifest(NAME)
    path = store.manifest_path(Reference.parse("M"))
    path.parent.mkdir()
    path.write_bytes(whole)
    change(store, b"image.tensor", b"image.tenror")
    assert [found.reference for found in restored(store, other)] == [NAME]
    assert store.read_manifest(NAME) == whole


def test_a_dry_run_changes_nothing(store: LocalStore, other: LocalStore) -> None:
    wrong = change(store, b"image.tensor", b"image.tenror")
    (found,) = restored(store, other, is_dry=True)
    assert found.quarantined is None
    assert store.read_manifest(NAME) == wrong
    assert not store.folder("quarantine").exists()


def test_needs_the_lock(store: LocalStore, other: LocalStore) -> None:
    wrong = change(store, b"image.tensor", b"image.tenror")
    with store._locks.shared(), pytest.raises(StoreBusy):
        restored(store, other)
    assert store.read_manifest(NAME) == wrong


def test_leaves_a_manifest_that_is_replaced_during_the_repair(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = store.resolve(NAME)
    less = with_layers(store, manifest, manifest.layers[1:]).to_bytes()
    change(store, b"image.tensor", b"image.tenror")
    references = other.references

    def publishing() -> object:
        store.manifest_path(NAME).write_bytes(less)
        return references()

    monkeypatch.setattr(other, "references", publishing)
    assert restored(store, other) == ()
    assert store.read_manifest(NAME) == less

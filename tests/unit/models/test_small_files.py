from __future__ import annotations

from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    InvalidManifest,
    ModelNotFound,
)
from blobstore.manifests.reference import Reference
from blobstore.models.small_files import ModelFiles
from blobstore.operations.describe.cat import read_file
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.damage import blob_path
from tests.support.models import add_blobs, dense_tensors, with_layers, write_folder


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path)
    add_blobs(store, "old", {"w": b"never opened"})
    manifest = store.resolve(Reference.parse("old"))
    store.names.publish(replace_any("m"), with_layers(store, manifest, manifest.layers))
    return store


def test_returns_the_manifest_of_a_name(store: LocalStore) -> None:
    reference = Reference.parse("m")
    for name in ("m", reference):
        files = ModelFiles.of(name, store)
        assert files.manifest == store.resolve(reference)
        assert (files.name, files.digest) == ("m:latest", Digest.of(files.data))
    with pytest.raises(ModelNotFound):
        ModelFiles.of("none", store)


def test_rejects_a_changed_manifest(store: LocalStore) -> None:
    for name in ("m", "old"):
        path = store.manifest_path(Reference.parse(name))
        path.write_bytes(path.read_bytes().replace(b'"name":"w"', b'"name":"v"'))
    with pytest.raises(InvalidManifest, match="^m:latest: the manifest was changed since"):
        ModelFiles.of("m", store)
    (layer,) = ModelFiles.of("old", store).manifest.layers  # of which nothing tells
    assert layer.name == "v"


def test_a_model_that_has_lost_its_config_keeps_its_files(store: LocalStore) -> None:
    blob_path(store, "").unlink()
    assert [layer.name for layer in ModelFiles.of("m", store).manifest.layers] == ["w"]


@pytest.mark.parametrize(
    ("content", "kind"), [(None, BlobMissing), (b"short", BlobDamaged), (b"altered", BlobDamaged)]
)
def test_errors_of_a_small_file_name_it_and_its_model(
    store: LocalStore, tmp_path: Path, content: bytes | None, kind: type[BlobstoreError]
) -> None:
    blobstore.create(write_folder(tmp_path / "source", dense_tensors()), "m", store=store)
    files = ModelFiles.of("m", store)
    layer = files.files["config.json"]
    path = Path(store.blob_path(layer.digest))
    path.unlink()
    if content is not None:
        path.write_bytes(content.ljust(layer.size) if content == b"altered" else content)
    for read in (files.read_file, files.read_json, files.file_path):
        with pytest.raises(kind, match="^file 'config.json' of model m:latest: "):
            read("config.json")
    with pytest.raises(kind, match="^file 'config.json' of model m:latest"):
        read_file("m", "config.json", store=store)

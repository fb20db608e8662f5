from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.errors import InvalidManifest, ModelNotFound
from blobstore.manifests.reference import Reference
from blobstore.models.files import ModelFiles
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path
from tests.support.models import add_blobs, with_layers


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path)
    add_blobs(store, "old", {"w": b"never opened"})
    manifest = store.resolve(Reference.parse("old"))
    store.publish(Reference.parse("m"), with_layers(store, manifest, manifest.layers))
    return store


def test_returns_the_manifest_of_a_name(store: LocalStore) -> None:
    reference = Reference.parse("m")
    for name in ("m", reference):
        assert ModelFiles.of(name, store).manifest == store.resolve(reference)
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

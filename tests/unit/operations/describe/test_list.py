from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidManifest, ModelNotFound, StoreError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.describe.list import list_models
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder
from tests.support.ollama_store import add_gguf_model


def make(store: LocalStore, tmp_path: Path, name: str, *tensors: str) -> None:
    chosen = {tensor: dense_tensors()[tensor] for tensor in tensors}
    create(write_folder(tmp_path / name, chosen), name, store=store)


def test_an_absent_store_is_empty(store: LocalStore) -> None:
    assert list_models(store=store) == ()


def test_counts_what_names_share_once(store: LocalStore, tmp_path: Path) -> None:
    make(store, tmp_path, "a", "mask", "scalar", "position_ids")
    make(store, tmp_path, "b", "mask", "scalar")
    make(store, tmp_path, "c", "scalar")
    models = list_models(store=store)
    assert [str(model.reference) for model in models] == ["a:latest", "b:latest", "c:latest"]
    manifests = [store.resolve(model.reference) for model in models]
    layers = [manifest.layers for manifest in manifests]
    # Neither configs nor records of the source.
    common = [layers[1][:-1], layers[1][:-1], layers[2][:-1]]
    for model, manifest, shared in zip(models, manifests, common, strict=True):
        assert model.size == sum(blob.size for blob in manifest.blobs)
        assert model.shared == sum(blob.size for blob in shared)
        assert model.digest == Digest.of(store.read_manifest(model.reference))
        assert model.modified == store.manifest_path(model.reference).stat().st_mtime


def test_steps_are_listed_in_their_order(store: LocalStore, tmp_path: Path) -> None:
    for name in ("run:step-10", "run:step-5", "run:step-5.state"):
        make(store, tmp_path, name, "scalar")
    names = ["run:step-5", "run:step-5.state", "run:step-10"]
    assert [model.name for model in list_models(store=store)] == names
    assert [str(name) for name in store.tags(Reference.parse("run"))] == names
    assert [model.name for model in list_models("*.state", store=store)] == names[1:2]
    assert [model.name for model in list_models([names[2], "r*5"], store=store)] == names[::2]
    for absent in ("x*", [names[0], "run:step-7"]):
        with pytest.raises(ModelNotFound):
            list_models(absent, store=store)


def test_a_blob_used_twice_by_one_model_is_not_shared(store: LocalStore) -> None:
    add_gguf_model(store, "one")
    path = next(store.folder("manifests").rglob("latest"))
    data = path.read_bytes()
    start = data.index(b'{"mediaType":"application/vnd.ollama.image.template"')
    layer = data[start : data.index(b"}", start) + 1]
    path.write_bytes(data.replace(layer, layer + b"," + layer))
    (model,) = list_models(store=store)
    assert len(store.resolve(model.reference).layers) == 6
    assert model.shared == 0
    assert model.size == sum(blob.stat().st_size for blob in store.folder("blobs").iterdir())


def test_lists_manifests_that_cannot_be_read_with_their_error(
    store: LocalStore, tmp_path: Path
) -> None:
    make(store, tmp_path, "whole", "mask")
    folder = store.folder("manifests") / "registry.ollama.ai/library/broken"
    folder.mkdir(parents=True)
    (folder / "json").write_bytes(b"{")
    with (folder / "huge").open("wb") as file:
        file.truncate(2**27)
    models = {model.reference.tag: model for model in list_models(store=store)}
    for tag in ("json", "huge"):
        assert isinstance(models[tag].error, InvalidManifest)
        assert str(folder / tag) in str(models[tag].error)
        assert models[tag].digest is None
        assert models[tag].modified > 0
    assert models["latest"].error is None


def test_skips_a_name_that_vanishes(store: LocalStore) -> None:
    add_gguf_model(store, "gone")
    add_gguf_model(store, "stays")
    gone, stays = store.references()
    store.references = lambda **_: iter((gone, stays))  # type: ignore[method-assign]
    store.manifest_path(gone).unlink()
    assert [model.reference for model in list_models(store=store)] == [stays]


def test_a_file_is_no_store(store: LocalStore) -> None:
    store.root.write_bytes(b"")
    with pytest.raises(StoreError, match="is not a folder"):
        list_models(store=store)

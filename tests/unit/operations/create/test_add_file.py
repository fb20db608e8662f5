"""A file is added to models as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import blobstore
from blobstore.manifests.media_types import FILE
from blobstore.manifests.model import LAYERS_DIGEST, layers_digest
from blobstore.manifests.reference import Reference
from blobstore.operations.create.add_file import add_file
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder

ONE, OTHER, NONE = map(Reference.parse, ("team/one", "team/other", "team/none"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"onnx" * 1000)
    return path


@pytest.fixture
def both(store: LocalStore, tmp_path: Path) -> LocalStore:
    folder = write_folder(tmp_path / "model", dense_tensors())
    for name in (ONE, OTHER):
        blobstore.create(folder, name, store=store)
    return store


def test_the_models_that_are_wanted_get_the_file(both: LocalStore, file: Path) -> None:
    before = both.read_manifest(OTHER)
    wanted = iter([True, False])
    found = add_file(both, [ONE, NONE, OTHER], lambda _: next(wanted), "onnx/model.onnx", file)
    assert found == [ONE]
    assert both.read_manifest(OTHER) == before
    (layer,) = (one for one in both.resolve(ONE).layers if one.name == "onnx/model.onnx")
    assert layer.media_type == FILE
    assert both.read_blob(layer.digest, layer.size) == file.read_bytes()
    assert not verify_models(store=both).faults
    with blobstore.open(ONE, store=both) as model:
        assert model.keys() == blobstore.open(OTHER, store=both).keys()


def test_a_model_that_has_such_a_file_keeps_it(both: LocalStore, file: Path) -> None:
    before = both.read_manifest(ONE)
    assert add_file(both, [ONE], lambda _: True, "config.json", file) == []
    assert both.read_manifest(ONE) == before


def test_the_config_names_the_new_layers(both: LocalStore, file: Path) -> None:
    add_file(both, [ONE], lambda _: True, "model.onnx", file)
    manifest = both.resolve(ONE)
    value = json.loads(both.read_blob(manifest.config.digest, manifest.config.size))
    assert value[LAYERS_DIGEST] == str(layers_digest(manifest.layers))


def test_a_name_that_has_changed_is_not_replaced(
    both: LocalStore, file: Path, tmp_path: Path
) -> None:
    other = write_folder(tmp_path / "new", {"w": next(iter(dense_tensors().values()))})

    def replace(_: object) -> bool:
        blobstore.create(other, ONE, store=both)
        return True

    assert add_file(both, [ONE], replace, "model.onnx", file) == []
    assert [layer.name for layer in both.resolve(ONE).layers if layer.name == "w"] == ["w"]

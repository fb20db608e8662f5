"""A file is added to models as it is."""

from __future__ import annotations

import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import blobstore
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.media_types import FILE
from blobstore.manifests.model import LAYERS_DIGEST
from blobstore.manifests.reference import Reference
from blobstore.operations.create.add_file import add_file
from blobstore.operations.maintenance.verify import verify_models
from blobstore.serve.pulled import PulledModels
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
        PulledModels(store).names.giving(name)
    return store


def test_the_models_that_are_wanted_get_the_file(both: LocalStore, file: Path) -> None:
    before = both.read_manifest(OTHER)
    wanted = iter([True, False])
    found = add_file(both, [ONE, NONE, OTHER], lambda *_: next(wanted), "onnx/model.onnx", file)
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
    assert add_file(both, [ONE], lambda *_: True, "config.json", file) == []
    assert both.read_manifest(ONE) == before


def test_the_config_names_the_new_layers(both: LocalStore, file: Path) -> None:
    add_file(both, [ONE], lambda *_: True, "model.onnx", file)
    manifest = both.resolve(ONE)
    value = json.loads(both.read_blob(manifest.config.digest, manifest.config.size))
    assert value[LAYERS_DIGEST] == str(layers_digest(manifest.layers))


def test_a_name_that_has_changed_is_not_replaced(
    both: LocalStore, file: Path, tmp_path: Path
) -> None:
    other = write_folder(tmp_path / "new", {"w": next(iter(dense_tensors().values()))})

    looks = iter([True, False])

    def is_wanted(*_: object) -> bool:
        blobstore.create(other, ONE, store=both)
        return next(looks)

    assert add_file(both, [ONE], is_wanted, "model.onnx", file) == []
    assert not list(looks), "the new model was looked at too"
    assert [layer.name for layer in both.resolve(ONE).layers if layer.name == "w"] == ["w"]


def test_models_get_all_files_that_are_added_at_once(both: LocalStore, tmp_path: Path) -> None:
    all_have_read, names = threading.Barrier(2), ["a.onnx", "b.onnx"]

    def add(name: str) -> list[Reference]:
        path, reads = tmp_path / name, iter([all_have_read.wait])
        path.write_bytes(name.encode())

        def is_wanted(*_: object) -> bool:
            for wait in reads:  # only the first time: one of both has to read again
                wait(60)
            return True

        return add_file(both, [ONE], is_wanted, name, path)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(add, names)) == [[ONE], [ONE]]
    assert {layer.name for layer in both.resolve(ONE).layers} >= set(names)
    assert not verify_models(store=both).faults


def test_a_model_that_has_this_file_is_one_that_has_got_it(both: LocalStore, file: Path) -> None:
    for _ in range(2):
        assert add_file(both, [ONE], lambda *_: True, "m.onnx", file) == [ONE]


def test_a_name_that_others_change_each_time_is_left_to_them(
    both: LocalStore, file: Path, tmp_path: Path
) -> None:
    before, other = both.resolve(ONE), tmp_path / "other"
    other.write_bytes(b"other")
    numbers = itertools.count()

    def is_wanted(*_: object) -> bool:
        add_file(both, [ONE], lambda *_: True, f"{next(numbers)}.onnx", other)
        return True

    assert add_file(both, [ONE], is_wanted, "model.onnx", file) == []
    assert len(both.resolve(ONE).layers) == len(before.layers) + next(numbers)

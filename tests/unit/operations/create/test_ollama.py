"""Models of an Ollama folder that are imported by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

import blobstore
from blobstore.errors import (
    InvalidReference,
    ModelNotFound,
    SourceNotFound,
    UnsupportedSource,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.operations.create.create import create
from blobstore.operations.create.create_all import create_all
from blobstore.store.local import LocalStore
from tests.support.gguf_files import TEXT, gguf_file, text
from tests.support.models import dense_tensors, write_folder
from tests.support.ollama_store import F32, GGUF_FILE, add_gguf_model

PROJECTOR = gguf_file(
    [("general.architecture", TEXT, text("clip"))], [("v.weight", F32, (2,), bytes(8))]
)


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """The folder of models that Ollama has."""
    folder = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    return LocalStore(folder)


def test_a_model_is_split_and_its_files_come_back(
    ollama: LocalStore, store: LocalStore, tmp_path: Path
) -> None:
    add_gguf_model(ollama, "vision:8b", projector=PROJECTOR)
    created = create("ollama://vision:8b", "m", store=store)
    assert created.tensors == 4
    assert len(store.resolve("m").layers_of(media_types.TENSOR)) == 4
    blobstore.export("m", tmp_path / "out", store=store)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        "model.gguf": GGUF_FILE,
        "mmproj-model.gguf": PROJECTOR,
        "LICENSE": b"first license",
    }


def test_a_model_is_split_in_the_folder_itself(ollama: LocalStore) -> None:
    add_gguf_model(ollama, "m")
    create("ollama://m", "split", store=ollama)
    found = blobstore.diff("m", "split", store=ollama)
    assert len(found.tensors) == 3
    assert all(tensor.is_same for tensor in found.tensors)


def test_the_folder_of_the_user_is_the_default(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    add_gguf_model(LocalStore(tmp_path / ".ollama" / "models"), "m")
    assert create("ollama://m", "m", store=store, dry_run=True).blobs


def test_all_models_of_the_folder_get_the_names_that_they_have_there(
    ollama: LocalStore, store: LocalStore, tmp_path: Path
) -> None:
    for name in ("vision:8b", "hf.co/org/tiny:Q4"):
        add_gguf_model(ollama, name)
    create(write_folder(tmp_path / "dense", dense_tensors()), "dense", store=ollama)

    planned = create_all("ollama://", store=store, dry_run=True)
    made = create_all("ollama://", store=store)

    assert [(model.name, model.source) for model in made] == [
        (name, f"ollama://{name}") for name in ("dense:latest", "hf.co/org/tiny:Q4", "vision:8b")
    ]
    assert [model.source for model in planned] == [model.source for model in made]
    assert "has 0 GGUF files" in str(made[0].error)
    assert sorted(map(str, store.references())) == ["hf.co/org/tiny:Q4", "vision:8b"]
    with pytest.raises(UsageError, match="ollama://vision"):
        create_all("ollama://vision:8b", store=store)


def test_a_folder_without_models_is_an_error(ollama: LocalStore, store: LocalStore) -> None:
    ollama.root.mkdir()
    with pytest.raises(SourceNotFound, match="has no models"):
        create_all("ollama://", store=store)


def test_other_models_are_refused(ollama: LocalStore, store: LocalStore, tmp_path: Path) -> None:
    add_gguf_model(ollama, "m")
    create(write_folder(tmp_path / "dense", dense_tensors()), "dense", store=ollama)
    with pytest.raises(UnsupportedSource, match="dense:latest of .* has 0 GGUF files"):
        create("ollama://dense", "m", store=store)
    with pytest.raises(ModelNotFound, match="other"):
        create("ollama://other", "m", store=store)
    with pytest.raises(InvalidReference):
        create("ollama://../m", "m", store=store)


def test_a_folder_that_is_not_there_is_said(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    with pytest.raises(SourceNotFound, match="none'; set OLLAMA_MODELS"):
        create("ollama://m", "m", store=store)

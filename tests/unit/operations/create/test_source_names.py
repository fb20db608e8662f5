"""A model gets the name of its source if the user gives none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blobstore.errors import NameTaken, UsageError
from blobstore.operations.create.create import create
from blobstore.operations.create.source_names import source_name
from blobstore.sources.base import DEFAULT_OPTIONS, SourceOptions
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, moe_tensors, write_folder
from tests.unit.cli.running import run


@pytest.mark.parametrize(
    ("source", "weights", "name"),
    [
        ("hf://org/name", None, "org/name:latest"),
        ("hf://org/name@v1.0", None, "org/name:v1.0"),
        ("hf://gpt2", None, "gpt2:latest"),
        ("https://huggingface.co/org/name/tree/main", None, "org/name:main"),
        (
            "https://huggingface.co/org/name/resolve/main/a/x-Q4_0.gguf?download=true",
            None,
            "org/name:Q4_0",
        ),
        ("https://hf.co/org/name/blob/v1/model.safetensors", None, "org/name:v1"),
        ("hf://org/name:q4_0", None, "org/name:Q4_0"),
        ("hf://org/name@v1:Q4_0", None, "org/name:v1-Q4_0"),
        ("hf://a.b/name", None, "a-b/name:latest"),
        ("ollama://x:y", None, "x:y"),
        ("/some/model folder", None, "model-folder:latest"),
        ("/some/model.SAFETENSORS", None, "model:latest"),
        ("s3://bucket/team/llama", None, "llama:latest"),
        ("gs://bucket/team/llama.gguf/", None, "llama:latest"),
        ("az://container", None, "container:latest"),
        ("https://host/x/model%20one.GGUF?signature=a.gguf#part", None, "model-one:latest"),
        ("/some/x-GGUF", "Q8_0", "x-GGUF:Q8_0"),
    ],
)
def test_every_kind_of_source_has_a_name(source: str, weights: str | None, name: str) -> None:
    assert str(source_name(source, SourceOptions(weights=weights))) == name


def test_folders_of_a_cache_have_the_name_of_their_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for folder in (snapshot, snapshot.parents[1]):
        assert str(source_name(folder, DEFAULT_OPTIONS)) == "org/name:latest"


def test_a_source_without_a_name_needs_one() -> None:
    with pytest.raises(UsageError, match="'/' gives the model no name"):
        source_name("/", DEFAULT_OPTIONS)


def test_only_the_name_of_another_model_is_refused(store: LocalStore, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "dense", dense_tensors())
    assert str(create(folder, store=store).reference) == "dense:latest"
    assert not create(folder, store=store).bytes_written
    changed = {name: np.ones_like(values) for name, values in dense_tensors().items()}
    for others in (changed, moe_tensors()):
        write_folder(folder, others)
        with pytest.raises(NameTaken, match=f"'blobstore create {folder} dense:latest' replaces"):
            create(folder, store=store)
    assert create(folder, "dense:latest", store=store).replaced


def test_the_command_needs_no_name(store: LocalStore, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "dense", dense_tensors())
    assert '"dense:latest"' in run("create", folder, "--dry-run", "--json").stdout
    assert "created dense:latest" in run("create", folder).stdout

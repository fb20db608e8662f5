"""The quantizations of a model in GGUF files become models of one name with different tags."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.errors import SourceError
from blobstore.operations.create.create_all import create_all
from blobstore.operations.describe.show import model_source
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from tests.support.hub_server import HubServer
from tests.unit.cli.running import run_forked
from tests.unit.sources.test_gguf_models import write


def names(folder: Path | str) -> list[str]:
    """Return the names of the models that a dry run finds, without their tag if it is the default one."""
    found = create_all(folder, store=LocalStore("unused"), dry_run=True)
    assert not any(model.error for model in found)
    return [model.name.removesuffix(":latest") for model in found]


def write_all(folder: Path, *files: str) -> Path:
    """Write models, and projectors if their names say so; return the folder."""
    for name in files:
        write(folder / name, "mmproj" if "mmproj" in name else "model", name)
    return folder


def test_each_has_its_projector(tmp_path: Path, store: LocalStore) -> None:
    files = ("gemma-Q4_K_M.gguf", "gemma-q8_0.gguf", "mmproj-F16.gguf", "gemma-UD-Q4_K_XL.gguf")
    folder = write_all(tmp_path / "Gemma", *files)
    made = create_all(folder, store=store)
    assert [model.name for model in made] == ["Gemma:Q4_K_M", "Gemma:UD-Q4_K_XL", "Gemma:Q8_0"]
    assert not any(model.created.notices for model in made if model.created)
    source = model_source("Gemma:Q8_0", store=store)
    assert source is not None
    assert [(file.name, file.role) for file in source.files] == [
        ("gemma-q8_0.gguf", "model"),
        ("mmproj-F16.gguf", "projector"),
    ]
    assert source.options == {"weights": "Q8_0"}
    options = SourceOptions(weights="*q8_0*")
    (only,) = create_all(folder, store=store, dry_run=True, source_options=options)
    assert only.name == "Gemma:Q8_0"


def test_a_folder_of_several_models_names_each_by_its_file(tmp_path: Path) -> None:
    write_all(tmp_path, "gemma-Q4_0.gguf", "gemma-Q8_0.gguf", "llama 3-Q4_0.gguf")
    assert names(tmp_path) == ["gemma:Q4_0", "gemma:Q8_0", "llama-3"]


def test_folders_of_quantizations_are_one_model(tmp_path: Path) -> None:
    folder = write_all(tmp_path / "x", "mmproj-F16.gguf")
    for label in ("BF16", "Q4_K_M"):
        for number in (1, 2):
            write(folder / label / f"x-0000{number}-of-00002.gguf", part=(number - 1, 2))
    assert names(folder) == ["x:BF16", "x:Q4_K_M"]
    assert names(tmp_path) == ["x:BF16", "x:Q4_K_M"]


def test_the_folder_of_lm_studio_has_publishers(tmp_path: Path) -> None:
    folder = tmp_path / ".lmstudio" / "models"
    write_all(folder, "org/gemma-GGUF/gemma-Q4_0.gguf", "org/gemma-GGUF/gemma-Q8_0.gguf")
    write_all(folder, "org/gemma-GGUF/mmproj-gemma-F16.gguf", "other/llama/llama-Q4_0.gguf")
    write_all(folder, "loose-Q4_0.gguf")
    found = ["org/gemma-GGUF:Q4_0", "org/gemma-GGUF:Q8_0", "other/llama", "loose"]
    assert names(folder) == names(folder.parent) == found
    assert names(folder.parent.rename(tmp_path / "lm-studio")) == found


def test_the_cache_of_llama_cpp_has_all_repositories_in_one_folder(
    tmp_path: Path, store: LocalStore
) -> None:
    write_all(tmp_path, "org_gemma-GGUF_gemma-Q4_K_M.gguf", "org_gemma-GGUF_mmproj-model-f16.gguf")
    write_all(tmp_path, "org_gemma-GGUF_gemma-Q8_0.gguf", "a_b_llama-Q4_0.gguf")
    for name in ("org=gemma-GGUF=latest", "org=gemma-GGUF=Q8_0", "a=b=latest"):
        (tmp_path / f"manifest={name}.json").write_text("{}")
    made = create_all(tmp_path, store=store)
    assert sorted(model.name for model in made) == [
        "a/b:latest",
        "org/gemma-GGUF:Q8_0",
        "org/gemma-GGUF:latest",
    ]
    source = model_source("org/gemma-GGUF:Q8_0", store=store)
    assert source is not None
    assert len(source.files) == 2
    source = model_source("a/b", store=store)
    assert source is not None
    assert len(source.files) == 1
    for path in tmp_path.glob("*gemma*.gguf"):
        path.unlink()
    assert names(tmp_path) == ["a/b"]


def test_one_quantization_is_a_model_itself(tmp_path: Path) -> None:
    write_all(tmp_path, "x-Q4_0.gguf", "mmproj-F16.gguf")
    with pytest.raises(
        SourceError, match="has weights itself; create it, or each of its files, without --all"
    ):
        names(tmp_path)


def test_a_repository_is_imported_by_its_address(tmp_path: Path, store: LocalStore) -> None:
    folder = write_all(tmp_path / "repo", "x-Q4_K_M.gguf", "x-Q8_0.gguf", "mmproj-F16.gguf")
    with HubServer() as server:
        server.add("org/x-GGUF", folder)
        variables = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf")}

        def create(*words: str, status: int = 0) -> str:
            done = run_forked("create", *words, "--store", store.root, **variables)
            assert done.returncode == status, done.stderr
            return (done.stdout + done.stderr).decode()

        assert "created org/x-GGUF:Q4_K_M: 2 tensors" in create("hf://org/x-GGUF:q4_k_m")
        assert not any("x-Q8_0" in request for request in server.requests)
        assert "created a:latest: 2 tensors" in create("hf.co/org/x-GGUF:Q8_0", "a")
        assert "('Q4_K_M', 'Q8_0'); choose one" in create("hf://org/x-GGUF", status=1)
        assert "it has Q4_K_M, Q8_0" in create("hf://org/x-GGUF:Q5_0", status=1)
        create("hf://org/x-GGUF:Q8_0", "b", "--weights", "*", status=2)
        server.requests.clear()
        assert "2 models, 0 failed" in create("--all", "hf://org/x-GGUF")
        assert sum("GET" in it and "mmproj" in it for it in server.requests.elements()) == 1
    assert not (store.root / "downloads").exists()
    assert sorted(map(str, store.references())) == [
        "a:latest",
        "org/x-GGUF:Q4_K_M",
        "org/x-GGUF:Q8_0",
    ]

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from tests.support.archives import packed_family
from tests.support.models import write_folder
from tests.unit.cli.conftest import DENSE_CONFIG
from tests.unit.cli.running import run, run_json


@pytest.mark.parametrize("command", ["show", "inspect"])
@pytest.mark.parametrize("place", [".", "model.safetensors"])
def test_lists_the_tensors_of_a_source(
    store: LocalStore, dense: Path, command: str, place: str
) -> None:
    heading, *rows, total, metadata = run(command, dense / place).stdout.splitlines()

    assert heading.split() == ["NAME", "TYPE", "SHAPE", "SIZE"]
    assert len(rows) == 9
    assert total.startswith(f"{dense / place}: 9 tensors, ")
    assert metadata == "  metadata of model.safetensors: format = pt"
    assert not store.root.exists()


def test_patterns_select_tensors_of_a_source(store: LocalStore, dense: Path) -> None:
    found = run_json("show", dense, "*norm*")

    assert [tensor["name"] for tensor in found["tensors"]] == ["model.layers.0.norm.weight"]
    assert "1 of 9 tensors" in run("show", dense, "*norm*").stdout
    assert "nothing in " in run("show", dense, "absent*", exit_code=3).stderr


def test_prints_a_source_as_json(store: LocalStore, dense: Path) -> None:
    found = run_json("show", dense)

    assert set(found) == {
        *("source", "kind", "repository", "commit", "bytes", "tensors", "files", "metadata"),
        "notices",
    }
    assert found["files"] == ["config.json", "merges.txt", "tokenizer.json"]
    assert found["metadata"] == {"model.safetensors": {"format": "pt"}}
    assert found["bytes"] == sum(tensor["bytes"] for tensor in found["tensors"])


@pytest.mark.parametrize("command", ["show", "inspect"])
def test_lists_the_models_of_an_archive(store: LocalStore, tmp_path: Path, command: str) -> None:
    path = tmp_path / "family.bsar"
    packed_family(LocalStore(tmp_path / "origin"), path)

    lines = run(command, path).stdout.splitlines()
    found = run_json(command, path)

    assert lines[0].split() == ["NAME", "ID", "SIZE", "STORED", "SIGNED", "BY"]
    assert [line.split()[0] for line in lines[1:3]] == ["base:latest", "tuned:latest"]
    assert lines[3].startswith(f"{path}: 2 models, 8 blobs (3 as deltas) in ")
    assert [model["name"] for model in found["models"]] == ["base:latest", "tuned:latest"]
    assert found["bytes"] == path.stat().st_size
    assert [model["name"] for model in run_json("show", path, "b*")["models"]] == ["base:latest"]
    assert not store.root.exists()


def test_a_truncated_archive_is_damaged(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "family.bsar"
    packed_family(LocalStore(tmp_path / "origin"), path)
    path.write_bytes(path.read_bytes()[:-1])

    assert run("show", path, exit_code=4).stderr.startswith("blobstore: error: ")


def test_lists_the_models_of_a_folder_of_models(store: LocalStore, tmp_path: Path) -> None:
    for name in ("a", "org/b"):
        write_folder(tmp_path / "all" / name, {}, files={"config.json": DENSE_CONFIG})

    found = run_json("show", tmp_path / "all")["models"]

    assert [model["name"] for model in found] == ["a", "org/b"]
    assert run("show", tmp_path / "all").stdout.endswith(
        f"2 models; 'blobstore create --all {tmp_path / 'all'}' imports them\n"
    )


def test_a_model_in_the_store_wins_over_a_folder(
    stored: LocalStore, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(dense.parent)

    assert run("show", "dense").stdout.startswith("dense:latest: TinyForCausalLM (tiny)\n")
    assert run("show", "./dense").stdout.startswith("NAME ")
    run("rm", "dense")
    assert run("show", "dense").stdout.startswith("NAME ")


@pytest.mark.parametrize("path", ["./absent", "/absent", "absent.safetensors", "absent.bsar"])
def test_a_path_that_does_not_exist_is_not_found(store: LocalStore, path: str) -> None:
    error = run("show", path, exit_code=3).stderr
    assert error.startswith("blobstore: error: ")
    assert "no model" not in error


def test_views_of_manifests_are_for_models_in_the_store(store: LocalStore, dense: Path) -> None:
    assert "--files applies only to" in run("show", dense, "--files", exit_code=2).stderr
    assert "--sort applies only to" in run("show", dense, "--sort", "size", exit_code=2).stderr


def test_inspect_says_where_models_of_the_store_are_shown(stored: LocalStore) -> None:
    error = run("inspect", "dense", exit_code=3).stderr
    assert error.endswith("no such file: 'dense'; for a model in the store, use 'blobstore show'\n")

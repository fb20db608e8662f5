from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.support.models import dense_tensors, quantizable_tensors, write_folder
from tests.unit.cli.running import run, run_json


def test_writes_the_folder_back(stored: LocalStore, tmp_path: Path) -> None:
    result = run("export", "dense", tmp_path / "out")
    assert result.stdout.startswith(f"exported dense:latest to {tmp_path}/out: 9 tensors in 1 file")
    arrays = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: array.tobytes() for name, array in dense_tensors().items()
    }


def test_dequantizes_when_asked(store: LocalStore, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", quantizable_tensors())
    run("create", folder, "m", "--quantize", "int4")
    run("export", "m", tmp_path / "packed")
    run("export", "m", tmp_path / "plain", "--dequantize")
    names = {
        name: set(load_file(tmp_path / name / "model.safetensors")) for name in ("packed", "plain")
    }
    assert names["plain"] == set(quantizable_tensors())
    assert "lm_head.scales" in names["packed"]


def test_takes_the_size_of_shards(stored: LocalStore, tmp_path: Path) -> None:
    exported = run_json("export", "dense", tmp_path / "out", "--shard-size", "0.2kB")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert exported["shards"] == len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert exported["files"] == len(files)
    assert exported["bytes_written"] == sum(path.stat().st_size for path in files)
    assert exported["tensors"] == 9


@pytest.mark.parametrize("command", ["export", "link"])
def test_refuses_a_folder_that_is_not_empty(
    stored: LocalStore, tmp_path: Path, command: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_bytes(b"")
    run(command, "dense", tmp_path / "out", exit_code=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize("command", ["export", "link"])
def test_takes_the_number_of_threads(stored: LocalStore, tmp_path: Path, command: str) -> None:
    run(command, "dense", tmp_path / "out", "--jobs", "1")
    result = run(command, "dense", tmp_path / "other", "-j", "0", exit_code=2)
    assert "'--jobs' / '-j'" in result.stderr


@pytest.mark.parametrize("command", ["export", "link"])
def test_an_older_folder_is_replaced_by_force_only(
    stored: LocalStore, tmp_path: Path, command: str
) -> None:
    out = tmp_path / "out"
    run("export", "dense", out, "--shards", "1kB")
    assert "--force" in run(command, "dense", out, exit_code=1).stderr
    before = (out / "config.json").stat().st_ino

    run(command, "dense", out, "--force")

    assert (out / "config.json").stat().st_ino != before
    assert {path.name for path in out.parent.iterdir()} == {"dense", "out", "store"}


@pytest.mark.parametrize("place", ["mine.txt", "inner/mine.bin"])
def test_a_folder_with_other_files_is_never_replaced(
    stored: LocalStore, tmp_path: Path, place: str
) -> None:
    out = tmp_path / "out"
    run("export", "dense", out)
    (out / place).parent.mkdir(exist_ok=True)
    (out / place).write_bytes(b"mine")
    before = sorted(out.rglob("*"))

    error = run("export", "dense", out, "--force", exit_code=1).stderr

    assert f"has the file '{place}', which is not one of this model" in error
    assert sorted(out.rglob("*")) == before
    assert {path.name for path in out.parent.iterdir()} == {"dense", "out", "store"}


# Several models


@pytest.fixture
def family(store: LocalStore) -> LocalStore:
    """Three models of one namespace, and one of another."""
    for number, name in enumerate(("team/a", "team/a:v1", "team/b", "other/b")):
        put(store, name, {"x": number})
    return store


def test_each_of_several_models_gets_a_folder_of_its_own(
    family: LocalStore, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shown = run("export", "team/*", out)
    assert shown.stdout.startswith(f"exported 3 models to {out}: ")
    assert sorted(path.name for path in out.iterdir()) == ["a", "a--v1", "b"]
    for name, folder in (("team/a", "a"), ("team/a:v1", "a--v1"), ("team/b", "b")):
        run("export", name, tmp_path / folder)
        expected = (tmp_path / folder / "model.safetensors").read_bytes()
        assert (out / folder / "model.safetensors").read_bytes() == expected

    # Of several namespaces, each is in the name; one glob is several models, even if it matches one.
    run("export", "team/b", "other/*", out)
    assert {path.name for path in out.iterdir()} >= {"team--b", "other--b"}
    run("export", "other/*", tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["b"]


def test_one_model_that_fails_leaves_no_folder_and_the_others_follow(
    family: LocalStore, tmp_path: Path
) -> None:
    layer = family.resolve("team/a").layers[0]
    Path(family.blob_path(layer.digest)).unlink()
    out = tmp_path / "out"
    (out / "b").mkdir(parents=True)
    (out / "b" / "mine").touch()
    found = run_json("export", "team/*", out, exit_code=4)
    assert [(model["name"], model["error"] is None) for model in found["models"]] == [
        ("team/a:latest", False),
        ("team/a:v1", True),
        ("team/b:latest", False),
    ]
    assert "--force" in found["models"][2]["error"]
    assert sorted(path.name for path in out.iterdir()) == ["a--v1", "b"]
    assert [path.name for path in (out / "b").iterdir()] == ["mine"]
    error = run("export", "team/*", out, exit_code=4).stderr
    assert "blobstore: error: team/a:latest: " in error
    assert "goes on where it stopped" not in error


def test_two_models_of_one_folder_are_refused_before_anything_is_written(
    family: LocalStore, tmp_path: Path
) -> None:
    for first, second in (("x/m:v1", "x/m--v1"), ("y/m:V1", "y/m--v1")):
        put(family, first, {"x": 1})
        put(family, second, {"x": 2})
        error = run("export", first, second, tmp_path / "out", exit_code=1).stderr
        assert f"{second}" in error
        assert "would both be in the folder 'm" in error.lower()
        assert not (tmp_path / "out").exists()


def test_several_models_have_options_in_common(family: LocalStore, tmp_path: Path) -> None:
    run("export", "team/a", "team/b", tmp_path / "out", "--single")
    assert (
        "takes one NAME"
        in run("export", "team/*", tmp_path / "out", "--layout", "ollama", exit_code=2).stderr
    )
    assert "missing argument" in run("export", tmp_path / "out", exit_code=2).stderr.lower()
    assert "exists already" in run("export", "team/*", tmp_path / "out", exit_code=1).stderr
    run("export", "team/*", tmp_path / "out", "--force")

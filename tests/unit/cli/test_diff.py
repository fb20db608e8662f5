from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.model import ModelConfig
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.models import add_blobs, blob, dense_tensors, write_folder
from tests.unit.cli.running import run, run_json


@pytest.fixture
def other(stored: LocalStore, tmp_path: Path) -> LocalStore:
    """A store with ``dense`` and ``other``, which differs in every way."""
    tensors = dense_tensors()
    tensors["mask"] = ~tensors["mask"]
    tensors["position_ids"] = tensors["position_ids"].astype("int16").reshape(5, 1)
    tensors["new"] = tensors.pop("empty")
    folder = write_folder(tmp_path / "other", tensors, files={"tokenizer.json": b"{}"})
    run("create", folder, "other")
    return stored


def test_equal_models_have_exit_code_0(stored: LocalStore) -> None:
    run("cp", "dense", "copy")
    result = run("diff", "dense", "copy")
    assert result.stderr == ""
    assert result.stdout == "tensors: 9 same, 0 changed\nfiles: 4 same, 0 changed\n"
    found = run_json("diff", "dense", "copy")
    assert found["same"]
    assert {item["change"] for item in (*found["tensors"], *found["files"])} == {"same"}
    assert all(item["same_blob"] for item in found["tensors"])


def test_prints_what_differs_with_exit_code_1(other: LocalStore) -> None:
    result = run("diff", "dense", "other", exit_code=1)
    assert result.stderr == ""
    heading, *rows, tensors, files = result.stdout.splitlines()
    assert heading.split() == ["CHANGE", "NAME", "A:", "dense:latest", "B:", "other:latest"]
    cells = [[cell for cell in row.split("  ") if cell] for row in rows]
    stripped = [[cell.strip() for cell in row] for row in cells]
    assert stripped[:4] == [
        ["only in A", "empty", "F32 [0, 3]", "-"],
        ["bytes", "mask", "BOOL [3]", "BOOL [3]"],
        ["type, shape", "position_ids", "I64 [5]", "I16 [5, 1]"],
        ["only in B", "new", "-", "F32 [0, 3]"],
    ]
    layers = {layer.name: layer for layer in other.resolve(Reference.parse("dense")).layers}
    config, merges = layers["config.json"], layers["merges.txt"]
    assert stripped[4][:3] == ["changed", "config.json", f"{config.digest.short} {config.size} B"]
    assert stripped[5] == ["only in A", "merges.txt", f"{merges.digest.short} 4 B", "-"]
    assert len(rows) == 6
    assert tensors == "tensors: 6 same, 2 changed, 1 only in A, 1 only in B"
    assert files == "files: 2 same, 1 changed, 1 only in A"


def test_lists_all_with_an_option(other: LocalStore) -> None:
    lines = run("diff", "dense", "other", "--all", exit_code=1).stdout.splitlines()
    assert sum(line.startswith("same ") for line in lines) == 8
    assert len(lines) == 1 + 10 + 4 + 2


def test_json_has_both_sides(other: LocalStore) -> None:
    found = run_json("diff", "dense", "other", exit_code=1)
    assert (found["a"], found["b"], found["same"]) == ("dense:latest", "other:latest", False)
    tensors = {item["name"]: item for item in found["tensors"]}
    assert tensors["empty"]["b"] is None
    assert tensors["new"]["a"] is None
    assert tensors["position_ids"]["differs_in"] == ["type", "shape"]
    digest = tensors["mask"]["a"].pop("digest")
    assert digest != tensors["mask"]["b"]["digest"]
    assert tensors["mask"]["a"] == {"type": "BOOL", "group_size": None, "shape": [3], "bytes": 3}
    files = {item["name"]: item for item in found["files"]}
    assert files["merges.txt"]["b"] is None
    assert files["config.json"]["change"] == "changed"
    assert files["config.json"]["a"]["digest"] != files["config.json"]["b"]["digest"]


def test_errors_have_other_exit_codes_than_differences(other: LocalStore) -> None:
    assert "did you mean 'dense'?" in run("diff", "dens", "other", exit_code=3).stderr
    digest = other.resolve(Reference.parse("other")).layers[0].digest
    (other.folder("blobs") / digest.file_name).unlink()
    run("diff", "dense", "other", exit_code=4)
    run("diff", "dense", exit_code=2)


@pytest.fixture
def steps(other: LocalStore) -> LocalStore:
    """The same store with a run of three steps, of which two are equal."""
    run("cp", "dense", "run:step-2")
    run("cp", "other", "run:step-10")
    run("tag", "run:step-2", "best")
    return other


@pytest.mark.parametrize("names", [["run:*"], ["run:step-10", "run:best", "run:step-2"]])
def test_the_steps_of_a_run_are_rows_of_one_table(steps: LocalStore, names: list[str]) -> None:
    heading, row = run("diff", *names, exit_code=1).stdout.splitlines()

    assert heading.split("  ")[-3:] == ["TENSORS CHANGED", "BYTES CHANGED", "FILES CHANGED"]
    assert row.split()[:2] == ["run:step-2", "run:step-10"]
    assert row.split()[2:] == ["4", "of", "10", "13", "B", "2"]
    assert run_json("diff", *names, exit_code=1)["steps"] == [
        {
            "a": "run:step-2",
            "b": "run:step-10",
            "same": False,
            "tensors": 10,
            "differing": 4,
            "bytes": 13,
            "files": 2,
        }
    ]


def test_a_run_needs_two_steps(steps: LocalStore) -> None:
    assert "missing argument 'B'" in run("diff", "run:step-10*", exit_code=2).stderr
    assert (
        "fewer than two different models"
        in run("diff", "run:[bs]*2", "run:best", "run:best", exit_code=2).stderr
    )
    assert "no model matches" in run("diff", "none:*", exit_code=3).stderr


def test_packed_tensors_show_their_type(store: LocalStore) -> None:
    for name, byte in (("a", b"\0"), ("b", b"\1")):
        weight = ("x", "U32", (1, 8), byte * 32)
        parts = weight, ("x.scale", "F32", (1, 2), bytes(8)), ("x.bias", "F32", (1, 2), bytes(8))
        data = blob(*parts, quant_type="int4", group_size="32")
        add_blobs(store, name, {"x": data})
    result = run("diff", "a", "b", exit_code=1)
    assert result.stdout.splitlines()[1].split("  ")[0] == "bytes"
    assert "int4 g32 [1, 64]" in result.stdout


def test_the_config_of_a_model_of_tensors_does_not_count(stored: LocalStore) -> None:
    manifest = stored.resolve("dense")
    data = ModelConfig(file_type="int4", layers_digest=layers_digest(manifest.layers)).to_bytes()
    with stored.ingest() as ingest:
        digest = ingest.add(len(data), lambda: [data]).digest
        ingest.publish()
        config = manifest.config._replace(digest=digest, size=len(data))
        stored.names.publish(replace_any("other"), replace(manifest, config=config))

    result = run("diff", "dense", "other")

    assert "\nchanged  config  " in result.stdout
    assert run_json("diff", "dense", "other")["same"]

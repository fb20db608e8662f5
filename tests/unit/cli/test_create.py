from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from blobstore.store.local import LocalStore
from tests.support.damage import blob_path, flip
from tests.support.models import dense_tensors, moe_tensors, quantizable_tensors, write_folder
from tests.support.published import write_published
from tests.unit.cli.running import run, run_json


def blob_bytes(store: LocalStore) -> int:
    return sum(path.stat().st_size for path in store.folder("blobs").iterdir())


def test_reports_what_was_written(store: LocalStore, dense: Path) -> None:
    created = run_json("create", dense, "dense")
    assert created["name"] == "dense:latest"
    assert created["tensors"] == len(dense_tensors())
    assert created["blobs"] == len(list(store.folder("blobs").iterdir()))
    assert created["bytes_written"] == blob_bytes(store)
    assert created["bytes_present"] == 0
    assert created["seconds"] >= 0


def test_reports_that_everything_existed_already(stored: LocalStore, dense: Path) -> None:
    created = run_json("create", dense, "again")
    assert created["bytes_written"] == 0
    assert created["bytes_present"] == blob_bytes(stored)


def test_prints_one_line_and_nothing_else_when_piped(store: LocalStore, dense: Path) -> None:
    result = run("create", dense, "dense:v1")
    assert result.stdout.startswith("created dense:v1: 9 tensors in 14 blobs, ")
    assert ", 0 B already there, " in result.stdout
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_creates_the_given_store(tmp_path: Path, store: LocalStore, dense: Path) -> None:
    run("create", dense, "dense", "--store", tmp_path / "other" / "deep")
    assert run_json("list", "--store", tmp_path / "other" / "deep")["models"]
    assert not store.root.exists()


@pytest.mark.parametrize("form", ["packed", "stacked"])
def test_accepts_the_form_of_experts(store: LocalStore, moe: Path, form: str) -> None:
    created = run_json("create", moe, "moe", "--experts", form, "--jobs", 3)
    shown = run_json("show", "moe")
    assert created["tensors"] == len(moe_tensors())
    expected = len(moe_tensors()) if form == "packed" else 7
    assert len(shown["tensors"]) == expected


def test_notices_go_to_standard_error(store: LocalStore, dense: Path) -> None:
    (dense / "model.safetensors").rename(dense / "model-00001-of-00001.safetensors")
    write_folder(dense, {"x": dense_tensors()["scalar"]}, stem="consolidated")
    (dense / "odd\x1b\u202e.bin").write_bytes(b"")
    result = run("create", dense, "dense")
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("note: ") and line.isprintable() for line in lines)
    assert result.stdout.startswith("created ")


def test_chooses_weights_by_pattern(store: LocalStore, dense: Path) -> None:
    write_folder(dense, {"only": dense_tensors()["scalar"]}, stem="consolidated")
    assert run_json("create", dense, "c", "--weights", "consolidated*")["tensors"] == 1
    assert run_json("create", dense, "m", "--weights", "model*")["tensors"] == 9


def test_skips_tensors_that_the_index_does_not_name_if_requested(
    store: LocalStore, moe: Path
) -> None:
    path = moe / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.layers.0.mlp.gate.weight"]
    path.write_text(json.dumps(index))
    run("create", moe, "moe", exit_code=4)
    created = run_json("create", moe, "moe", "--ignore-unindexed")
    assert created["tensors"] == len(moe_tensors()) - 1


@pytest.mark.parametrize("form", ["packed", "stacked"])
def test_a_dry_run_prints_the_plan(store: LocalStore, moe: Path, form: str) -> None:
    planned = run_json("create", moe, "moe", "--experts", form, "--dry-run")
    text = run("create", moe, "moe", "--experts", form, "--dry-run", "-v").stdout
    short = run("create", moe, "moe", "--experts", form, "--dry-run").stdout
    assert not store.root.exists()

    run("create", moe, "moe", "--experts", form)
    layers = [
        layer
        for layer in run_json("show", "moe", "--layers")["layers"]
        if layer["media_type"].endswith("image.tensor")
    ]
    assert [(blob["name"], blob["bytes"]) for blob in planned["blobs"]] == [
        (layer["name"], layer["bytes"]) for layer in layers
    ]
    stored = {tensor["name"] for tensor in run_json("show", "moe")["tensors"]}
    assert {name for blob in planned["blobs"] for name in blob["tensors"]} == stored
    assert planned["files"] == ["config.json"]
    assert all(layer["name"] in text for layer in layers)
    assert text.endswith("nothing was written\n")
    assert short == text.splitlines(keepends=True)[-1]


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_missing_source_is_not_found(store: LocalStore, more: list[str]) -> None:
    result = run("create", "/nowhere/mo\x1bdel", "m", *more, exit_code=3)
    assert result.stderr == ("blobstore: error: no such folder or file: '/nowhere/mo\\x1bdel'\n")
    assert not store.root.exists()


def test_a_truncated_source_is_damaged(store: LocalStore, dense: Path) -> None:
    os.truncate(dense / "model.safetensors", 900)
    run("create", dense, "dense", exit_code=4)
    assert not store.root.exists()


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_rejects_a_name_that_differs_only_in_case(
    stored: LocalStore, dense: Path, more: list[str]
) -> None:
    assert "differs only in case" in run("create", dense, "Dense", *more, exit_code=1).stderr


def test_a_file_at_the_path_of_the_store_is_an_error(store: LocalStore, dense: Path) -> None:
    store.root.write_bytes(b"")
    run("create", dense, "dense", exit_code=1)
    run("list", exit_code=1)
    assert store.root.read_bytes() == b""


# Quantization

LAYER = "model.layers.0"


@pytest.fixture
def bf16(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "bf16", quantizable_tensors())


def test_quantizes_to_the_requested_type(store: LocalStore, bf16: Path) -> None:
    options = ("--quantize", "Q4", "--group-size", 64, "--policy", "uniform")
    override = ("--quantize-override", "lm_head*=none")
    run("create", bf16, "m", *options, *override)
    tensors = {tensor["name"]: tensor for tensor in run_json("show", "m")["tensors"]}
    weight = tensors[f"{LAYER}.self_attn.v_proj.weight"]
    assert (weight["type"], weight["group_size"], weight["shape"]) == ("int4", 64, [64, 128])
    assert weight["bits_per_weight"] == 4.5
    assert tensors["lm_head.weight"]["type"] == "BF16"


def test_a_dry_run_prints_every_decision_with_its_reason(store: LocalStore, bf16: Path) -> None:
    printed = run("create", bf16, "m", "--quantize", "int4", "--dry-run").stdout.splitlines()
    assert printed[0].split() == ["TENSOR", "FROM", "TO", "BEFORE", "AFTER", "REASON"]
    assert len(printed) == 1 + len(quantizable_tensors()) + 2
    rows = {line.split()[0]: line for line in printed}
    row = f"{LAYER}.self_attn.q_proj.weight BF16 int4 g32 32.8 kB 10.2 kB requested type"
    assert " ".join(rows[f"{LAYER}.self_attn.q_proj.weight"].split()) == row
    assert " ".join(rows["model.embed_tokens.weight"].split()).endswith(" embedding")
    assert printed[-2].endswith(" bits per weight")
    assert printed[-1].endswith("; nothing was written")
    assert not store.root.exists()


def test_an_import_follows_the_decisions_of_a_dry_run(store: LocalStore, bf16: Path) -> None:
    options = ("--quantize", "nvfp4", "--experts", "stacked")
    planned = run_json("create", bf16, "m", *options, "--dry-run")
    run_json("create", bf16, "m", *options)
    shown = run_json("show", "m")["tensors"]

    assert {row["tensor"]: row["type"] for row in planned["decisions"]} == {
        tensor["name"]: tensor["type"] for tensor in shown
    }
    assert {row["tensor"]: row["bytes_after"] for row in planned["decisions"]} == {
        tensor["name"]: tensor["bytes"] for tensor in shown
    }
    assert planned["bytes"] == sum(
        layer["bytes"]
        for layer in run_json("show", "m", "--layers")["layers"]
        if layer["media_type"] == "application/vnd.ollama.image.tensor"
    )


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--quantize", "fp8"], "in Ollama it means int8"),
        (["--quantize", "int4", "--group-size", "48"], "int4 cannot have groups of 48"),
        (["--group-size", "32"], "requires a type to quantize to"),
        (["--quantize", "int4", "--quantize-override", "x"], "'x'"),
        (["--quantize", "int4", "--quantize-override", "x=int4"], "matches the override 'x"),
        (["--quantize", "int4", "--policy", "best"], "--policy"),
    ],
)
def test_invalid_options_are_usage_errors(
    store: LocalStore, bf16: Path, options: list[str], what: str, more: list[str]
) -> None:
    assert what in run("create", bf16, "m", *options, *more, exit_code=2).stderr
    assert not store.root.exists()


def test_values_that_cannot_be_quantized_are_damage(store: LocalStore, tmp_path: Path) -> None:
    tensors = quantizable_tensors()
    tensors["lm_head.weight"][3, 5] = float("nan")
    folder = write_folder(tmp_path / "model", tensors)
    result = run("create", folder, "m", "--quantize", "int4", exit_code=4)
    assert "tensor 'lm_head.weight': element [3, 5] is nan" in result.stderr
    run("show", "m", exit_code=3)
    assert not list(store.folder("blobs").iterdir())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    value = {"model": {"a": torch.ones(2)}, "ema": {"e": torch.ones(1), "f": torch.ones(1)}}
    torch.save(value, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def test_imports_the_model_of_a_checkpoint_and_notes_the_rest(
    store: LocalStore, checkpoint: Path
) -> None:
    result = run("create", checkpoint, "m")
    assert "left out: 'ema' (2 tensors); choose another part with --subtree" in result.stderr
    assert [row["name"] for row in run_json("show", "m")["tensors"]] == ["a"]


def test_the_values_of_a_checkpoint_are_exported_as_a_file(
    store: LocalStore, tmp_path: Path
) -> None:
    value = {"model": {"a": torch.ones(2)}, "epoch": 3, "args": {"lr": 0.1, "best": float("inf")}}
    torch.save(value, tmp_path / "x.pt")
    run("create", tmp_path / "x.pt", "m")
    run("export", "m", tmp_path / "out")
    exported = json.loads((tmp_path / "out/checkpoint_values.json").read_bytes())
    assert exported == {"epoch": 3, "args": {"lr": 0.1, "best": "Infinity"}}
    run("create", tmp_path / "out", "again")
    run("export", "again", tmp_path / "second")
    assert json.loads((tmp_path / "second/checkpoint_values.json").read_bytes()) == exported


def test_a_damaged_model_is_repaired_without_the_skipped_tensors(
    store: LocalStore, tmp_path: Path
) -> None:
    torch.save({"a": torch.ones(2), "odd": torch.eye(2).to_sparse()}, tmp_path / "x.pt")
    run("create", tmp_path / "x.pt", "m", "--skip-unreadable")
    flip(blob_path(store, "a"))
    run("verify", exit_code=4)
    run("repair", "m", "--from", tmp_path / "x.pt")
    run("verify")


@pytest.mark.parametrize("dry", [False, True])
def test_skips_tensors_of_unknown_types_on_request(
    store: LocalStore, tmp_path: Path, dry: bool
) -> None:
    value = {"a": torch.ones(2), "odd": torch.ones(2, dtype=torch.complex128)}
    torch.save(value, tmp_path / "x.pt")
    result = run("create", tmp_path / "x.pt", "m", exit_code=1)
    assert "leave such tensors out with --skip-unreadable" in result.stderr
    more = ["--dry-run"] if dry else []
    result = run("create", tmp_path / "x.pt", "m", "--skip-unreadable", *more)
    assert "left out: 1 tensor of kinds that are not read: 'odd'" in result.stderr
    run("convert", tmp_path / "x.pt", tmp_path / "x.safetensors", "--skip-unreadable")
    assert (tmp_path / "x.safetensors").exists()


def test_imports_the_requested_part_of_a_checkpoint(store: LocalStore, checkpoint: Path) -> None:
    assert run_json("create", checkpoint, "e", "--subtree", "ema")["tensors"] == 2
    assert run_json("create", checkpoint, "all", "--subtree", ".")["tensors"] == 3
    assert [row["name"] for row in run_json("show", "all")["tensors"]] == [
        "ema.e",
        "ema.f",
        "model.a",
    ]


def test_lists_the_parts_of_a_checkpoint_and_writes_nothing(
    store: LocalStore, checkpoint: Path
) -> None:
    assert run_json("create", checkpoint, "m", "--list") == [
        {"path": ".", "tensors": 3, "bytes": None},
        {"path": "model", "tensors": 1, "bytes": None},
        {"path": "ema", "tensors": 2, "bytes": None},
    ]
    lines = run("create", checkpoint, "m", "--list").stdout.splitlines()
    assert [line.split() for line in lines[1:]] == [[".", "3"], ["model", "1"], ["ema", "2"]]
    assert not store.root.exists()


class Settings:
    """A class that only its own code can read."""


def test_lists_the_parts_without_unknown_objects(store: LocalStore, tmp_path: Path) -> None:
    path, weights = tmp_path / "voice.pth", {"a.w": torch.ones(2), "b.w": torch.ones(2)}
    torch.save({"weight": weights, "config": Settings(), "ema": {"x": torch.ones(1)}}, path)
    refused = run("create", path, "m", exit_code=1)
    assert "choose a part without them: --subtree weight, ema, or store" in refused.stderr
    parts = run_json("create", path, "m", "--list")
    assert [(part["path"], part["tensors"]) for part in parts] == [("weight", 2), ("ema", 1)]
    assert "weight" in run("inspect", path, exit_code=1).stdout
    run("create", path, "m", "--subtree", "weight")
    torch.save(Settings(), path)
    assert "only their own code can read" in run("create", path, "--list", exit_code=1).stderr


def test_rejects_a_part_of_anything_but_a_checkpoint(store: LocalStore, dense: Path) -> None:
    result = run("create", dense, "m", "--subtree", "model", exit_code=2)
    assert "so it has no parts for --subtree" in result.stderr


def test_rejects_keeping_the_names_of_other_folders_than_metas(
    store: LocalStore, dense: Path
) -> None:
    result = run("create", dense, "m", "--keep-names", exit_code=2)
    assert "is not a Meta Llama folder" in result.stderr


def test_a_checkpoint_that_would_run_code_changes_nothing(
    store: LocalStore, tmp_path: Path
) -> None:
    torch.save({"a": torch.ones(1), "b": os.getcwd}, tmp_path / "x.pt")
    result = run("create", tmp_path / "x.pt", "m", exit_code=1)
    assert result.stderr.count("\n") == 1
    assert "it uses 'posix.getcwd', which checkpoints of tensors do not need" in result.stderr
    assert not store.folder("blobs").exists()


def test_a_paranoid_import_hashes_existing_blobs(stored: LocalStore, dense: Path) -> None:
    run("create", dense, "again", "--paranoid")
    path = blob_path(stored, "merges.txt", "dense")
    flip(path)
    result = run("create", dense, "other", "--paranoid")
    assert f"note: replaced blob sha256:{path.name[7:]}, which was damaged" in result.stderr


def test_decodes_8_bit_floats_on_request(store: LocalStore, tmp_path: Path) -> None:
    weight = np.ones((128, 128), ml_dtypes.float8_e4m3fn)
    tensors = {"w.weight": weight, "w.weight_scale": np.array(2, np.float32)}
    folder = write_folder(tmp_path / "model", tensors)
    for options, kind, size in ([], "fp8", 16388), (["--decode"], "BF16", 32768):
        (decision,) = run_json("create", folder, "m", *options, "--dry-run")["decisions"]
        assert (decision["type"], decision["bytes_after"]) == (kind, size)
        run("create", folder, f"m:{kind}", *options)
        (tensor,) = run_json("show", f"m:{kind}")["tensors"]
        assert (tensor["type"], tensor["bytes"], tensor["shape"]) == (kind, size, [128, 128])
    assert (
        "1 weight of 8-bit floats decoded to BF16"
        in run("create", folder, "again", "--decode").stderr
    )


def test_waits_as_long_as_the_option_says(stored: LocalStore, moe: Path) -> None:
    with stored.exclusive_lock():
        found = run_json("create", moe, "moe", "--wait", "0", exit_code=1)
    assert found["error"]["kind"] == "StoreBusy"
    assert list(map(str, stored.references())) == ["dense:latest"]


@pytest.mark.slow
def test_says_which_model_lost_its_name(stored: LocalStore, dense: Path, moe: Path) -> None:
    digest = run_json("list", "dense")["models"][0]["digest"].removeprefix("sha256:")
    assert run_json("create", dense, "dense")["replaced"] is False
    assert "another model" not in run("create", dense, "dense").stderr
    note = (
        f"note: dense:latest was the name of another model, {digest[:12]}, until now; "
        "'blobstore restore dense:latest' brings that back"
    )
    assert note in run("create", moe, "dense").stderr
    run("restore", "dense:latest")
    assert run_json("list", "dense")["models"][0]["digest"] == f"sha256:{digest}"
    assert run_json("create", moe, "dense")["replaced"] is True
    # Unlike a note, the result is also printed with --quiet.
    assert run("create", dense, "dense", "--quiet").stdout.startswith(
        "created dense:latest, which was the name of another model: "
    )


def test_keeps_a_source_as_published_on_request(tmp_path: Path, store: LocalStore) -> None:
    source = write_published(tmp_path / "awq", "awq")
    for options in (("--dry-run",), ()):
        result = run("create", source, "m", "--as-is", *options)
        assert result.stderr == "note: awq, kept as published\n"
    assert run_json("show", "m", "--source")["options"] == {"as_is": True}


def test_a_source_that_is_a_model_of_the_store_is_no_repository(stored: LocalStore) -> None:
    result = run("create", "dense", "other", exit_code=3)
    assert "the store has a model of this name; 'blobstore cp'" in result.stderr
    assert "hf://den" in run("create", "den", "other", exit_code=3).stderr

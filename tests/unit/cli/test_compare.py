from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.operations.compare.compare import compare_models
from blobstore.store.local import LocalStore
from tests.support.converted import write_converted
from tests.support.models import Arrays, write_folder
from tests.unit.cli.running import run, run_json

EXPERTS = "model.layers.0.mlp.experts"


def tensors() -> Arrays:
    random = np.random.default_rng(1)
    names = [
        *(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)),
        *(f"{EXPERTS}.{number}.up_proj.weight" for number in range(2)),
    ]
    return (
        {
            name: random.standard_normal((32, 64 * place), dtype=np.float32)
            for place, name in enumerate(names, 1)
            if "experts" not in name
        }
        | {name: random.standard_normal((32, 128)) for name in names if "experts" in name}
        | {"model.norm.weight": np.ones(64, np.float32)}
    )


def add(folder: Path, name: str, arrays: Arrays, *options: str) -> None:
    run("create", write_folder(folder / name, arrays), name, *options)


@pytest.fixture
def models(store: LocalStore, tmp_path: Path) -> LocalStore:
    """A store with ``base`` and ``packed``, which was quantized from it and has stacked experts."""
    arrays = {name: array.astype(np.float32) for name, array in tensors().items()}
    add(tmp_path, "base", arrays)
    options = ("--quantize", "int4", "--policy", "uniform", "--experts", "stacked")
    add(tmp_path, "packed", arrays, *options)
    return store


@pytest.fixture
def odd(store: LocalStore, tmp_path: Path) -> LocalStore:
    """A store with ``odd`` and ``even``, whose numbers cannot all be compared."""
    even: Arrays = {"zero": np.zeros(3), "nan": np.ones(3), "some": np.ones(3), "mine": np.ones(1)}
    add(tmp_path, "even", even)
    changed: Arrays = {
        "zero": np.ones(3),
        "nan": np.full(3, np.nan),
        "some": np.array([1, 3, np.inf]),
        "yours": np.ones(1),
    }
    add(tmp_path, "odd", changed)
    return store


def names(value: Any) -> list[str]:
    return [tensor["name"] for tensor in value["tensors"]]


def no_constants(text: str) -> Any:
    pytest.fail(f"{text} is no JSON")


def test_prints_a_table_and_totals(models: LocalStore) -> None:
    result = run("compare", "packed", "base", "--all")
    lines = result.stdout.splitlines()
    compared = compare_models("packed", "base", store=models)

    assert result.stderr == ""
    assert " ".join(lines[0].split()) == "NAME TYPE BASE BITS REL ERROR SNR dB WORST GROUP"
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:-1]}
    assert list(rows) == [tensor.name for tensor in compared.tensors]
    assert rows["model.norm.weight"] == "F32 F32 32 0 inf -"
    tensor = next(item for item in compared.tensors if item.name.endswith("1.up_proj.weight"))
    worst = tensor.worst
    assert worst is not None
    assert rows[tensor.name] == (
        f"int4 g32 F32 6 {tensor.relative_error:.3g} {tensor.snr_db:.1f} "
        f"{worst.relative_error:.3g} at row {worst.row}, column {worst.column}"
    )
    assert lines[-1] == (
        f"4 of 5 tensors differ: relative error {compared.relative_error:.3g}, SNR "
        f"{compared.snr_db:.1f} dB, largest error {compared.max_abs_error:.3g}; "
        f"{compared.bits_per_weight:.3g} bits per weight, 32 in the base"
    )


def test_says_that_models_are_equal(models: LocalStore) -> None:
    result = run("compare", "base", "base")
    assert result.stdout.splitlines()[-1] == (
        "5 tensors, all equal; 32 bits per weight, 32 in the base"
    )


def test_prints_exact_numbers_as_json(models: LocalStore) -> None:
    value = run_json("compare", "packed", "base")
    compared = compare_models("packed", "base", store=models)

    assert (value["name"], value["base"]) == ("packed:latest", "base:latest")
    for row, tensor in zip(value["tensors"], compared.tensors, strict=True):
        assert row["name"] == tensor.name
        assert row["relative_error"] == tensor.relative_error
        assert row["max_abs_error"] == tensor.max_abs_error
        assert row["shape"] == list(tensor.shape)
        assert (row["bytes"], row["base_bytes"]) == (tensor.nbytes, tensor.base_nbytes)
        assert row["equal"] == (tensor.name == "model.norm.weight")
        if tensor.worst:
            assert row["snr_db"] == tensor.snr_db
            assert row["worst_group"] == tensor.worst._asdict()
            assert (row["type"], row["group_size"]) == ("int4", 32)
            assert (row["base_type"], row["base_group_size"]) == ("F32", None)
    (equal,) = [row for row in value["tensors"] if row["equal"]]
    assert (equal["relative_error"], equal["snr_db"]) == (0, "Infinity")
    assert (equal["worst_group"], equal["group_size"]) == (None, None)
    assert value["total"] == {
        "tensors": 5,
        "differing": 4,
        "relative_error": compared.relative_error,
        "snr_db": compared.snr_db,
        "max_abs_error": compared.max_abs_error,
        "nonfinite": 0,
        "bits_per_weight": compared.bits_per_weight,
        "base_bits_per_weight": 32,
    }


def test_json_has_no_infinite_numbers(odd: LocalStore) -> None:
    text = run("compare", "odd", "even", "--json").stdout
    value = json.loads(text, parse_constant=no_constants)
    rows = {row["name"]: row for row in value["tensors"]}
    assert (rows["zero"]["relative_error"], rows["zero"]["snr_db"]) == ("Infinity", "-Infinity")
    assert rows["zero"]["worst_group"]["relative_error"] == "Infinity"
    assert (rows["nan"]["relative_error"], rows["nan"]["snr_db"]) == (None, None)
    assert (rows["nan"]["nonfinite"], rows["some"]["nonfinite"]) == (3, 1)
    assert rows["some"]["relative_error"] == pytest.approx(math.sqrt(2))
    assert value["total"]["nonfinite"] == 4
    assert value["only_in_name"] == ["yours"]
    assert value["only_in_base"] == ["mine"]


def test_shows_nonfinite_elements_and_tensors_that_only_one_model_has(odd: LocalStore) -> None:
    result = run("compare", "odd", "even", "--sort", "error")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["nan", "some", "zero"]
    assert lines[1].split()[3:] == ["64", "-", "-", "-,", "3", "non-finite"]
    assert " ".join(lines[3].split()[3:]) == "64 inf -inf inf at row 0, column 0"
    assert lines[5:] == [
        "not measured: 4 elements that differ and are not finite in one of the models",
        "only in odd:latest: yours",
        "only in even:latest: mine",
    ]


def test_shortens_long_lists_of_tensors_that_only_one_model_has(
    store: LocalStore, tmp_path: Path
) -> None:
    arrays: Arrays = {f"x{number:02}": np.ones(1) for number in range(26)}
    add(tmp_path, "many", arrays)
    add(tmp_path, "few", {"x00": np.ones(1)})
    line = run("compare", "few", "many").stdout.splitlines()[-1]
    assert line.startswith("only in many:latest: x01, x02, ")
    assert line.endswith(", x20 and 5 more")


def test_orders_rows(models: LocalStore) -> None:
    rows = run_json("compare", "packed", "base")["tensors"]
    by_error = sorted(rows, key=lambda row: row["relative_error"], reverse=True)

    def order(key: str) -> list[str]:
        return names(run_json("compare", "packed", "base", "--sort", key))

    assert order("error") == order("snr") == names({"tensors": by_error})
    assert order("name") == sorted(names({"tensors": rows}))
    sizes = [
        row["bytes"] for row in run_json("compare", "packed", "base", "--sort", "size")["tensors"]
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_shows_only_the_worst_rows(models: LocalStore) -> None:
    worst = run_json("compare", "packed", "base", "--sort", "error")
    top = run_json("compare", "packed", "base", "--top", "2")
    assert top["tensors"] == worst["tensors"][:2]
    assert top["total"] == worst["total"]
    largest = run_json("compare", "packed", "base", "--top", "1", "--sort", "size")
    assert largest["tensors"][0]["bytes"] == max(row["bytes"] for row in worst["tensors"])


def test_takes_patterns(models: LocalStore) -> None:
    value = run_json("compare", "packed", "base", "*.experts.*", "*.norm.*")
    assert set(names(value)) == {
        f"{EXPERTS}.0.up_proj.weight",
        f"{EXPERTS}.1.up_proj.weight",
        "model.norm.weight",
    }
    run("compare", "packed", "base", "nothing", exit_code=3)


def test_names_models_that_are_nearly_right(models: LocalStore) -> None:
    assert "did you mean 'base'" in run("compare", "packed", "bas", exit_code=3).stderr


def test_escapes_hostile_names(store: LocalStore, tmp_path: Path) -> None:
    name = "esc\x1b[2J\u202e\nblobstore: error: spoofed"
    add(tmp_path, "a", {name: np.ones(1), f"{name}1": np.ones(1)})
    add(tmp_path, "b", {name: np.zeros(1), f"{name}2": np.ones(1)})
    result = run("compare", "a", "b")
    lines = result.stdout.splitlines()
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 5
    assert lines[1].startswith(r"esc\x1b[2J\u202e\nblobstore: error: spoofed  F64")
    assert names(run_json("compare", "a", "b")) == [name]


# The page


def test_writes_a_page(models: LocalStore, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    assert run("compare", "packed", "base", "--html", target).stderr == f"note: wrote {target}\n"
    assert target.read_text().startswith("<!doctype html>")
    assert "packed:latest compared with base:latest" in target.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"base", "packed", "store", "page.html"}


def test_writes_a_page_and_prints_json(models: LocalStore, tmp_path: Path) -> None:
    value = run_json("compare", "packed", "base", "--top", "1", "--html", tmp_path / "page.html")
    assert len(value["tensors"]) == 1
    assert (tmp_path / "page.html").read_text().count("q_proj") > 1  # the page has them all


def test_replaces_the_file_that_a_link_leads_to(models: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    run("compare", "packed", "base", "--html", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text().startswith("<!doctype")


@pytest.mark.parametrize("kind", ["folder", "pipe", "/dev/null", "none/page.html", "x\0y", ""])
def test_refuses_a_place_for_the_page_before_it_reads(
    kind: str, models: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    place = tmp_path / kind if kind else ""
    # There is no such model; that would be the error if it had been searched for.
    result = run("compare", "none", "base", "--html", place, exit_code=1 + ("\0" in kind))
    assert re.search("is not a regular file|cannot|no path can have", result.stderr)
    assert list((tmp_path / "folder").iterdir()) == []


def test_reports_that_a_page_cannot_be_written(
    models: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blobstore.core.files.os.write", full)
    result = run("compare", "packed", "base", "--html", tmp_path / "page.html", exit_code=1)
    assert "No space left on device" in result.stderr
    assert not list(tmp_path.glob("*page*"))
    assert not list(tmp_path.glob("*.tmp"))


def test_equal_tensors_are_listed_if_asked_for(stored: LocalStore) -> None:
    run("cp", "dense", "copy")

    assert run("compare", "dense", "copy").stdout.startswith("9 tensors, all equal")
    assert run("compare", "dense", "copy", "--all").stdout.count("\n") == 11
    assert run("compare", "dense", "copy", "empty").stdout.count("\n") == 3


# GGUF models


@pytest.fixture
def converted(store: LocalStore, tmp_path: Path) -> LocalStore:
    """A store with ``hf`` and ``gguf``, its conversion of an architecture whose names are not known."""
    random = np.random.default_rng(0)
    names = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
    arrays: Arrays = {
        f"model.layers.0.{name}.weight": random.standard_normal((64, 64), dtype=np.float32)
        for name in names
    }
    add(tmp_path, "hf", arrays)
    run("create", write_converted(tmp_path / "m.gguf", arrays, "smollm3"), "gguf")
    return store


def test_names_of_an_architecture_are_given(converted: LocalStore, tmp_path: Path) -> None:
    result = run("compare", "gguf", "hf", exit_code=1)
    assert "'smollm3' are not known, only those of llama" in result.stderr
    result = run("compare", "gguf", "hf", "--names", "qwen2")
    assert result.stdout.startswith("3 tensors, all equal")
    value = run_json("compare", "gguf", "hf", "--names", "llama")
    assert value["total"]["differing"] == 1


def test_a_gguf_file_is_compared_by_its_path(converted: LocalStore, tmp_path: Path) -> None:
    run("rm", "gguf")
    file = tmp_path / "m.gguf"
    before = file.stat(), sorted(converted.root.rglob("*"))

    value = run_json("compare", file, "hf", "--names", "qwen2")

    assert (value["name"], value["base"]) == (str(file), "hf:latest")
    assert value["total"]["differing"] == 0
    assert run("compare", "hf", file, "--names", "qwen2").stdout.startswith("3 tensors, all equal")
    assert run("compare", file, file).stdout.startswith("3 tensors, all equal")
    assert (file.stat(), sorted(converted.root.rglob("*"))) == before


def test_other_paths_are_imported_before_they_are_compared(
    converted: LocalStore, tmp_path: Path
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGML" * 8)
    assert "is not a GGUF file" in run("compare", file, "hf", exit_code=4).stderr
    result = run("compare", tmp_path / "hf", "hf", exit_code=2)
    assert "'blobstore create PATH NAME' imports what a path names" in result.stderr


def test_names_are_read_from_a_file(converted: LocalStore, tmp_path: Path) -> None:
    file = tmp_path / "names.json"
    file.write_text('{"blk.{layer}.ffn_up": "model.layers.{layer}.mlp.up_proj"}')
    value = run_json("compare", "gguf", "hf", "--names", file)
    assert [row["name"] for row in value["tensors"]] == ["model.layers.0.mlp.up_proj.weight"]
    assert value["only_in_name"] == ["blk.0.attn_q.weight", "blk.0.attn_v.weight"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is neither a file nor one of the architectures llama, "),
        ("{", "not valid JSON"),
        ('{"a": "b", "a": "c"}', "cannot be read"),
        ("[]", "is not a JSON object whose values are names"),
        ('{"a": 1}', "is not a JSON object whose values are names"),
        ('{"like": "x"}', "the architecture 'x' are not known"),
    ],
)
def test_files_without_names_are_refused(
    converted: LocalStore, tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "names.json"
    if content is not None:
        file.write_text(content)
    assert message in run("compare", "gguf", "hf", "--names", file, exit_code=2).stderr


def test_the_models_of_a_glob_are_rows_of_one_table(odd: LocalStore) -> None:
    run("cp", "even", "run:1")
    run("cp", "odd", "run:2")
    run("cp", "odd", "run:best")
    heading, row = run("compare", "run:*").stdout.splitlines()
    assert heading.split()[:4] == ["NAME", "BASE", "TENSORS", "DIFFER"]
    assert row.split()[:2] == ["run:2", "run:1"]
    (step,) = run_json("compare", "run:*")["steps"]
    total = run_json("compare", "odd", "even")["total"]
    assert step == {"name": "run:2", "base": "run:1"} | total

    assert [step["name"] for step in run_json("compare", "run:*", "even")["steps"]] == [
        "run:1",
        "run:2",
    ]
    assert len(run_json("compare", "run:*", "run:1")["steps"]) == 1
    (step,) = run_json("compare", "run:*", "run:1", "zero")["steps"]
    assert step["tensors"] == 1


def test_what_is_for_one_model_is_no_option_of_a_glob(odd: LocalStore, tmp_path: Path) -> None:
    for option in (("--top", "1"), ("--sort", "size"), ("--html", tmp_path / "x"), ("--all",)):
        assert "are for one model NAME" in run("compare", "*", *option, exit_code=2).stderr
    assert "missing argument 'BASE'" in run("compare", "odd", exit_code=2).stderr

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ollama_store import GGUF_FILE
from tests.unit.cli.running import run, run_json


class Evil:
    def __reduce__(self) -> Any:
        return print, ("\x1b[2J",)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    value = {
        "model": {"a": torch.ones(2, 3), "b": torch.tensor(1.0)},
        "optimizer": {"state": {0: {"step": torch.ones(1)}}},
        "epoch": 3,
    }
    torch.save(value, tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    torch.save({"a": torch.ones(1), "b\x1b[2J": Evil()}, tmp_path / "evil.pt")
    return tmp_path / "evil.pt"


def test_shows_kind_globals_and_parts(checkpoint: Path) -> None:
    result = run("inspect", checkpoint)
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{checkpoint}: zip checkpoint, ")
    assert lines[1] == "would import 2 tensors, 28 B"
    assert any("'optimizer' (1 tensor)" in line for line in lines)
    assert ["torch.FloatStorage", "type", "of", "a", "storage"] in [
        row.split()[:5] for row in lines
    ]
    assert ["model", "2"] in [row.split() for row in lines]
    assert ["optimizer.state.0", "1"] in [row.split() for row in lines]
    assert "[2, 3]" not in result.stdout


def test_lists_tensors_if_asked(checkpoint: Path) -> None:
    rows = [line.split() for line in run("inspect", checkpoint, "--tensors").stdout.splitlines()]
    assert ["a", "F32", "2x3", "24", "B"] in rows
    assert ["b", "F32", "scalar", "4", "B"] in rows


def test_lists_the_tensors_of_another_part(checkpoint: Path) -> None:
    found = run_json("inspect", checkpoint, "--subtree", "optimizer")
    assert [tensor["name"] for tensor in found["tensors"]] == ["state.0.step"]


def test_prints_json(checkpoint: Path) -> None:
    found = run_json("inspect", checkpoint)
    assert found["file"] == str(checkpoint)
    assert found["bytes"] == checkpoint.stat().st_size
    assert found["kind"] == "zip checkpoint"
    assert found["refusal"] is None
    assert found["tensors"][0] == {"name": "a", "dtype": "F32", "shape": [2, 3], "bytes": 24}
    assert {"path": "model", "tensors": 2, "bytes": None} in found["parts"]
    assert found["unreadable"] == {}
    assert {"torch._utils._rebuild_tensor_v2"} < {item["name"] for item in found["globals"]}
    assert {item["pickle"] for item in found["globals"]} == {"x/data.pkl"}


def test_a_refused_file_is_described_with_exit_code_4(evil: Path) -> None:
    result = run("inspect", evil, exit_code=4)
    assert "refused: " in result.stdout
    assert ["__builtin__.print", "REFUSED"] in [
        row.split()[:2] for row in result.stdout.splitlines()
    ]
    assert "\x1b" not in result.stdout
    refused = run_json("inspect", evil, exit_code=4)
    assert [item["name"] for item in refused["globals"] if item["use"] is None] == [
        "__builtin__.print"
    ]


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    assert "no such file" in run("inspect", tmp_path / "none", exit_code=3).stderr


def test_a_wrong_subtree_is_wrong_usage(checkpoint: Path) -> None:
    result = run("inspect", checkpoint, "--subtree", "none", exit_code=2)
    assert "there is no subtree 'none' with tensors; there are '.', 'model'" in result.stderr


def test_tensors_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    value = {"a": torch.ones(1), "odd": torch.ones(1, dtype=torch.complex128)}
    torch.save(value, tmp_path / "x.pt")
    assert "cannot read 'odd': " in run("inspect", tmp_path / "x.pt").stdout
    assert set(run_json("inspect", tmp_path / "x.pt")["unreadable"]) == {"odd"}


def _truncated(path: Path) -> None:
    torch.save({"a": torch.ones(64)}, path)
    os.truncate(path, path.stat().st_size - 100)


def _half_a_download(path: Path) -> None:
    path.write_bytes(b"<!DOCTYPE html><html>log in</html>")


def _program(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{path.stem}/constants.pkl", b"N.")


def _no_tensors(path: Path) -> None:
    torch.save({"a": 1}, path)


def _optimizer(path: Path) -> None:
    torch.save(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), path)


@pytest.mark.parametrize(
    ("write", "code"),
    [
        (_truncated, 4),
        (_half_a_download, 4),
        (_program, 1),
        (_no_tensors, 1),
        (_optimizer, 1),
    ],
    ids=lambda value: str(getattr(value, "__name__", value)),
)
def test_only_damaged_files_have_exit_code_4(write: Any, code: int, tmp_path: Path) -> None:
    write(tmp_path / "x.pt")
    assert run_json("inspect", tmp_path / "x.pt", exit_code=code)["refusal"]
    store = tmp_path / "store"
    result = run("create", tmp_path / "x.pt", "m", "--store", store, exit_code=code)
    assert result.stderr.count("\n") == 1
    assert not store.joinpath("blobs").exists()


def test_a_type_that_is_not_read_is_no_damage(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, dtype=torch.complex128)}, tmp_path / "x.pt")
    words = ("create", tmp_path / "x.pt", "m", "--store", tmp_path / "store")
    assert "have no type in the safetensors format" in run(*words, exit_code=1).stderr


def test_a_gguf_file_is_listed_as_show_does(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(GGUF_FILE)

    assert run("inspect", file).stdout == run("show", file).stdout

"""A folder is described, also if it could not be imported."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.sources.distributed.inspect import inspect_folder
from tests.support.distributed_folders import data_name, grid, write_folder
from tests.unit.cli.running import run, run_json

MODEL: dict[Any, Any] = {("model", "a"): (torch.ones(4, 2), grid((4, 2), 2))}
OPTIMIZER: dict[Any, Any] = {("optimizer", "state", "a"): (torch.ones(4, 2), grid((4, 2), 2))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "step", MODEL | OPTIMIZER, {("step",): 5})


def test_describes_the_tree(folder: Path) -> None:
    found = inspect_folder(folder, "")
    assert found.kind == "folder of torch.distributed.checkpoint"
    assert found.refusal is None
    assert found.size == sum((folder / data_name(rank)).stat().st_size for rank in range(2))
    assert [spec.name for spec in found.tensors] == ["a"]
    assert [tuple(part) for part in found.subtrees] == [
        (".", 2, 64),
        ("model", 1, 32),
        ("optimizer", 1, 32),
        ("optimizer.state", 1, 32),
    ]
    assert all(item.use for item in found.globals)
    names = [item.name for item in inspect_folder(folder, "", subtree="optimizer").tensors]
    assert names == ["state.a"]


def test_an_optimizer_is_described_too(tmp_path: Path) -> None:
    found = inspect_folder(write_folder(tmp_path / "step", OPTIMIZER), "")
    assert found.refusal is None
    assert found.tensors == ()
    assert len(found.subtrees) == 3
    assert "no tensors of a model" in found.notices[0]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("\x1b[2J",)


def test_a_hostile_file_is_described(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    found = inspect_folder(folder, "")
    assert found.refusal is not None
    assert "uses 'builtins.print'" in found.refusal
    assert [(item.name, item.use) for item in found.globals] == [("builtins.print", None)]
    (folder / ".metadata").unlink()
    assert inspect_folder(folder, "").globals == []


def test_the_command_shows_sizes(folder: Path) -> None:
    lines = run("inspect", folder).stdout.splitlines()
    assert lines[1] == "would import 1 tensor, 32 B"
    assert ["model", "1", "32", "B"] in [line.split() for line in lines]
    assert run_json("inspect", folder)["parts"][1] == {"path": "model", "tensors": 1, "bytes": 32}
    assert run("create", "--list", folder).stdout.splitlines()[1].split() == [".", "2", "64", "B"]
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert "REFUSED" in run("inspect", folder, exit_code=4).stdout


def test_the_command_names_parts_that_are_not_there(folder: Path) -> None:
    result = run("inspect", folder, "--subtree", "x", exit_code=2)
    assert "there is no subtree 'x' with tensors; there are '.', 'model'" in result.stderr

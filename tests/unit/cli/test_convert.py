from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.cli.running import run, run_json


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    value = {"model": {"a": torch.ones(2, 3)}, "ema": {"e": torch.ones(1)}}
    torch.save(value, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def test_writes_a_file_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    result = run("convert", checkpoint, out)
    assert result.stdout == f"wrote {out}: 1 tensor, {out.stat().st_size} B\n"
    assert result.stderr.startswith("note: ")
    assert "'ema' (1 tensor)" in result.stderr
    assert set(load_file(out)) == {"a"}


def test_prints_json(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    found = run_json("convert", checkpoint, out, "--subtree", "ema")
    assert (found["file"], found["tensors"]) == (str(out), 1)
    assert found["bytes_written"] == out.stat().st_size
    assert len(found["notices"]) == 1


def test_replaces_only_with_force(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"precious")
    result = run("convert", checkpoint, out, exit_code=1)
    assert "exists already; replace it with --force" in result.stderr
    run("convert", checkpoint, out, "--force")
    assert set(load_file(out)) == {"a"}


def test_a_refused_file_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": os.getcwd}, tmp_path / "x.pt")
    result = run("convert", tmp_path / "x.pt", tmp_path / "out.safetensors", exit_code=1)
    assert "it uses 'posix.getcwd'" in result.stderr
    assert os.listdir(tmp_path) == ["x.pt"]


def test_takes_the_number_of_threads(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    run("convert", checkpoint, out, "--jobs", "1")
    run("convert", checkpoint, out, "--force", "-j", "0", exit_code=2)


def test_the_file_must_be_named_as_what_it_is(checkpoint: Path, tmp_path: Path) -> None:
    result = run("convert", checkpoint, tmp_path / "out.bin", exit_code=2)
    assert "must end in .safetensors" in result.stderr
    assert not (tmp_path / "out.bin").exists()

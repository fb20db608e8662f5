"""python -m blobstore.safetensors: what it prints, and its exit status."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.safetensors.__main__ import main
from blobstore.safetensors.numpy import save_file

FOUND: dict[str, np.ndarray[Any, Any]] = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(1, np.int8),
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_file(FOUND, tmp_path / "a", {"x": "y\n"})
    return str(tmp_path / "a")


def test_a_table_has_a_line_for_each_tensor(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([path]) == 0
    assert capsys.readouterr().out == (
        "x: y\\n\na  F32  2x3     24\nb  I8   scalar  1\n2 tensors, 25 bytes\n"
    )


def test_json_has_metadata_types_shapes_and_places(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([path, "--json", "--sha256"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "metadata": {"x": "y\n"},
        "tensors": [
            {
                "name": name,
                "dtype": dtype,
                "shape": list(FOUND[name].shape),
                "data_offsets": places,
                "sha256": hashlib.sha256(FOUND[name].tobytes()).hexdigest(),
            }
            for name, dtype, places in [("a", "F32", [0, 24]), ("b", "I8", [24, 25])]
        ],
    }


def test_a_check_prints_nothing(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([path, "--check"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_damaged_file_is_an_error(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(path).open("ab") as file:
        file.write(b"x")

    assert main([path, "--check"]) == 4
    assert "file not fully covered" in capsys.readouterr().err


def test_a_missing_file_is_an_error(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([path + "z"]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_a_file_may_have_one_tensor_or_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({}, tmp_path / "a")

    assert main([str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == "0 tensors, 0 bytes\n"
    save_file({"x": np.array(1, np.int8)}, tmp_path / "a")
    assert main([str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out.endswith("\n1 tensor, 1 byte\n")


def test_the_module_is_a_program(path: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "blobstore.safetensors", path],
        capture_output=True,
        check=True,
        text=True,
    )

    assert done.stdout.endswith("2 tensors, 25 bytes\n")
    assert done.stderr == ""


def test_a_file_of_another_format_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_bytes(b"RIFF" + bytes(range(100)))
    assert main([str(tmp_path / "a")]) == 4
    assert "the file is damaged, or of another format" in capsys.readouterr().err
    (tmp_path / "a").write_bytes(b"PK\x03\x04" + bytes(range(100)))
    assert main([str(tmp_path / "a")]) == 4
    assert "PyTorch" in capsys.readouterr().err
    (tmp_path / "a").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab")
    assert main([str(tmp_path / "a")]) == 4
    assert "this is a pointer of git-lfs" in capsys.readouterr().err

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.support.gguf_files import ARRAY, TEXT, U32, gguf_file, text, texts
from tests.unit.cli.running import run, run_json


@pytest.fixture
def path(tmp_path: Path) -> Path:
    values = [
        ("general.architecture", TEXT, text("llama")),
        ("llama.block_count", U32, struct.pack("<I", 7)),
        ("tokens", ARRAY, texts(["a", "b"])),
        ("tokenizer.chat_template", TEXT, text("{{ x }}\x1b[2J\n")),
    ]
    tensors = [("a.weight", 12, [256, 2], bytes(288)), ("b", 0, [3], bytes(12))]
    # Whatever its name is.
    (tmp_path / "model.bin").write_bytes(gguf_file(values, tensors))
    return tmp_path / "model.bin"


def test_lists_the_tensors_and_the_metadata(path: Path) -> None:
    heading, *rows, total, architecture, blocks, tokens, template = run(
        "show", path
    ).stdout.splitlines()
    assert heading.split() == ["NAME", "TYPE", "SHAPE", "SIZE"]
    assert [row.split() for row in rows] == [
        ["a.weight", "Q4_K", "[2,", "256]", "288", "B"],
        ["b", "F32", "[3]", "12", "B"],
    ]
    assert total == f"{path}: GGUF 3, model, llama, 2 tensors, 515 parameters, 300 B"
    assert architecture == "  general.architecture = llama"
    assert blocks == "  llama.block_count = 7"
    assert tokens == "  tokens = 2 values of type string"
    assert template == r"  tokenizer.chat_template = {{ x }}\x1b[2J\n"


def test_patterns_select_tensors(path: Path) -> None:
    assert "1 of 2 tensors, 3 parameters" in run("show", path, "b").stdout
    assert "nothing in" in run("show", path, "x*", exit_code=3).stderr


def test_prints_json(path: Path) -> None:
    found = run_json("show", path, "b")
    (tensor,) = found.pop("tensors")
    assert tensor.pop("offset") % 32 == 0
    assert tensor == {"name": "b", "type": "F32", "shape": [3], "bytes": 12}
    assert found == {
        "source": str(path),
        "kind": "gguf",
        "role": "model",
        "version": 3,
        "bytes": 12,
        "metadata": {
            "general.architecture": "llama",
            "llama.block_count": 7,
            "tokens": {"type": "string", "count": 2},
            "tokenizer.chat_template": "{{ x }}\x1b[2J\n",
        },
    }


def test_a_damaged_file_is_an_error_in_one_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])
    assert "the file ends at byte 100, in its header" in run("show", path, exit_code=4).stderr

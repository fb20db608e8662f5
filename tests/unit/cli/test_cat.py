from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from tests.unit.cli.running import LAUNCHER, on_terminal, run, run_forked, run_json


def test_prints_a_file_byte_for_byte(stored: LocalStore, dense: Path) -> None:
    for name in ("config.json", "merges.txt"):
        assert run_forked("cat", "dense", name).stdout == (dense / name).read_bytes()


def test_prints_large_and_binary_files(store: LocalStore, dense: Path) -> None:
    data = bytes(range(256)) * 20_000
    (dense / "model.onnx").write_bytes(data)
    run("create", dense, "dense", "--keep", "*.onnx")

    assert run_forked("cat", "dense", "model.onnx").stdout == data
    assert run_json("cat", "dense", "model.onnx")["text"] is None


def test_escapes_what_a_terminal_would_obey(store: LocalStore, dense: Path) -> None:
    (dense / "README.md").write_bytes(b"# \x1b]0;x\x07\n")
    run("create", dense, "dense")

    assert on_terminal(LAUNCHER, "cat", "dense", "README.md") == b"# \\x1b]0;x\\x07\r\n"


def test_a_file_that_the_model_does_not_have_is_not_found(stored: LocalStore) -> None:
    error = run("cat", "dense", "absent.json", exit_code=3).stderr
    assert "has no file 'absent.json'; its files are 'config.json', 'merges.txt'" in error


def test_prints_json(stored: LocalStore) -> None:
    found = run_json("cat", "dense", "merges.txt")
    assert found.pop("digest").startswith("sha256:")
    assert found == {"name": "dense:latest", "file": "merges.txt", "bytes": 4, "text": "a b\n"}


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_damaged_file_ends_with_an_error(stored: LocalStore, options: list[str]) -> None:
    layer = next(item for item in stored.resolve("dense").layers if item.name == "merges.txt")
    path = Path(stored.blob_path(layer.digest))
    path.chmod(0o644)
    path.write_bytes(b"a c\n")

    assert "is damaged" in run("cat", "dense", "merges.txt", *options, exit_code=4).stderr


@pytest.mark.slow
def test_prints_large_texts_as_json(store: LocalStore, dense: Path) -> None:
    text = "".join(f"token {number}\n" for number in range(500_000))
    (dense / "vocab.txt").write_text(text)
    run("create", dense, "dense", "--keep", "vocab.txt")

    assert run_json("cat", "dense", "vocab.txt")["text"] == text

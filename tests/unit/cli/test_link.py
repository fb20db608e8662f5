from __future__ import annotations

import json
from pathlib import Path

from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, quantizable_tensors, write_folder
from tests.unit.cli.running import run, run_json

COUNT = len(dense_tensors())


def test_makes_a_folder_of_links(stored: LocalStore, tmp_path: Path) -> None:
    result = run("link", "dense", tmp_path / "farm")
    assert result.stderr == ""
    start = f"linked dense:latest in {tmp_path}/farm: {COUNT} tensors in {COUNT} links ("
    assert result.stdout.startswith(start)
    assert "copied" not in result.stdout
    links = [path for path in (tmp_path / "farm").iterdir() if path.is_symlink()]
    assert len(links) == COUNT


def test_makes_hard_links_when_asked(stored: LocalStore, tmp_path: Path) -> None:
    run("link", "dense", tmp_path / "farm", "--hard")
    files = list((tmp_path / "farm").glob("*.safetensors"))
    assert [path.is_symlink() for path in files] == [False] * COUNT
    assert {path.stat().st_nlink for path in files} == {2}


def test_adds_old_keys_when_asked(store: LocalStore, tmp_path: Path) -> None:
    files = {"config.json": b'{"num_local_experts": 2}'}
    source = write_folder(tmp_path / "model", dense_tensors(), files=files)
    run("create", source, "m")
    run("link", "m", tmp_path / "farm", "--old-keys")
    config = json.loads((tmp_path / "farm" / "config.json").read_bytes())
    assert config == {"num_local_experts": 2, "num_experts": 2}


def test_says_what_is_copied(store: LocalStore, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "model", quantizable_tensors())
    run("create", source, "m", "--quantize", "int4")
    result = run("link", "m", tmp_path / "farm")
    assert result.stderr.startswith("note: weight files that are copies: 3; ")
    assert "note: weight files that are copies: 1; " in result.stderr
    assert " links (" in result.stdout
    assert ", 4 files copied (" in result.stdout


def test_prints_exact_numbers_as_json(stored: LocalStore, tmp_path: Path) -> None:
    linked = run_json("link", "dense", tmp_path / "farm")

    assert linked.pop("seconds") >= 0
    files = list((tmp_path / "farm").iterdir())
    assert linked == {
        "name": "dense:latest",
        "folder": str(tmp_path / "farm"),
        "files": len(files),
        "tensors": COUNT,
        "links": COUNT,
        "bytes_linked": sum(path.stat().st_size for path in files if path.is_symlink()),
        "shared": 0,
        "bytes_shared": 0,
        "copied": 0,
        "bytes_copied": 0,
        "notices": [],
    }

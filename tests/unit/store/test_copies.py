from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from blobstore.store.copies import copies, copies_folder, hold_copies, remove_copies


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place for the copies of the store ``tmp_path``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = copies_folder(tmp_path)
    assert folder is not None
    return folder


def test_each_store_has_a_place_whatever_leads_to_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    assert copies_folder(tmp_path / "link") == folder
    assert copies_folder(tmp_path / "other") != folder


def test_there_are_none_without_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert copies_folder(tmp_path) is None
    assert copies(tmp_path) == []
    assert not list(remove_copies(tmp_path, is_dry=False))


def test_a_program_that_takes_the_place_of_a_process_holds_the_copies(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "file").write_bytes(b"abc")
    script = f"""
import os
from pathlib import Path
from blobstore.store.copies import {hold_copies.__name__}
{hold_copies.__name__}(Path({str(folder)!r}))
os.execv("/bin/cat", ["cat"])
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(b"x\n")
        server.stdin.flush()
        assert server.stdout.readline() == b"x\n"
        assert not list(remove_copies(tmp_path, is_dry=False))
        server.stdin.close()
    assert list(remove_copies(tmp_path, is_dry=True)) == [(folder / "model", 3)]
    assert copies(tmp_path) == [folder / "model"]
    assert list(remove_copies(tmp_path, is_dry=False)) == [(folder / "model", 3)]
    assert copies(tmp_path) == []

"""Changing files: what they contain afterwards, and what an error, a kill or a full disk leaves of them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blobstore.safetensors import SafetensorError, edit_file, safe_open
from blobstore.safetensors.numpy import load_file, save, save_file

TENSORS: dict[str, Any] = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5, dtype=np.int8),
    "c": np.arange(100, dtype=np.float64),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "a.safetensors", {"x": "y"})
    return tmp_path / "a.safetensors"


def padded(path: Path) -> Path:
    """Give a file a header that has space for more."""
    save_file(TENSORS, path, {"x": "y"}, alignment=4096)
    return path


def content(path: Path) -> tuple[dict[str, Any], dict[str, str] | None]:
    with safe_open(path, "np") as file:
        return {name: file[name].tolist() for name in file}, file.metadata()


def expected(**changes: Any) -> dict[str, Any]:
    found = {**TENSORS, **changes}
    return {name: found[name].tolist() for name in sorted(found) if found[name] is not None}


@pytest.mark.parametrize("in_place", [False, True])
def test_tensors_are_changed_and_added(path: Path, in_place: bool) -> None:
    padded(path)
    changes = {"a": -TENSORS["a"], "d": np.ones((2, 2), np.float32), "e": np.zeros(3, np.int8)}
    changes["d"] = changes["d"].T
    inode = path.stat().st_ino
    assert edit_file(path, changes, in_place=in_place) is False or in_place
    assert content(path) == (expected(**changes), {"x": "y"})
    assert (path.stat().st_ino == inode) == in_place or in_place


def test_only_what_changes_is_written_in_place(path: Path) -> None:
    padded(path)
    inode, size = path.stat().st_ino, path.stat().st_size
    assert edit_file(path, {"b": TENSORS["b"] + 1}, metadata={"long": "z" * 1000}, in_place=True)
    assert content(path) == (expected(b=TENSORS["b"] + 1), {"long": "z" * 1000})
    assert (path.stat().st_ino, path.stat().st_size) == (inode, size)


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": {"b": np.arange(6, dtype=np.int8)}},  # another size
        {"tensors": {"b": np.arange(5, dtype=np.uint8)}},  # another type
        {"tensors": {"new": np.arange(5, dtype=np.float32)}},  # would not be aligned
        {"metadata": {"x": "y" * 5000}},
        {"remove": ["c"]},
    ],
)
def test_a_file_is_rewritten_if_it_must_be(path: Path, change: dict[str, Any]) -> None:
    padded(path)
    inode = path.stat().st_ino
    assert not edit_file(path, **change, in_place=True)
    assert path.stat().st_ino != inode
    tensors = dict(change.get("tensors", {})) | dict.fromkeys(change.get("remove", []))
    assert content(path) == (expected(**tensors), change.get("metadata", {"x": "y"}))


def test_a_rewritten_file_is_that_of_save_file(path: Path, tmp_path: Path) -> None:
    changes = {"a": TENSORS["a"][:2], "0": np.ones(3)}
    edit_file(path, changes, metadata=None, remove=["c"])
    wanted = {**TENSORS, **changes}
    del wanted["c"]
    save_file(wanted, tmp_path / "b")
    assert path.read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, 3, dtype=torch.bfloat16), mx.ones((2, 3)), np.ones((2, 3))]
)
def test_tensors_may_be_of_any_framework(path: Path, tensor: Any) -> None:
    edit_file(path, {"t": tensor})
    with safe_open(path, "pt") as file:
        assert file["t"].tolist() == [[1, 1, 1]] * 2


def test_mode_and_link_stay(path: Path, tmp_path: Path) -> None:
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    edit_file(link, remove=["a"])
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(load_file(path)) == ["b", "c"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remove": ["z"]}, "File does not contain tensor 'z'"),
        ({"remove": ["a"], "tensors": {"a": np.ones(1)}}, "to be written and removed"),
        ({"tensors": {"a": [1, 2]}}, "of type list; expected an array"),
        ({"tensors": {"__metadata__": np.ones(1)}}, "reserved"),
        ({"tensors": {"a": np.array(["x"])}}, "Unknown dtype"),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_what_cannot_be_written_changes_nothing(
    path: Path, change: dict[str, Any], message: str, in_place: bool
) -> None:
    before = path.read_bytes()
    with pytest.raises(SafetensorError, match=message):
        edit_file(path, **change, in_place=in_place)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        edit_file(tmp_path / "missing", {})
    with pytest.raises(OSError, match="No such device"):
        edit_file(tmp_path, {})
    (tmp_path / "bad").write_bytes(b"x" * 50)
    with pytest.raises(SafetensorError):
        edit_file(tmp_path / "bad", {})


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS])
def test_bytes_are_copied_where_the_system_cannot(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    edit_file(path, remove=["b"])
    assert content(path) == (expected(b=None), {"x": "y"})


def test_a_full_disk_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = path.read_bytes()
    monkeypatch.setattr(os, "copy_file_range", refuse)
    with pytest.raises(SafetensorError, match="No space left"):
        edit_file(path, remove=["b"])
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("call", ["copy_file_range", "fsync", "rename"])
def test_a_killed_process_changes_nothing(path: Path, call: str) -> None:
    """The process stops itself at a system call, and is killed there."""
    before = path.read_bytes()
    code = f"""
        import os, signal, sys
        from pathlib import Path
        def stop(*args, **options):
            os.kill(os.getpid(), signal.SIGKILL)
        if {call!r} == "rename":
            Path.replace = stop
        else:
            setattr(os, {call!r}, stop)
        from blobstore.safetensors import edit_file
        edit_file({str(path)!r}, remove=["b"])
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert result.returncode == -signal.SIGKILL
    assert path.read_bytes() == before


names = st.text(st.characters(codec="utf-8"), max_size=4).filter(
    lambda name: name != "__metadata__"
)
arrays = st.builds(
    lambda kind, shape: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind),
    st.sampled_from([np.uint8, np.float16, np.float64]),
    st.lists(st.integers(0, 3), max_size=2),
)
files = st.dictionaries(names, arrays, max_size=4)


@given(files, files, st.booleans())
def test_any_change_of_any_file_gives_the_file_of_both(
    old: dict[str, Any], new: dict[str, Any], in_place: bool
) -> None:
    path = Path(f"/dev/shm/blobstore-test-{os.getpid()}")
    try:
        path.write_bytes(save(old, {"a": "b"}, alignment=512))
        edit_file(path, new, in_place=in_place)
        assert content(path) == (
            {name: value.tolist() for name, value in sorted({**old, **new}.items())},
            {"a": "b"},
        )
    finally:
        path.unlink()

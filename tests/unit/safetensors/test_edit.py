"""Changing files: what they contain afterwards, and what an error, a kill or a full disk leaves of them."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import blobstore
import blobstore.safetensors.torch
from blobstore.safetensors import SafetensorError, edit, edit_file, safe_open
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


def test_the_mode_stays(path: Path) -> None:
    path.chmod(0o640)
    edit_file(path, remove=["a"])
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(load_file(path)) == ["b", "c"]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_another_name_of_a_file_keeps_its_bytes(
    path: Path, tmp_path: Path, link: Callable[[Path, Path], None], in_place: bool
) -> None:
    other, before = tmp_path / "other", path.read_bytes()
    link(other, path)
    assert not edit_file(other, {"b": TENSORS["b"] + 1}, in_place=in_place)
    assert path.read_bytes() == before
    assert content(other) == (expected(b=TENSORS["b"] + 1), {"x": "y"})


@pytest.mark.parametrize(("mode", "after"), [(0o444, 0o644), (0o400, 0o600), (0o640, 0o640)])
def test_what_replaces_a_link_can_be_edited_again(
    path: Path, tmp_path: Path, mode: int, after: int
) -> None:
    path.chmod(mode)
    link = tmp_path / "link"
    link.symlink_to(path)
    edit_file(link, {"b": TENSORS["b"] + 1})
    assert stat.S_IMODE(link.lstat().st_mode) == after
    assert edit_file(link, {"b": TENSORS["b"]}, in_place=True)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_file_that_nobody_may_write_to_is_not_edited_in_place(path: Path) -> None:
    path.chmod(0o444)  # which does not stop root
    inode = path.stat().st_ino
    assert not edit_file(path, {"b": TENSORS["b"] + 1}, in_place=True)
    assert path.stat().st_ino != inode
    assert content(path) == (expected(b=TENSORS["b"] + 1), {"x": "y"})


def _torch_views(path: Path) -> dict[str, Any]:
    return blobstore.safetensors.torch.load_file(path)


def _handle_views(framework: str) -> Callable[[Path], dict[str, Any]]:
    def read(path: Path) -> dict[str, Any]:
        with safe_open(path, framework) as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}

    return read


def _views_of_a_hard_link(path: Path) -> dict[str, Any]:
    other = path.with_name("other")
    other.hardlink_to(path)
    found = load_file(other)
    other.unlink()
    return found


def _views_of_a_map(path: Path) -> dict[str, Any]:
    """Map the file as any program can, at an address that the library does not know."""
    mapped = np.memmap(path, np.uint8, "r")
    size = int.from_bytes(mapped[:8].tobytes(), "little") + 8
    return {
        name: mapped[size + entry["data_offsets"][0] : size + entry["data_offsets"][1]].view("f4")
        for name, entry in json.loads(mapped[8:size].tobytes()).items()
    }


@pytest.mark.parametrize("in_memory", [1 << 28, 1000], ids=["memory", "file"])
@pytest.mark.parametrize(
    "views",
    [
        load_file,
        _torch_views,
        _handle_views("np"),
        _handle_views("pt"),
        _handle_views("mlx"),
        _views_of_a_hard_link,
        _views_of_a_map,
    ],
)
def test_tensors_of_a_file_may_be_exchanged_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, views: Callable[[Path], Any], in_memory: int
) -> None:
    monkeypatch.setattr(edit, "_IN_MEMORY", in_memory)
    path = tmp_path / "exchanged"
    save_file({"a": np.full(5000, 1, np.float32), "b": np.full(5000, 2, np.float32)}, path)
    tensors = views(path)
    assert edit_file(path, {"a": tensors["b"], "b": tensors["a"]}, in_place=True)
    found = load_file(path)
    assert set(found["a"].tolist()) == {2}
    assert set(found["b"].tolist()) == {1}
    assert [file.name for file in tmp_path.iterdir()] == ["exchanged"]


def test_a_tensor_may_be_moved_within_its_own_bytes_in_place(tmp_path: Path) -> None:
    path, values = tmp_path / "moved", np.arange(1 << 20, dtype=np.int32)
    save_file({"a": values[:1], "b": values}, path)
    mapped = np.memmap(path, np.int32, "r")
    begin = len(mapped) - len(values) - 1
    assert edit_file(path, {"b": mapped[begin:-1]}, in_place=True)
    assert np.array_equal(load_file(path)["b"], np.concatenate([[0], values[:-1]]))


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


@pytest.mark.slow
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

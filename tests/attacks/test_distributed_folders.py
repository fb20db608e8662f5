"""Hostile folders of ``torch.distributed.checkpoint``: refused in one line, and nothing is written."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

import blobstore
from tests.faults.processes import Ended, nursery
from tests.support.distributed_folders import data_name, grid, write_folder

HUGE = 2**63 - 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {("model", name): (torch.randn(40, 30), grid((40, 30), 2, 3)) for name in "ab"}
    return write_folder(tmp_path / "step", tensors, {("step",): 3})


def ran_by(*arguments: object) -> Ended:
    """Run the command line in a process of its own."""
    return nursery().run("blobstore", *arguments)


def refused(folder: Path, *words: str) -> None:
    """Check that a folder is refused in one line, and that nothing is written."""
    store = folder.parent / "store"
    ran = ran_by("create", folder, "model", "--store", store)
    assert ran.code in (1, 4), ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert len(ran.stderr) < 2000
    assert all(word in ran.stderr for word in words), ran.stderr
    assert not [path for path in store.rglob("*") if path.name.startswith("sha256")]
    assert ran_by("list", "--store", store, "--json").stdout.count("digest") == 0


def changed(folder: Path, change: Callable[[Metadata], object]) -> Path:
    path = folder / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("where", ["all", "planner_data", "version"])
def test_metadata_that_run_a_command(folder: Path, where: str) -> None:
    trap = folder.parent / "trap"
    command = Command(f"touch {trap}")
    if where == "all":
        (folder / ".metadata").write_bytes(pickle.dumps(command))
    else:
        changed(folder, lambda metadata: setattr(metadata, where, command))
    refused(folder, "posix.system", "no code was executed")
    assert ran_by("inspect", folder).code == 4
    assert not trap.exists()
    if where != "all":  # otherwise torch runs the command, and fails only then
        FileSystemReader(folder).read_metadata()
        assert trap.exists()


def test_an_item_that_runs_a_command(folder: Path) -> None:
    trap = folder.parent / "trap"
    values = {("step",): Command(f"touch {trap}")}
    write_folder(folder, {("model", "a"): (torch.ones(2), grid((2,)))}, values)
    store = folder.parent / "store"
    ran = ran_by("create", folder, "model", "--store", store)
    assert ran.code == 0, ran.stderr
    assert "left out: 1 value that is neither a tensor nor simple, in 'step'" in ran.stderr
    assert not trap.exists()


def set_size(metadata: Metadata, *sizes: int) -> None:
    entry: Any = metadata.state_dict_metadata["model.a"]
    entry.size = torch.Size(sizes)


def set_piece(metadata: Metadata, number: int, offsets: Any, sizes: Any) -> None:
    entry: Any = metadata.state_dict_metadata["model.a"]
    entry.chunks[number] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def set_place(metadata: Metadata, **changes: Any) -> None:
    index = next(key for key in metadata.storage_data if key.fqn == "model.a")
    metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **changes)


def remove_piece(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["model.a"]
    entry.chunks.pop()


CHANGES: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a larger tensor": (lambda it: set_size(it, 41, 30), "leave a hole"),
    "a smaller tensor": (lambda it: set_size(it, 39, 30), "not inside the tensor's [39, 30]"),
    "a huge tensor": (lambda it: set_size(it, HUGE, 30), "more than 2^63 - 1 bytes"),
    "the largest tensor": (lambda it: set_size(it, 2**31, 2**29), "leave a hole"),
    "a tensor of no elements": (lambda it: set_size(it, 0, HUGE), "not inside the tensor's"),
    "a missing piece": (remove_piece, "its 5 pieces leave a hole"),
    "a piece over another": (lambda it: set_piece(it, 0, (0, 0), (20, 11)), "pieces overlap"),
    "a piece that is too small": (lambda it: set_piece(it, 0, (0, 0), (20, 9)), "leave a hole"),
    "a piece of another shape": (
        lambda it: set_piece(it, 0, (0, 0), (10, 20)),
        "pieces",
    ),
    "a piece of huge sizes": (lambda it: set_piece(it, 0, (0, 0), (HUGE, HUGE)), "not inside"),
    "a piece at a huge offset": (
        lambda it: set_piece(it, 0, (HUGE, 0), (20, 10)),
        "there is no item for its piece",
    ),
    "a path to elsewhere": (
        lambda it: set_place(it, relative_path="../../etc/passwd"),
        "not the plain name of a file",
    ),
    "an absolute path": (
        lambda it: set_place(it, relative_path="/etc/passwd"),
        "not the plain name of a file",
    ),
    "a huge length": (lambda it: set_place(it, length=HUGE), "overlap|an item ends at byte"),
    "a huge offset": (lambda it: set_place(it, offset=HUGE), "an item ends at byte"),
    "an item of another tensor": (lambda it: set_place(it, offset=5), "overlap|no end record"),
    "an empty item": (lambda it: set_place(it, length=0), "no end record"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_metadata_that_contradict_the_data(folder: Path, case: str) -> None:
    change, words = CHANGES[case]
    changed(folder, change)
    store = folder.parent / "store"
    ran = ran_by("create", folder, "model", "--store", store)
    assert ran.code == 4, ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert any(word in ran.stderr for word in words.split("|")), ran.stderr
    assert not [path for path in store.rglob("*") if path.name.startswith("sha256")]


def nested(opening: bytes, closing: bytes, count: int) -> bytes:
    return b"\x80\x04" + opening * count + b"N" + closing * count + b"."


def shared(levels: int) -> bytes:
    """Return a pickle of a few bytes whose value has 2 ** levels parts."""
    data = b"\x80\x04)\x94"
    for level in range(levels):
        data += b"h%ch%c\x86\x94" % (level, level)
    return data + b"."


@pytest.mark.parametrize(
    "data",
    [
        nested(b"(", b"t", 1000),
        nested(b"", b"\x85", 100_000),
        b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x04(" + b"]" * 300_000,
        b"\x80\x04" + b"]0" * 500_000 + b"N.",
        shared(60),
        b"\x80\x04\x8d" + HUGE.to_bytes(8, "little") + b"x",
        b"\x80\x04\x95" + HUGE.to_bytes(8, "little") + b"N.",
        b"",
        b"\x80\x04N.",
        bytes(10_000),
    ],
    ids=[
        "a thousand tuples",
        "a hundred thousand tuples",
        "a hundred thousand lists",
        "millions of lists on the stack",
        "millions of lists",
        "shared tuples",
        "a huge string",
        "a huge frame",
        "nothing",
        "None",
        "zeros",
    ],
)
def test_pickles_that_are_bombs(folder: Path, data: bytes) -> None:
    (folder / ".metadata").write_bytes(data)
    refused(folder, ".metadata")


def test_values_that_share_their_parts(folder: Path) -> None:
    value: Any = ()
    for _ in range(60):
        value = (value, value)
    changed(folder, lambda metadata: setattr(metadata, "planner_data", {"model.a": value}))
    ran = ran_by("create", folder, "model", "--store", folder.parent / "store")
    assert ran.code == 0, ran.stderr  # the keys are not what torch writes, and are ignored


PATHS: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "too many keys": ("model.a", ("model",) * 100_000, "100000 keys lead to it"),
    "too many keys of a value": ("step", (0,) * 101, "101 keys lead to it"),
    "keys within a tensor": ("step", ("model", "a", "b"), "'model.a' of the state leads to two"),
    "keys of a tensor": ("step", ("model", "a"), "'model.a' of the state leads to two"),
    "a key that is not Unicode": ("step", ("\udc80",), "is not Unicode"),
}


@pytest.mark.parametrize("case", PATHS)
def test_keys_that_lead_nowhere(folder: Path, case: str) -> None:
    name, keys, words = PATHS[case]
    changed(folder, lambda metadata: metadata.planner_data.update({name: keys}))
    store = folder.parent / "store"
    ran = ran_by("create", folder, "run:1", "--state", "--store", store)
    assert ran.code in (1, 2, 4), ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert words in ran.stderr, ran.stderr
    assert not [path for path in store.rglob("*") if path.name.startswith("sha256")]


@pytest.mark.parametrize("index", [10**9, -1])
def test_a_list_with_holes_takes_no_memory(folder: Path, index: int) -> None:
    changed(folder, lambda metadata: metadata.planner_data.update({"step": ("list", index)}))
    store = folder.parent / "store"
    ran = ran_by("create", folder, "run:1", "--state", "--store", store)
    assert ran.code == 0, ran.stderr
    assert blobstore.load("run:1", store=store)["list"] == {index: 3}


def test_values_that_are_nested_too_deeply(tmp_path: Path) -> None:
    value: Any = 1
    for _ in range(200):
        value = [value]
    folder = write_folder(
        tmp_path / "step", {("model", "a"): (torch.ones(2), grid((2,), 1))}, {("deep",): value}
    )
    ran = ran_by("create", folder, "run:1", "--state", "--store", tmp_path / "store")
    assert ran.code == 0, ran.stderr
    assert "left out: 'deep" in ran.stderr
    loaded = blobstore.load("run:1", store=tmp_path / "store")
    assert list(loaded) == ["model"]


@pytest.mark.parametrize("keep", [0, 10, 2000, -1])
def test_data_files_that_are_cut(folder: Path, keep: int) -> None:
    path = folder / data_name(1)
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, "__1_0.distcp")


def test_data_files_that_are_swapped(folder: Path) -> None:
    first, second = (folder / data_name(rank) for rank in range(2))
    shutil.move(first, folder / "x")
    shutil.move(second, first)
    shutil.move(folder / "x", second)
    refused(folder, "distcp")


def test_data_files_of_another_kind(folder: Path) -> None:
    path = folder / data_name(1)
    path.unlink()
    os.mkfifo(path)
    refused(folder, "not a regular file")
    path.unlink()
    path.mkdir()
    refused(folder, "not a regular file")
    path.rmdir()
    path.symlink_to("/etc/passwd")
    refused(folder, "leads out of the model's folder")


def test_names_that_would_be_paths(folder: Path) -> None:
    names = ("../../x", "/etc/passwd", "\x1b[2J", "a\nb", "..")
    tensors = {("model", name): (torch.ones(2), grid((2,))) for name in names}
    write_folder(folder, tensors)
    store = folder.parent / "store"
    before = sorted(path for path in folder.parent.rglob("*") if not path.is_relative_to(store))
    ran = ran_by("create", folder, "model", "--store", store)
    assert "\x1b" not in ran.stdout + ran.stderr
    after = sorted(path for path in folder.parent.rglob("*") if not path.is_relative_to(store))
    assert before == after
    assert not (store.parent.parent / "x").exists()

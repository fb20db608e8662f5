"""Both ways of each call: as it is here, and as on macOS, whose calls are faked."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core import system
from tests.support.models import dense_tensors, write_folder
from tests.unit.cli.running import run, run_json

FULL_SYNC = 51
UNFLUSHED = -1
DATA = bytes(range(256)) * 64


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take from this system what macOS does not have; return the sizes of what is flushed."""
    sizes: list[int] = []
    control: Callable[..., Any] = fcntl.fcntl

    def flush(descriptor: int, command: int, argument: int = 0) -> Any:
        if command != FULL_SYNC:
            return control(descriptor, command, argument)
        sizes.append(os.fstat(descriptor).st_size)
        return 0

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_SYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", flush)
    missing: list[tuple[Any, str]] = [(mmap, "MADV_HUGEPAGE"), (time, "CLOCK_BOOTTIME")]
    missing += [
        (os, name)
        for name in ("posix_fadvise", "copy_file_range", "memfd_create", "O_DIRECT", "RWF_NOWAIT")
    ]
    for module, name in missing:
        monkeypatch.delattr(module, name, raising=False)
    for name in ("_MAX_MAP_COUNT", "_MAPS"):
        monkeypatch.setattr(system, name, Path("/no/such/file"))
    # macOS rejects the advice of Linux: the pages of a map are read one by one.
    for name in ("MADV_HUGEPAGE", "MADV_POPULATE_READ"):
        monkeypatch.setattr(f"blobstore.core.mmap.{name}", -1)
    return sizes


@pytest.fixture
def file(tmp_path: Path) -> Any:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def test_without_the_calls_of_linux_nothing_is_asked_for(flushed: list[int], file: int) -> None:
    system.will_read(file, len(DATA))
    system.drop_pages(file)
    system.use_large_pages(mmap.mmap(-1, mmap.PAGESIZE))

    assert not system.can_drop_pages()
    assert system.direct_flag() == 0
    assert system.is_in_page_cache(file, 0, len(DATA))
    assert system.map_counts() is None
    assert system.copy_range(file, 0, 10, file, 20) is None
    assert not system.share_range(file, 0, 4096, file, 4096)
    assert os.pread(file, len(DATA), 0) == DATA


def test_a_file_without_a_name_is_like_one_in_memory(flushed: list[int]) -> None:
    descriptor = system.unnamed_file()
    try:
        assert os.write(descriptor, DATA) == len(DATA)
        assert os.pread(descriptor, len(DATA), 0) == DATA
        assert os.fstat(descriptor).st_nlink == 0
    finally:
        os.close(descriptor)


def test_the_clock_goes_on(flushed: list[int]) -> None:
    assert system.seconds_since_start() <= system.seconds_since_start()


@pytest.mark.parametrize("number", sorted(system._CANNOT_COPY))
def test_file_systems_that_cannot_copy_say_none(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    assert system.copy_range(0, 0, 1, 1, 0) is None


def test_a_full_disk_is_an_error_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    with pytest.raises(OSError, match="No space"):
        system.copy_range(0, 0, 1, 1, 0)


def test_models_are_stored_frozen_and_exported_as_on_macos(
    flushed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / "store"))
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append(UNFLUSHED))
    values = np.random.default_rng(0).standard_normal((256, 256), dtype=np.float32)
    source = write_folder(tmp_path / "source", {**dense_tensors(), "large": values})

    def run_durably(*arguments: object) -> None:
        flushed.clear()
        run(*arguments)
        # One flush empties the cache of the disk, into which all that was synced before has gone.
        assert flushed[-1:] not in ([], [UNFLUSHED])

    run_durably("create", source, "dense")
    hot = {path.name: path.read_bytes() for path in (tmp_path / "store/blobs").iterdir()}
    run_durably("freeze", "dense")
    assert run_json("du")["cold"]["files"] == 1
    run("verify", "dense")
    run_durably("export", "dense", tmp_path / "out")
    run_durably("thaw", "dense")
    benchmark = run_json("bench", "dense", "--jobs", 1)

    for path in source.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert {path.name: path.read_bytes() for path in (tmp_path / "store/blobs").iterdir()} == hot
    assert {item["place"] for item in benchmark["measurements"]} == {"page cache"}


# Memory and GPUs


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """Return the folders of control groups of both versions, the first of them without a limit."""
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\nBuffers: 1 kB\n")
    folders = tmp_path / "cgroup", tmp_path / "cgroup" / "memory"
    names = [(limit, used) for _, limit, used in system._MEMORY_GROUPS]
    found = tuple((folder, *own) for folder, own in zip(folders, names, strict=True))
    monkeypatch.setattr(system, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(system, "_MEMORY_GROUPS", found)
    folders[1].mkdir(parents=True)
    (folders[0] / "memory.max").write_text("max\n")
    (folders[0] / "memory.current").write_text("7\n")
    return folders


def test_memory_is_what_the_system_has_left(groups: tuple[Path, Path]) -> None:
    assert system.available_memory() == 2048 << 10


@pytest.mark.parametrize(
    ("used", "stat", "left"),
    [
        (0, None, 1_000_000),
        (300_000, None, 700_000),
        (300_000, "anon 1\ninactive_file 20000\nactive_file 3000\nfile 90000\n", 723_000),
        (300_000, "inactive_file 9\ntotal_inactive_file 50000\n", 750_000),
        (300_000, "inactive_file\n", 700_000),
        (1_000_001, None, 0),
    ],
)
@pytest.mark.parametrize("version", [2, 1])
def test_memory_is_at_most_what_a_container_has_left(
    groups: tuple[Path, Path], version: int, used: int, stat: str | None, left: int
) -> None:
    group, limit, usage = system._MEMORY_GROUPS[2 - version]
    (group / limit).write_text("1000000\n")
    (group / usage).write_text(f"{used}\n")
    if stat is not None:
        (group / "memory.stat").write_text(stat)
    assert system.available_memory() == left


@pytest.mark.parametrize("text", ["", "MemAvailable:", "MemAvailable: x kB"])
def test_memory_of_a_system_that_does_not_say_what_is_left_is_all_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "meminfo").write_text(text)
    monkeypatch.setattr(system, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(system, "_MEMORY_GROUPS", ())
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert system.available_memory() == size


def test_a_gpu_needs_a_device_of_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "_GPUS", (tmp_path / "nvidiactl", tmp_path / "kfd"))
    assert not system.may_have_gpu()
    (tmp_path / "kfd").touch()
    assert system.may_have_gpu()

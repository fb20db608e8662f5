from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import secrets
import signal
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.core import files
from blobstore.core.files import (
    FileState,
    FileVersion,
    is_there,
    make_folders,
    open_regular,
    open_to_append,
    read_ahead,
    read_exactly,
    read_regular,
    replacing,
    status_of,
    without_start,
    write_all,
    write_file,
    write_pieces,
)
from blobstore.core.mmap import is_cached
from blobstore.errors import BlobstoreError, StoreError
from tests.support import sandbox
from tests.support.descriptors import ANYWHERE, open_files
from tests.support.page_cache import dropped


@pytest.fixture
def tmp_path(disk_path: Path) -> Path:
    """Return a folder on a disk, whose files leave the page cache."""
    return disk_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(b"0123456789")
    return tmp_path / "file"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
def test_reading_ahead_loads_a_file_into_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(os.urandom(1 << 20))
    if not dropped(path):
        pytest.skip("this file system keeps files in memory")
    read_ahead(str(path))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while not is_cached(descriptor, 1 << 20):  # the whole suite has a time limit
            time.sleep(0.01)
    finally:
        os.close(descriptor)


def test_reading_ahead_ignores_folders_and_missing_files(path: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(path)
    for name in ("missing", "pipe", "link", "."):
        read_ahead(str(tmp_path / name))


def test_opens_regular_files_and_returns_their_size(path: Path) -> None:
    descriptor, size = open_regular(path)
    try:
        assert size == 10
        assert read_exactly(descriptor, 3, 4) == b"456"
        assert read_exactly(descriptor, 30, 4) == b"456789"
        assert read_exactly(descriptor, 1, 10) == b""
        assert read_exactly(descriptor, 0, 0) == b""
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_follows_links_only_if_allowed(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    os.close(open_regular(link)[0])
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(link, follow=False)


def test_rejects_files_that_might_never_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(tmp_path):
        made.bind("socket")
    before = open_files(ANYWHERE)
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "socket", Path("/dev/zero")):
        with pytest.raises(BlobstoreError, match=f"'{path}' is not a regular file"):
            open_regular(path)
    assert open_files(ANYWHERE) == before


def test_reads_files_up_to_a_limit(path: Path) -> None:
    assert read_regular(path, 10) == b"0123456789"
    with pytest.raises(BlobstoreError, match="has 10 bytes, over the limit of 9"):
        read_regular(path, 9)


def test_writes_every_byte_to_a_slow_reader() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        write_all(writer, memoryview(bytes(400_000)).cast("I"))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        assert len(stream.read()) == 400_000
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("count", range(8))
def test_buffers_are_left_without_the_bytes_that_are_done(count: int) -> None:
    buffers = [memoryview(part) for part in (b"abc", b"", b"d", b"efg")]
    rest = without_start(buffers, count)
    assert b"".join(rest) == b"abcdefg"[count:]
    assert not rest or rest[0]


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_appears_complete(tmp_path: Path, durable: bool) -> None:
    target = tmp_path / "new"
    with replacing(target, durable=durable) as descriptor:
        write_all(descriptor, b"content")
        assert not target.exists()
    assert target.read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_keeps_the_old_file(path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), replacing(path) as descriptor:
        write_all(descriptor, b"half")
        raise error
    assert path.read_bytes() == b"0123456789"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("sizes", [[], [0, 3], [2, 20, 20, 5], [7, 8], [8], [9], [1] * 17, [40]])
def test_pieces_are_written_in_aligned_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(files, "_FOLIO", 8)
    ends, limit = [0], 12
    writev = os.writev

    def short(descriptor: int, buffers: list[memoryview]) -> int:
        whole = b"".join(buffers)
        ends.append(ends[-1] + len(whole))
        return writev(descriptor, [whole[:limit]])

    monkeypatch.setattr(os, "writev", short)
    numbers = iter(range(256))
    pieces = [bytes(next(numbers) for _ in range(size)) for size in sizes]
    path = tmp_path / "a"
    with path.open("wb") as file:
        limit = 100
        write_pieces(file.fileno(), iter(pieces))
    assert path.read_bytes() == b"".join(pieces)
    assert [end % 8 for end in ends] == [0] * len(ends)
    assert ends[-1] == sum(sizes) // 8 * 8
    with path.open("wb") as file:
        limit = 3  # a write may be short
        write_pieces(file.fileno(), iter(pieces))
    assert path.read_bytes() == b"".join(pieces)


def test_a_target_that_cannot_be_replaced_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "target", [b"x"])
    assert [item.name for item in tmp_path.iterdir()] == ["target"]


def test_creates_the_temporary_file_in_the_given_folder(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with replacing(tmp_path / "target", temporary=tmp_path / "tmp"):
        assert len(list((tmp_path / "tmp").iterdir())) == 1
        assert [item.name for item in tmp_path.iterdir()] == ["tmp"]
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_the_umask_reduces_the_mode(tmp_path: Path, umask: int) -> None:
    def write() -> str:
        write_file(tmp_path / "plain", [b"x"])
        write_file(tmp_path / "readable", [b"x"], mode=0o444)
        return "done"

    assert sandbox.call(write, umask=umask) == "done"
    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "readable").stat().st_mode) == 0o444 & ~umask


def test_replaces_a_link_instead_of_its_target(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    write_file(link, [b"new"])
    assert path.read_bytes() == b"0123456789"
    assert not link.is_symlink()


def test_a_temporary_file_that_exists_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0")
    theirs = tmp_path / f".{os.getpid()}-0.tmp"
    theirs.write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "target", [b"ours"])
    assert theirs.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [theirs]


def test_creates_missing_folders(tmp_path: Path) -> None:
    make_folders(tmp_path / "a" / "b" / "c", tmp_path / "a")
    make_folders(tmp_path / "a" / "b" / "c", tmp_path / "a")
    assert (tmp_path / "a" / "b" / "c").is_dir()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the paths of the files and folders that are synced from now on."""
    paths: list[str] = []
    really_sync = os.fsync

    def sync(descriptor: int) -> None:
        paths.append(str(Path(f"/dev/fd/{descriptor}").readlink()))
        really_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    return paths


def test_new_folders_are_durable_in_their_parents(tmp_path: Path, synced: list[str]) -> None:
    top = tmp_path / "a" / "b" / "top"
    make_folders(top / "c", top)
    below = [top / "c", top, tmp_path / "a" / "b", tmp_path / "a", tmp_path]
    assert synced == list(map(str, below))
    synced.clear()
    make_folders(top / "c", top)
    assert synced == [str(top / "c"), str(top)]
    synced.clear()
    make_folders(top / "cache" / "notes", top, durable=False)
    assert (top / "cache" / "notes").is_dir()
    assert synced == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_file_systems_that_cannot_sync_folders_are_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    really_sync = os.fsync

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        really_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    write_file(tmp_path / "file", [b"x"])
    assert (tmp_path / "file").read_bytes() == b"x"


@pytest.mark.parametrize("kind", [stat.S_ISDIR, stat.S_ISREG])
def test_a_sync_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[int], bool]
) -> None:
    def sync(descriptor: int) -> None:
        if kind(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(OSError, match="Input/output"):
        write_file(tmp_path / "file", [b"x"])


@pytest.mark.parametrize("number", [0, errno.ENOTSUP, errno.EIO])
def test_on_macos_the_cache_of_the_disk_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[str], number: int
) -> None:
    flushed: list[str] = []

    def control(descriptor: int, command: int) -> None:
        assert command == 51
        flushed.append(str(Path(f"/dev/fd/{descriptor}").readlink()))
        if number:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    with contextlib.ExitStack() as stack:
        if number == errno.EIO:
            stack.enter_context(pytest.raises(OSError, match="Input/output"))
        write_file(tmp_path / "file", [b"x"])
    if number == errno.EIO:
        assert len(flushed) == 1
        assert not synced
    else:
        assert flushed[-1] == str(tmp_path)
        assert len(flushed) == 2
        assert synced == (flushed if number else [])


def test_creates_folders_by_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_folders(Path("a/b"), Path("a"))
    make_folders(Path("c"), Path())
    assert (tmp_path / "a" / "b").is_dir()
    assert (tmp_path / "c").is_dir()


HALF = """
import sys
from pathlib import Path
from blobstore.core.files import replacing, write_all
with replacing(Path(sys.argv[1])) as descriptor:
    write_all(descriptor, b"half")
    print("written", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_kill_before_the_rename_keeps_the_old_file(tmp_path: Path, old: bytes | None) -> None:
    target = tmp_path / "target"
    if old is not None:
        target.write_bytes(old)
    with sandbox.start(HALF, target) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert (target.read_bytes() if target.exists() else None) == old
    rest = [path for path in tmp_path.iterdir() if path != target]
    assert [path.read_bytes() for path in rest] == [b"half"]
    assert all(path.name.endswith(".tmp") for path in rest)


def test_a_partial_write_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    # At the limit the system takes a part of the bytes; only the next write fails.
    outcome = sandbox.call(
        lambda: write_file(tmp_path / "target", [bytes(20)]), limits={resource.RLIMIT_FSIZE: 10}
    )
    assert "File too large" in outcome
    assert list(tmp_path.iterdir()) == []


def test_a_file_whose_status_cannot_be_read_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "file"
    path.write_bytes(b"content")
    before = open_files(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fails)
        with pytest.raises(OSError, match="Input/output error"):
            open_regular(path)
    assert open_files(path) == before


def test_only_an_error_about_a_name_means_that_nothing_has_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("none", "file/in-a-file", "loop/in-a-loop"):
        assert status_of(tmp_path / name) is None
    assert status_of(tmp_path / "loop", follow=True) is None
    assert is_there(tmp_path / "loop")
    for look in (status_of, is_there, FileState.of, FileVersion.of):
        with pytest.raises(StoreError, match="cannot look at .*: File name too long"):
            look(tmp_path / ("a" * 300))


def test_a_file_keeps_its_state_when_it_is_linked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    before = FileVersion.of(path)
    os.link(path, tmp_path / "link")
    after = FileVersion.of(path)
    assert before is not None
    assert after is not None
    assert before.state == after.state == FileState.of(path)


@pytest.mark.parametrize("kind", ["own", "link", "pipe", "second name", "nothing"])
def test_only_a_file_of_this_user_alone_is_continued(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "part", tmp_path / "other"
    other.write_bytes(b"precious")
    if kind == "own":
        path.write_bytes(b"begin")
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "second name":
        path.hardlink_to(other)
    descriptor = open_to_append(path)
    os.write(descriptor, b" end")
    os.close(descriptor)
    assert path.read_bytes() == (b"begin end" if kind == "own" else b" end")
    assert other.read_bytes() == b"precious"


def test_own_folders_are_made_through_no_link(tmp_path: Path) -> None:
    top, outside = tmp_path / "store", tmp_path / "outside"
    outside.mkdir()
    (top / ".own").mkdir(parents=True)
    for place in ("blobs", ".own/cold"):
        (top / place).symlink_to(outside)
        make_folders(top / place / "a", top)
    (top / ".own" / "arrivals").symlink_to(outside)
    with pytest.raises(NotADirectoryError, match="arrivals"):
        make_folders(top / ".own" / "arrivals" / "b", top)
    assert [it.name for it in outside.iterdir()] == ["a"]

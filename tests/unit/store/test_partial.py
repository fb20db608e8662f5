from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.core.digest import BlobId, Digest
from blobstore.core.fork import NOT_INHERITED
from blobstore.core.workers import Cancelled
from blobstore.errors import StoreError
from blobstore.store import partial
from blobstore.store.local import LocalStore
from blobstore.store.partial import PartialBlob, bytes_done
from tests.support.descriptors import ANYWHERE, open_files
from tests.support.sandbox import NOBODY

DATA = bytes(range(250))
BLOB = BlobId(Digest.of(DATA), len(DATA))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "PART", 100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / ".blobstore" / "partial"


def opened(folder: Path) -> PartialBlob:
    found = PartialBlob.open(folder, BLOB)
    assert found is not None
    return found


def fill(file: PartialBlob, *parts: int) -> None:
    for part in parts:
        missing = file.missing_bytes(part)
        file.write(part, DATA[missing.start : missing.stop])
        file.catch_up()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_parts_may_come_in_any_order(folder: Path, order: tuple[int, ...]) -> None:
    with opened(folder) as file:
        assert file.missing == [0, 1, 2]
        fill(file, *order)
        assert file.missing == []
        assert file.has_right_digest()
        file.complete()
        assert file.path.read_bytes() == DATA


def test_a_file_continues_at_the_byte_after_the_last_one(folder: Path) -> None:
    with opened(folder) as file:
        file.write(0, DATA[:37])
        file.write(1, DATA[100:101])
    with opened(folder) as file:
        assert file.done == 38
        assert file.missing_bytes(0) == range(37, 100)
        assert file.missing_bytes(1) == range(101, 200)
        fill(file, 0, 1, 2)
        assert file.has_right_digest()


def test_a_complete_file_stays_complete_until_it_has_the_name_of_the_blob(folder: Path) -> None:
    with opened(folder) as file:
        fill(file, 0, 1, 2)
        file.complete()
    with opened(folder) as file:
        assert file.missing == []
        assert file.has_right_digest()


def test_wrong_bytes_have_another_digest(folder: Path) -> None:
    with opened(folder) as file:
        fill(file, 0, 1)
        file.write(2, bytes(50))
        assert not file.has_right_digest()


def test_more_bytes_than_a_part_lacks_are_refused(folder: Path) -> None:
    with opened(folder) as file:
        file.write(2, DATA[200:240])
        with pytest.raises(ValueError, match="11 bytes for a part that lacks 10"):
            file.write(2, bytes(11))


def test_an_empty_blob_is_complete_at_once(folder: Path) -> None:
    found = PartialBlob.open(folder, BlobId(Digest.of(b""), 0))
    assert found is not None
    with found as file:
        assert file.missing == []
        assert file.has_right_digest()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        DATA[:-1],
        DATA + bytes(23),
        DATA + bytes(25),
        DATA + (101).to_bytes(8, "little") + bytes(16),
        DATA + bytes(16) + (51).to_bytes(8, "little"),
        DATA + b"\xff" * 24,
        bytes(1000),
    ],
    ids=["empty", "short", "23", "25", "counter over the part", "over the last", "huge", "long"],
)
def test_a_file_that_makes_no_sense_is_begun_again(folder: Path, content: bytes) -> None:
    with opened(folder) as file:
        path = file.path
    path.write_bytes(content)
    with opened(folder) as file:
        assert file.done == 0
        fill(file, 0, 1, 2)
        assert file.has_right_digest()


def test_a_file_that_is_being_filled_is_locked(folder: Path) -> None:
    with opened(folder):
        assert PartialBlob.open(folder, BLOB) is None
    opened(folder).close()


def test_a_forked_process_does_not_keep_a_file_locked(folder: Path) -> None:
    file = opened(folder)
    here, there = socket.socketpair()
    child = os.fork()
    if not child:
        here.close()
        there.send(b"started")
        there.recv(1)
        os._exit(0)
    with here:
        there.close()
        here.recv(7)
        for owner in (file, file._lock):
            NOT_INHERITED.discard(owner._descriptor)
            os.close(owner._descriptor)  # as if the parent had been killed
        opened(folder).close()
    os.waitpid(child, 0)


@pytest.mark.parametrize("of_lock", [False, True])
@pytest.mark.parametrize(
    "make", [Path.symlink_to, Path.hardlink_to, lambda path, _: os.mkfifo(path)]
)
def test_a_link_or_pipe_in_place_of_a_file_is_replaced(
    folder: Path, tmp_path: Path, make: Callable[[Path, Path], None], of_lock: bool
) -> None:
    with opened(folder) as file:
        path = file._lock._path if of_lock else file.path
    victim = tmp_path / "victim"
    victim.write_bytes(DATA + bytes(24))
    path.unlink()
    make(path, victim)
    with opened(folder) as file:
        assert file.done == 0
        fill(file, 0, 1, 2)
        file.complete()
        assert file.path.read_bytes() == DATA
    assert victim.read_bytes() == DATA + bytes(24)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_replaced(folder: Path) -> None:
    with opened(folder) as file:
        fill(file, 0)
        path = file.path
    os.chown(path, NOBODY, NOBODY)
    with opened(folder) as file:
        assert file.done == 0
        assert file.path.stat().st_uid == os.geteuid()
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_gives_the_file_to_the_owner_of_the_store_and_continues_it(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    folder = tmp_path / ".blobstore" / "partial"
    for done in (0, 100):
        with opened(folder) as file:
            assert file.done == done
            fill(file, 0)
            assert file.path.stat().st_uid == folder.stat().st_uid == NOBODY


def test_no_descriptor_stays_open(folder: Path) -> None:
    before = open_files(ANYWHERE)
    with opened(folder):
        PartialBlob.open(folder, BLOB)
    assert open_files(ANYWHERE) == before


# Processes that do not see each other's locks


@pytest.fixture
def _no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system where ``flock`` does nothing."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


@pytest.mark.usefixtures("_no_locks")
def test_no_process_writes_to_the_file_of_another_even_if_locks_do_nothing(folder: Path) -> None:
    with opened(folder) as slow, opened(folder) as fast:
        slow.write(0, DATA[:10])
        fill(fast, 0, 1, 2)
        assert fast.has_right_digest()
        fast.complete()
        blob = fast.path.rename(folder / "blob")
        fill(slow, 0, 1, 2)
        assert slow.has_right_digest()
        slow.complete()
        assert blob.read_bytes() == slow.path.read_bytes() == DATA


@pytest.mark.usefixtures("_no_locks")
def test_two_pulls_publish_one_blob_even_if_locks_do_nothing(store: LocalStore) -> None:
    with store.ingest() as first, store.ingest() as second:
        files = [ingest.open_partial(BLOB) for ingest in (first, second)]
        for file, ingest in zip(files, (first, second), strict=True):
            assert file is not None
            with file:
                fill(file, *file.missing)
                ingest.adopt_partial(file)
        second.publish()
        first.publish()
    assert Path(store.blob_path(BLOB.digest)).read_bytes() == DATA
    assert partial_files(store) == []


def test_a_complete_file_has_no_descriptor_that_can_write(folder: Path) -> None:
    with opened(folder) as file:
        fill(file, 0, 1, 2)
        file.complete()
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if descriptor.samefile(file.path):
                    flags = fcntl.fcntl(int(descriptor.name), fcntl.F_GETFL)
                    assert flags & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(file._descriptor, b"x", 0)


def test_a_file_is_continued_by_a_copy_of_what_is_there(folder: Path) -> None:
    with opened(folder) as file:
        fill(file, 0)
        before = file.path
    content = before.read_bytes()
    with opened(folder) as file:
        assert file.done == 100
        assert file.path != before
        fill(file, 1, 2)
        assert file.has_right_digest()
    assert before.read_bytes() == content


def test_the_file_that_has_most_is_continued(folder: Path) -> None:
    with opened(folder) as file:
        fill(file, 0)
    with opened(folder) as file:
        fill(file, 1)
    with opened(folder) as file:
        assert file.missing == [2]


def test_a_file_to_which_nothing_was_written_for_a_minute_is_removed(folder: Path) -> None:
    with opened(folder) as file:
        fill(file, 0)
        before = file.path
    opened(folder).close()
    assert before.exists()
    os.utime(before, (before.stat().st_atime, before.stat().st_mtime - 61))
    with opened(folder) as file:
        assert file.done == 100
        assert not before.exists()


def test_an_earlier_file_makes_space_on_a_full_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as file:
        fill(file, 0)
        before = file.path
    write = os.pwrite

    def written(descriptor: int, data: bytes, offset: int) -> int:
        if before.exists() and offset >= 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    with opened(folder) as file:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", written)
            fill(file, 1)
        assert not before.exists()
        fill(file, 2)
        assert file.has_right_digest()


def test_a_stopped_import_ends_a_copy(folder: Path) -> None:
    with opened(folder) as file:
        fill(file, 0)
        before = file.path
    used = open_files(ANYWHERE)

    def stop() -> None:
        raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        PartialBlob.open(folder, BLOB, stop)
    assert open_files(ANYWHERE) == used
    assert before.exists()
    with opened(folder) as file:
        assert file.done == 100


def test_the_bytes_of_a_blob_are_counted_without_its_lock(folder: Path) -> None:
    assert bytes_done(folder, BLOB) == 0
    with opened(folder) as file:
        fill(file, 0)
        file.write(2, DATA[200:201])
        assert bytes_done(folder, BLOB) == 101
        fill(file, 1, 2)
        file.complete()
    assert bytes_done(folder, BLOB) == 250


# In an import


def filled(store: LocalStore, *, is_published: bool) -> None:
    with store.ingest() as ingest:
        file = ingest.open_partial(BLOB)
        assert file is not None
        with file:
            fill(file, *file.missing)
            assert file.has_right_digest()
            ingest.adopt_partial(file)
        if is_published:
            ingest.publish()


def partial_files(store: LocalStore) -> list[Path]:
    return [path for path in store.folder("partial").iterdir() if path.suffix != ".lock"]


def test_an_import_publishes_a_complete_file_read_only(store: LocalStore) -> None:
    filled(store, is_published=True)
    path = Path(store.blob_path(BLOB.digest))
    assert path.read_bytes() == DATA
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert list(store.folder("partial").iterdir()) == []


def test_the_umask_holds_for_published_files(store: LocalStore) -> None:
    before = os.umask(0o077)
    try:
        filled(store, is_published=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path(store.blob_path(BLOB.digest)).stat().st_mode) == 0o400


def test_a_complete_file_outlives_an_import_that_fails(store: LocalStore) -> None:
    filled(store, is_published=False)
    (path,) = partial_files(store)
    assert path.read_bytes() == DATA
    filled(store, is_published=True)
    assert store.exists(*BLOB)


def test_two_imports_may_adopt_one_file(store: LocalStore) -> None:
    with store.ingest() as first, store.ingest() as second:
        for ingest in (first, second):
            file = ingest.open_partial(BLOB)
            assert file is not None
            with file:
                fill(file, *file.missing)
                assert file.has_right_digest()
                ingest.adopt_partial(file)
        first.publish()
        second.publish()
    assert Path(store.blob_path(BLOB.digest)).read_bytes() == DATA


def test_a_file_that_was_replaced_before_it_is_published_is_not_used(store: LocalStore) -> None:
    with store.ingest() as ingest:
        file = ingest.open_partial(BLOB)
        assert file is not None
        with file:
            fill(file, *file.missing)
            ingest.adopt_partial(file)
        file.path.unlink()
        file.path.write_bytes(bytes(250))
        with pytest.raises(StoreError, match="another program has changed or removed"):
            ingest.publish()
    assert not store.exists(*BLOB)


def test_a_damaged_blob_is_replaced_by_a_complete_file(store: LocalStore) -> None:
    filled(store, is_published=True)
    path = Path(store.blob_path(BLOB.digest))
    path.chmod(0o644)
    path.write_bytes(bytes(250))
    with store.ingest() as ingest:
        assert ingest.find(*BLOB) is None
        file = ingest.open_partial(BLOB)
        assert file is not None
        with file:
            fill(file, *file.missing)
            ingest.adopt_partial(file)
        ingest.publish()
        assert list(ingest.repaired) == [BLOB.digest]
    assert path.read_bytes() == DATA


def test_a_file_whose_counters_could_not_be_written_does_not_replace_an_earlier_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder) as file:
        fill(file, 0)
    write = os.pwrite

    def full(descriptor: int, data: bytes, place: int) -> int:
        if place >= BLOB.size:
            raise OSError(errno.ENOSPC, "no space")
        return write(descriptor, data, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="no space"):
            PartialBlob.open(folder, BLOB)
    with opened(folder) as file:
        assert file.missing == [1, 2]
        fill(file, 1, 2)
        assert file.has_right_digest()


def test_files_that_get_another_owner_are_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.store.partial_lock.belongs_to_us", lambda *_: False)
    with pytest.raises(StoreError, match="files that this user creates in .* somebody else"):
        PartialBlob.open(folder, BLOB)


def test_a_new_file_that_another_process_removes_at_once_is_created_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals = [1, 2]

    def give_to_owner(path: Path) -> None:
        if removals:  # as the process that has published the blob removes what is listed
            removals.pop()
            partial.remove_partial(folder, BLOB.digest)
        assert path.parent == folder

    monkeypatch.setattr(partial, "give_to_owner", give_to_owner)
    with opened(folder) as file:
        fill(file, 0, 1, 2)
        assert file.has_right_digest()
        file.complete()
        assert file.path.read_bytes() == DATA
    assert not removals
    assert len(list(folder.iterdir())) == 2  # with the lock


def test_a_file_that_vanishes_again_and_again_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "give_to_owner", Path.unlink)
    with pytest.raises(FileNotFoundError):
        PartialBlob.open(folder, BLOB)
    assert open_files(folder) == []

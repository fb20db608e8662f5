from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.workers import Cancelled
from blobstore.errors import BlobstoreError, DamagedSource, StoreError
from blobstore.store import ingest as ingests
from blobstore.store.ingest import Ingested
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.descriptors import ANYWHERE, open_files


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    descriptors = open_files(ANYWHERE)
    threads = threading.active_count()
    yield LocalStore(tmp_path / "store")
    assert open_files(ANYWHERE) == descriptors
    assert threading.active_count() == threads


def temporary(store: LocalStore) -> list[Path]:
    return list(store.folder("temporary").iterdir())


def blobs(store: LocalStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.folder("blobs").iterdir()}


def put(store: LocalStore, data: bytes) -> Digest:
    with store.ingest() as ingest:
        digest = ingest.add(len(data), lambda: [data]).digest
        ingest.publish()
    return digest


def test_a_blob_gets_its_name_when_it_is_published(store: LocalStore) -> None:
    with store.ingest() as ingest:
        added = ingest.add(6, lambda: [b"abc", b"", b"def"])
        assert (added.digest, added.size, added.written) == (Digest.of(b"abcdef"), 6, True)
        assert blobs(store) == {}
        ingest.publish()
        assert blobs(store) == {Digest.of(b"abcdef").file_name: b"abcdef"}
    assert temporary(store) == []


def test_an_existing_blob_is_not_rewritten(store: LocalStore) -> None:
    digest = put(store, b"abc")
    before = os.stat(store.blob_path(digest))
    with store.ingest() as ingest:
        assert not ingest.add(3, lambda: [b"abc"]).written
        assert ingest.add(3, lambda: [b"xyz"]).written
        assert temporary(store) != []
        ingest.publish()
    after = os.stat(store.blob_path(digest))
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(blobs(store)) == 2


def test_an_existing_blob_is_only_read(store: LocalStore) -> None:
    put(store, b"abc")

    def read() -> Iterator[bytes]:
        assert temporary(store) == []
        yield b"abc"
        assert temporary(store) == []

    with store.ingest() as ingest:
        assert not ingest.add(3, read).written


@pytest.mark.parametrize(("budget", "listings"), [(10**6, 0), (0, 1)])
def test_the_sizes_of_all_blobs_are_listed_only_if_that_is_cheaper_than_hashing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, budget: int, listings: int
) -> None:
    monkeypatch.setattr(ingests, "_HASHED_WHILE_LISTED", budget)
    put(store, b"abc")
    calls: list[int] = []
    real = store.blob_sizes

    def sizes() -> set[int]:
        calls.append(1)
        return real()

    monkeypatch.setattr(store, "blob_sizes", sizes)
    with store.ingest() as ingest:
        for data in (b"abc", b"xyz", b"longer"):
            ingest.add(len(data), partial(iter, [data]))
        ingest.publish()
    assert len(calls) == listings
    assert len(blobs(store)) == 3


def test_what_is_hashed_in_vain_is_less_than_a_listing_costs(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, b"abc")
    reads: list[int] = []

    def read() -> list[bytes]:
        reads.append(len(reads))
        return [len(reads).to_bytes(100, "big")]

    with store.ingest() as ingest:
        monkeypatch.setattr(type(ingest), "_listing_cost", 250)
        for _ in range(5):
            ingest.add(100, read)
    assert len(reads) == 2 * 2 + 3


def test_the_same_bytes_twice_in_one_import_are_one_blob(store: LocalStore) -> None:
    with store.ingest() as ingest:
        for _ in range(3):
            ingest.add(3, lambda: [b"abc"])
        ingest.publish()
    assert blobs(store) == {Digest.of(b"abc").file_name: b"abc"}
    assert temporary(store) == []


@pytest.mark.parametrize("size", [0, 2, 4, 2**40])
def test_a_blob_of_another_size_than_announced_is_rejected(store: LocalStore, size: int) -> None:
    with store.ingest() as ingest:
        with pytest.raises(DamagedSource, match=f"announced with {size} bytes has 3"):
            ingest.add(size, lambda: [b"abc"])
        assert temporary(store) == []
        ingest.publish()
    assert blobs(store) == {}


def test_nothing_is_left_without_publishing(store: LocalStore) -> None:
    with store.ingest() as ingest:
        ingest.add(3, lambda: [b"abc"])
        assert len(temporary(store)) == 1
    assert temporary(store) == []
    assert blobs(store) == {}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_nothing(store: LocalStore, error: type[BaseException]) -> None:
    def broken() -> Iterator[bytes]:
        yield b"a"
        raise error

    with pytest.raises(error), store.ingest() as ingest:
        ingest.add(3, lambda: [b"abc"])
        ingest.add(5, broken)
    assert temporary(store) == []
    assert blobs(store) == {}


def test_the_files_of_other_imports_are_kept(store: LocalStore) -> None:
    with store.ingest() as other:
        other.add(5, lambda: [b"other"])
        with store.ingest() as ingest:
            ingest.add(3, lambda: [b"abc"])
        assert len(temporary(store)) == 1
        other.publish()
    assert blobs(store) == {Digest.of(b"other").file_name: b"other"}


def test_two_imports_of_the_same_bytes_both_succeed(store: LocalStore) -> None:
    with store.ingest() as first, store.ingest() as second:
        first.add(3, lambda: [b"abc"])
        second.add(3, lambda: [b"abc"])
        first.publish()
        second.publish()
    assert blobs(store) == {Digest.of(b"abc").file_name: b"abc"}


@pytest.mark.parametrize("size", [0, 2, 4])
@pytest.mark.parametrize("is_size_known", [True, False])
def test_a_damaged_blob_is_not_taken_for_an_existing_one(
    store: LocalStore, size: int, is_size_known: bool
) -> None:
    path = Path(store.blob_path(put(store, b"abc")))
    if is_size_known:
        put(store, b"xyz")  # so bytes of this size are hashed before they are written
    path.chmod(0o644)
    path.write_bytes(bytes(size))
    with store.ingest() as ingest:
        item = ingest.add(3, lambda: [b"abc"])
        assert (item.written, item.is_repair) == (True, True)
        assert path.read_bytes() == bytes(size)
        ingest.publish()
    assert path.read_bytes() == b"abc"
    (quarantined,) = ingest.repaired.values()
    assert quarantined is not None
    assert quarantined.read_bytes() == bytes(size)
    assert temporary(store) == []


def link(path: Path) -> None:
    path.symlink_to("/dev/null")


def link_of_the_right_size(path: Path) -> None:
    path.symlink_to("abc")


@pytest.mark.parametrize("make", [link, link_of_the_right_size, Path.mkdir, os.mkfifo])
def test_only_a_regular_file_counts_as_a_blob(
    store: LocalStore, make: Callable[[Path], None]
) -> None:
    path = Path(store.blob_path(put(store, b"abc")))
    path.unlink()
    make(path)
    with store.ingest() as ingest:
        ingest.add(3, lambda: [b"abc"])
        assert not path.is_file() or path.is_symlink()
        ingest.publish()
    assert not path.is_symlink()
    assert path.read_bytes() == b"abc"
    assert temporary(store) == []


def test_a_damaged_blob_that_two_threads_add_is_replaced_once(store: LocalStore) -> None:
    path = Path(store.blob_path(put(store, b"abc")))
    path.chmod(0o644)
    path.write_bytes(b"abd")
    with store.ingest() as first, store.ingest() as second:
        for ingest in (first, second):
            ingest.add(3, lambda: [b"abc"])
        first.publish()
        second.publish()
    assert (len(first.repaired), len(second.repaired)) == (1, 0)
    assert path.read_bytes() == b"abc"
    assert temporary(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077, 0o777])
def test_blobs_are_read_only_and_follow_the_umask(tmp_path: Path, umask: int) -> None:
    store = LocalStore(tmp_path / "store")
    put(store, b"first")
    outcome = sandbox.call(lambda: put(store, b"abc"), umask=umask)
    assert outcome == str(Digest.of(b"abc"))
    mode = os.stat(store.blob_path(Digest.of(b"abc"))).st_mode
    assert stat.S_IMODE(mode) == 0o444 & ~umask


def test_a_blob_that_another_user_keeps_private_is_named() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder / "store")
        put(store, b"abc")
        path = Path(store.blob_path(Digest.of(b"abc")))
        path.chmod(0)
        for shared in (store.root, *(it for it in store.root.rglob("*") if it.is_dir())):
            shared.chmod(0o777)
        store._layout.lock.chmod(0o666)
        outcome = sandbox.call(lambda: put(store, b"abc"), unprivileged=True)
        assert outcome == f"StoreError: blob '{path}' cannot be read: Permission denied"


@pytest.mark.slow
def test_threads_can_add_blobs_concurrently(store: LocalStore) -> None:
    contents = [bytes([number % 200]) * (1 + number % 7) * 1000 for number in range(300)]
    with store.ingest() as ingest, ThreadPoolExecutor(8) as pool:
        added = list(pool.map(lambda data: ingest.add(len(data), lambda: [data]), contents))
        ingest.publish()
    assert [item.digest for item in added] == [Digest.of(content) for content in contents]
    assert blobs(store) == {Digest.of(content).file_name: content for content in contents}
    assert temporary(store) == []


def test_an_import_that_has_ended_accepts_no_blobs(store: LocalStore) -> None:
    with store.ingest() as ingest:
        pass
    with pytest.raises(BlobstoreError, match="the import was stopped"):
        ingest.add(3, lambda: [b"abc"])
    assert temporary(store) == []


def test_the_import_waits_for_threads_that_are_still_writing(store: LocalStore) -> None:
    begun, stop = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def never_ending() -> Iterator[bytes]:
        while True:
            yield b"x"
            begun.set()
            stop.wait(0.01)

    def work() -> None:
        try:
            ingest.add(3, never_ending)
        except BlobstoreError as error:
            errors.append(error)

    with store.ingest() as ingest:
        worker = threading.Thread(target=work)
        worker.start()
        begun.wait(30)
    assert temporary(store) == []
    worker.join(30)
    assert [str(error) for error in errors] == ["the import was stopped"]


def break_sync(monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[int], bool]) -> None:
    """Make fsync fail, as on a bad disk, for files whose mode satisfies ``is_broken``."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if is_broken(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def test_no_blob_gets_a_name_if_one_cannot_be_synced(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="failed: Input/output error"), store.ingest() as ingest:
        ingest.add(3, lambda: [b"abc"])
        break_sync(monkeypatch, stat.S_ISREG)
        ingest.add(3, lambda: [b"bad"])
        ingest.publish()
    assert temporary(store) == []
    assert blobs(store) == {}


def test_the_import_fails_if_an_existing_blob_cannot_be_synced(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, b"abc")
    break_sync(monkeypatch, stat.S_ISREG)
    with pytest.raises(StoreError, match="failed: Input/output error"):
        put(store, b"abc")
    assert blobs(store) == {Digest.of(b"abc").file_name: b"abc"}


def test_the_import_fails_if_names_cannot_be_synced(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="failed: Input/output error"), store.ingest() as ingest:
        ingest.add(3, lambda: [b"abc"])
        break_sync(monkeypatch, stat.S_ISDIR)
        ingest.publish()
    assert temporary(store) == []


@pytest.mark.slow
def test_a_slow_disk_needs_few_descriptors(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught_up = threading.Event()

    def slow_sync(_: int) -> None:
        caught_up.wait(1)  # enough time to add hundreds of blobs
        caught_up.set()

    def put_many() -> str:
        with store.ingest() as ingest:
            monkeypatch.setattr(os, "fsync", slow_sync)
            for number in range(500):
                data = b"%d" % number
                ingest.add(len(data), lambda data=data: [data])  # type: ignore[misc]
            ingest.publish()
        return "done"

    assert sandbox.call(put_many, limits={resource.RLIMIT_NOFILE: 256}) == "done"
    assert len(blobs(store)) == 500


PUT_MANY = """
import sys
from blobstore.store.local import LocalStore
with LocalStore(sys.argv[1]).ingest() as ingest:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(300):
        data = b"%d" % number * 1000
        ingest.add(len(data), lambda: [data])
    ingest.publish()
"""


@pytest.mark.slow
def test_processes_can_add_the_same_blobs_concurrently(store: LocalStore) -> None:
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(sandbox.start(PUT_MANY, store.root)) for _ in range(2)]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        outcomes = [(child.communicate(timeout=60)[1], child.returncode) for child in children]
    assert outcomes == [("", 0), ("", 0)]
    contents = [b"%d" % number * 1000 for number in range(300)]
    assert blobs(store) == {Digest.of(data).file_name: data for data in contents}
    assert temporary(store) == []


def test_a_found_blob_is_leased_until_the_import_ends(store: LocalStore) -> None:
    with store.ingest() as ingest:
        added = ingest.add(4, lambda: [b"blob"])
        ingest.publish()
    with store.ingest() as ingest:
        assert ingest.find(added.digest, 4) == replace(added, written=False, file="")
        assert ingest.find(Digest.of(b"other"), 5) is None
        assert added.digest in store.read_leases().digests
        assert ingest.find(added.digest, 5) is None
    assert store.read_leases().digests == set()


# Worker processes


def test_an_import_adopts_and_publishes_the_blobs_of_a_worker(store: LocalStore) -> None:
    with store.ingest() as ingest:
        worker = store.join_ingest(ingest.name)
        item = worker.add(3, lambda: [b"abc"])
        assert item.written
        assert [path.name for path in temporary(store)] == [item.file]
        assert item.file.rpartition("-")[0] == ingest.name  # so gc knows that it is in use
        assert item.digest in store.read_leases().digests
        assert blobs(store) == {}
        ingest.adopt(item)
        ingest.publish()
        worker.close()
    assert blobs(store) == {item.digest.file_name: b"abc"}
    assert temporary(store) == []


def test_a_worker_leases_the_blobs_that_it_finds(store: LocalStore) -> None:
    digest = put(store, b"abc")
    with store.ingest() as ingest:
        with contextlib.closing(store.join_ingest(ingest.name)) as worker:
            assert worker.add(3, lambda: [b"abc"]) == Ingested(digest, 3, written=False)
        assert digest in store.read_leases().digests


def test_an_import_removes_the_blobs_of_a_worker_that_it_did_not_adopt(store: LocalStore) -> None:
    with store.ingest() as ingest, contextlib.closing(store.join_ingest(ingest.name)) as worker:
        worker.add(3, lambda: [b"abc"])
    assert temporary(store) == []


def test_a_worker_leaves_no_file_once_the_import_has_ended(store: LocalStore) -> None:
    ended = contextlib.ExitStack()
    ingest = ended.enter_context(store.ingest())

    def pieces() -> Iterator[bytes]:
        yield b"a"
        ended.close()
        yield b"b"

    with contextlib.closing(store.join_ingest(ingest.name)) as worker:
        with pytest.raises(Cancelled, match="the import was stopped"):
            worker.add(2, pieces)
        assert worker.has_ended
        with pytest.raises(Cancelled):
            worker.add(2, lambda: [b"ab"])
    with pytest.raises(Cancelled):
        store.join_ingest(ingest.name)
    assert temporary(store) == []


def test_an_import_fails_if_another_machine_has_taken_it_for_dead(store: LocalStore) -> None:
    """A gc that does not see the lock of a lease removes it, and then what it held."""
    with store.ingest() as ingest:
        ingest.add(3, lambda: [b"abc"])
        (lease,) = store.folder("leases").iterdir()
        lease.unlink()
        with pytest.raises(StoreError, match="locks .flock. do not work between its machines"):
            ingest.publish()


def test_a_worker_fails_if_its_blob_cannot_be_synced(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.ingest() as ingest, contextlib.closing(store.join_ingest(ingest.name)) as worker:
        with monkeypatch.context() as patched:
            break_sync(patched, stat.S_ISREG)
            with pytest.raises(OSError, match="Input/output error"):
                worker.add(3, lambda: [b"abc"])
        ingest.publish()
    assert blobs(store) == {}
    assert temporary(store) == []


def test_a_worker_that_syncs_later_has_durable_blobs_only_then(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.ingest() as ingest:
        broken = store.join_ingest(ingest.name, sync_later=True)
        with contextlib.closing(broken), monkeypatch.context() as patched:
            break_sync(patched, stat.S_ISREG)
            broken.add(3, lambda: [b"abc"])
            with pytest.raises(OSError, match="Input/output error"):
                broken.sync()
        with contextlib.closing(store.join_ingest(ingest.name, sync_later=True)) as worker:
            item = worker.add(3, lambda: [b"abc"])
            worker.sync()
            ingest.adopt(item)
        ingest.publish()
    assert blobs(store) == {item.digest.file_name: b"abc"}


def test_a_blob_of_parts_is_synced_once_and_complete(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    with store.ingest() as ingest:
        note = monkeypatch.setattr
        note(os, "fsync", lambda descriptor: synced.append(os.pread(descriptor, 9, 0)))
        ingest.write_parts("file", [(2, b"cdef")])
        ingest.add_parts("file", 6, b"ab")
        ingest.sync()
        assert synced == [b"abcdef"]


def test_processes_of_one_machine_write_one_blob_together(store: LocalStore) -> None:
    with store.ingest() as ingest:
        with contextlib.closing(store.join_ingest(ingest.name)) as worker:
            assert worker.machine_folder == ingest.machine_folder != ""
            worker.write_parts("file", [(4, b"ef"), (2, b"cd")])
            item = ingest.add_parts("file", 6, b"ab")
            assert item.digest == Digest.of(b"abcdef")
            # What the store has, or what is not complete, leaves no file.
            worker.write_parts("short", [(0, b"abc")])
            with pytest.raises(DamagedSource, match="6 bytes has 3"):
                worker.add_parts("short", 6, b"ab")
        ingest.publish()
        ingest.write_parts("again", [(0, b"abcdef")])
        assert ingest.add_parts("again", 6, b"") == Ingested(item.digest, 6, written=False)
    assert blobs(store) == {item.digest.file_name: b"abcdef"}
    assert temporary(store) == []
    assert (store.folder("blobs") / item.digest.file_name).stat().st_mode & 0o777 == 0o444

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.workers import Cancelled
from blobstore.errors import StoreBusy, StoreError
from blobstore.store.local import LocalStore
from tests.support import sandbox

A, B, C = (Digest.of(name) for name in (b"a", b"b", b"c"))
HOLD = """
import sys, time
from blobstore.core.digest import Digest
from blobstore.store.local import LocalStore
store = LocalStore(sys.argv[1])
with getattr(store._locks, sys.argv[2])() as lease:
    if lease is not None:
        lease.hold([Digest.of(b"a"), Digest.of(b"b")])
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module", autouse=True)
def _nothing_older_is_collected() -> None:
    """Keep what was made before these tests out of their collections, of which each would look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    gc.collect()  # objects of earlier tests
    descriptors = len(os.listdir("/dev/fd"))
    yield LocalStore(tmp_path / "store", lock_timeout=0.05)
    until = time.monotonic() + 10
    while len(os.listdir("/dev/fd")) > descriptors and time.monotonic() < until:
        gc.collect()  # threads of other tests may have one open for a moment
    assert len(os.listdir("/dev/fd")) <= descriptors


@pytest.fixture
def others() -> Iterator[list[subprocess.Popen[str]]]:
    """Give a list for the other processes, which are killed at the end."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def other(
    processes: list[subprocess.Popen[str]], store: LocalStore, way: str
) -> subprocess.Popen[str]:
    """Start a process that holds a lock or a lease, and wait until it does."""
    command = [sys.executable, "-c", HOLD, str(store.root), way]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=sandbox.ROOT)
    processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize(
    ("theirs", "ours", "is_free"),
    [
        ("shared", "shared", True),
        ("shared", "exclusive", False),
        ("exclusive", "shared", False),
        ("exclusive", "exclusive", False),
        ("lease", "exclusive", True),
    ],
)
def test_exclusive_locks_exclude_all_others(
    store: LocalStore, others: list[subprocess.Popen[str]], theirs: str, ours: str, is_free: bool
) -> None:
    store.folder("leases").mkdir(parents=True)
    process = other(others, store, theirs)
    if is_free:
        with getattr(store._locks, ours)():
            pass
    else:
        with pytest.raises(StoreBusy, match=r"timed out after 0.05 s waiting for the lock"):
            getattr(store._locks, ours)().__enter__()
    process.kill()
    process.wait()
    with getattr(store._locks, ours)():  # a process that has died holds no lock
        pass


@pytest.mark.slow
def test_waits_for_the_lock(store: LocalStore) -> None:
    store.lock_timeout = 30
    order: list[str] = []
    with store.exclusive_lock():
        thread = threading.Thread(target=lambda: _note(store, order))
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def _note(store: LocalStore, order: list[str]) -> None:
    with store._locks.shared():
        order.append("second")


@pytest.mark.slow
def test_threads_of_one_process_exclude_each_other_too(store: LocalStore) -> None:
    with store._locks.shared(), store._locks.shared(), pytest.raises(StoreBusy):
        store.exclusive_lock().__enter__()


@pytest.mark.slow
def test_a_lease_lists_the_blobs_that_it_holds(store: LocalStore) -> None:
    with store.lease() as lease:
        lease.hold([A])
        lease.hold([A, B])
        found = store.read_leases()
        assert found == ({lease.name: {A, B}}, {})
        assert (store.folder("leases") / lease.name).stat().st_size == 2 * 66
    assert store.read_leases() == ({}, {})
    assert list(store.folder("leases").iterdir()) == []


def test_a_lease_that_cannot_be_removed_is_ended_by_its_lock(store: LocalStore) -> None:
    folder = store.folder("leases")
    with store.lease() as lease:
        lease.hold([A])
        folder.rename(folder.with_name("aside"))
        folder.write_bytes(b"")
    folder.unlink()
    folder.with_name("aside").rename(folder)
    found = store.read_leases()
    assert found.digests == set()
    assert [path.name for path in found.dead] == [lease.name]


def test_leases_of_dead_processes_are_distinguished_from_living_ones(
    store: LocalStore, others: list[subprocess.Popen[str]]
) -> None:
    dead, living = (other(others, store, "lease") for _ in range(2))
    dead.kill()
    dead.wait()
    found = store.read_leases()
    assert found.digests == {A, B}
    assert [name.partition("-")[0] for name in found.held] == [str(living.pid)]
    assert [path.name.partition("-")[0] for path in found.dead] == [str(dead.pid)]


@pytest.mark.slow
def test_a_lease_lives_as_long_as_a_forked_child(store: LocalStore) -> None:
    reader, writer = os.pipe()
    with store.lease() as lease:
        lease.hold([A])
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        (store.folder("leases") / lease.name).rename(store.folder("leases") / "kept")
    assert store.read_leases().digests == {A}
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)
    assert store.read_leases().digests == set()


@pytest.mark.slow
@pytest.mark.parametrize("junk", [b"\xff" * 65, b"zz", A.hex.encode(), b"\n" * 70])
def test_junk_in_a_lease_holds_nothing(store: LocalStore, junk: bytes) -> None:
    with store.lease() as lease:
        (store.folder("leases") / lease.name).write_bytes(junk)
        assert not store.read_leases().digests & {A, B, C}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 30, 65, 66, 67, 100, 130])
@pytest.mark.parametrize("is_other", [False, True])
def test_a_line_torn_by_a_full_disk_spoils_no_later_one(
    store: LocalStore, size: int, is_other: bool
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with store.lease() as lease, store._locks.join_lease(lease.name) as joined:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                lease.hold([A, B])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (store.folder("leases") / lease.name).stat().st_size == size
        (joined if is_other else lease).hold([C])
        assert C in store.read_leases().digests
        lease.hold([A, B])
        assert store.read_leases().digests == {A, B, C}


@pytest.mark.slow
def test_a_symbolic_link_is_not_a_lease(store: LocalStore, tmp_path: Path) -> None:
    store.folder("leases").mkdir(parents=True)
    (store.folder("leases") / "1-a").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        store.read_leases()


@pytest.mark.slow
def test_a_pipe_among_the_leases_is_not_waited_for(store: LocalStore) -> None:
    store.folder("leases").mkdir(parents=True)
    pipe = store.folder("leases") / "1-a"
    os.mkfifo(pipe)
    assert store.read_leases() == ({}, {pipe: set()})


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lease", "reading_lease"])
def test_no_lease_begins_while_another_process_removes_blobs(store: LocalStore, way: str) -> None:
    """That process would take a lease that is not locked yet for one of a dead process."""
    store.lease().close()
    with store.exclusive_lock(), pytest.raises(StoreBusy):
        getattr(store._locks, way)()
    assert list(store.folder("leases").iterdir()) == []


@pytest.mark.slow
def test_a_lease_does_not_grow_while_another_process_removes_blobs(store: LocalStore) -> None:
    """That process has read the lease already."""
    with store.lease() as lease:
        with store.exclusive_lock(), pytest.raises(StoreBusy):
            lease.hold([A])
        assert store.read_leases().digests == set()


@pytest.mark.slow
def test_the_exclusive_lock_is_taken_on_a_file_that_is_open_for_writing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS refuses it otherwise."""
    really_lock = fcntl.flock
    modes: dict[int, int] = {}

    def lock(descriptor: int, kind: int) -> None:
        modes[kind] = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        really_lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", lock)
    with store.exclusive_lock():
        assert modes == {fcntl.LOCK_EX | fcntl.LOCK_NB: os.O_RDWR}


@pytest.mark.slow
def test_readers_without_folders_or_permission_get_no_lease() -> None:
    with sandbox.common_folder() as folder:
        store = LocalStore(folder)

        def read() -> str:
            with store.lease_if_writable([A]):
                return "read"

        assert read() == sandbox.call(read, unprivileged=True) == "read"
        assert not any(folder.iterdir())
        store.lease().close()
        assert sandbox.call(read, unprivileged=True) == "read"


@pytest.mark.slow
def test_readers_get_no_lease_while_the_store_is_busy(store: LocalStore) -> None:
    store.lease().close()
    with store.exclusive_lock(), store.lease_if_writable([A]):
        assert store.read_leases().digests == set()
    with store.lease_if_writable([A]):
        assert store.read_leases().digests == {A}


@pytest.mark.slow
def test_a_forked_process_does_not_keep_the_lock(store: LocalStore) -> None:
    reader, writer = os.pipe()
    with store.exclusive_lock():
        child = os.fork()
        if child == 0:  # as if another thread had forked it
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
    with store.exclusive_lock():
        pass
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)


@pytest.mark.slow
def test_a_forked_process_does_not_end_what_its_parent_holds(store: LocalStore) -> None:
    def leave() -> None:
        lock.close()
        leases.close()

    with contextlib.ExitStack() as leases, contextlib.ExitStack() as lock:
        leases.enter_context(store.lease()).hold([A])
        lock.enter_context(store.exclusive_lock())
        assert sandbox.call(leave) == "None"
        assert store.read_leases().digests == {A}
        with pytest.raises(StoreBusy):
            store._locks.shared().__enter__()


@pytest.mark.slow
def test_a_running_import_waits_longer_for_the_lock(store: LocalStore) -> None:
    with store.ingest() as ingest, store.lease() as lease:
        holding = contextlib.ExitStack()
        holding.enter_context(store.exclusive_lock())
        with pytest.raises(StoreBusy):  # after which an import would have failed
            lease.hold([A])
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(ingest.find, A, 1)
            for _ in range(3):
                with pytest.raises(StoreBusy):
                    lease.hold([A])
            assert not found.done()
            holding.close()
            assert found.result(60) is None


@pytest.mark.slow
def test_an_import_that_is_stopped_waits_no_longer_for_the_lock(store: LocalStore) -> None:
    with store.ingest() as ingest, store.exclusive_lock(), ThreadPoolExecutor(1) as pool:
        found = pool.submit(ingest.find, A, 1)
        ingest.stop()
        with pytest.raises(Cancelled):
            found.result(60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_an_error(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for way in (
        store._locks.shared,
        store._locks.exclusive,
        store._locks.lease,
    ):
        with pytest.raises(StoreError, match=r"has no locks \(flock\)"):
            way().__enter__()
    with store.lease_if_writable([A]):  # readers need none
        assert not any(store.folder("leases").iterdir())


@pytest.mark.slow
def test_a_pickled_store_has_the_same_locks(store: LocalStore) -> None:
    again: LocalStore = pickle.loads(pickle.dumps(store))
    with again.exclusive_lock(), pytest.raises(StoreBusy):
        store._locks.shared().__enter__()


@pytest.mark.slow
def test_a_lease_that_ends_while_leases_are_read_hides_no_other(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.lease() as lease, store.lease() as other:
        lease.hold([A])
        other.hold([A])
        first, _ = sorted(store.folder("leases").iterdir())
        really_open = os.open

        def late(path: Path, *arguments: int) -> int:
            if path == first:
                path.rename(store.root / "ended")
            return really_open(path, *arguments)

        monkeypatch.setattr(os, "open", late)
        assert store.read_leases().digests == {A}


@pytest.mark.slow
def test_a_lease_waits_for_a_process_that_tests_its_lock(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_lock = fcntl.flock
    refusals = [BlockingIOError(), BlockingIOError()]

    def late(descriptor: int, kind: int) -> None:
        if kind & fcntl.LOCK_EX and refusals:
            raise refusals.pop()
        really_lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with store.lease() as lease:
        lease.hold([A])
        assert not refusals
        assert store.read_leases().digests == {A}


@pytest.mark.slow
def test_a_forked_process_cannot_write_to_the_files_of_a_lease(store: LocalStore) -> None:
    store.folder("temporary").mkdir(parents=True, exist_ok=True)
    with store.lease() as lease:
        path, descriptor = lease.create_file()
        closed, other = lease.create_file()
        lease.close_file(other)
        again = os.open(closed, os.O_RDONLY)
        assert again == other
        child = os.fork()
        if child == 0:
            with contextlib.suppress(OSError):
                os.write(descriptor, b"of the child")
            is_kept = os.path.samestat(os.fstat(again), closed.stat())
            os._exit(0 if is_kept else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.write(descriptor, b"of the parent")
        lease.close_file(descriptor)
        os.close(again)
        assert path.read_bytes() == b"of the parent"


@pytest.mark.slow
def test_a_forked_process_does_not_keep_the_lease_of_an_import_alive(store: LocalStore) -> None:
    lease = store._locks.lease(is_import=True)
    lease.hold([A])
    reader, writer = os.pipe()
    started, starting = os.pipe()
    child = os.fork()
    if child == 0:  # a worker process that lost its parent; it waits until the end of the test
        os.close(writer)
        os.write(starting, b"x")
        os.read(reader, 1)
        os._exit(0)
    os.read(started, 1)  # the child has closed its copies of the leases
    assert A in store.read_leases().digests
    os.close(lease._descriptor)  # as the system does when the process is killed
    # Another thread may be starting a process, which has a copy until it runs its program.
    deadline = time.monotonic() + 10
    while not store.read_leases().dead and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [path.name for path in store.read_leases().dead] == [lease.name]
    lease._descriptor = os.open(os.devnull, os.O_RDONLY)
    lease.close()
    for descriptor in (started, starting, reader, writer):
        os.close(descriptor)
    os.waitpid(child, 0)

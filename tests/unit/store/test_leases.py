from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.fork import NOT_INHERITED
from blobstore.errors import StoreBusy, StoreError
from blobstore.store.leases import JoinedLease, Lease
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.locking import closing_store, holder

A, B, C = (Digest.of(name) for name in (b"a", b"b", b"c"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with closing_store(tmp_path / "store") as store:
        yield store


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
    store: LocalStore,
) -> None:
    with holder(store, "lease") as dead, holder(store, "lease") as living:
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
    with store.lease() as lease, JoinedLease(store._layout, store._locks, lease.name) as joined:
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


def test_a_lease_without_an_end_takes_no_memory(store: LocalStore) -> None:
    store.folder("leases").mkdir(parents=True)
    sparse = store.folder("leases") / "1-a"
    sparse.touch()
    os.truncate(sparse, 2**40)
    assert store.read_leases() == ({}, {sparse: set()})
    with sparse.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # by a process that lives
        with pytest.raises(StoreError, match="has 1099511627776 bytes; remove it"):
            store.read_leases()


@pytest.mark.slow
@pytest.mark.parametrize("is_created", [True, False])
def test_no_lease_begins_while_another_process_removes_blobs(
    store: LocalStore, is_created: bool
) -> None:
    """That process would take a lease that is not locked yet for one of a dead process."""
    store.lease().close()
    with store.exclusive_lock(), pytest.raises(StoreBusy):
        Lease.new(store._layout, store._locks, is_created=is_created)
    assert list(store.folder("leases").iterdir()) == []


@pytest.mark.slow
def test_a_lease_does_not_grow_while_another_process_removes_blobs(store: LocalStore) -> None:
    """That process has read the lease already."""
    with store.lease() as lease:
        with store.exclusive_lock(), pytest.raises(StoreBusy):
            lease.hold([A])
        assert store.read_leases().digests == set()


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
    lease = Lease.new(store._layout, store._locks, is_import=True)
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
    NOT_INHERITED.discard(lease._descriptor)
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

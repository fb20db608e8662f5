from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.workers import Cancelled
from blobstore.errors import BlobstoreError, StoreBusy, StoreError
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.locking import closing_store, holder

A = Digest.of(b"a")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with closing_store(tmp_path / "store") as store:
        yield store


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
    store: LocalStore, theirs: str, ours: str, is_free: bool
) -> None:
    store.folder("leases").mkdir(parents=True)
    with holder(store, theirs):
        if is_free:
            with getattr(store._locks, ours)():
                pass
        else:
            with pytest.raises(StoreBusy, match=r"timed out after 0.05 s waiting for the lock"):
                getattr(store._locks, ours)().__enter__()
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
        store.lease,
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


def test_a_pipe_or_link_in_place_of_the_lock_is_refused(store: LocalStore, tmp_path: Path) -> None:
    lock = store.root / ".blobstore" / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.unlink(missing_ok=True)
    os.mkfifo(lock)
    with pytest.raises(BlobstoreError, match="is not a regular file"):
        store._locks.shared().__enter__()
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        store._locks.shared().__enter__()
    assert not (tmp_path / "elsewhere").exists()

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

import pytest

from blobstore.core.workers import Cancelled
from blobstore.operations.freeze import batches as moving
from blobstore.operations.freeze.batches import BatchRunner
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_all_is_made_on_threads_and_settled_on_the_caller_s(store: LocalStore) -> None:
    settled: list[int] = []
    me = threading.get_ident()
    batches = 0

    def settle(made: Sequence[int]) -> None:
        nonlocal batches
        assert threading.get_ident() == me
        batches += 1
        settled.extend(made)

    def make(item: int) -> int:
        assert threading.get_ident() != me
        return item * 10

    with BatchRunner(store, None, 0) as work:
        work.run(range(200), make, lambda item: item, settle, 3)
    assert sorted(settled) == [10 * item for item in range(200)]
    assert batches >= 200 // moving._BATCH


def test_what_found_no_room_is_made_again_after_the_others(store: LocalStore) -> None:
    room = 2
    settled: list[int] = []

    def make(item: int) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "full")
        room -= 1
        return item

    def settle(made: Sequence[int]) -> None:
        nonlocal room
        settled.extend(made)
        room += len(made)

    with BatchRunner(store, None, 0) as work:
        work.run([1, 2, 3, 4, 5], make, lambda item: item, settle, 1)
        assert sorted(settled) == [1, 2, 3, 4, 5]
        room = 0
        with pytest.raises(OSError, match="full"):
            work.run([6], make, lambda item: item, settle, 1)


def test_an_error_stops_the_others(store: LocalStore) -> None:
    def make(item: int) -> int:
        if item == 3:
            raise ValueError("three")
        return item

    with BatchRunner(store, None, 0) as work:
        with pytest.raises(ValueError, match="three"):
            work.run([1, 2, 3], make, lambda item: item, lambda _: None, 1)
        with pytest.raises(Cancelled):
            work.tell(1, "more")


def test_files_are_synced_and_of_a_living_lease(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    with BatchRunner(store, None, 0) as work:
        monkeypatch.setattr(os, "fsync", synced.append)
        with work.temporary() as (path, descriptor):
            os.write(descriptor, b"1")
        assert synced == [descriptor]
        assert path.read_bytes() == b"1"
        assert path.stat().st_mode & 0o777 == 0o444
        assert path.name.rpartition("-")[0] == work.lease
        assert [item.name for item in store.folder("leases").iterdir()] == [work.lease]
        with pytest.raises(ValueError, match="x"), work.temporary() as (other, _):
            raise ValueError("x")
        assert not other.exists()
        monkeypatch.undo()
    assert list(store.folder("temporary").iterdir()) == []
    assert list(store.folder("leases").iterdir()) == []

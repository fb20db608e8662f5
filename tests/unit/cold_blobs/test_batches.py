from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from blobstore.cold_blobs.batches import _BATCH, TemporaryFiles, run_in_batches
from blobstore.core.digest import Digest
from blobstore.core.workers import Cancelled, WorkerPool
from blobstore.manifests.descriptor import Descriptor
from blobstore.store.local import LocalStore


def blobs(sizes: Iterable[int]) -> list[Descriptor]:
    return [Descriptor("application/test", Digest.of(b""), size) for size in sizes]


def test_jobs_run_on_threads_and_their_results_come_in_batches() -> None:
    caller = threading.get_ident()

    def job(blob: Descriptor) -> int:
        assert threading.get_ident() != caller
        return blob.size * 10

    batches = list(run_in_batches(WorkerPool(3, None, 0), blobs(range(200)), job))
    assert sorted(item for batch in batches for item in batch) == [10 * item for item in range(200)]
    assert len(batches) >= 200 // _BATCH
    assert max(map(len, batches)) <= _BATCH


def test_a_job_that_finds_no_space_runs_again_after_a_commit() -> None:
    space = 2

    def job(blob: Descriptor) -> int:
        nonlocal space
        if not space:
            raise OSError(errno.ENOSPC, "full")
        space -= 1
        return blob.size

    pool = WorkerPool(1, None, 0)
    committed: list[int] = []
    for batch in run_in_batches(pool, blobs([1, 2, 3, 4, 5]), job):
        committed += batch
        space += len(batch)
    assert sorted(committed) == [1, 2, 3, 4, 5]
    space = 0
    with pytest.raises(OSError, match="full"):
        list(run_in_batches(pool, blobs([6]), job))


def test_a_job_that_fails_for_another_reason_is_not_run_again() -> None:
    runs: list[int] = []

    def job(blob: Descriptor) -> None:
        runs.append(blob.size)
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        list(run_in_batches(WorkerPool(1, None, 0), blobs([1]), job))
    assert runs == [1]


def test_an_error_stops_the_other_jobs() -> None:
    def job(blob: Descriptor) -> int:
        if blob.size == 3:
            raise ValueError("three")
        return blob.size

    pool = WorkerPool(1, None, 0)
    with pytest.raises(ValueError, match="three"):
        list(run_in_batches(pool, blobs([1, 2, 3]), job))
    with pytest.raises(Cancelled):
        pool.report(1, "more")


def test_closing_the_iterator_stops_the_jobs() -> None:
    pool = WorkerPool(2, None, 0)
    batches = run_in_batches(pool, blobs(range(1000)), lambda blob: blob.size)
    next(batches)
    batches.close()
    assert pool.stopping.is_set()


def test_temporary_files_are_synced_and_named_by_a_living_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "store")
    synced: list[int] = []
    with TemporaryFiles(store) as files:
        monkeypatch.setattr(os, "fsync", synced.append)
        with files.create() as (path, descriptor):
            os.write(descriptor, b"1")
        assert synced == [descriptor]
        assert path.read_bytes() == b"1"
        assert path.stat().st_mode & 0o777 == 0o444
        assert path.name.rpartition("-")[0] == files.lease.name
        assert [item.name for item in store.folder("leases").iterdir()] == [files.lease.name]
        with pytest.raises(ValueError, match="x"), files.create() as (other, _):
            raise ValueError("x")
        assert not other.exists()
        monkeypatch.undo()
    assert list(store.folder("temporary").iterdir()) == []
    assert list(store.folder("leases").iterdir()) == []

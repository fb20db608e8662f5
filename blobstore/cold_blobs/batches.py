"""Runs jobs that write temporary files, and yields their results in batches to be committed.

Committing needs the store's exclusive lock. A batch of files per lock keeps other processes waiting less
often than a lock per file, and bounds the disk space that uncommitted files take.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING, TypeVar

from blobstore.core.files import make_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path
    from typing import Final, Self

    from blobstore.core.workers import WorkerPool
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.local import LocalStore

    Report = Callable[[int, str], None]
    """Is called with a number of bytes done, and the name of their layer."""

_BATCH: Final = 64
"""The most blobs per batch."""
_BATCH_BYTES: Final = 256 << 20
"""About the most bytes of blobs per batch: as much free disk space is needed."""
# Bounds the finished work that is lost if the process is killed.
_BATCH_SECONDS: Final = 2.0

NO_SPACE: Final = {errno.ENOSPC, errno.EDQUOT}

Result = TypeVar("Result")


class BlobProgress:
    """Reports the progress of one blob: exactly ``total`` bytes, though some are processed twice."""

    def __init__(self, report: Report, name: str, total: int) -> None:
        """Report nothing yet."""
        self._report = report
        self._name = name
        self._remaining = total

    def add(self, count: int) -> None:
        """Report up to ``count`` bytes more."""
        count = min(count, self._remaining)
        self._remaining -= count
        self._report(count, self._name)

    def finish(self) -> None:
        """Report the bytes that are left."""
        self.add(self._remaining)


class TemporaryFiles:
    """A lease and the temporary files that carry its name, which ``gc`` keeps while the lease lives."""

    def __init__(self, store: LocalStore) -> None:
        for name in ("blobs", "cold", "temporary"):
            make_folders(store.folder(name), store.root)
        self.lease = store.lease()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lease.remove_files()
        self.lease.close()

    @contextlib.contextmanager
    def create(self) -> Iterator[tuple[Path, int]]:
        """Yield the path and the descriptor of a new file, which is synced when the block ends.

        If the block raises, the file is removed.
        """
        path, descriptor = self.lease.create_file()
        try:
            try:
                yield path, descriptor
                # The caller renames the file later, and the new name must not become durable before
                # the bytes.
                os.fsync(descriptor)
            finally:
                self.lease.close_file(descriptor)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def run_in_batches(
    pool: WorkerPool, blobs: Sequence[Descriptor], job: Callable[[Descriptor], Result]
) -> Generator[list[Result], None, None]:
    """Run a job for each blob, the largest first, and yield the results in batches.

    A job that finds no space on the disk is run again once the caller has committed the results of the
    others, which may have freed some.

    Raises:
        OSError: no job found space.
        Exception: the first error of a job.
    """

    def run(blob: Descriptor) -> Result | OSError:
        try:
            return job(blob)
        except OSError as error:
            if error.errno in NO_SPACE:
                return error.with_traceback(None)  # whose frames keep files mapped
            raise

    remaining = sorted(blobs, key=lambda blob: blob.size, reverse=True)
    while remaining:
        without_space: list[tuple[Descriptor, OSError]] = []
        batch: list[Result] = []
        size, started, has_result = 0, time.monotonic(), False
        # Closed if the caller fails to commit, too: jobs must not go on after that.
        with contextlib.closing(pool.completed(remaining, run)) as completed:
            for blob, result in completed:
                if isinstance(result, OSError):
                    without_space.append((blob, result))
                else:
                    batch.append(result)
                    size += blob.size
                    has_result = True
                # Once a job finds no space, commit what there is: that removes hot files.
                is_full = len(batch) >= _BATCH or size >= _BATCH_BYTES
                is_late = time.monotonic() - started >= _BATCH_SECONDS
                if batch and (is_full or is_late or without_space):
                    yield batch
                    batch, size, started = [], 0, time.monotonic()
        if batch:
            yield batch
        # Nothing was committed that could have freed space, so another round would fail too.
        if without_space and not has_result:
            raise without_space[0][1]
        remaining = [blob for blob, _ in without_space]

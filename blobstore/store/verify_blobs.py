"""Reads and hashes many blobs in parallel, and reports the damaged ones.

It knows blobs alone. The operation ``verify`` uses it, and adds what manifests and headers must hold.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from blobstore.core.workers import Cancelled, WorkerPool
from blobstore.errors import BlobMissing, BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.core.rate_limit import RateLimiter
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.local import LocalStore
    from blobstore.store.protocols import BlobChecker
    from blobstore.store.verified_cache import VerifiedBlobs


def bases_of(store: LocalStore, blobs: Iterable[Descriptor]) -> dict[Digest, Descriptor]:
    """Return the bases of those blobs whose cold file is a delta.

    Cold blobs that cannot be read are skipped: reading the blob reports the error.
    """
    bases = {}
    for blob in blobs:
        if store.has_cold(blob.digest):
            with contextlib.suppress(BlobstoreError):
                found = store.open_cold(blob.digest)
                if found.base is not None:
                    # It keeps the name, by which repair can compute it from a source.
                    bases[blob.digest] = blob._replace(digest=found.base, size=found.base_size)
    return bases


def damaged_blobs(
    store: BlobChecker,
    blobs: Sequence[Descriptor],
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    verified: VerifiedBlobs | None = None,
    pace: RateLimiter | None = None,
    cold_files_of: LocalStore | None = None,
    as_bases: bool = False,
) -> Iterator[tuple[Descriptor, BlobstoreError]]:
    """Read every blob completely, in parallel; yield those that are missing or damaged, with the error.

    Closing the iterator stops the threads without waiting for blobs to be read to their ends.

    Args:
        store: the store.
        blobs: the blobs to read.
        jobs: number of threads; by default one per processor.
        progress: called with the bytes that were read.
        verified: records the results, also if the work is interrupted.
        pace: limits the bytes per second.
        cold_files_of: a store whose cold files of hot blobs are read too. They are read after the hot file and do
            not count as progress.
        as_bases: a blob may be in ``cold_files_of`` by its second hard link alone.
    """
    pool = WorkerPool(jobs, progress, sum(blob.size for blob in blobs))

    def pause(size: int) -> None:
        if pace is not None:
            pace.spend(size, pool.stopping.wait)
        if pool.stopping.is_set():
            raise Cancelled("stopped")

    def check(blob: Descriptor) -> None:
        def count(size: int) -> None:
            pause(size)
            pool.report(size, blob.name or str(blob.digest))

        with contextlib.nullcontext() if verified is None else verified.noting(*blob.id):
            try:
                store.check_digest(blob.digest, blob.size, count)
            except BlobMissing:
                if cold_files_of is None or not as_bases:
                    raise
                cold_files_of.check_base_link(blob.digest, blob.size, count)
        if (
            cold_files_of is not None
            and cold_files_of.has_cold(blob.digest)
            and cold_files_of.has_hot(blob.digest)
        ):
            # Thawed between the look and the read.
            with contextlib.suppress(BlobMissing):
                cold_files_of.check_cold(blob.digest, blob.size, pause)

    # The largest first, so that no thread is left with a large blob when the others are done.
    in_order = sorted(blobs, key=lambda blob: blob.size, reverse=True)
    try:
        with contextlib.closing(pool.completed(in_order, partial(_error_of, check))) as results:
            yield from ((blob, error) for blob, error in results if error is not None)
    finally:
        if verified is not None:
            verified.save()


def _error_of(check: Callable[[Descriptor], None], blob: Descriptor) -> BlobstoreError | None:
    try:
        check(blob)
    except Cancelled:
        raise
    except BlobstoreError as error:
        return error
    return None

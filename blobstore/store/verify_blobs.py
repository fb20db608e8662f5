"""Digests of many blobs checked at once."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from blobstore.core.progress import Meter
from blobstore.errors import BlobMissing, BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.core.workers import RateLimiter
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.local import LocalStore
    from blobstore.store.verified_cache import VerifiedBlobs


def bases_of(store: LocalStore, blobs: Iterable[Descriptor]) -> dict[Digest, Descriptor]:
    """Return those of the blobs whose cold form is coded by another, and by which.

    What cannot be read is passed over: who reads the blob is told.
    """
    bases = {}
    for blob in blobs:
        if store._cold.has(blob.digest):
            with contextlib.suppress(BlobstoreError):
                found = store._cold.open(blob.digest)
                if found.base is not None:
                    # By the same name it is planned from a source.
                    bases[blob.digest] = blob._replace(digest=found.base, size=found.base_size)
    return bases


class _Stopped(Exception):
    """Nobody waits for the result any more."""


def damaged_blobs(
    store: LocalStore,
    blobs: Sequence[Descriptor],
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    verified: VerifiedBlobs | None = None,
    pace: RateLimiter | None = None,
    both_forms: bool = False,
    as_bases: bool = False,
) -> Iterator[tuple[Descriptor, BlobstoreError]]:
    """Read every blob whole, in parallel; yield those that are missing or damaged, with the error.

    Of a blob that is hot and cold the cold form is read only if ``both_forms`` are wanted; that a blob
    is damaged only in that form is told after the other was read, and counts no bytes. What is looked
    for ``as_bases`` may be there by its second name alone.

    What is found of each is noted in ``verified``, also if the work is broken off. It goes no faster
    than ``pace``. Breaking off does not wait for blobs to be read to their ends.
    """
    work = _Checking(
        store, blobs, progress, verified, pace, both_forms=both_forms, as_bases=as_bases
    )
    pool = ThreadPoolExecutor(jobs or os.cpu_count(), thread_name_prefix="blobstore-check")
    try:
        # The largest first, so that no thread is left with one when the others are done.
        in_order = sorted(blobs, key=lambda blob: blob.size, reverse=True)
        checks = {pool.submit(work.check, blob): blob for blob in in_order}
        for done in as_completed(checks):
            error = done.exception()
            if isinstance(error, BlobstoreError):
                yield checks[done], error
            elif error is not None:
                raise error
    finally:
        work.stop.set()
        pool.shutdown(cancel_futures=True)
        if verified is not None:
            verified.save()


class _Checking:
    """The check of one blob, with what all checks share."""

    def __init__(
        self,
        store: LocalStore,
        blobs: Sequence[Descriptor],
        progress: Progress | None,
        verified: VerifiedBlobs | None,
        pace: RateLimiter | None,
        *,
        both_forms: bool,
        as_bases: bool,
    ) -> None:
        self.stop = threading.Event()
        self._store = store
        self._meter = Meter(progress, sum(blob.size for blob in blobs))
        self._verified = verified
        self._pace = pace
        self._both_forms = both_forms
        self._as_bases = as_bases

    def check(self, blob: Descriptor) -> None:
        """Read a blob whole. Raises as :meth:`LocalStore.check_digest`."""

        def count(size: int) -> None:
            self._go_on(size)
            self._meter.add(size, blob.name or str(blob.digest))

        verified = self._verified
        noting = contextlib.nullcontext() if verified is None else verified.noting(blob.digest)
        with noting:
            try:
                self._store.check_digest(blob.digest, blob.size, count)
            except BlobMissing:
                if not self._as_bases:
                    raise
                self._store.check_base_link(blob.digest, blob.size, count)
        if self._both_forms and self._store._hot.has(blob.digest):
            with contextlib.suppress(BlobMissing):
                self._store.check_cold(blob.digest, blob.size, self._go_on)

    def _go_on(self, size: int) -> None:
        if self._pace is not None:
            self._pace.spend(size, self.stop.wait)
        if self.stop.is_set():
            raise _Stopped

"""Digests of many blobs checked at once."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from blobstore.errors import BlobstoreError
from blobstore.progress import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.pace import Pace
    from blobstore.progress import Progress
    from blobstore.store.local import LocalStore
    from blobstore.store.verified import VerifiedBlobs


class _Stopped(Exception):
    """Nobody waits for the result any more."""


def damaged_blobs(
    store: LocalStore,
    blobs: Sequence[Descriptor],
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    verified: VerifiedBlobs | None = None,
    pace: Pace | None = None,
) -> Iterator[tuple[Descriptor, BlobstoreError]]:
    """Read every blob whole, in parallel; yield those that are missing or damaged, with the error.

    What is found of each is noted in ``verified``, also if the work is broken off. It goes no faster
    than ``pace``. Breaking off does not wait for blobs to be read to their ends.
    """
    meter = Meter(progress, sum(blob.size for blob in blobs))
    stop = threading.Event()

    def counting(blob: Descriptor) -> Callable[[int], None]:
        def count(size: int) -> None:
            if pace is not None:
                pace.spend(size, stop.wait)
            if stop.is_set():
                raise _Stopped
            meter.add(size, blob.name or str(blob.digest))

        return count

    def check(blob: Descriptor) -> None:
        noting = contextlib.nullcontext() if verified is None else verified.noting(blob.digest)
        with noting:
            store.check_digest(blob.digest, blob.size, counting(blob))

    pool = ThreadPoolExecutor(jobs or os.cpu_count(), thread_name_prefix="blobstore-check")
    try:
        # The largest first, so that no thread is left with one when the others are done.
        in_order = sorted(blobs, key=lambda blob: blob.size, reverse=True)
        checks = {pool.submit(check, blob): blob for blob in in_order}
        for done in as_completed(checks):
            error = done.exception()
            if isinstance(error, BlobstoreError):
                yield checks[done], error
            elif error is not None:
                raise error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        if verified is not None:
            verified.save()

"""Digests of many blobs checked at once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from blobstore.errors import BlobstoreError
from blobstore.progress import Meter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.progress import Progress
    from blobstore.store.local import LocalStore


def damaged_blobs(
    store: LocalStore,
    blobs: Sequence[Descriptor],
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[Descriptor, BlobstoreError]]:
    """Read every blob whole, in parallel; yield those that are missing or damaged, with the error."""
    meter = Meter(progress, sum(blob.size for blob in blobs))

    def check(blob: Descriptor) -> None:
        store.check_digest(
            blob.digest, blob.size, lambda count: meter.add(count, blob.name or str(blob.digest))
        )

    pool = ThreadPoolExecutor(jobs or os.cpu_count(), thread_name_prefix="blobstore-check")
    try:
        checks = {pool.submit(check, blob): blob for blob in blobs}
        for done in as_completed(checks):
            error = done.exception()
            if isinstance(error, BlobstoreError):
                yield checks[done], error
            elif error is not None:
                raise error
    finally:
        pool.shutdown(cancel_futures=True)

"""Thaws models: decompresses the blobs of frozen models into files again.

Threads decode each blob into a temporary file and compare its digest. Batches of these files are
committed under the store's exclusive lock: each file gets its path among the hot blobs, durably, and only
then the cold file is removed. So at every moment a blob is hot or cold or both.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blobstore.cold_blobs.batches import TemporaryFiles, run_in_batches
from blobstore.core import interrupts
from blobstore.core.digest import Digester
from blobstore.core.escape import quote
from blobstore.core.files import FileState, is_there, sync_folder, write_all
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.manifests import media_types
from blobstore.store.bases import link_base
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models
from blobstore.store.quarantine import put_in_place

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from blobstore.cold_blobs.batches import Report
    from blobstore.core.progress import Progress
    from blobstore.errors import BlobstoreError
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Names, Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Thawed:
    """The result of :func:`blobstore.thaw`."""

    references: tuple[Reference, ...]
    blobs: int
    """Number of blobs that were cold and are hot now."""
    size: int
    """Bytes of these blobs."""
    stored: int
    """Bytes that they took before."""
    faults: tuple[BlobstoreError, ...]
    """Why blobs could not be thawed."""
    seconds: float


def thaw_models(
    references: Names,
    *,
    store: StoreLike = None,
    keep_cold: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Thawed:
    """Decompress frozen models, for programs that map or link their files.

    Args:
        references: the models. Blobs that they share with other models are thawed for those too.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        keep_cold: keep the compressed form too, so that freezing again is fast.
        jobs: number of threads; by default one per processor.
        progress: called with the name of a layer, the bytes done and the bytes in total.

    Returns:
        the blobs, and the bytes before and after.

    Raises:
        ModelNotFound: a model does not exist.
        InvalidManifest: the manifest of a model cannot be read.
        StoreBusy: another process held the store's lock for too long.
        StoreError: the store cannot be read or written. Blobs that were thawed before remain thawed.
        UsageError: ``jobs`` is below 1.
    """
    started = time.monotonic()
    check_jobs(jobs)
    store = LocalStore.of(store)
    names = named_models(store, references)
    blobs = {
        layer.digest: layer
        for name in names
        for layer in store.resolve(name).layers_of(media_types.TENSOR)
    }
    thawed: list[_DecodedBlob] = []
    faults: list[BlobstoreError] = []
    cold = [blob for blob in blobs.values() if store.has_cold(blob.digest)]
    if cold:
        pool = WorkerPool(jobs, progress, sum(blob.size for blob in cold))
        with store.writing(), TemporaryFiles(store) as files:
            # gc keeps the bases as long as their deltas.
            files.lease.hold(blob.digest for blob in cold)
            decode = partial(_decode, store, files=files, report=pool.report)
            for batch in run_in_batches(pool, cold, decode):
                faults += (item.fault for item in batch if item.fault is not None)
                thawed += _commit(
                    store, [item for item in batch if item.state], keep_cold=keep_cold
                )
    with interrupts.deferred():  # all is done, and the user learns what
        for blob in blobs.values():
            if not store.has(blob.digest) and not store.is_shared(blob.digest):
                path = quote(store.blob_path(blob.digest))
                faults.append(BlobMissing(f"layer {quote(blob.name)}: blob {path} is missing"))
    return Thawed(
        references=names,
        blobs=len(thawed),
        size=sum(item.blob.size for item in thawed),
        stored=sum(item.stored for item in thawed),
        faults=tuple(faults),
        seconds=time.monotonic() - started,
    )


class _DecodedBlob(NamedTuple):
    """A blob whose hot file is durable and was verified, or the reason why it has none."""

    blob: Descriptor
    path: Path | None = None
    """The temporary file; None if the hot file has its final path already."""
    state: FileState | None = None
    """Identifies the verified file; None if there is none."""
    replaced: FileState | None = None
    """Identifies the damaged file at the final path; None if there was none."""
    stored: int = 0
    fault: BlobstoreError | None = None


def _decode(
    store: LocalStore, blob: Descriptor, files: TemporaryFiles, report: Report
) -> _DecodedBlob:
    """Decode a blob into a temporary file, or verify an existing hot file."""
    try:
        cold = store.open_cold(*blob.id)
        hot = store.blob_path(blob.digest)
        state = FileState.of(hot)
        if state is not None and _is_intact(store, blob, report):
            return _DecodedBlob(blob, None, state, None, cold.stored)
        with files.create() as (path, descriptor):
            digester = Digester()
            for piece in cold.pieces():
                digester.update(piece)
                write_all(descriptor, piece)
                report(len(piece), blob.name)
            if digester.digest() != blob.digest:
                cold.check()  # raises, and says what is wrong
                raise BlobDamaged(  # noqa: TRY301 - the handler names the layer
                    f"blob {quote(hot)} was decoded twice, to different bytes"
                )
        return _DecodedBlob(blob, path, FileState.of(str(path)), state, cold.stored)
    except (BlobMissing, BlobDamaged) as error:
        if not store.has_cold(blob.digest):  # another process has thawed or removed it
            return _DecodedBlob(blob)
        return _DecodedBlob(blob, fault=error.at(f"layer {quote(blob.name)}"))


def _is_intact(store: LocalStore, blob: Descriptor, report: Report) -> bool:
    """Return whether the hot file is intact; sync it, because its writer may not have."""
    try:
        store.check_digest(*blob.id, lambda count: report(count, blob.name))
        descriptor = store.open_hot(*blob.id)
    except (BlobMissing, BlobDamaged):
        return False
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    # A program that takes no lock may have removed the name since; the synced file is then lost.
    return is_there(store.blob_path(blob.digest))


def _commit(
    store: LocalStore, batch: Sequence[_DecodedBlob], *, keep_cold: bool
) -> list[_DecodedBlob]:
    """Give hot blobs their paths and remove the cold files; return the blobs that are hot now."""
    store.cold_bases()  # opens the cold blobs that are new, before the lock is held
    with store.exclusive_lock():
        for item in batch:
            hot = store.blob_path(item.blob.digest)
            # Replace only the file that was found damaged: another process may have put an intact
            # one there.
            if item.path is not None and FileState.of(hot) == item.replaced:
                if is_there(hot):
                    put_in_place(store, item.blob.digest, item.path)
                else:
                    item.path.replace(hot)
        # If another process has put a different file there, the blob stays cold too.
        placed = [
            item for item in batch if FileState.of(store.blob_path(item.blob.digest)) == item.state
        ]
        # The hot names must be durable before the cold files go.
        sync_folder(store.folder("blobs"))
        if not keep_cold:
            bases = set(store.cold_bases().values())
            for item in placed:
                digest, cold = item.blob.digest, store.cold_path(item.blob.digest)
                # Programs that take no lock may have removed the hot file since.
                if FileState.of(store.blob_path(digest)) != item.state or not is_there(cold):
                    continue
                # The base of other blobs must get its second link, or it stays cold too.
                if digest not in bases or link_base(store, digest):
                    os.unlink(cold)  # noqa: PTH108 - a blob's path is a string
            sync_folder(store.folder("cold"))
    return placed

"""The operation ``cp --to``: copies a model to another store, without an archive in between.

The blobs are hashed on the way, decompressed if they are frozen, and named when all of them are durable.
The manifest comes last, byte for byte, so the model has the same ID in both stores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.outcomes import Outcome, each_of
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import BlobDamaged, BlobMissing, UsageError
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.names import NameUpdate, NewModel, NewSignature

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.ingest import Ingest, Ingested
    from blobstore.store.names import Name


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedModel:
    """A model that was copied to another store."""

    source: Reference
    target: Reference
    store: Path
    """The folder of the other store."""
    digest: Digest
    """The digest of the manifest's bytes."""
    replaced: bool
    """Whether the name belonged to another model of that store before."""
    bytes_written: int
    bytes_present: int
    """Bytes of the blobs that the other store had already."""
    seconds: float


def copy_to_store(
    source: str | Reference,
    to: LocalStore | str | os.PathLike[str],
    target: Name | None = None,
    *,
    store: StoreLike = None,
    force: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> CopiedModel:
    """Copy a model to another store. The copy is complete, or there is none.

    Args:
        source: the model's name.
        to: the other store or its folder, which is made if it does not exist.
        target: its name in the other store, or the update of that; by default the same name.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        force: replace another model of the other store that has the name.
        jobs: number of threads; by default one per processor.
        progress: called with the current blob, bytes done and total bytes.

    Returns:
        both names, the store, and the bytes that were written and present.

    Raises:
        ModelNotFound: the store has no such model.
        InvalidManifest, BlobMissing, BlobDamaged: the model is damaged; nothing is copied.
        NameTaken: the name belongs to another model of the other store, or was given to one in the meantime.
        NameConflict: a name of the other store differs only in case.
        StoreBusy: the lock of a store could not be acquired in time.
        StoreError: a store cannot be used.
        UsageError: both are the same store, or ``jobs`` is below 1.
    """
    started = time.monotonic()
    check_jobs(jobs)
    source = Reference.of(source)
    target = source if target is None else target
    if not isinstance(target, NameUpdate):
        target = Reference.of(target)
    store, other = LocalStore.to_read(store), LocalStore.of(to)
    if other.root.exists() and store.root.exists() and other.root.samefile(store.root):
        raise UsageError(f"both are the store {quote(store.root)}; cp without --to gives a name")
    store.resolve(source)  # checks it
    data, manifest = store.parse(source)  # it may be another one by now
    digest = Digest.of(data)
    with store.lease_if_writable(blob.digest for blob in manifest.blobs), other.ingest() as ingest:
        update = other.names.claim(target, digest, force=force)
        ingested = _copy_blobs(store, manifest.blobs, ingest, jobs, progress)
        ingest.publish()
        signatures = (
            NewSignature(digest, kept.data, kept.is_verified)
            for kept in store.kept_signatures(digest)
            if kept.data is not None
        )
        model = NewModel(update, data, manifest.blobs)
        (former,) = other.names.install([model], signatures, ingest=ingest)
    return CopiedModel(
        source=source,
        target=update.reference,
        store=other.root,
        digest=digest,
        replaced=former is not None,
        bytes_written=sum(item.size for item in ingested if item.written),
        bytes_present=sum(item.size for item in ingested if not item.written),
        seconds=time.monotonic() - started,
    )


def copy_models(
    names: Sequence[Reference],
    to: str,
    *,
    store: LocalStore,
    progress: Progress | None,
    **options: Any,
) -> list[Outcome[CopiedModel]]:
    """Copy several models to another store under their own names, and return what became of each.

    Args:
        names: the models.
        to: the folder of the other store.
        store: the store.
        progress: called with the number of the model and its name, and the bytes of all models.
        options: as for :func:`copy_to_store`.

    Raises:
        UsageError: both are the same store, or an option is invalid.
    """
    sizes = [sum(blob.size for blob in store.blobs_of(name)) for name in names]

    def copy(number: int, step: Progress | None) -> CopiedModel:
        return copy_to_store(names[number], to, store=store, progress=step, **options)

    return list(each_of([str(name) for name in names], sizes, progress, copy))


def _copy_blobs(
    store: LocalStore,
    blobs: Sequence[Descriptor],
    ingest: Ingest,
    jobs: int | None,
    progress: Progress | None,
) -> list[Ingested]:
    """Add the blobs that the other store does not have."""
    found = [ingest.find(blob.digest, blob.size, is_hashed=False) for blob in blobs]
    missing = [blob for blob, item in zip(blobs, found, strict=True) if item is None]
    workers = WorkerPool(jobs, progress, sum(blob.size for blob in missing))

    def copy(blob: Descriptor) -> Ingested:
        label = blob.name or blob.media_type

        def pieces() -> Iterator[memoryview]:
            for piece in store.read_pieces(blob.digest, blob.size):
                yield piece
                workers.report(len(piece), label)

        # Decompressing frozen blobs twice would take longer than writing them in vain.
        try:
            item = ingest.add(blob.size, pieces, once=True)
        except (BlobDamaged, BlobMissing) as error:
            raise error.at(f"layer {quote(label)}") from None
        # The error ends the import, so the wrong bytes get no name.
        if item.digest != blob.digest:
            raise BlobDamaged(
                f"layer {quote(label)}: blob {blob.digest} is damaged: it has digest {item.digest}"
            )
        return item

    return [item for item in found if item is not None] + workers.run(missing, copy)

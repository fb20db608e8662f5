"""Workflow: the blobs of frozen models become files again, as they were.

A blob is decoded into a file that has its digest and is synced; only then, with the store's lock alone, it
gets its name among the hot ones, durably, and the cold one is removed. So at every instant a blob is hot
or cold or both.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digester
from blobstore.core.escape import quote
from blobstore.core.files import sync_folder, write_all
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.freeze.batches import BatchRunner
from blobstore.store.bases import link_base
from blobstore.store.cold import file_state
from blobstore.store.local import LocalStore
from blobstore.store.quarantine import put_in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from blobstore.core.progress import Progress
    from blobstore.errors import BlobstoreError
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.cold import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Thawed:
    """What :func:`thaw_models` did."""

    references: tuple[Reference, ...]
    blobs: int
    """Blobs that were cold and are hot now."""
    size: int
    """Bytes of these."""
    stored: int
    """Bytes that they took before."""
    faults: tuple[BlobstoreError, ...]
    """What is wrong with blobs that could not be thawed."""
    seconds: float


def thaw_models(
    references: Sequence[str | Reference],
    *,
    store: LocalStore | None = None,
    keep_cold: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Thawed:
    """Write the blobs of frozen models as they were, for programs that map or link their files.

    Args:
        references: the models. Blobs that they share with others are thawed for those too.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        keep_cold: leave the cold form beside the hot one, so that freezing again costs no coding.
        jobs: threads; by default the machine's processors.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        ModelNotFound: a model does not exist.
        InvalidManifest: a manifest of them cannot be read.
        StoreBusy: others have kept the store's lock all the time.
        StoreError: the store cannot be read or written. What was thawed before stays so.
        UsageError: ``jobs`` is below 1.
    """
    started = time.monotonic()
    check_jobs(jobs)
    store = store or LocalStore()
    names = [
        Reference.parse(reference) if isinstance(reference, str) else reference
        for reference in references
    ]
    names = list(dict.fromkeys(names))
    blobs = {
        layer.digest: layer
        for reference in names
        for layer in store.resolve(reference).layers_of(media_types.TENSOR)
    }
    work = _Thawing(store, keeps_cold=keep_cold)
    cold = [blob for blob in blobs.values() if store.has_cold(blob.digest)]
    if cold:
        with store.writing():
            work.run(cold, jobs, progress)
    for blob in blobs.values():
        if not store.has(blob.digest):
            work.faults.append(_missing(store, blob))
    return Thawed(
        references=tuple(names),
        blobs=work.count,
        size=work.size,
        stored=work.stored,
        faults=tuple(work.faults),
        seconds=time.monotonic() - started,
    )


def _missing(store: LocalStore, blob: Descriptor) -> BlobMissing:
    path = quote(store.blob_path(blob.digest))
    return BlobMissing(f"layer {quote(blob.name)}: blob {path} is missing")


class _Made(NamedTuple):
    """A blob whose hot form is whole, and durable."""

    blob: Descriptor
    path: Path | None
    """Its file; None if it has its name already."""
    state: State | None
    """That of the file."""
    seen: State | None
    """That of what was in its place before, which was not whole; None if there was nothing."""
    stored: int


class _Thawing:
    def __init__(self, store: LocalStore, *, keeps_cold: bool) -> None:
        self._store = store
        self._keeps_cold = keeps_cold
        self.count = 0
        self.size = 0
        self.stored = 0
        self.faults: list[BlobstoreError] = []

    def run(self, cold: Sequence[Descriptor], jobs: int | None, progress: Progress | None) -> None:
        """Thaw blobs that are cold."""
        total = sum(blob.size for blob in cold)
        with BatchRunner(self._store, progress, total) as moving:
            moving.hold(blob.digest for blob in cold)

            def make(blob: Descriptor) -> _Made | None:
                try:
                    return self._make(blob, moving)
                except (BlobMissing, BlobDamaged) as error:
                    if self._store.has_cold(blob.digest):  # not removed by another process
                        self.faults.append(error.at(f"layer {quote(blob.name)}"))
                    return None

            def settle(made: Sequence[_Made | None]) -> None:
                self._settle([item for item in made if item is not None])

            moving.run(cold, make, lambda blob: blob.size, settle, jobs)

    def _make(self, blob: Descriptor, moving: BatchRunner) -> _Made:
        """Write a blob as it was, or find that it is there."""
        cold = self._store.open_cold(blob.digest, blob.size)
        hot = self._store.blob_path(blob.digest)

        def tell(count: int) -> None:
            moving.tell(count, blob.name)

        if (state := file_state(hot)) is not None and self._is_whole(blob, hot, tell):
            return _Made(blob, None, state, None, cold.stored)
        with moving.temporary() as (path, descriptor):
            digester = Digester()
            for piece in cold.pieces():
                digester.update(piece)
                write_all(descriptor, piece)
                tell(len(piece))
            if digester.digest() != blob.digest:
                cold.check()  # says what is wrong
                raise BlobDamaged(
                    f"blob {quote(hot)} was decoded to other bytes than a moment later"
                )
        return _Made(blob, path, file_state(str(path)), state, cold.stored)

    def _is_whole(self, blob: Descriptor, path: str, tell: Callable[[int], None]) -> bool:
        """Tell whether the hot blob is whole, and make that durable: whoever wrote it may not have."""
        try:
            self._store.check_digest(blob.digest, blob.size, tell)
            descriptor = self._store.open_hot(blob.digest, blob.size)
        except (BlobMissing, BlobDamaged):
            return False
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return os.path.lexists(path)

    def _settle(self, made: Sequence[_Made]) -> None:
        """Give blobs their names, and remove the cold ones."""
        with self._store.exclusive_lock():
            placed = [item for item in made if self._is_placed(item)]
            sync_folder(self._store.folder("blobs"))
            # A blob by which others are coded needs a second name, or stays cold too.
            bases = set(self._store.cold_bases().values())
            for item in placed:
                self.count += 1
                self.size += item.blob.size
                self.stored += item.stored
                if not self._keeps_cold:
                    self._remove_cold(item, is_base=item.blob.digest in bases)
            sync_folder(self._store.folder("cold"))

    def _is_placed(self, item: _Made) -> bool:
        """Put a blob in its place; tell whether what is there is what was checked."""
        hot = self._store.blob_path(item.blob.digest)
        if item.path is not None and file_state(hot) == item.seen:
            if os.path.lexists(hot):
                put_in_place(self._store, item.blob.digest, item.path)
            else:
                item.path.replace(hot)
        # Otherwise others have put something there meanwhile: then it stays cold too.
        return file_state(hot) == item.state

    def _remove_cold(self, item: _Made, *, is_base: bool) -> None:
        hot, cold = (
            self._store.blob_path(item.blob.digest),
            self._store.cold_path(item.blob.digest),
        )
        if file_state(hot) != item.state or not os.path.lexists(cold):
            return
        if not is_base or link_base(self._store, item.blob.digest):
            os.unlink(cold)  # noqa: PTH108 - a blob's path is a text

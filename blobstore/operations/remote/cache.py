"""Blobs of a model elsewhere, kept in the local store as in a cache.

Blobs are written while a model is loaded, and synced and named in the background, so that nobody waits for
the disk. If the store cannot be written, or the disk is full, nothing more is kept.
"""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError, StoreError
from blobstore.store.reachability import ReachableBlobs

if TYPE_CHECKING:
    from blobstore.store.ingest import Ingest
    from blobstore.store.local import LocalStore


class BlobCache:
    """Keeps the blobs of one model in a store. Any number of threads may use it."""

    def __init__(self, store: LocalStore, manifest: bytes, needed: int, limit: int | None) -> None:
        """Write nothing yet.

        Args:
            store: the store.
            manifest: that of the model.
            needed: bytes of its blobs that the store lacks.
            limit: bytes of blobs to keep for all models elsewhere, at most.
        """
        self._store = store
        self._manifest = manifest
        self._needed = needed
        self._limit = limit
        self._is_off = False
        self._background = ThreadPoolExecutor(1, thread_name_prefix="blobstore-cache")

    def begin(self) -> None:
        """Note that the model is used, and remove others if the cache is too large."""
        try:
            if self._limit is not None and self._needed:
                manifest = Digest.of(self._manifest)
                self._is_off = not evict_models(self._store, self._needed, self._limit, manifest)
            if not self._is_off:
                with self._store.writing():
                    self._store.cached_models.keep(self._manifest)
        except (BlobstoreError, OSError):
            self._is_off = True

    def batch(self) -> BlobBatch:
        """Return what the blobs of one load are kept with."""
        return BlobBatch(self)

    def begin_import(self) -> tuple[Ingest, contextlib.ExitStack] | None:
        """Begin an import of blobs, and return what ends it; None if nothing is kept any more."""
        if self._is_off:
            return None
        with contextlib.ExitStack() as stack:
            ingest = stack.enter_context(self._store.ingest())
            return ingest, stack.pop_all()

    def stop(self) -> None:
        """Keep nothing more."""
        self._is_off = True

    def finish(self, ingest: Ingest, ending: contextlib.ExitStack) -> None:
        """Let the blobs of an import get their names, without waiting for that."""

        def publish() -> None:
            with contextlib.suppress(BlobstoreError, OSError), ending:
                ingest.publish()

        self._background.submit(publish)

    def close(self) -> None:
        """Wait until all blobs have their names."""
        self._background.shutdown()


class BlobBatch:
    """Keeps the blobs of one load, from any number of threads."""

    def __init__(self, cache: BlobCache) -> None:
        self._cache = cache
        self._import: tuple[Ingest, contextlib.ExitStack] | None = None
        self._lock = threading.Lock()

    def keep(self, digest: Digest, data: memoryview) -> None:
        """Write a blob whose digest was computed in this memory."""
        try:
            with self._lock:
                self._import = self._import or self._cache.begin_import()
            if self._import is not None:
                self._import[0].add_hashed(digest, data)
        except (BlobstoreError, OSError):
            self._cache.stop()

    def publish(self) -> None:
        """Let the blobs get their names, without waiting for that."""
        if self._import is not None:
            self._cache.finish(*self._import)


def evict_models(store: LocalStore, needed: int, limit: int, manifest: Digest) -> bool:
    """Remove cached models until ``needed`` bytes fit into ``limit``; return whether they do.

    The model that was not used for longest goes first. Blobs that a model of the store, another cached model
    or a running process needs stay.

    Args:
        store: the store.
        needed: bytes that are about to be kept.
        limit: bytes of blobs that are kept for models elsewhere, at most.
        manifest: the model that needs them, which stays.

    Raises:
        StoreError: the store cannot be read or written.
    """
    if needed > limit:
        return False
    with store.exclusive_lock(), store.writing():
        leased = set().union(*store.read_leases().held.values())
        models = sorted(store.cached_models.all(), key=lambda model: model.used)
        reachable = ReachableBlobs(store, cached_within=-1)  # by models of the store itself
        reachable.update()
        own = reachable.reached()
        sizes = {
            name: size
            for model in models
            for name in model.blobs
            if name not in own and (size := _size(store, name))
        }
        kept = sum(sizes.values())
        for number, model in enumerate(models):
            if kept + needed <= limit:
                break
            if model.path.name == manifest.hex:
                continue
            others = {name for one in (*models[number + 1 :],) for name in one.blobs}
            for name in set(model.blobs) & sizes.keys() - others:
                digest = Digest(name)
                if digest not in leased and not store.has_base_link(digest):
                    Path(store.blob_path(digest)).unlink(missing_ok=True)
                    kept -= sizes.pop(name)
            model.path.unlink(missing_ok=True)
        return kept + needed <= limit


def _size(store: LocalStore, name: str) -> int:
    """Return the bytes of a hot blob, 0 if there is none."""
    try:
        return os.lstat(store.blob_path(Digest(name))).st_size
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(f"blob {name} cannot be read: {error.strerror}") from error

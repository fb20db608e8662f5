"""Blobs of a remote model, kept in the local store as in a cache.

Blobs are written while a model is loaded, and synced and named in the background, so that loading does
not wait for the disk. If the store cannot be written, or the disk is full, nothing more is kept. Processes that open one
model at the same time claim its blobs, so that one of them reads a blob, and the others take it from the store.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

from blobstore.core import capacity
from blobstore.core.digest import BlobId, Digest
from blobstore.errors import BlobstoreError
from blobstore.remotes.cache_limit import evict_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from blobstore.store.claims import BlobClaims
    from blobstore.store.ingest import Ingest
    from blobstore.store.local import LocalStore


_SMALL: Final = 64 * 2**10
"""A blob of fewer bytes is read by each process, which costs less than to wait for another."""


class BlobCache:
    """Keeps the blobs of one model in a store. Any number of threads may use it."""

    def __init__(self, store: LocalStore, manifest: bytes, needed: int, limit: int | None) -> None:
        """Write nothing yet.

        Args:
            store: the store.
            manifest: that of the model.
            needed: bytes of its blobs that the store lacks.
            limit: bytes of blobs to keep for all remote models, at most.
        """
        self._store = store
        self._manifest = manifest
        self._needed = needed
        self._limit = limit
        self._is_off = False
        self._claims: BlobClaims | None = None
        self._background = capacity.KEPT.executor()

    def begin(self) -> None:
        """Note that the model is used, and remove others if the cache is too large."""
        try:
            if self._limit is not None and self._needed:
                manifest = Digest.of(self._manifest)
                self._is_off = not evict_models(self._store, self._needed, self._limit, manifest)
            if not self._is_off:
                with self._store.writing():
                    # Before the first blob: gc would delete blobs that no manifest reaches.
                    self._store.remote_cache.keep(self._manifest)
                with contextlib.suppress(OSError):  # the file is another user's
                    self._claims = self._store.claims()
        except (BlobstoreError, OSError):
            self._is_off = True

    @property
    def claims(self) -> BlobClaims | None:
        """The claims of this process; None if nothing is kept, because waiting would be in vain."""
        return None if self._is_off else self._claims

    def batch(self) -> BlobBatch:
        """Return a batch that keeps the blobs of one load."""
        return BlobBatch(self)

    def begin_import(self) -> tuple[Ingest, contextlib.ExitStack] | None:
        """Begin an import of blobs, and return it with the stack that ends it; None if nothing is kept any more."""
        if self._is_off:
            return None
        with contextlib.ExitStack() as stack:
            ingest = stack.enter_context(self._store.ingest())
            # The import is ended later, in the background.
            return ingest, stack.pop_all()

    def stop(self) -> None:
        """Keep nothing more."""
        self._is_off = True

    def finish(
        self, started: tuple[Ingest, contextlib.ExitStack] | None, claimed: Iterable[Digest]
    ) -> None:
        """Let the blobs of an import get their names, and give up claims, without waiting for that."""

        def publish() -> None:
            try:
                if started is not None:
                    with contextlib.suppress(BlobstoreError, OSError), started[1]:
                        started[0].publish()
            finally:
                # After the names: a process that waits for a claim then looks for the blob.
                if self._claims is not None:
                    self._claims.release(claimed)

        self._background.submit(publish)

    def close(self) -> None:
        """Wait until all blobs have their names."""
        self._background.shutdown()
        # The file of the claims is closed when nobody uses them any more.
        self._claims = None


class BlobBatch:
    """Keeps the blobs of one load, from any number of threads."""

    def __init__(self, cache: BlobCache) -> None:
        self._cache = cache
        self._import: tuple[Ingest, contextlib.ExitStack] | None = None
        self._claimed: set[Digest] = set()
        self._lock = threading.Lock()

    def claim(self, blob: BlobId) -> bool:
        """Claim a blob that is going to be read; return False if another process is reading it."""
        claims = self._cache.claims
        if claims is None or blob.size < _SMALL:
            return True
        is_claimed = claims.take(blob.digest)
        if is_claimed:
            self._claimed.add(blob.digest)
        return is_claimed

    def wait(self, blob: BlobId, pause: Callable[[float], object]) -> None:
        """Claim a blob that another process is reading, as soon as that has ended."""
        claims = self._cache.claims
        if claims is not None and claims.wait(blob.digest, pause):
            self._claimed.add(blob.digest)

    def give_up(self, blob: BlobId) -> None:
        """Let others claim a blob that need not be read after all."""
        claims = self._cache.claims
        if claims is not None and blob.digest in self._claimed:
            claims.release([blob.digest])
            self._claimed.discard(blob.digest)

    def beat(self) -> None:
        """Let other processes see that this one is reading."""
        claims = self._cache.claims
        if claims is not None:
            claims.beat()

    def keep(self, digest: Digest, data: memoryview) -> None:
        """Write a blob whose digest was computed in this memory."""
        try:
            # The first blob begins the import that all threads share.
            with self._lock:
                self._import = self._import or self._cache.begin_import()
            if self._import is not None:
                self._import[0].add_hashed(digest, data)
        except (BlobstoreError, OSError):
            self._cache.stop()

    def publish(self) -> None:
        """Let the blobs get their names, and end the claims, without waiting for that."""
        if self._import is not None or self._claimed:
            self._cache.finish(self._import, self._claimed)
        # Blobs that another process could not keep are read after this, with a new import.
        self._import, self._claimed = None, set()

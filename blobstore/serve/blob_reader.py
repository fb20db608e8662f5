"""Opens the blobs of responses, after checking them once. All of it blocks; nothing here knows of sockets.

A blob is hashed before its first byte is sent, and again if its file has changed since. The store's cache of
verified blobs is read and extended. A cold blob is decoded for that, and again when it is sent: each chunk of it
has a checksum, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import FileState, FileVersion, open_regular
from blobstore.errors import BlobDamaged, BlobMissing, Damaged
from blobstore.serve.messages import StoredPart
from blobstore.store.blobs import ADVICE
from blobstore.store.verified_cache import cold_state

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from blobstore.serve.messages import BlobPart
    from blobstore.store.cold import ColdBlob
    from blobstore.store.local import LocalStore
    from blobstore.store.verified_cache import VerifiedBlobs

PIECE = 1 << 20
_MARGIN_NS = 3 * 10**9
"""A file that changed within this time may change again without a new timestamp; see ``verified_cache``."""
_SAVE_SECONDS = 10.0
_MAX_KNOWN = 1 << 16
"""Each takes half a KiB. Those that are forgotten are in the cache of the store."""


class OpenBlob(NamedTuple):
    """A blob that is ready to be sent. The caller closes it."""

    descriptor: int | None
    """Of its hot file; None if it is cold."""
    state: object
    """Differs if one of the files with its bytes has changed."""
    is_verified: bool
    """Whether its bytes are known to be right."""

    def close(self) -> None:
        """Close the file, if there is one."""
        if self.descriptor is not None:
            os.close(self.descriptor)

    def check_same(self) -> None:
        """Check that nothing has written to the file since it was opened. Raises BlobDamaged."""
        if self.descriptor is None or not isinstance(self.state, FileVersion):
            return
        if FileState.of_status(os.fstat(self.descriptor)) != self.state.state:
            raise BlobDamaged("a blob was written to while it was sent", advice=ADVICE)


@dataclass(frozen=True, slots=True)
class ColdPiece:
    """A range of a cold blob."""

    _blob: ColdBlob
    digest: Digest
    begin: int
    end: int

    @property
    def key(self) -> tuple[Digest, int, int]:
        """What is decoded, whichever file it comes from."""
        return self.digest, self.begin, self.end

    @property
    def size(self) -> int:
        """The bytes that it is decoded to."""
        return self.end - self.begin

    def decode(self) -> bytearray:
        """Return the bytes, which are checked.

        Raises:
            BlobMissing, BlobDamaged, StoreError: they cannot be read or decoded.
        """
        data = bytearray(self.size)
        self._blob.read_into(self.begin, memoryview(data))
        return data


class BlobReader:
    """The blobs of a store. Threads may share it."""

    def __init__(self, store: LocalStore, on_verified: Callable[[int], object]) -> None:
        """Read from ``store``; ``on_verified`` gets the bytes of each blob that was hashed."""
        self._store = store
        self._on_verified = on_verified
        self._intact: dict[str, object] = {}
        """The states in which blobs were found intact."""
        self._bases: dict[str, Digest | None] = {}
        """The bases of the cold blobs among them."""
        self._local = threading.local()
        self._saving = threading.Lock()
        self._caches: list[tuple[VerifiedBlobs, threading.Lock]] = []
        """The cache of each thread, with the lock that the thread holds while it uses it."""

    def open(self, part: BlobPart) -> OpenBlob:
        """Open the file of a blob.

        Raises:
            BlobMissing: it is neither hot nor cold.
            BlobDamaged: it has another size. StoreError: it cannot be read.
        """
        known = self._intact.get(part.digest.hex)
        state: object
        try:
            descriptor = self._store.open_hot(part.digest, part.size)
        except BlobMissing:
            if not (self._store.has_cold(part.digest) or self._store.is_shared(part.digest)):
                raise
            state = cold_state(self._store, part.digest, self._bases.get(part.digest.hex))
            return OpenBlob(None, state, state == known)
        state = FileVersion.of_status(os.fstat(descriptor))
        return OpenBlob(descriptor, state, state == known)

    def knows(self, part: BlobPart) -> bool:
        """Return whether a blob was found intact. Its file may have changed since."""
        return part.digest.hex in self._intact

    def open_stored(self, part: StoredPart) -> OpenBlob:
        """Open the file of a cold blob, which was hashed when it was listed.

        Raises:
            BlobMissing: it is another file by now, or cannot be read.
        """
        try:
            descriptor, _ = open_regular(part.path)
        except OSError as error:
            raise BlobMissing(f"cold blob {quote(part.path)} cannot be read: {error}") from error
        if FileVersion.of_status(os.fstat(descriptor)) != part.version:
            os.close(descriptor)
            raise BlobMissing(f"cold blob {quote(part.path)} was replaced")
        return OpenBlob(descriptor, part.version, is_verified=True)

    def verify(self, digest: Digest, size: int) -> object:
        """Hash a blob, unless that was done before. Return the state in which it is intact.

        Raises:
            BlobDamaged: the digest differs. Otherwise as :meth:`open`.
        """
        with self._cache() as cache:
            return self._verify(cache, digest, size)

    def verify_again(self, part: BlobPart | StoredPart) -> None:
        """Hash a blob that could not be sent, although it was found intact before.

        Raises as :meth:`verify`.
        """
        if isinstance(part, StoredPart):  # its digest is that of another form
            blob = self.open_stored(part)
            try:
                self._digest(part.path, blob.descriptor or 0, part.size)
            finally:
                blob.close()
            return
        self._intact.pop(part.digest.hex, None)
        with self._cache() as cache:
            try:
                self._verify(cache, part.digest, part.size, uses_cache=False)
            finally:
                cache.save()  # at once, because the next check reads it

    def _verify(
        self, cache: VerifiedBlobs, digest: Digest, size: int, *, uses_cache: bool = True
    ) -> object:
        try:
            descriptor = self._store.open_hot(digest, size)
        except BlobMissing:
            if not (self._store.has_cold(digest) or self._store.is_shared(digest)):
                raise
            return self._verify_cold(cache, digest, size, uses_cache=uses_cache)
        try:
            before = FileVersion.of_status(os.fstat(descriptor))
            if not (uses_cache and cache.has(digest, size)):
                with cache.noting(digest):
                    self._hash(descriptor, digest, size)
            # Only if it did not change in the meantime, so that the verdict is about this version.
            if FileVersion.of_status(os.fstat(descriptor)) == before:
                self._remember(digest, before, [before])
        finally:
            os.close(descriptor)
        self._save(cache)
        return before

    def _verify_cold(
        self, cache: VerifiedBlobs, digest: Digest, size: int, *, uses_cache: bool
    ) -> object:
        # The checksums of chunks find accidents. Only the digest says that the bytes are those of the blob.
        blob, before = cache.open_cold(digest, size)
        if not (uses_cache and cache.has_cold(digest, size)):
            try:
                blob.check()
            except Damaged:
                cache.forget(before)
                raise
            cache.note(before)
            self._on_verified(size)
        if cold_state(self._store, digest, blob.base) == before.versions:
            # Before the state, which `open` compares with the files of this base.
            self._bases[digest.hex] = blob.base
            self._remember(digest, before.versions, before.versions)
        self._save(cache)
        return before.versions

    def _remember(
        self, digest: Digest, state: object, versions: Sequence[FileVersion | None]
    ) -> None:
        """Remember that a blob is intact, if its files have not changed just now."""
        changes = [max(one.modified, one.changed) for one in versions if one is not None]
        if max(changes, default=0) < time.time_ns() - _MARGIN_NS:
            if len(self._intact) >= _MAX_KNOWN:
                self._intact.clear()
                self._bases.clear()
            self._intact[digest.hex] = state

    def _hash(self, descriptor: int, digest: Digest, size: int) -> None:
        path = self._store.blob_path(digest)
        found = self._digest(path, descriptor, size)
        if found != digest:
            message = f"blob {quote(path)} is damaged: its bytes have digest {found}"
            raise BlobDamaged(message, advice=ADVICE)

    def _digest(self, path: str, descriptor: int, size: int) -> Digest:
        try:
            found = Digest.of_pieces(_pieces(descriptor, size))
        except OSError as error:  # a disk that has lost the bytes is no better than wrong ones
            message = f"blob {quote(path)} cannot be read: {error.strerror}"
            raise BlobDamaged(message, advice=ADVICE) from error
        self._on_verified(size)
        return found

    def cold_pieces(self, part: BlobPart) -> Iterator[ColdPiece]:
        """Open a cold blob, and return the pieces of a range, none of them read yet. Raises as :meth:`ColdPiece.decode`."""
        blob = self._store.open_cold(part.digest, part.size)
        pieces = _pieces_of(blob, part)
        # The first one is found here, because only that may take long: before it are all that the range leaves out.
        return chain([*islice(pieces, 1)], pieces)

    def save(self) -> None:
        """Save the results for the next process, except those of threads that are verifying now."""
        for cache, lock in self._caches:
            if lock.acquire(blocking=False):
                try:
                    cache.save()
                finally:
                    lock.release()

    def _save(self, cache: VerifiedBlobs) -> None:
        """Save the results of this thread from time to time, unless another one is saving its own."""
        is_due = time.monotonic() - self._local.saved > _SAVE_SECONDS
        # Several at once would take the processor from the loop, and replace each other's file if it grows.
        if is_due and self._saving.acquire(blocking=False):
            try:
                cache.save()
                self._local.saved = time.monotonic()
            finally:
                self._saving.release()

    @contextlib.contextmanager
    def _cache(self) -> Iterator[VerifiedBlobs]:
        """Yield the cache of this thread, because threads cannot share an instance."""
        if not hasattr(self._local, "cache"):
            self._local.cache, self._local.saved = self._store.verified_blobs(), time.monotonic()
            self._local.lock = threading.Lock()
            self._caches.append((self._local.cache, self._local.lock))
        with self._local.lock:
            yield self._local.cache


def _pieces_of(blob: ColdBlob, part: BlobPart) -> Iterator[ColdPiece]:
    end = part.begin + part.length
    for chunks in blob.container.chunk_ranges(PIECE, part.size):
        if chunks.begin >= end:
            return
        if chunks.end > part.begin:
            yield ColdPiece(blob, part.digest, max(chunks.begin, part.begin), min(chunks.end, end))


def _pieces(descriptor: int, size: int) -> Generator[memoryview, None, None]:
    offset = 0
    while piece := os.pread(descriptor, min(PIECE, size - offset), offset):
        yield memoryview(piece)  # if it became shorter, it has another digest
        offset += len(piece)


def read_ahead(descriptor: int, offset: int, count: int) -> None:
    """Read a range into the page cache."""
    for place in range(offset, offset + count, PIECE):
        os.pread(descriptor, min(PIECE, offset + count - place), place)

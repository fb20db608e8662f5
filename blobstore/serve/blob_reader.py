"""Opens the blobs of responses, after checking them once. All of it blocks; nothing here knows of sockets.

A hot blob is hashed before its first byte is sent, and again if its file has changed since, judged as in the
store's cache of verified blobs, which is read and extended. A cold blob is decoded in pieces of which each has
a checksum, so it needs no check of its own.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import FileVersion, open_regular
from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.store.blobs import ADVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from blobstore.serve.messages import BlobPart, StoredPart
    from blobstore.store.local import LocalStore
    from blobstore.store.verified_cache import VerifiedBlobs

PIECE = 1 << 20
_MARGIN_NS = 3 * 10**9
"""A file that has changed so lately may change again without another time; see ``verified_cache``."""
_SAVE_SECONDS = 10.0
_MAX_KNOWN = 1 << 20
_CAN_PROBE = hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT")


class HotBlob(NamedTuple):
    """An open file of a blob. The caller closes the descriptor."""

    descriptor: int
    is_verified: bool
    """Whether its bytes are known to be right."""


class BlobReader:
    """The blobs of a store. Threads may share it."""

    def __init__(self, store: LocalStore, on_verified: Callable[[int], object]) -> None:
        """Read from ``store``; ``on_verified`` gets the bytes of each blob that was hashed."""
        self._store = store
        self._on_verified = on_verified
        self._intact: dict[str, FileVersion] = {}
        self._local = threading.local()
        self._caches: list[VerifiedBlobs] = []

    def open_hot(self, part: BlobPart) -> HotBlob | None:
        """Open the file of a blob; None if it has none, because it is cold.

        Raises:
            BlobMissing: it is neither hot nor cold.
            BlobDamaged: it has another size. StoreError: it cannot be read.
        """
        try:
            descriptor = self._store.open_hot(part.digest, part.size)
        except BlobMissing:
            if self._store.has_cold(part.digest):
                return None
            raise
        version = FileVersion.of_status(os.fstat(descriptor))
        return HotBlob(descriptor, self._intact.get(part.digest.hex) == version)

    def open_stored(self, part: StoredPart) -> HotBlob:
        """Open the file of a cold blob, which was hashed when it was listed.

        Raises:
            BlobMissing: it is another file by now. StoreError: it cannot be read.
        """
        try:
            descriptor, _ = open_regular(self._store.cold_path(part.digest))
        except OSError as error:
            raise BlobMissing(f"cold blob {part.digest} cannot be read: {error}") from error
        if FileVersion.of_status(os.fstat(descriptor)) != part.version:
            os.close(descriptor)
            raise BlobMissing(f"cold blob {part.digest} was replaced")
        return HotBlob(descriptor, is_verified=True)

    def verify(self, digest: Digest, size: int) -> None:
        """Hash the file of a blob, unless that was done before.

        Raises:
            BlobDamaged: the digest differs. Otherwise as :meth:`open_hot`.
        """
        cache = self._cache()
        descriptor = self._store.open_hot(digest, size)
        try:
            before = FileVersion.of_status(os.fstat(descriptor))
            if not cache.has(digest, size):
                with cache.noting(digest):
                    self._hash(descriptor, digest, size)
            is_settled = max(before.modified, before.changed) < time.time_ns() - _MARGIN_NS
            if is_settled and FileVersion.of_status(os.fstat(descriptor)) == before:
                if len(self._intact) >= _MAX_KNOWN:
                    self._intact.clear()
                self._intact[digest.hex] = before
        finally:
            os.close(descriptor)
        if time.monotonic() - self._local.saved > _SAVE_SECONDS:
            cache.save()
            self._local.saved = time.monotonic()

    def _hash(self, descriptor: int, digest: Digest, size: int) -> None:
        found = Digest.of_pieces(_pieces(descriptor, size))
        self._on_verified(size)
        if found != digest:
            raise BlobDamaged(
                f"blob {quote(self._store.blob_path(digest))} is damaged: its bytes have digest {found}",
                advice=ADVICE,
            )

    def cold_pieces(self, part: BlobPart) -> Iterator[bytes]:
        """Yield a range of a cold blob. Each piece is decoded, and checked, when it is asked for.

        Raises:
            BlobMissing, BlobDamaged, StoreError: it cannot be opened or decoded.
        """
        blob = self._store.open_cold(part.digest, part.size)
        end = part.begin + part.length
        for chunks in blob.container.chunk_ranges(PIECE, part.size):
            first, last = max(chunks.begin, part.begin), min(chunks.end, end)
            if first < last:
                piece = bytearray(last - first)
                blob.read_into(first, memoryview(piece))
                yield bytes(piece)

    def save(self) -> None:
        """Keep what was found intact for the next process. No thread may be verifying."""
        for cache in self._caches:
            cache.save()

    def _cache(self) -> VerifiedBlobs:
        """Return the cache of this thread: an instance is not made for several."""
        if not hasattr(self._local, "cache"):
            self._local.cache, self._local.saved = self._store.verified_blobs(), time.monotonic()
            self._caches.append(self._local.cache)
        cache: VerifiedBlobs = self._local.cache
        return cache


def _pieces(descriptor: int, size: int) -> Generator[memoryview, None, None]:
    offset = 0
    while piece := os.pread(descriptor, min(PIECE, size - offset), offset):
        yield memoryview(piece)  # if it became shorter, it has another digest
        offset += len(piece)


def is_in_memory(descriptor: int, offset: int, count: int) -> bool:
    """Return whether reading a range is likely not to wait for a disk: its ends are in the page cache."""
    if not _CAN_PROBE or not count:
        return True
    byte = bytearray(1)
    try:
        for place in (offset, offset + count - 1):
            os.preadv(descriptor, [byte], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # the file system does not say
        return True
    return True


def read_ahead(descriptor: int, offset: int, count: int) -> None:
    """Read a range into the page cache."""
    for place in range(offset, offset + count, PIECE):
        os.pread(descriptor, min(PIECE, offset + count - place), place)

"""What a store asks of a place elsewhere that has blobs which the store lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blobstore.core.digest import BlobId, Digest
    from blobstore.core.progress import Progress


class BlobRange(NamedTuple):
    """Some of the bytes of a blob."""

    digest: Digest
    size: int
    """Of the whole blob."""
    begin: int
    end: int


class Ranges(Protocol):
    """Ranges of blobs in memory."""

    def take(self, digest: Digest, begin: int, end: int) -> memoryview | None:
        """Return memory that has just these bytes and is not returned again; None if none does."""
        ...

    def find(self, digest: Digest, begin: int, end: int) -> memoryview:
        """Return bytes of a blob. Raises KeyError if not all of them were read."""
        ...


class RemoteBlobs(Protocol):
    """Reads blobs from elsewhere that a local store lacks."""

    def is_elsewhere(self, digest: Digest) -> bool:
        """Return whether the local store lacks a blob."""
        ...

    def stored_size(self, blob: BlobId) -> int:
        """Return how many bytes are read for a blob; fewer than its own if they are compressed."""
        ...

    def load(
        self, blobs: Iterable[tuple[Digest, int, memoryview]], progress: Progress | None = None
    ) -> None:
        """Fill memory with blobs, given by digest, size and memory, and check their digests.

        Raises:
            BlobMissing, BlobDamaged: a blob is missing, or has other bytes.
            RemoteError: the remote cannot be reached, refuses access or misbehaves.
        """
        ...

    def read_ranges(self, wanted: Iterable[BlobRange]) -> Ranges:
        """Read parts of blobs into memory that may be read-only. Raises as :meth:`load`."""
        ...

"""Blobs on their way to a remote: what is sent, and their bytes, hashed while they are sent."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import BlobId, Digester
from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from blobstore.core.digest import Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.local import LocalStore


class PushedBlob(NamedTuple):
    """A blob that the target must have."""

    digest: Digest
    size: int
    label: str
    pieces: Callable[[], Generator[bytes | memoryview, None, None]]
    """Returns its bytes from the first one on, unchecked."""

    @classmethod
    def of(cls, blob: Descriptor, store: LocalStore) -> PushedBlob:
        """Return a blob of a store."""
        return cls(*blob.id, blob.name or blob.media_type, partial(store.read_pieces, *blob.id))

    @property
    def id(self) -> BlobId:
        """The blob by digest and size."""
        return BlobId(self.digest, self.size)


class CheckedPieces:
    """The bytes of a blob, hashed while they are read once, although they are asked for in parts."""

    def __init__(self, blob: PushedBlob, report: Callable[[int], object] = lambda _: None) -> None:
        """Read nothing yet. ``report`` is called with the bytes done; those sent again count once."""
        self._blob = blob
        self._report = report
        self._reported = 0
        self._source: Generator[bytes | memoryview, None, None] | None = None
        self._digester = Digester()
        self._piece = memoryview(b"")
        """The last piece that was read; it ends where the digest does."""

    def close(self) -> None:
        """Close the reader of the blob."""
        if self._source is not None:
            self._source.close()

    def __call__(self, offset: int) -> Generator[memoryview, None, None]:
        """Yield the bytes from ``offset`` on, the last of them only if all are intact.

        Raises:
            BlobDamaged: the digest differs.
        """
        # A digest cannot go back, so bytes before the last piece are read again from the start of
        # the blob.
        if self._source is None or offset < self._digester.size - len(self._piece):
            self.close()
            self._source = self._blob.pieces()
            self._digester, self._piece = Digester(), memoryview(b"")
        while offset < self._blob.size:
            end = self._digester.size
            if offset < end:
                yield self._piece[offset - end :]
                offset = end
                if end > self._reported:
                    self._report(end - self._reported)
                    self._reported = end
            else:
                self._read_piece()

    def _read_piece(self) -> None:
        blob, digester = self._blob, self._digester
        piece = next(self._source, None) if self._source is not None else None
        if piece is not None:
            self._piece = memoryview(piece).cast("B")
            digester.update(piece)
        # Checked before the last piece is passed on, so the server never gets the end of a damaged
        # blob.
        if (piece is None or digester.size >= blob.size) and digester.digest() != blob.digest:
            raise BlobDamaged(
                f"layer {quote(blob.label)}: blob {blob.digest} is damaged: it has digest "
                f"{digester.digest()}",
                advice="nothing was published; run 'blobstore repair', then push again",
            )

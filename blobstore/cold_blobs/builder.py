"""Compresses a hot blob into a temporary file, then reads that back, decodes and hashes it.

A delta must decode with the bytes that its base's digest promises. A delta that was encoded against a
corrupted base would decode only until the base is repaired, and would then be lost. So the file of the
base is hashed, and must be the same file before and after the delta is decoded.
"""

from __future__ import annotations

import contextlib
import os
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from blobstore.cold_blobs.batches import BlobProgress
from blobstore.cold_blobs.blob_encoder import BlobEncoder, write_verified
from blobstore.core.files import FileState, write_all
from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.store.bases import WholeBases
from blobstore.store.cold import ColdBlob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import Final

    from typing_extensions import Buffer

    from blobstore.cold_blobs.batches import Report, TemporaryFiles
    from blobstore.cold_blobs.blob_encoder import SizeEstimator
    from blobstore.compression.base import BaseBlob
    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.local import LocalStore

BLOCK: Final = 4096
"""Bytes that file systems allocate at least."""
_ATTEMPTS: Final = 3
"""Attempts to decode a delta, if its base is frozen or thawed at the same time."""


class EncodedBlob(NamedTuple):
    """A blob whose cold file is durable and was verified, or the reason why it has none."""

    blob: Descriptor
    path: Path | None = None
    """The temporary file; None if the cold file has its final path already."""
    state: FileState | None = None
    """Identifies the verified file; None if there is no cold file."""
    stored: int = 0
    base: Digest | None = None
    fault: BlobMissing | BlobDamaged | None = None
    """Why the blob cannot be read. Without fault and state, compressing it saves nothing."""


class _FileOutput:
    """A temporary file that a cold file is written to."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = 0

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        write_all(self._descriptor, data)
        self.size += memoryview(data).nbytes

    def clear(self) -> None:
        """Discard what was written."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.size = 0


class ColdBlobBuilder:
    """Builds the cold files of blobs. Threads share it."""

    def __init__(
        self,
        store: LocalStore,
        estimator: SizeEstimator,
        bases: Mapping[Digest, BlobId],
        *,
        chains: bool = False,
    ) -> None:
        """Encode blobs against ``bases``, which may be deltas themselves if ``chains`` are made."""
        self._store = store
        self._chains = chains
        self._estimator = estimator
        self._bases = bases
        self._verified = WholeBases(store)
        self.has_links = True
        """Whether the file system has hard links; without them, only cold blobs can be bases."""
        self.fallbacks: set[Digest] = set()
        """Blobs that are compressed alone, because their delta or their base is not intact."""

    def estimate(self, blob: Descriptor) -> tuple[int, Digest | None]:
        """Return about the compressed size of a blob, and its base if that saves enough.

        Raises as :meth:`SizeEstimator.estimate`.
        """
        base = self._base_of(blob)
        size = self._estimator.estimate(blob.id, base)
        saves = base is not None and size < self._estimator.estimate(blob.id)
        return size, base.digest if base is not None and saves else None

    def _base_of(self, blob: Descriptor) -> BlobId | None:
        """Return the base that a blob is to be encoded against, if that is intact and can be kept."""
        base = self._bases.get(blob.digest)
        # A hot base must get a second hard link, or it could be deleted before its deltas.
        if base is None or not (self.has_links or self._store.has_cold(base.digest)):
            return None
        # Checked again when the delta is decoded; checking it here saves an encoding in vain.
        if self._verified.intact_file(*base) is not None:
            return base
        self.fallbacks.add(blob.digest)
        return None

    def build(self, blob: Descriptor, files: TemporaryFiles, report: Report) -> EncodedBlob:
        """Build the cold file of a blob, or verify an existing one.

        Args:
            blob: the blob.
            files: make the temporary file.
            report: called with the bytes read and decoded, twice the blob's size in total.

        Raises:
            OSError: the file cannot be written.
        """
        progress = BlobProgress(report, blob.name, 2 * blob.size)
        try:
            encoded = None
            if self._store.has_cold(blob.digest):
                # --keep-hot or an interrupted freeze left it. If it is damaged, the hot file replaces it.
                with contextlib.suppress(BlobMissing, BlobDamaged):
                    self._store.open_cold(*blob.id)
                    where = self._store.cold_path(blob.digest)
                    encoded = self._verify(blob, where, None, progress.add)
            if encoded is None:
                encoded = self._encode(blob, files, progress.add)
        except (BlobMissing, BlobDamaged) as error:
            return EncodedBlob(blob, fault=error)
        progress.finish()
        return encoded

    def _encode(
        self, blob: Descriptor, files: TemporaryFiles, report: Callable[[int], None]
    ) -> EncodedBlob:
        """Encode a blob into a new file, and verify that.

        Raises:
            BlobDamaged: the file does not decode to the blob.
        """
        base = self._base_of(blob)
        in_chain = self._chains and base is not None and self._is_delta(base)
        encoder = BlobEncoder(
            self._store,
            blob.id,
            self._estimator.level,
            base,
            chains=self._chains,
            in_chain=in_chain,
        )
        with files.create() as (path, descriptor):
            output = _FileOutput(descriptor)

            def verify() -> EncodedBlob | None:
                os.fsync(descriptor)  # which may still change the state of the file
                return self._verify(blob, str(path), path, report)

            try:
                encoded = write_verified(
                    encoder,
                    output,
                    # File systems allocate complete blocks, so only fewer blocks are a gain.
                    is_gain=lambda: count_blocks(output.size) < count_blocks(blob.size),
                    verify=verify,
                    report=report,
                    on_fallback=lambda: self.fallbacks.add(blob.digest),
                )
            except BlobDamaged:
                self._store.check_digest(*blob.id)  # names the hot file if that is damaged
                raise
        if encoded is None:
            path.unlink()
            return EncodedBlob(blob)
        return encoded

    def _is_delta(self, blob: BlobId) -> bool:
        """Return whether a blob can be read only with its base."""
        return self._store.is_cold(blob.digest) and self._store.open_cold(*blob).base is not None

    def _verify(
        self, blob: Descriptor, where: str, path: Path | None, report: Callable[[int], None]
    ) -> EncodedBlob | None:
        """Decode and hash the cold file at ``where``; return None if its base is damaged or changes.

        Raises:
            BlobMissing, BlobDamaged: it is not there, or does not decode to the blob.
        """

        def first_file(digest: Digest, size: int) -> Iterator[BaseBlob]:
            files = self._store.base_files(digest, size, in_chain=self._chains)
            return islice(files, 1)  # the one that was hashed

        # Read before the file is decoded: the commit compares it, and so notices any later change.
        state = FileState.of(where)
        for _ in range(_ATTEMPTS):
            cold = ColdBlob(where, blob.digest, first_file)
            file = None
            if cold.base is not None:
                file = self._verified.intact_file(cold.base, cold.base_size)
                if file is None:
                    return None
            cold.check(report)
            if cold.base is None and state is not None:
                # Renaming keeps the state, so the committed file need not be hashed as a base.
                self._verified.add(blob.digest, (self._store.cold_path(blob.digest), state))
            # The base had one file all the time, so the bytes that were hashed are those that were
            # decoded against.
            if cold.base is None or self._verified.file(cold.base) == file:
                return EncodedBlob(blob, path, state, cold.stored, cold.base)
        return None


def count_blocks(size: int) -> int:
    """Return how many blocks of a file system a file of ``size`` bytes takes."""
    return -(-size // BLOCK)

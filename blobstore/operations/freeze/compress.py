"""The cold form of a blob: coded into a file, read back, decoded and hashed.

What is coded by another blob must decode by the bytes that the other one's digest promises. By other
bytes, rotten or written over, it would decode as well, until these are mended; then it would be lost. So
the file of the base that is decoded by is hashed, and must be the same file before and after.
"""

from __future__ import annotations

import contextlib
import os
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.files import write_all
from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.store.bases import WholeBases, forms_of_base
from blobstore.store.cold import ColdBlob, file_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from blobstore.compression.base import BaseBlob
    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.operations.freeze.batches import BatchRunner
    from blobstore.operations.freeze.blob_encoder import BlobEncoder, SizeEstimator
    from blobstore.store.cold import State
    from blobstore.store.local import LocalStore

BLOCK = 4096
"""What file systems give room in."""
_CHECKS = 3
"""How often a blob is decoded whose base becomes hot or cold meanwhile."""


class EncodedBlob(NamedTuple):
    """A blob whose cold form is whole, and durable."""

    blob: Descriptor
    path: Path | None
    """Its file; None if it has its name already."""
    state: State | None
    """That of the file; None if there is no use in one."""
    stored: int
    base: Digest | None


class ColdBlobBuilder:
    """Makes cold forms, on any thread."""

    def __init__(
        self, store: LocalStore, estimator: SizeEstimator, bases: Mapping[Digest, BlobId]
    ) -> None:
        """Take the store, how hard to try, and by what blobs may be coded."""
        self._store = store
        self._estimator = estimator
        self._bases = bases
        self._whole = WholeBases(store)
        self.has_links = True
        """Whether a base that is hot can have a second name; without that it can be none."""

    def coding(self, blob: Descriptor) -> BlobEncoder:
        """Return how a blob is best coded.

        Raises as :class:`BlobEncoder`.
        """
        base = self._bases.get(blob.digest)
        if base is None or not (self.has_links or self._store.has_cold(base.digest)):
            return self._alone(blob)
        coding = self._estimator.choose_encoder(blob.id, base)
        # What would be in vain need not be tried; it is looked at again when it is done.
        if coding.has_base and not self._whole.is_whole(*base, self._whole.form(base.digest)):
            return coding.without_base()
        return coding

    def make(self, blob: Descriptor, moving: BatchRunner) -> EncodedBlob:
        """Code a blob, and check that it decodes to what it was.

        Raises:
            BlobMissing, BlobDamaged: the blob is not whole.
            OSError: the file cannot be written.
        """
        left = 2 * blob.size

        def tell(count: int) -> None:
            nonlocal left
            count = min(count, left)  # some is done twice
            left -= count
            moving.tell(count, blob.name)

        made = self._found(blob, tell) or self._made(blob, moving, tell)
        tell(left)
        return made

    def settled(self, made: EncodedBlob) -> None:
        """Note that what was made has its name."""
        if made.base is None and made.state is not None:
            cold = self._store.cold_path(made.blob.digest)
            self._whole.add(made.blob.digest, (cold, made.state))

    def _alone(self, blob: Descriptor) -> BlobEncoder:
        return self._estimator.choose_encoder(blob.id)

    def _found(self, blob: Descriptor, tell: Callable[[int], None]) -> EncodedBlob | None:
        """Return the cold form beside the hot one, kept or left by a killed freeze, if it is whole."""
        if not self._store.has_cold(blob.digest):
            return None
        with contextlib.suppress(BlobMissing, BlobDamaged):  # the hot one is there to make it anew
            self._store.open_cold(blob.digest, blob.size)
            return self._checked(blob, self._store.cold_path(blob.digest), None, tell)
        return None

    def _made(
        self, blob: Descriptor, moving: BatchRunner, tell: Callable[[int], None]
    ) -> EncodedBlob:
        coding = self.coding(blob)
        if coding.has_base:
            with contextlib.suppress(BlobDamaged):  # so much the base may be to blame for
                made = self._coded(blob, coding, moving, tell)
                if made is not None:
                    return made
            coding = coding.without_base()
        try:
            made = self._coded(blob, coding, moving, tell)
        except BlobDamaged:
            self._store.check_digest(blob.digest, blob.size)  # says so of the blob itself
            raise
        if made is None:
            raise AssertionError
        return made

    def _coded(
        self,
        blob: Descriptor,
        coding: BlobEncoder,
        moving: BatchRunner,
        tell: Callable[[int], None],
    ) -> EncodedBlob | None:
        """Code a blob into a new file; None if it is coded by what is not whole.

        Raises:
            BlobDamaged: it does not decode to what it should be.
        """
        with moving.temporary() as (path, descriptor):
            coding.write(lambda data: write_all(descriptor, data), tell)
            stored = os.fstat(descriptor).st_size
            is_gain = blocks(stored) < blocks(blob.size)
            if not is_gain:
                os.ftruncate(descriptor, 0)
        if not is_gain:
            path.unlink()
            return EncodedBlob(blob, None, None, blob.size, None)
        made = None
        try:
            made = self._checked(blob, str(path), path, tell)
        finally:
            if made is None:
                path.unlink(missing_ok=True)
        return made

    def _checked(
        self, blob: Descriptor, where: str, path: Path | None, tell: Callable[[int], None]
    ) -> EncodedBlob | None:
        """Decode a cold form; None if what it is coded by is not whole, or does not keep still.

        Raises:
            BlobMissing, BlobDamaged: it is not there, or does not decode to the blob.
        """
        state = file_state(where)
        for _ in range(_CHECKS):
            cold = ColdBlob(where, blob.digest, self._first_form)
            form = None
            if cold.base is not None:
                form = self._whole.form(cold.base)
                if not self._whole.is_whole(cold.base, cold.base_size, form):
                    return None
            cold.check(tell)
            if cold.base is None or self._whole.form(cold.base) == form:
                return EncodedBlob(blob, path, state, cold.stored, cold.base)
        return None

    def _first_form(self, digest: Digest, size: int) -> Iterator[BaseBlob]:
        """Yield the form of a base that was hashed, and no other."""
        return islice(forms_of_base(self._store, digest, size), 1)


def blocks(size: int) -> int:
    """Return the blocks of a file system that a file of ``size`` bytes takes."""
    return -(-size // BLOCK)

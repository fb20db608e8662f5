"""Blobs of a store, read and checked, whether they are hot or cold.

A blob is trusted for its size when it is opened, and for its digest when that is asked for. One that
is not there may be there cold: that is looked for only then, so that it costs nothing where nothing is
cold. And since a blob may be frozen or thawed between two looks, there are several.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from blobstore.core.digest import Digest, Digester
from blobstore.core.escape import quote
from blobstore.core.files import read_exactly, write_all
from blobstore.errors import BlobDamaged, BlobMissing, Damaged, InvalidHeader, StoreError
from blobstore.safetensors.header import Header
from blobstore.store.bases import forms_of_base
from blobstore.store.cold import ColdShelf
from blobstore.store.hot import ADVICE, HotShelf

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from blobstore.compression.base import BaseBlob
    from blobstore.core.mmap import MappedRegion
    from blobstore.store.layout import Layout

__all__ = ["ADVICE", "BlobReader"]

_MAX_SMALL_BLOB = 256 * 2**20
_LOOKS = 3
"""How often a blob is looked for, hot and cold, before it is missing."""

_Found = TypeVar("_Found")


class BlobReader:
    """The blobs of a store, for reading."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.hot = HotShelf(layout)
        """Blobs that are files of their own."""
        self.pinned = HotShelf(layout, layout.base_blob)
        """Second names of blobs by which cold ones are coded."""
        # By a reader of its own: one that held itself would live until the collector comes by.
        self.cold = ColdShelf(layout, partial(_forms_in, layout))
        """Blobs that are coded."""

    def exists(self, digest: Digest, size: int) -> bool:
        """Tell whether the blob is here, hot or cold, by its size; the digest is not computed.

        Raises:
            BlobDamaged: a file of that name has another size or is not a regular file.
        """
        try:
            self.check_size(digest, size)
        except BlobMissing:
            return False
        return True

    def has(self, digest: Digest) -> bool:
        """Tell whether there is a file in the place of a blob, hot or cold, whatever is in it."""
        return any(self.hot.has(digest) or self.cold.has(digest) for _ in range(_LOOKS))

    def is_cold(self, digest: Digest) -> bool:
        """Tell whether a blob is here cold only."""
        return not self.hot.has(digest) and self.cold.has(digest)

    def frozen(self) -> set[Digest]:
        """Return the blobs that are here cold only.

        Raises:
            StoreError: the cold ones cannot be listed.
        """
        return {digest for digest in self.cold.files() if not self.hot.has(digest)}

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that the blob is here, hot or cold, and has ``size`` bytes.

        Raises:
            BlobMissing: it is not in the store.
            BlobDamaged: it has another size; or is cold, and what it is coded by is not here.
        """
        try:
            self.hot.check_size(digest, size)
        except BlobMissing:
            self._either(
                lambda: self.hot.check_size(digest, size), lambda: self._check_cold(digest, size)
            )

    def open_blob(self, digest: Digest, size: int) -> int:
        """Open a blob of ``size`` bytes; return its descriptor, which the caller closes.

        That of a cold blob is of a file in memory, which takes its size: read it by other means.

        Raises:
            BlobMissing: it is not in the store.
            BlobDamaged: it has another size, is a symbolic link, or cannot be decoded.
        """
        try:
            return self.hot.open(digest, size)
        except BlobMissing:
            return self._either(
                lambda: self.hot.open(digest, size), lambda: self._open_decoded(digest, size)
            )

    def map_blobs(
        self, blobs: Sequence[tuple[Digest, int]], slots: Iterable[int], region: MappedRegion
    ) -> Iterator[int]:
        """Map the blobs at ``slots`` of ``blobs`` into the same slots of ``region``, yielding each.

        Cold ones are decoded into them. No descriptor stays open. Raises as :meth:`open_blob`.
        """
        for slot in slots:
            digest, size = blobs[slot]
            try:
                self.hot.map(digest, size, slot, region)
            except BlobMissing:
                self.bring_blob(digest, size, slot, region)
            yield slot

    def bring_blob(self, digest: Digest, size: int, slot: int, region: MappedRegion) -> None:
        """Map a blob into a slot of ``region``, or decode it there. Raises as :meth:`open_blob`."""
        self._either(
            lambda: self.hot.map(digest, size, slot, region),
            lambda: self._decode_into(digest, size, slot, region),
        )

    def is_cached(self, digest: Digest, size: int) -> bool:
        """Tell whether most of a blob's file is in the page cache.

        Raises as :meth:`open_blob`; BlobMissing also where a blob is cold only.
        """
        return self.hot.is_cached(digest, size)

    def read_into(
        self,
        digest: Digest,
        size: int,
        offset: int,
        buffer: memoryview,
        *,
        past_cache: bool = False,
    ) -> None:
        """Read bytes of a blob of ``size`` bytes, from ``offset`` on, until ``buffer`` is full.

        With ``past_cache`` they do not come into the page cache. ``offset`` and ``buffer`` begin at a
        page then, and ``buffer`` ends with one, behind the end of the blob if need be. Of a cold blob
        only what is wanted is decoded.

        Raises:
            BlobDamaged: also when the blob ends before. Otherwise as :meth:`open_blob`.
        """
        try:
            self.hot.read_into(digest, size, offset, buffer, past_cache=past_cache)
        except BlobMissing:
            self._either(
                lambda: self.hot.read_into(digest, size, offset, buffer, past_cache=past_cache),
                lambda: self._read_cold(digest, size, offset, buffer),
            )

    def read_blob(self, digest: Digest, size: int, limit: int = _MAX_SMALL_BLOB) -> bytes:
        """Return the bytes of a small blob, such as a config, after checking its digest.

        Raises:
            BlobDamaged: also when the digest differs. Otherwise as :meth:`open_blob`.
        """
        if size > limit:
            raise BlobDamaged(
                f"blob {digest} of {size} bytes is too large to be read as a small file"
            )
        descriptor = self.open_blob(digest, size)
        try:
            data = read_exactly(descriptor, size, 0)
        finally:
            os.close(descriptor)
        found = Digest.of(data)
        if found != digest:
            raise _wrong_digest(self.layout.blob(digest), digest, found)
        return data

    def read_blob_header(self, digest: Digest, size: int) -> Header:
        """Return the checked safetensors header of a tensor blob.

        Raises:
            BlobDamaged: the header breaks the format. Otherwise as :meth:`open_blob`.
        """
        (header,) = self.read_headers([(digest, size)])
        if isinstance(header, Header):
            return header
        raise header

    def read_headers(
        self, blobs: Iterable[tuple[Digest, int]], region: MappedRegion | None = None
    ) -> Iterator[Header | Damaged | StoreError]:
        """Yield the checked header of each tensor blob, or what is wrong with the blob.

        With ``region``, each that is not cold is mapped into the slot of its place in ``blobs``.
        """
        for slot, (digest, size) in enumerate(blobs):
            try:
                try:
                    header = self.hot.read_header(digest, size, slot, region)
                except BlobMissing:
                    header = self._cold_header(digest, size, slot, region)
            except InvalidHeader as error:
                message = f"blob {quote(self.layout.blob(digest))}: {error}"
                yield BlobDamaged(message)
            except (Damaged, StoreError) as error:
                yield error
            except OSError as error:
                yield self.hot.explained(digest, error)
            else:
                yield header

    def check_digest(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Read the whole blob and compare its digest; ``progress`` gets the bytes of each read.

        A cold one is decoded. Of one that is hot and cold, the hot form alone is looked at.

        Raises:
            BlobDamaged: the digest differs. Otherwise as :meth:`open_blob`.
        """
        _check(self.read_pieces(digest, size), self.layout.blob(digest), digest, progress)

    def check_pinned(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Read the second name of a base and compare its digest. As :meth:`check_digest`."""
        pieces = self.pinned.pieces(self.pinned.open(digest, size), digest, size)
        _check(pieces, self.layout.base_blob(digest), digest, progress)

    def check_cold(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Decode the cold form of a blob and compare its digest.

        Raises:
            BlobMissing: there is none.
            BlobDamaged: it cannot be decoded, or gives other bytes.
        """
        self.cold.open(digest, size).check(progress)

    def read_pieces(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob, unchecked, in pieces that are good until the next one.

        Raises:
            BlobDamaged: also when it cannot be read to its end. Otherwise as :meth:`open_blob`.
        """
        try:
            pieces = self.hot.pieces(self.hot.open(digest, size), digest, size)
        except BlobMissing:
            pieces = self._either(
                lambda: self.hot.pieces(self.hot.open(digest, size), digest, size),
                lambda: self.cold.open(digest, size).pieces(),
            )
        with contextlib.closing(pieces):
            yield from pieces

    def base(self, digest: Digest, size: int) -> BaseBlob:
        """Return a blob of ``size`` bytes by which others are coded.

        Raises as :func:`forms_of_base`.
        """
        return next(forms_of_base(self, digest, size))

    def blob_sizes(self) -> set[int]:
        """Return the sizes of all blobs that are not cold only."""
        return self.hot.sizes()

    def check_root(self) -> None:
        """Check that the store is a folder, if it is there at all.

        Raises:
            StoreError: something else is in its place, or a folder above it is closed.
        """
        root = self.layout.root
        try:
            is_other = root.exists() and not root.is_dir()
        except OSError as error:
            raise StoreError(f"cannot open the store {quote(root)}: {error.strerror}") from error
        if is_other:
            raise StoreError(f"the store {quote(root)} is not a folder")

    # Cold blobs

    def _check_cold(self, digest: Digest, size: int) -> None:
        base = self.cold.open(digest, size).base
        if base is not None and not (self.has(base) or self.pinned.has(base)):
            path = quote(self.layout.cold_blob(digest))
            raise BlobDamaged(
                f"cold blob {path} cannot be decoded: its base {base} is missing{ADVICE}"
            )

    def _cold_header(
        self, digest: Digest, size: int, slot: int, region: MappedRegion | None
    ) -> Header:
        return self._either(
            lambda: self.hot.read_header(digest, size, slot, region),
            lambda: self.cold.open(digest, size).read_header(),
        )

    def _open_decoded(self, digest: Digest, size: int) -> int:
        blob = self.cold.open(digest, size)
        descriptor = _new_file()
        try:
            for piece in blob.pieces():
                write_all(descriptor, piece)
            os.lseek(descriptor, 0, os.SEEK_SET)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _decode_into(self, digest: Digest, size: int, slot: int, region: MappedRegion) -> None:
        blob = self.cold.open(digest, size)
        with region.making(slot, size) as room:
            blob.read_into(0, room)

    def _read_cold(self, digest: Digest, size: int, offset: int, buffer: memoryview) -> None:
        self.cold.open(digest, size).read_into(offset, buffer[: max(size - offset, 0)])

    @staticmethod
    def _either(hot: Callable[[], _Found], cold: Callable[[], _Found]) -> _Found:
        """Return what one of two ways to a blob gives, which may change places meanwhile.

        Raises:
            BlobMissing: it is neither hot nor cold; the message names the hot one.
        """
        for look in range(_LOOKS):
            try:
                return hot()
            except BlobMissing:
                if look == _LOOKS - 1:
                    raise
            with contextlib.suppress(BlobMissing):
                return cold()
        raise AssertionError


def _forms_in(layout: Layout, digest: Digest, size: int) -> Iterator[BaseBlob]:
    return forms_of_base(BlobReader(layout), digest, size)


def _new_file() -> int:
    """Return the descriptor of a new file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("blobstore", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _check(
    pieces: Generator[memoryview, None, None],
    path: str,
    digest: Digest,
    progress: Callable[[int], None] | None,
) -> None:
    digester = Digester()
    with contextlib.closing(pieces):
        for piece in pieces:
            digester.update(piece)
            if progress is not None:
                progress(len(piece))
    if digester.digest() != digest:
        raise _wrong_digest(path, digest, digester.digest())


def _wrong_digest(path: str, expected: Digest, found: Digest) -> BlobDamaged:
    return BlobDamaged(
        f"blob {quote(path)} is damaged: its bytes have digest {found}, expected {expected}{ADVICE}"
    )

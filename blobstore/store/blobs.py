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
from blobstore.store.cold import BaseCache, ColdShelf
from blobstore.store.hot import ADVICE, HotShelf

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.compression.base import BaseBlob
    from blobstore.core.mmap import MappedRegion
    from blobstore.store.cold import ColdBlob, Read
    from blobstore.store.layout import Folder, Layout

__all__ = ["ADVICE", "BlobReader"]

_MAX_SMALL_BLOB = 256 * 2**20
_LOOKS = 3
"""How often a blob is looked for, hot and cold, before it is missing."""

_Found = TypeVar("_Found")


class BlobReader:
    """The blobs of a store, for reading."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._hot = HotShelf(layout)
        """Blobs that are files of their own."""
        self._pinned = HotShelf(layout, layout.base_blob)
        """Second hard links of blobs that serve as bases."""
        # The shelf gets a reader of its own: one that referred to itself would live until the
        # garbage collector runs.
        self._cold = ColdShelf(layout, partial(_forms_in, layout))
        """Compressed blobs."""
        self._bases = BaseCache(self._cold)

    @property
    def root(self) -> Path:
        """The absolute path of the store's folder."""
        return self._layout.root

    def folder(self, name: Folder) -> Path:
        """Return the path of one of the store's folders, which may not exist yet."""
        path: Path = getattr(self._layout, name)
        return path

    def blob_path(self, digest: Digest) -> str:
        """Return the path of a hot blob; a string, because a model has thousands of blobs."""
        return self._layout.blob(digest)

    def cold_path(self, digest: Digest) -> str:
        """Return the path of a cold blob, which is named by the digest of the decoded bytes."""
        return self._layout.cold_blob(digest)

    def base_path(self, digest: Digest) -> str:
        """Return the path of the second hard link of a hot blob that is the base of cold ones."""
        return self._layout.base_blob(digest)

    # Which forms of a blob exist

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
        return any(self._hot.has(digest) or self._cold.has(digest) for _ in range(_LOOKS))

    def has_hot(self, digest: Digest) -> bool:
        """Return whether the blob has a file of its own, whatever its content."""
        return self._hot.has(digest)

    def has_cold(self, digest: Digest) -> bool:
        """Return whether the blob has a cold form, whatever its content."""
        return self._cold.has(digest)

    def has_base_link(self, digest: Digest) -> bool:
        """Return whether the blob has a second hard link that keeps it as a base."""
        return self._pinned.has(digest)

    def cold_files(self) -> dict[Digest, os.stat_result]:
        """Return the status of every cold blob's file.

        Raises:
            StoreError: they cannot be listed.
        """
        return self._cold.files()

    def cold_bases(
        self, cold: Mapping[Digest, os.stat_result] | None = None
    ) -> dict[Digest, Digest]:
        """Return the bases of the delta-compressed blobs among ``cold``, by default all cold blobs.

        Cold blobs that cannot be read are skipped.

        Raises:
            StoreError: they cannot be listed.
        """
        return self._bases.known(self.cold_files() if cold is None else cold)

    def base_of(
        self, digest: Digest, status: os.stat_result, *, must_be_known: bool = True
    ) -> Digest | None:
        """Return the base of a cold blob from :meth:`cold_files`; see :meth:`BaseCache.of`."""
        return self._bases.of(digest, status, must_be_known=must_be_known)

    def is_cold(self, digest: Digest) -> bool:
        """Tell whether a blob is here cold only."""
        return not self._hot.has(digest) and self._cold.has(digest)

    def frozen(self) -> set[Digest]:
        """Return the blobs that are here cold only.

        Raises:
            StoreError: the cold ones cannot be listed.
        """
        return {digest for digest in self._cold.files() if not self._hot.has(digest)}

    def check_size(self, digest: Digest, size: int, *, as_base: bool = False) -> None:
        """Check that the blob is here, hot or cold, and has ``size`` bytes.

        A blob that is needed only ``as_base`` may be here by its second hard link alone.

        Raises:
            BlobMissing: it is not in the store.
            BlobDamaged: it has another size; or is cold, and what it is coded by is not here.
        """
        if as_base and not self.has(digest):
            self._pinned.check_size(digest, size)
            return
        try:
            self._hot.check_size(digest, size)
        except BlobMissing:
            self._either(
                lambda: self._hot.check_size(digest, size), lambda: self._check_cold(digest, size)
            )

    def open_blob(self, digest: Digest, size: int) -> int:
        """Open a blob of ``size`` bytes; return its descriptor, which the caller closes.

        That of a cold blob is of a file in memory, which takes its size: read it by other means.

        Raises:
            BlobMissing: it is not in the store.
            BlobDamaged: it has another size, is a symbolic link, or cannot be decoded.
        """
        try:
            return self._hot.open(digest, size)
        except BlobMissing:
            return self._either(
                lambda: self._hot.open(digest, size), lambda: self._open_decoded(digest, size)
            )

    def open_hot(self, digest: Digest, size: int) -> int:
        """Open the blob's own file as :meth:`open_blob` does.

        Raises:
            BlobMissing: also if the blob is only cold.
        """
        return self._hot.open(digest, size)

    def open_cold(
        self, digest: Digest, size: int | None = None, read: Read | None = None
    ) -> ColdBlob:
        """Open the cold form of a blob; see :meth:`ColdShelf.open`."""
        return self._cold.open(digest, size, read)

    def map_hot(self, digest: Digest, size: int, slot: int, region: MappedRegion) -> None:
        """Map the blob's own file into a slot of ``region``. Raises as :meth:`open_hot`."""
        self._hot.map(digest, size, slot, region)

    def mmap_hot(self, digest: Digest, size: int) -> memoryview:
        """Return the mapped bytes of the blob's own file. Raises as :meth:`open_hot`."""
        return self._hot.whole(digest, size)

    def map_blobs(
        self, blobs: Sequence[tuple[Digest, int]], slots: Iterable[int], region: MappedRegion
    ) -> Iterator[int]:
        """Map the blobs at ``slots`` of ``blobs`` into the same slots of ``region``, yielding each.

        Cold ones are decoded into them. No descriptor stays open. Raises as :meth:`open_blob`.
        """
        for slot in slots:
            digest, size = blobs[slot]
            try:
                self._hot.map(digest, size, slot, region)
            except BlobMissing:
                self.bring_blob(digest, size, slot, region)
            yield slot

    def bring_blob(self, digest: Digest, size: int, slot: int, region: MappedRegion) -> None:
        """Map a blob into a slot of ``region``, or decode it there. Raises as :meth:`open_blob`."""
        self._either(
            lambda: self._hot.map(digest, size, slot, region),
            lambda: self._decode_into(digest, size, slot, region),
        )

    def is_cached(self, digest: Digest, size: int) -> bool:
        """Tell whether most of a blob's file is in the page cache.

        Raises as :meth:`open_blob`; BlobMissing also where a blob is cold only.
        """
        return self._hot.is_cached(digest, size)

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
            self._hot.read_into(digest, size, offset, buffer, past_cache=past_cache)
        except BlobMissing:
            self._either(
                lambda: self._hot.read_into(digest, size, offset, buffer, past_cache=past_cache),
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
            raise _wrong_digest(self._layout.blob(digest), digest, found)
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
                    header = self._hot.read_header(digest, size, slot, region)
                except BlobMissing:
                    header = self._cold_header(digest, size, slot, region)
            except InvalidHeader as error:
                message = f"blob {quote(self._layout.blob(digest))}: {error}"
                yield BlobDamaged(message)
            except (Damaged, StoreError) as error:
                yield error
            except OSError as error:
                yield self._hot.explained(digest, error)
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
        _check(self.read_pieces(digest, size), self._layout.blob(digest), digest, progress)

    def read_base_link(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of a base's second hard link as :meth:`read_pieces` does."""
        return self._pinned.pieces(self._pinned.open(digest, size), digest, size)

    def check_base_link(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Hash a base's second hard link as :meth:`check_digest` does."""
        pieces = self.read_base_link(digest, size)
        _check(pieces, self._layout.base_blob(digest), digest, progress)

    def check_cold(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Decode the cold form of a blob and compare its digest.

        Raises:
            BlobMissing: there is none.
            BlobDamaged: it cannot be decoded, or gives other bytes.
        """
        self._cold.open(digest, size).check(progress)

    def read_pieces(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob, unchecked, in pieces that are good until the next one.

        Raises:
            BlobDamaged: also when it cannot be read to its end. Otherwise as :meth:`open_blob`.
        """
        try:
            pieces = self._hot.pieces(self._hot.open(digest, size), digest, size)
        except BlobMissing:
            pieces = self._either(
                lambda: self._hot.pieces(self._hot.open(digest, size), digest, size),
                lambda: self._cold.open(digest, size).pieces(),
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
        return self._hot.sizes()

    def check_root(self) -> None:
        """Check that the store is a folder, if it is there at all.

        Raises:
            StoreError: something else is in its place, or a folder above it is closed.
        """
        root = self._layout.root
        try:
            is_other = root.exists() and not root.is_dir()
        except OSError as error:
            raise StoreError(f"cannot open the store {quote(root)}: {error.strerror}") from error
        if is_other:
            raise StoreError(f"the store {quote(root)} is not a folder")

    # Cold blobs

    def _check_cold(self, digest: Digest, size: int) -> None:
        base = self._cold.open(digest, size).base
        if base is not None and not (self.has(base) or self._pinned.has(base)):
            path = quote(self._layout.cold_blob(digest))
            raise BlobDamaged(
                f"cold blob {path} cannot be decoded: its base {base} is missing{ADVICE}"
            )

    def _cold_header(
        self, digest: Digest, size: int, slot: int, region: MappedRegion | None
    ) -> Header:
        return self._either(
            lambda: self._hot.read_header(digest, size, slot, region),
            lambda: self._cold.open(digest, size).read_header(),
        )

    def _open_decoded(self, digest: Digest, size: int) -> int:
        blob = self._cold.open(digest, size)
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
        blob = self._cold.open(digest, size)
        with region.writable_slot(slot, size) as room:
            blob.read_into(0, room)

    def _read_cold(self, digest: Digest, size: int, offset: int, buffer: memoryview) -> None:
        self._cold.open(digest, size).read_into(offset, buffer[: max(size - offset, 0)])

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

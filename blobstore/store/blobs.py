"""The blobs of a store, read and checked, whether they are hot or cold.

A blob is trusted for its size when it is opened; its digest is checked only on request. The cold file is
looked for only if there is no hot one, so a store without cold blobs pays nothing for them. Another process
may freeze or thaw a blob between two looks, so there are several.

A store may have a shared store below it. What reads a blob finds it there if this store has no file of it; what asks
for files (:meth:`BlobReader.has_hot`, :meth:`BlobReader.blob_path`) or changes them knows those of this store alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, TypeVar

from blobstore.core import limits
from blobstore.core.digest import BlobId, Digest
from blobstore.core.escape import quote
from blobstore.core.files import is_absence, read_exactly, status_of, write_all
from blobstore.core.mmap import new_buffer
from blobstore.core.progress import Meter
from blobstore.core.system import unnamed_file
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    Damaged,
    InvalidHeader,
    StoreError,
)
from blobstore.safetensors.header import Header
from blobstore.store.blob_ranges import LoadedRanges
from blobstore.store.cold import LOOKS, ColdShelf
from blobstore.store.cold_index import ColdIndex
from blobstore.store.hot import ADVICE, HotShelf
from blobstore.store.layout import why_refused
from blobstore.store.scan import check_own

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
    from pathlib import Path

    from blobstore.compression.base import BaseBlob
    from blobstore.core.mmap import MappedRegion
    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.blob_ranges import BlobRange
    from blobstore.store.cold import ColdBlob, Read
    from blobstore.store.layout import Folder, Layout

__all__ = ["ADVICE", "BlobReader"]

_Result = TypeVar("_Result")


class BlobReader:
    """The blobs of a store, for reading."""

    def __init__(self, layout: Layout, shared: BlobReader | None = None) -> None:
        self._layout = layout
        self._shared = shared
        self._hot = HotShelf(layout)
        """Blobs that are plain files."""
        self._pinned = HotShelf(layout, layout.base_blob)
        """Second hard links of hot blobs that serve as bases."""
        self._cold = ColdShelf(layout, self._hot, self._pinned)
        """Compressed blobs."""
        self.cold_index = ColdIndex(layout, self._cold)
        """The bases of cold blobs."""
        self._held: dict[Path, tuple[int, int]] | None = None
        """The devices and inodes of folders that must stay, once they are there."""

    # Paths

    @property
    def root(self) -> Path:
        """The absolute path of the store's folder."""
        return self._layout.root

    def folder(self, name: Folder) -> Path:
        """Return the path of one of the store's folders, which may not exist yet."""
        path: Path = getattr(self._layout, name)
        return path

    def blob_path(self, digest: Digest) -> str:
        """Return the path of the hot blob of a ``digest``, as a string; a frozen blob has no file there."""
        return self._layout.blob(digest)

    def cold_path(self, digest: Digest) -> str:
        """Return the path of a cold blob, which is named by the digest of the decoded bytes."""
        return self._layout.cold_blob(digest)

    def base_path(self, digest: Digest) -> str:
        """Return the path of the second hard link of a hot blob that is the base of cold ones."""
        return self._layout.base_blob(digest)

    def hold_folders(self) -> None:
        """From now on, refuse to read or write if a folder of the store is gone, or another one is in its place.

        A server of another's models would fetch what it misses, and write it below the mount point of a disk that is
        gone.
        """
        self._held = {}
        self.check_root()

    def check_root(self) -> None:
        """Check that the store is a folder, if it exists, and that its folders are those of :meth:`hold_folders`.

        Raises:
            StoreError: it is something else, or a folder above it cannot be entered.
        """
        if self._held is not None:
            for path in (self.root, self._layout.manifests, self._layout.blobs):
                status = status_of(path, follow=True)
                now = status and (status.st_dev, status.st_ino)
                if (self._held.setdefault(path, now) if now else self._held.get(path)) != now:
                    raise StoreError(
                        f"{quote(path)} is no longer the folder that it was: its disk may be gone"
                    )
        try:
            status = self.root.stat()
        except OSError as error:
            if is_absence(error):
                return
            raise StoreError(
                f"cannot open the store {quote(self.root)}: {error.strerror}"
            ) from error
        if not stat.S_ISDIR(status.st_mode):
            raise StoreError(f"the store {quote(self.root)} is not a folder")

    @contextlib.contextmanager
    def writing(self, *, is_dry: bool = False) -> Iterator[None]:
        """Convert an OSError of the block into an error that says why the store cannot be written.

        A dry run only reads, so its errors say that the store cannot be read.

        Raises:
            StoreError: the system refused an operation.
        """
        if self._held is not None:
            self.check_root()
        try:
            check_own(self.root)
            yield
        except OSError as error:
            self.check_root()
            raise StoreError(why_refused(self.root, error, is_dry=is_dry)) from error

    # Which blobs there are, hot or cold

    def exists(self, digest: Digest, size: int) -> bool:
        """Return whether the blob exists, hot or cold, by its size; the digest is not computed.

        Raises:
            BlobDamaged: a file of that name has another size or is not a regular file.
        """
        try:
            self.check_size(digest, size)
        except BlobMissing:
            return False
        return True

    def has(self, digest: Digest) -> bool:
        """Return whether the blob has a hot or a cold file, whatever its content."""
        # A blob that is frozen or thawed between the two looks is missed in both places.
        return any(self._hot.has(digest) or self._cold.has(digest) for _ in range(LOOKS))

    def has_hot(self, digest: Digest) -> bool:
        """Return whether the blob has a hot file, a file of its own, whatever its content."""
        return self._hot.has(digest)

    def has_cold(self, digest: Digest) -> bool:
        """Return whether the blob has a cold file, whatever its content."""
        return self._cold.has(digest)

    def has_base_link(self, digest: Digest) -> bool:
        """Return whether the blob has a second hard link that keeps it as a base."""
        return self._pinned.has(digest)

    def is_local(self, digest: Digest) -> bool:
        """Return True: all blobs are files; see :class:`~blobstore.store.protocols.BlobAccess`."""
        del digest
        return True

    def is_cold(self, digest: Digest) -> bool:
        """Return whether the blob has a cold file only."""
        return not self._hot.has(digest) and self._cold.has(digest)

    def frozen(self) -> set[Digest]:
        """Return the blobs that have a cold file only.

        Raises:
            StoreError: the cold blobs cannot be listed.
        """
        return {digest for digest in self._cold.files() if not self._hot.has(digest)}

    def blob_sizes(self) -> set[int]:
        """Return the sizes of all hot blobs, those of the shared store too.

        Raises:
            StoreError: they cannot be listed.
        """
        return self._hot.sizes() | (self._shared.blob_sizes() if self._shared else set())

    def cold_files(self) -> dict[Digest, os.stat_result]:
        """Return the status of every cold blob's file.

        Raises:
            StoreError: they cannot be listed.
        """
        return self._cold.files()

    def cold_bases(
        self, cold: Mapping[Digest, os.stat_result] | None = None
    ) -> dict[Digest, Digest]:
        """Return the bases of the deltas among the ``cold`` blobs, by default among all.

        Cold blobs without an entry in the index are opened; damaged ones among them are skipped.

        Raises:
            StoreError: they cannot be listed.
        """
        return self.cold_index.known(self.cold_files() if cold is None else cold)

    def base_of(self, digest: Digest, status: os.stat_result) -> Digest | None:
        """Return the base of a cold blob from :meth:`cold_files`; see :meth:`ColdIndex.of`."""
        return self.cold_index.of(digest, status)

    def is_shared(self, digest: Digest) -> bool:
        """Return whether the shared store has a file of the blob, and this one has none."""
        return self._shared is not None and self._shared.has(digest) and not self.has(digest)

    def readable_path(self, digest: Digest) -> str:
        """Return the path of the hot blob of a ``digest`` that is read: here, or in the shared store."""
        if self._shared is not None and self._shared.has_hot(digest) and not self.has(digest):
            return self._shared.blob_path(digest)
        return self.blob_path(digest)

    def _first(self, read: Callable[[HotShelf, ColdShelf], _Result]) -> _Result:
        """Return what ``read`` gets from the files of this store, or else from those of the shared one."""
        try:
            return read(self._hot, self._cold)
        except BlobMissing as error:
            if self._shared is None:
                raise
            missing = error
        try:
            return self._shared._first(read)
        except BlobMissing:
            store = quote(self._shared.root)
            raise BlobMissing(f"{missing.message}, and not in the shared store {store}") from None

    # Checking

    def check_size(self, digest: Digest, size: int, *, as_base: bool = False) -> None:
        """Check that the blob exists, hot or cold, and has ``size`` bytes.

        A blob that is needed only ``as_base`` may be here by its second hard link alone.

        Raises:
            BlobMissing: it is not in the store.
            BlobDamaged: it has another size; or it is cold and its base is missing.
        """
        if as_base and not self.has(digest):
            self._pinned.check_size(digest, size)
            return

        self._first(
            lambda hot, cold: _either(
                lambda: hot.check_size(digest, size), lambda: cold.check_size(digest, size)
            )
        )

    def check_digest(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Read all ``size`` bytes of the blob and compare their ``digest``.

        ``progress`` is called with the number of bytes of each read.

        A cold blob is decoded. If the blob is hot and cold, only the hot file is read.

        Raises:
            BlobDamaged: the digest differs. Otherwise as :meth:`open_blob`.
        """
        found = Digest.of_pieces(self.read_pieces(digest, size), progress)
        _check_found(self._layout.blob(digest), digest, found)

    def check_cold(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Decode the cold file of a blob and compare its digest.

        Raises:
            BlobMissing: there is no cold file.
            BlobDamaged: it cannot be decoded, or the digest differs.
        """
        self._cold.open(digest, size).check(progress)

    def check_base_link(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Read the second hard link of a base and compare its digest, as :meth:`check_digest` does."""
        found = Digest.of_pieces(self.read_base_link(digest, size), progress)
        _check_found(self._layout.base_blob(digest), digest, found)

    def has_blobs(self, blobs: Iterable[BlobId | Descriptor]) -> bool:
        """Return whether the store has all of these blobs, judged by their sizes."""
        try:
            for blob in blobs:
                self.check_size(blob.digest, blob.size)
        except BlobstoreError:
            return False
        return True

    # Opening and mapping

    def open_blob(self, digest: Digest, size: int) -> int:
        """Open a blob of ``size`` bytes; return its descriptor, which the caller closes.

        A cold blob is decoded into an anonymous file in memory, so read large ones by other means.

        Raises:
            BlobMissing: it is not in the store.
            BlobDamaged: it has another size, is a symbolic link, or cannot be decoded.
            StoreError: it cannot be read.
        """

        def decode(cold: ColdShelf) -> int:
            blob = cold.open(digest, size)
            descriptor = unnamed_file()
            try:
                for piece in blob.pieces():
                    write_all(descriptor, piece)
                os.lseek(descriptor, 0, os.SEEK_SET)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor

        return self._first(
            lambda hot, cold: _either(lambda: hot.open(digest, size), lambda: decode(cold))
        )

    def open_hot(self, digest: Digest, size: int) -> int:
        """Open the hot file of a blob as :meth:`open_blob` does.

        Raises:
            BlobMissing: there is no hot file. Otherwise as :meth:`open_blob`.
        """
        return self._first(lambda hot, _: hot.open(digest, size))

    def open_cold(
        self, digest: Digest, size: int | None = None, read: Read | None = None
    ) -> ColdBlob:
        """Open the cold file of a blob; see :meth:`ColdShelf.open`."""
        return self._first(lambda _, cold: cold.open(digest, size, read))

    def map_hot(self, digest: Digest, size: int, slot: int, region: MappedRegion) -> None:
        """Map the hot file of a blob into a slot of ``region``. Raises as :meth:`open_hot`."""
        self._first(lambda hot, _: hot.map(digest, size, slot, region))

    def mmap_hot(self, digest: Digest, size: int) -> memoryview:
        """Return the mapped bytes of the hot file of a blob. Raises as :meth:`open_hot`."""
        return self._first(lambda hot, _: hot.mmap(digest, size).data)

    def is_cached(self, digest: Digest, size: int) -> bool:
        """Return whether most of the hot file is in the page cache. Raises as :meth:`open_hot`."""
        return self._first(lambda hot, _: hot.is_cached(digest, size))

    def map_blob(self, digest: Digest, size: int, slot: int, region: MappedRegion) -> None:
        """Map a blob into a slot of ``region``, or decode it there. Raises as :meth:`open_blob`.

        No descriptor stays open.
        """

        def decode(cold: ColdShelf) -> None:
            blob = cold.open(digest, size)
            with region.writable_slot(slot, size) as memory:
                blob.read_into(0, memory)

        self._first(
            lambda hot, cold: _either(
                lambda: hot.map(digest, size, slot, region), lambda: decode(cold)
            )
        )

    def base_files(
        self, digest: Digest, size: int, *, in_chain: bool = False
    ) -> Iterator[BaseBlob]:
        """Yield a base from each of its files that can be opened; see :meth:`ColdShelf.base_files`."""
        return self._cold.base_files(digest, size, in_chain=in_chain)

    def base(self, digest: Digest, size: int, *, in_chain: bool = False) -> BaseBlob:
        """Return a base from the cheapest of its files that can be opened. Raises as :meth:`base_files`."""
        return next(self.base_files(digest, size, in_chain=in_chain))

    # Reading

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

        With ``past_cache`` they bypass the page cache. ``offset`` and the ends of ``buffer`` must then be
        multiples of the page size; the buffer may reach past the end of the blob. Of a cold blob only the
        requested bytes are decoded.

        Raises:
            BlobDamaged: also if the blob ends before the buffer is full. Otherwise as :meth:`open_blob`.
        """
        self._first(
            lambda hot, cold: _either(
                lambda: hot.read_into(digest, size, offset, buffer, past_cache=past_cache),
                lambda: cold.open(digest, size).read_into(
                    offset, buffer[: max(size - offset, 0)] if past_cache else buffer
                ),
            )
        )

    def load(
        self, blobs: Iterable[tuple[Digest, int, memoryview]], progress: Progress | None = None
    ) -> None:
        """Fill memory with blobs, given by digest, size and memory, and check their digests.

        Raises as :meth:`check_digest`.
        """
        wanted = list(blobs)
        meter = Meter(progress, sum(size for _, size, _ in wanted))
        for digest, size, memory in wanted:
            self.read_into(digest, size, 0, memory[:size])
            # The bytes in memory are hashed, and not the file, which another program could change
            # between two reads.
            _check_found(self._layout.blob(digest), digest, Digest.of(memory[:size]))
            meter.add(size, digest.short)

    def read_ranges(self, wanted: Iterable[BlobRange]) -> LoadedRanges:
        """Read parts of blobs into new memory; nothing is verified. Raises as :meth:`read_into`.

        Each blob is read once, from the first byte that is wanted to the last: of a cold one, every range
        would decode its neighbours again.
        """
        spans: dict[tuple[Digest, int], tuple[int, int]] = {}
        for digest, size, begin, end in wanted:
            first, last = spans.get((digest, size), (begin, end))
            spans[digest, size] = min(first, begin), max(last, end)
        loaded: dict[Digest, list[tuple[int, memoryview]]] = {}
        for blob, (begin, end) in spans.items():
            memory = new_buffer(end - begin)
            self.read_into(*blob, begin, memory)
            loaded[blob[0]] = [(begin, memory)]
        return LoadedRanges(loaded)

    def read_blob(self, digest: Digest, size: int, limit: int = limits.SMALL_FILES.one) -> bytes:
        """Return the ``size`` bytes of a small blob, such as a config, after checking their ``digest``.

        A blob of more than ``limit`` bytes is damaged.

        Raises:
            BlobDamaged: also if the digest differs. Otherwise as :meth:`open_blob`.
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
        _check_found(self._layout.blob(digest), digest, Digest.of(data))
        return data

    def read_pieces(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob, unchecked. A piece is valid until the next one.

        Raises:
            BlobDamaged: also if it cannot be read to its end. Otherwise as :meth:`open_blob`.
        """
        pieces = self._first(
            lambda hot, cold: _either(
                lambda: hot.pieces(digest, size), lambda: cold.open(digest, size).pieces()
            )
        )
        with contextlib.closing(pieces):
            yield from pieces

    def read_base_link(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of a base's second hard link as :meth:`read_pieces` does."""
        yield from self._pinned.pieces(digest, size)

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
        """Yield for each tensor blob its checked header, or the error that reading it raised.

        With ``region``, each hot blob is also mapped, into the slot of its position in ``blobs``.
        """

        def read(digest: Digest, size: int, slot: int) -> Header:
            return self._first(
                lambda hot, cold: _either(
                    lambda: hot.read_header(digest, size, slot, region),
                    lambda: cold.open(digest, size).read_header(),
                )
            )

        for slot, (digest, size) in enumerate(blobs):
            try:
                header = read(digest, size, slot)
            except InvalidHeader as error:
                yield BlobDamaged(f"blob {quote(self._layout.blob(digest))}: {error}")
            except (Damaged, StoreError) as error:
                yield error
            except OSError as error:
                yield self._hot.error_of(digest, error)
            else:
                yield header


def _either(hot: Callable[[], _Result], cold: Callable[[], _Result]) -> _Result:
    """Return the result for the hot file of a blob, or the cold one. A blob may be frozen or thawed in between."""
    for look in range(LOOKS):
        try:
            return hot()
        except BlobMissing:
            if look == LOOKS - 1:
                raise
        with contextlib.suppress(BlobMissing):
            return cold()
    raise AssertionError


def _check_found(path: str, expected: Digest, found: Digest) -> None:
    if found != expected:
        raise BlobDamaged(
            f"blob {quote(path)} is damaged: its bytes have digest {found}",
            advice=ADVICE,
        )

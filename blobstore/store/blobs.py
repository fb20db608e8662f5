"""Blobs of a store, read and checked.

A blob is trusted for its size when it is opened, and for its digest when that is asked for. Links
are refused: a store holds files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from blobstore.digest import Digest, Digester
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    Damaged,
    InvalidHeader,
    StoreError,
)
from blobstore.files import read_exactly, read_past_cache
from blobstore.mapping import is_cached
from blobstore.safetensors.file import read_header
from blobstore.safetensors.header import Header
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from blobstore.mapping import Region
    from blobstore.store.layout import Layout

# A link is refused; opening a pipe returns at once.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_READ_SIZE = 1 << 20
ADVICE = "; run 'blobstore repair NAME --from SOURCE'"
"""What all messages about a damaged blob end in."""
_MAX_SMALL_BLOB = 256 * 2**20


class BlobReader:
    """The blobs of a store, for reading."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def exists(self, digest: Digest, size: int) -> bool:
        """Tell whether the blob is here, by its size; the digest is not computed.

        Raises:
            BlobDamaged: a file of that name has another size or is not a regular file.
        """
        try:
            self.check_size(digest, size)
        except BlobMissing:
            return False
        return True

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that the blob is here and has ``size`` bytes.

        Raises:
            BlobMissing: it is not in the store.
            BlobDamaged: it has another size.
        """
        path = self.layout.blob(digest)
        try:
            found = os.lstat(path)
        except OSError as error:
            raise self._blob_error(digest, error) from None
        if found.st_size != size or not stat.S_ISREG(found.st_mode):
            raise _damage(path, size, found)

    def open_blob(self, digest: Digest, size: int) -> int:
        """Open a blob of ``size`` bytes; return its descriptor, which the caller closes.

        Raises:
            BlobMissing: it is not in the store.
            BlobDamaged: it has another size, or is a symbolic link.
        """
        path = self.layout.blob(digest)
        try:
            descriptor = os.open(path, _OPEN_FLAGS)
            found = os.fstat(descriptor)
        except OSError as error:
            raise self._blob_error(digest, error) from None
        if found.st_size == size and stat.S_ISREG(found.st_mode):
            return descriptor
        os.close(descriptor)
        raise _damage(path, size, found)

    def map_blobs(
        self, blobs: Sequence[tuple[Digest, int]], slots: Iterable[int], region: Region
    ) -> Iterator[int]:
        """Map the blobs at ``slots`` of ``blobs`` into the same slots of ``region``, yielding each.

        No descriptor stays open. Raises as :meth:`open_blob`.
        """
        for slot in slots:
            digest, size = blobs[slot]
            descriptor = self.open_blob(digest, size)
            try:
                region.map(slot, descriptor, size)
            except OSError as error:
                raise self._blob_error(digest, error) from None
            finally:
                os.close(descriptor)
            yield slot

    def is_cached(self, digest: Digest, size: int) -> bool:
        """Tell whether most of a blob is in the page cache. Raises as :meth:`open_blob`."""
        descriptor = self.open_blob(digest, size)
        try:
            return is_cached(descriptor, size)
        finally:
            os.close(descriptor)

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
        page then, and ``buffer`` ends with one, behind the end of the blob if need be.

        Raises:
            BlobDamaged: also when the blob ends before. Otherwise as :meth:`open_blob`.
        """
        descriptor = self.open_blob(digest, size)
        try:
            if past_cache:
                count = read_past_cache(descriptor, buffer, offset)
                buffer = buffer[count : size - offset]
                offset += count
            while buffer:
                count = os.preadv(descriptor, [buffer], offset)
                if not count:
                    message = (
                        f"blob {quoted(self.layout.blob(digest))} ended at byte {offset} of {size} "
                        "while it was read"
                    )
                    raise BlobDamaged(message)
                buffer = buffer[count:]
                offset += count
        except OSError as error:
            raise self._blob_error(digest, error) from None
        finally:
            os.close(descriptor)

    def read_blob(self, digest: Digest, size: int, limit: int = _MAX_SMALL_BLOB) -> bytes:
        """Return the bytes of a small blob, such as a config, after checking its digest.

        Raises:
            BlobDamaged: also when the digest differs. Otherwise as :meth:`open_blob`.
        """
        if size > limit:
            message = f"blob {digest} of {size} bytes is too large to be read as a small file"
            raise BlobDamaged(message)
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
        self, blobs: Iterable[tuple[Digest, int]], region: Region | None = None
    ) -> Iterator[Header | Damaged | StoreError]:
        """Yield the checked header of each tensor blob, or what is wrong with the blob.

        With ``region``, each is mapped into the slot of its place in ``blobs`` while it is open.
        """
        for slot, (digest, size) in enumerate(blobs):
            try:
                descriptor = self.open_blob(digest, size)
                try:
                    if region is not None:
                        region.map(slot, descriptor, size)
                    header = read_header(descriptor, size)
                finally:
                    os.close(descriptor)
            except InvalidHeader as error:
                message = f"blob {quoted(self.layout.blob(digest))}: {error}"
                yield BlobDamaged(message)
            except (Damaged, StoreError) as error:
                yield error
            except OSError as error:
                yield self._blob_error(digest, error)
            else:
                yield header

    def check_digest(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Read the whole blob and compare its digest; ``progress`` gets the bytes of each read.

        Raises:
            BlobDamaged: the digest differs. Otherwise as :meth:`open_blob`.
        """
        digester = Digester()
        with contextlib.closing(self.read_pieces(digest, size)) as pieces:
            for piece in pieces:
                digester.update(piece)
                if progress is not None:
                    progress(len(piece))
        if digester.digest() != digest:
            raise _wrong_digest(self.layout.blob(digest), digest, digester.digest())

    def read_pieces(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob, unchecked, in pieces that are good until the next one.

        Raises:
            BlobDamaged: also when it cannot be read to its end. Otherwise as :meth:`open_blob`.
        """
        done = 0
        buffer = memoryview(bytearray(min(_READ_SIZE, size + 1)))
        descriptor = self.open_blob(digest, size)
        try:
            while count := os.preadv(descriptor, [buffer], done):
                yield buffer[:count]
                done += count
        except OSError as error:
            message = (
                f"blob {quoted(self.layout.blob(digest))} cannot be read at byte {done}: "
                f"{error.strerror}"
            )
            raise BlobDamaged(message) from error
        finally:
            os.close(descriptor)

    def blob_sizes(self) -> set[int]:
        """Return the sizes of all blobs."""
        try:
            with os.scandir(self.layout.blobs) as entries:
                return {entry.stat(follow_symlinks=False).st_size for entry in entries}
        except FileNotFoundError:
            return set()

    def check_root(self) -> None:
        """Check that the store is a folder, if it is there at all.

        Raises:
            StoreError: something else is in its place, or a folder above it is closed.
        """
        root = self.layout.root
        try:
            is_other = root.exists() and not root.is_dir()
        except OSError as error:
            message = f"cannot open the store {quoted(root)}: {error.strerror}"
            raise StoreError(message) from error
        if is_other:
            message = f"the store {quoted(root)} is not a folder"
            raise StoreError(message)

    def _blob_error(self, digest: Digest, error: OSError) -> Damaged | StoreError:
        path = quoted(self.layout.blob(digest))
        if error.errno == errno.ELOOP:
            return _not_a_file(self.layout.blob(digest))
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return BlobMissing(f"blob {path} is missing")
        return StoreError(f"blob {path} cannot be read: {error.strerror}")


def _not_a_file(path: str) -> BlobDamaged:
    return BlobDamaged(
        f"blob {quoted(path)} is damaged: it is a link, folder or device and not a file{ADVICE}"
    )


def _damage(path: str, size: int, found: os.stat_result) -> BlobDamaged:
    if not stat.S_ISREG(found.st_mode):
        return _not_a_file(path)
    return BlobDamaged(
        f"blob {quoted(path)} is damaged: it has {found.st_size} bytes, expected {size}{ADVICE}"
    )


def _wrong_digest(path: str, expected: Digest, found: Digest) -> BlobDamaged:
    return BlobDamaged(
        f"blob {quoted(path)} is damaged: its bytes have digest {found}, expected {expected}{ADVICE}"
    )

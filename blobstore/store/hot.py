"""Hot blobs: plain files, opened with care, mapped and read.

A blob is trusted for its size when it is opened. Symbolic links are refused. Nothing here knows of cold
blobs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from blobstore.core import interrupts
from blobstore.core.escape import quote
from blobstore.core.files import is_absence, is_there, read_exactly, read_past_cache
from blobstore.core.mmap import is_cached, mapped_file, too_many_maps
from blobstore.errors import BlobDamaged, BlobMissing, Damaged, StoreError
from blobstore.safetensors.file import read_header
from blobstore.store.blob_header import read_blob_header
from blobstore.store.scan import scan_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from blobstore.core.digest import Digest
    from blobstore.core.mmap import MappedFile, MappedRegion
    from blobstore.safetensors.header import Header
    from blobstore.store.layout import Layout

ADVICE = "run 'blobstore repair NAME --from SOURCE'"
"""The advice of all errors about damaged blobs."""
# O_NOFOLLOW refuses a link; with O_NONBLOCK, opening a pipe returns at once.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_READ_SIZE = 1 << 20


class HotShelf:
    """The files of blobs, for reading. Methods that need a blob raise as :meth:`open` does."""

    def __init__(self, layout: Layout, path: Callable[[Digest], str] | None = None) -> None:
        """Read the files that ``path`` names, by default those of the blobs."""
        self._layout = layout
        self._path = path or layout.blob

    def has(self, digest: Digest) -> bool:
        """Return whether the blob has a file, whatever its content."""
        interrupts.check()
        # A link counts as a file: opening it then reports damage, not a missing blob.
        return is_there(self._path(digest))

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that the blob exists and has ``size`` bytes."""
        interrupts.check()
        path = self._path(digest)
        try:
            found = os.lstat(path)
        except OSError as error:
            raise self.error_of(digest, error) from None
        if found.st_size != size or not stat.S_ISREG(found.st_mode):
            raise _damage(path, size, found)

    def open(self, digest: Digest, size: int) -> int:
        """Open a blob of ``size`` bytes; return its descriptor, which the caller closes.

        Raises:
            BlobMissing: it is not here; it may be cold.
            BlobDamaged: it has another size, or is not a regular file.
            StoreError: it cannot be read.
        """
        interrupts.check()
        path = self._path(digest)
        try:
            descriptor = os.open(path, _OPEN_FLAGS)
        except OSError as error:
            raise self.error_of(digest, error) from None
        try:
            # Of the open file, because the name may get another file in between.
            found = os.fstat(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise self.error_of(digest, error) from None
        # A map that reaches past the end of a shorter file would kill the process (SIGBUS).
        if found.st_size != size or not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise _damage(path, size, found)
        return descriptor

    def map(self, digest: Digest, size: int, slot: int, region: MappedRegion) -> None:
        """Map a blob into a slot. No descriptor stays open."""
        descriptor = self.open(digest, size)
        try:
            region.map(slot, descriptor, size)
        except OSError as error:
            raise self.error_of(digest, error) from None
        finally:
            os.close(descriptor)

    def mmap(self, digest: Digest, size: int) -> MappedFile:
        """Return a blob in a mapping of its own."""
        descriptor = self.open(digest, size)
        try:
            return mapped_file(descriptor, size)
        except OSError as error:
            raise self.error_of(digest, error) from None
        finally:
            os.close(descriptor)

    def is_cached(self, digest: Digest, size: int) -> bool:
        """Return whether most of a blob is in the page cache."""
        descriptor = self.open(digest, size)
        try:
            return is_cached(descriptor, size)
        finally:
            os.close(descriptor)

    def read_into(
        self, digest: Digest, size: int, offset: int, buffer: memoryview, *, past_cache: bool
    ) -> None:
        """Read bytes of a blob; see :meth:`BlobReader.read_into`."""
        descriptor = self.open(digest, size)
        try:
            if past_cache:
                count = read_past_cache(descriptor, buffer, offset)
                # The end of a blob is seldom the end of a page; the loop reads what is left through
                # the page cache.
                buffer = buffer[count : size - offset]
                offset += count
            while buffer:
                count = os.preadv(descriptor, [buffer], offset)
                if not count:
                    raise BlobDamaged(
                        f"blob {quote(self._path(digest))} ended at byte {offset} of {size} "
                        "while it was read"
                    )
                buffer = buffer[count:]
                offset += count
        except OSError as error:
            raise self.error_of(digest, error) from None
        finally:
            os.close(descriptor)

    def read_header(
        self, digest: Digest, size: int, slot: int, region: MappedRegion | None
    ) -> Header:
        """Read the header of a blob, and map the blob if there is a ``region``.

        Raises:
            InvalidHeader: the header breaks the format.
            OSError: the blob cannot be read or mapped.
        """
        descriptor = self.open(digest, size)
        try:
            if region is not None:
                region.map(slot, descriptor, size)
            return read_blob_header(
                lambda: read_header(descriptor, size),
                lambda begin, end: read_exactly(descriptor, end - begin, begin),
                size,
            )
        finally:
            os.close(descriptor)

    def pieces(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Open a blob; return a generator of its bytes. A piece is valid until the next one.

        The generator raises BlobDamaged if the blob cannot be read to its end.
        """
        # Opened before the first piece is asked for, so that the caller can try the cold file if
        # this one is missing.
        descriptor = self.open(digest, size)

        def read() -> Generator[memoryview, None, None]:
            done = 0
            buffer = memoryview(bytearray(min(_READ_SIZE, size + 1)))
            try:
                # Read to the end of the file, even past `size`: if the file has grown, its digest
                # must be wrong.
                while count := os.preadv(descriptor, [buffer], done):
                    yield buffer[:count]
                    done += count
            except OSError as error:
                path, reason = quote(self._path(digest)), error.strerror
                raise BlobDamaged(f"blob {path} cannot be read at byte {done}: {reason}") from error
            finally:
                os.close(descriptor)

        return read()

    def sizes(self) -> set[int]:
        """Return the sizes of all files."""
        sizes = set()
        for entry in scan_folder(self._layout.blobs):
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                sizes.add(entry.stat(follow_symlinks=False).st_size)
        return sizes

    def error_of(self, digest: Digest, error: OSError) -> Damaged | StoreError:
        """Return the error to raise when the system refuses an operation on a blob."""
        path = self._path(digest)
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link or a socket
            return not_a_file(f"blob {quote(path)}")
        if is_absence(error):
            return BlobMissing(f"blob {quote(path)} is missing")
        # Linux reports too many maps as a lack of memory.
        if error.errno == errno.ENOMEM and (limited := too_many_maps(f"blob {quote(path)}")):
            return limited
        return StoreError(f"blob {quote(path)} cannot be read: {error.strerror}")


def not_a_file(blob: str) -> BlobDamaged:
    """Return the error for a ``blob`` that is not a regular file."""
    return BlobDamaged(
        f"{blob} is damaged: it is a link, folder or device and not a file", advice=ADVICE
    )


def _damage(path: str, size: int, found: os.stat_result) -> BlobDamaged:
    if not stat.S_ISREG(found.st_mode):
        return not_a_file(f"blob {quote(path)}")
    return BlobDamaged(
        f"blob {quote(path)} is damaged: it has {found.st_size} bytes, expected {size}",
        advice=ADVICE,
    )

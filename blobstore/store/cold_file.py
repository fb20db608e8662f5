"""The file of a cold blob: mapped, and read into other memory if it is not in the page cache yet."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import weakref
from functools import partial

from blobstore.compression.file_view import FileView, Window
from blobstore.core.escape import quote
from blobstore.core.files import is_absence, open_regular
from blobstore.core.mmap import MappedRegion
from blobstore.core.system import direct_flag
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, ColdDamaged, StoreError
from blobstore.store.hot import not_a_file

_START = mmap.PAGESIZE
_END = 16 * mmap.PAGESIZE
"""Bytes at the end of a large file that are read first: most tables are smaller."""


def buffer_size(size: int) -> int:
    """Return how much memory reading ``size`` bytes of a file needs, because whole pages are read."""
    return (-(-size // mmap.PAGESIZE) + 1) * mmap.PAGESIZE


class ColdFile:
    """A mapped file. Its descriptor is closed when this object is deleted."""

    def __init__(self, path: str) -> None:
        """Map the file at ``path``.

        Raises:
            BlobMissing: it does not exist.
            BlobDamaged: it is a link, folder or device.
            StoreError: it cannot be read.
            BlobstoreError: the system refuses the address space.
        """
        try:
            self._descriptor, self.size = open_regular(path, follow=False)
        except OSError as error:
            raise _error_of(path, error) from None
        except BlobstoreError:
            raise not_a_file(f"cold blob {quote(path)}") from None
        self.close = weakref.finalize(self, os.close, self._descriptor)
        try:
            self._region = MappedRegion([self.size])
            self._region.map(0, self._descriptor, self.size)
        except OSError as error:
            self.close()
            raise _error_of(path, error) from None
        except BlobstoreError:
            self.close()  # the traceback keeps this object alive
            raise
        self.data = memoryview(self._region.memory)[: self.size]
        """The mapped bytes of the file."""
        self.touch = partial(self._region.populate, 0)
        """Reads the pages of a range before they are used, so that one that is lost is an OSError and not SIGBUS."""

    def is_cached(self) -> bool:
        """Return whether most of it is in the page cache."""
        return not self.size or self._region.is_cached(0, self.size)

    def fits(self, memory: memoryview) -> bool:
        """Return whether all of it can be read into ``memory``."""
        return buffer_size(self.size) <= len(memory)

    def pass_cache(self) -> None:
        """Bypass the page cache in all further reads, if the file system can.

        Threads share the descriptor, so the flag is set once and not for each read.
        """
        with contextlib.suppress(OSError):
            self._set_direct(direct_flag())

    def read(self, begin: int, end: int, memory: memoryview) -> FileView:
        """Read the bytes from ``begin`` to ``end`` into ``memory``; return a view of the whole file.

        ``memory`` is page-aligned and has at least the size that :func:`buffer_size` returns.

        Raises:
            ColdDamaged: the file has become shorter.
            OSError: it cannot be read.
        """
        return FileView(self.data, self._window(begin, end, memory))

    def read_ends(self, memory: memoryview) -> FileView:
        """Read the two ends of the file, which hold its header and table, or all of it if that fits.

        The ends fit into 64 KiB and a page. Otherwise as :meth:`read`.
        """
        if self.fits(memory):
            return self.read(0, self.size, memory)
        start = self._window(0, _START, memory)
        end = self._window(max(self.size - _END, 0), self.size, memory[_START:])
        return FileView(self.data, start, end)

    def _window(self, begin: int, end: int, memory: memoryview) -> Window:
        # Reads that bypass the page cache must begin and end at multiples of the page size.
        first = begin - begin % mmap.PAGESIZE
        wanted = end - first
        pages = memory[: -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE]
        done = 0
        while done < wanted:
            try:
                count = os.preadv(self._descriptor, [pages[done:]], first + done)
            except OSError as error:
                # Some file systems report only now that they cannot bypass the cache.
                if error.errno != errno.EINVAL:
                    raise
                self._set_direct(0)
                count = os.preadv(self._descriptor, [pages[done:]], first + done)
            if not count:
                raise ColdDamaged(
                    f"it ended at byte {first + done} of {self.size} while it was read"
                )
            done += count
        return Window(first, pages[:wanted].toreadonly())

    def _set_direct(self, flag: int) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~direct_flag()
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag)


def _error_of(path: str, error: OSError) -> BlobMissing | BlobDamaged | StoreError:
    if error.errno == errno.ELOOP:
        return not_a_file(f"cold blob {quote(path)}")
    if is_absence(error):
        return BlobMissing(f"cold blob {quote(path)} is missing")
    return StoreError(f"cold blob {quote(path)} cannot be read: {error.strerror}")

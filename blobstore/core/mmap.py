"""Files mapped into memory, without keeping their descriptors.

``mmap.mmap`` of Python 3.11 and 3.12 duplicates the descriptor and holds it for the life of the map,
so that a model of 3,000 blobs would need 3,000 descriptors. Here one anonymous map reserves the
addresses for all files of a model, and each file is mapped over its slot when it is needed: one
``mmap`` object owns the memory, exports buffers, and unmaps it all when the last view dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from typing import TYPE_CHECKING

from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Python exports it from 3.13 on.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# MAP_FIXED is the same on Linux, macOS and the BSDs; Python's mmap does not export it.
_MAP_OVER = mmap.MAP_PRIVATE | 0x10 | _MAP_NORESERVE
# As Linux numbers them; macOS shares the first and refuses the others, which is no harm.
_MADV_WILLNEED, _MADV_HUGEPAGE, _MADV_POPULATE_READ = 3, 14, 22
_MAP_FAILED = ctypes.c_void_p(-1).value
_LARGE_PAGE = 2 << 20
_SAMPLES = 5


class MappedRegion:
    """Room for some files, one after another in memory, each on a page of its own.

    Files of a large page or more begin at one: where the page cache has them in large pages, Linux
    maps these whole, and no byte of them takes a fault of its own.

    ``writable`` makes the maps private copies on write: what is written never reaches a file.
    A slot holds zeros until its file is mapped; behind the last page of a mapped file there is nothing
    that could be read. With ``filled``, files are not mapped but read into
    the slots by :meth:`slot_view`; the memory is asked for in large pages.

    Raises:
        BlobstoreError: there are not as many addresses, or the process may not have them.
    """

    def __init__(
        self, sizes: Sequence[int], *, writable: bool = False, filled: bool = False
    ) -> None:
        self.offsets = _layout(sizes, mmap.PAGESIZE if filled else _LARGE_PAGE)
        """Where each slot begins in :attr:`memory`."""
        self.present: set[int] = set()
        """The slots whose files were mapped, or made."""
        self._is_filled = filled
        self._protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable or filled else 0)
        # Without NORESERVE a private map larger than the machine's memory may be refused.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        total = max(self.offsets[-1], mmap.PAGESIZE)
        try:
            memory = mmap.mmap(-1, total, flags=flags, prot=self._protection)
        except (OSError, OverflowError) as error:
            raise BlobstoreError(
                f"cannot reserve {total} bytes of addresses to map files into: {error}"
            ) from error
        self._address = _address(memory)
        self._all = memory
        self.memory = memory if writable or not filled else memoryview(memory).toreadonly()
        """All of it; read-only unless ``writable``."""
        if filled:
            # Fresh memory in small pages takes as long to come by as the bytes to be read.
            _madvise(self._address, total, _MADV_HUGEPAGE)

    def map(self, slot: int, descriptor: int, size: int) -> None:
        """Map the first ``size`` bytes of an open file; the descriptor may be closed afterwards.

        Raises:
            OSError: the file cannot be mapped.
        """
        if size == 0:  # there are no empty maps
            self.present.add(slot)
            return
        begin, end = self.offsets[slot : slot + 2]
        # To where the next slot begins: a gap between two maps would be a map of its own.
        if (
            _mmap(self._address + begin, end - begin, self._protection, _MAP_OVER, descriptor, 0)
            == _MAP_FAILED
        ):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

        self.present.add(slot)

    @contextlib.contextmanager
    def writable_slot(self, slot: int, size: int) -> Iterator[memoryview]:
        """Give fresh memory in large pages in the place of a file, to be filled in the block.

        Unless the region is writable, it cannot be written to afterwards. Threads may fill slots at
        once.

        Raises:
            BlobstoreError: there is no memory.
        """
        if size == 0:
            yield memoryview(bytearray())
            self.present.add(slot)
            return
        begin, end = self.offsets[slot : slot + 2]
        address, length = self._address + begin, end - begin
        flags = _MAP_OVER | mmap.MAP_ANONYMOUS
        both = mmap.PROT_READ | mmap.PROT_WRITE
        if not self._is_filled and _mmap(address, length, both, flags, -1, 0) == _MAP_FAILED:
            raise BlobstoreError(f"no memory for {size} bytes: {os.strerror(ctypes.get_errno())}")
        # The last would be whole though the bytes end amid it: as much again for blobs of two and a bit.
        # Small ones lie side by side, and those that are filled at once share large pages.
        large = size if size < _LARGE_PAGE else size - size % _LARGE_PAGE
        _madvise(address, large, _MADV_HUGEPAGE)
        yield memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        if not self._is_filled and self._protection != both:
            _mprotect(address, length, self._protection)
        self.present.add(slot)

    def close(self) -> None:
        """Unmap all files, or leave that to the last view that is out."""
        with contextlib.suppress(BufferError):
            self._all.close()

    def slot_view(self, slot: int, begin: int, end: int) -> memoryview:
        """Return the room of a slot for bytes of a file, to the end of their last page."""
        start = self.offsets[slot]
        return memoryview(self._all)[start + begin : start + _rounded(end, mmap.PAGESIZE)]

    def will_need(self, slot: int, size: int) -> None:
        """Ask for the bytes of a mapped file to be read, and do not wait for them."""
        if size:
            _madvise(self._address + self.offsets[slot], size, _MADV_WILLNEED)

    def is_cached(self, slot: int, size: int) -> bool:
        """Tell whether a mapped file is in the page cache, by a sample of its pages."""
        return _is_cached(self._address + self.offsets[slot], size)

    def will_populate(self, slot: int, size: int) -> None:
        """Ask for a mapped file to be read into large pages when it is populated."""
        if size >= _LARGE_PAGE:
            _madvise(self._address + self.offsets[slot], size, _MADV_HUGEPAGE)

    def populate(self, slot: int, begin: int, end: int) -> None:
        """Make pages of a mapped file this process's, without the interpreter's lock.

        What is not in the page cache is read for that.

        Raises:
            OSError: it cannot be read, or has become shorter.
        """
        start = self.offsets[slot] + begin
        if not _madvise(self._address + start, end - begin, _MADV_POPULATE_READ):
            return
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number))
        # An old kernel, or another system.
        bytes(memoryview(self._all)[start : start + end - begin : mmap.PAGESIZE])


def mapped(descriptor: int, size: int) -> memoryview:
    """Return an open file of ``size`` bytes as memory.

    It needs no descriptor; Python's own maps keep one each, and a model can have thousands.

    Raises:
        OSError: the file cannot be mapped.
        BlobstoreError: the process may not have the addresses.
    """
    region = MappedRegion([size])
    region.map(0, descriptor, size)
    begin = region.offsets[0]
    return memoryview(region.memory)[begin : begin + size]


def is_cached(descriptor: int, size: int) -> bool:
    """Tell whether an open file of ``size`` bytes is in the page cache, by a sample of its pages."""
    if not size:
        return True
    address = _mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        return True
    try:
        return _is_cached(address, size)
    finally:
        _munmap(address, size)


def _is_cached(address: int, size: int) -> bool:
    last = (size - 1) // mmap.PAGESIZE
    state = ctypes.create_string_buffer(1)
    for part in range(_SAMPLES):
        page = address + last * part // (_SAMPLES - 1) * mmap.PAGESIZE
        # Where that is not told, as of files of others, it is no error and looks like a yes.
        if _mincore(page, 1, state) == 0 and state.raw == b"\0":
            return False
    return True


def _layout(sizes: Sequence[int], large_page: int) -> list[int]:
    """Return where each file begins, and where the room for them ends."""
    offsets = []
    end = 0
    for size in sizes:
        begin = _rounded(end, large_page) if size >= large_page else end
        offsets.append(begin)
        end = begin + _rounded(size, mmap.PAGESIZE)
    # Linux puts memory of whole large pages where such a page begins.
    is_large = max(sizes, default=0) >= large_page
    return [*offsets, _rounded(end, large_page if is_large else mmap.PAGESIZE)]


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class _Buffer(ctypes.Structure):
    """``Py_buffer`` of CPython's C interface, as far as the address; the rest is padding."""

    _fields_ = (("address", ctypes.c_void_p), ("rest", ctypes.c_byte * 256))


def _address(memory: mmap.mmap) -> int:
    # ctypes' own from_buffer() refuses read-only memory.
    view = _Buffer()
    _get_buffer(memory, ctypes.byref(view), 0)
    try:
        return view.address or 0
    finally:
        _release_buffer(ctypes.byref(view))


_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_munmap = ctypes.CDLL(None).munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None

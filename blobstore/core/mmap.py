"""Files mapped into memory, or read into it, without keeping their descriptors open.

``mmap.mmap`` of Python 3.11 and 3.12 duplicates the descriptor and keeps it for the life of the map, so
that a model of 3,000 blobs would need 3,000 descriptors. Here, one anonymous map reserves the addresses
of all files of a model, and each file is mapped over its slot when it is needed. One ``mmap`` object owns
the memory, exports buffers, and unmaps everything when the last view is deleted.

A process may have a limited number of maps, 65,530 on Linux. A region can therefore read its small files
one after another into an *arena*, which is one map.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.files import open_regular
from blobstore.core.system import (
    MADV_HUGEPAGE,
    MADV_POPULATE_READ,
    MAP_FIXED,
    MAP_NORESERVE,
    map_counts,
    use_large_pages,
)
from blobstore.errors import BlobstoreError, TooManyMaps

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

_MAP_OVER = mmap.MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value
_LARGE_PAGE = 2 << 20
_SAMPLES = 5
_ALIGNMENT = 64
"""Alignment of files in an arena; tensors are aligned to 8 bytes in their files."""
_OWN_MAP = 1 << 20
"""Buffers of at least so many bytes are maps of their own, in large pages."""
_NEAR_LIMIT = 1000
"""Free maps below which a lack of memory is one of maps; others may have been freed since it failed."""


class MappedRegion:
    """Address space for several files, each in a slot of whole pages.

    Files of at least a large page start at a large-page boundary: if the page cache holds them in
    large pages, Linux maps these with one fault each.

    If ``writable``, the maps are private and copied on write; nothing written reaches a file. A slot
    holds zeros until its file is mapped. Nothing after the last page of a mapped file can be read. If
    ``filled``, files are not mapped, but read into :meth:`slot_view`, and the memory is requested in
    large pages.

    The files of the slots ``read_slots`` are in the arena: :meth:`map` reads them.

    Raises:
        BlobstoreError: the system or a limit of the process does not allow that many addresses.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        writable: bool = False,
        filled: bool = False,
        read_slots: Collection[int] = frozenset(),
    ) -> None:
        large_page = mmap.PAGESIZE if filled else _LARGE_PAGE
        self.offsets = _layout(sizes, large_page)
        """The start of each slot in :attr:`memory`, and the end of all."""
        self._ends: Sequence[int] = self.offsets[1:]
        begin = self.offsets[-1]
        if read_slots:
            self.offsets, self._ends, begin = _layout_with_arena(sizes, large_page, read_slots)
        self.read_slots = read_slots
        """The slots whose files are read and not mapped."""
        self.present: set[int] = set()
        """The slots that were mapped or filled."""
        self._is_filled = filled
        self._protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable or filled else 0)
        # Without NORESERVE, a private map larger than the machine's memory may fail.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        total = max(self.offsets[-1], mmap.PAGESIZE)
        try:
            memory = mmap.mmap(-1, total, flags=flags, prot=self._protection)
        except (OSError, OverflowError) as error:
            raise BlobstoreError(
                f"cannot reserve {total} bytes of addresses to map files into: {error}"
            ) from error
        self._address = _address(memory)
        self._all = memory
        if begin < total and not self._protection & mmap.PROT_WRITE:
            both = mmap.PROT_READ | mmap.PROT_WRITE
            if _mprotect(self._address + begin, total - begin, both):
                raise _no_memory(total - begin)
        self.memory = memory if writable or not filled else memoryview(memory).toreadonly()
        """The whole region; read-only unless ``writable``."""
        if filled:
            # Allocating memory in small pages would take as long as reading the bytes.
            _madvise(self._address, total, MADV_HUGEPAGE)

    def map(self, slot: int, descriptor: int, size: int) -> None:
        """Map the first ``size`` bytes of an open file; the descriptor may be closed afterwards.

        Raises:
            OSError: the file cannot be mapped or read.
        """
        if slot in self.read_slots:
            _read_into(descriptor, self._arena_slot(slot, size))
        elif size:  # mmap rejects empty maps
            begin, end = self.offsets[slot], self._ends[slot]
            # Up to the next slot, because the kernel would count a gap between two maps as a map.
            address, length = self._address + begin, end - begin
            if _mmap(address, length, self._protection, _MAP_OVER, descriptor, 0) == _MAP_FAILED:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        self.present.add(slot)

    @contextlib.contextmanager
    def writable_slot(self, slot: int, size: int) -> Iterator[memoryview]:
        """Put fresh memory in large pages into a slot, to be filled in the ``with`` block.

        Afterwards it is read-only unless the region is writable. Threads may fill slots concurrently.

        Raises:
            BlobstoreError: there is not enough memory.
        """
        if size == 0 or slot in self.read_slots:
            yield self._arena_slot(slot, size)
            self.present.add(slot)
            return
        begin, end = self.offsets[slot], self._ends[slot]
        address, length = self._address + begin, end - begin
        flags = _MAP_OVER | mmap.MAP_ANONYMOUS
        both = mmap.PROT_READ | mmap.PROT_WRITE
        if not self._is_filled and _mmap(address, length, both, flags, -1, 0) == _MAP_FAILED:
            raise _no_memory(size)
        # Not for the end of a large blob: the system would allocate a whole large page for it, and
        # so twice the memory of a blob of little more than 2 MiB. Small blobs are adjacent, and those
        # that are filled at the same time share large pages.
        large = size if size < _LARGE_PAGE else size - size % _LARGE_PAGE
        _madvise(address, large, MADV_HUGEPAGE)
        yield memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        if not self._is_filled and self._protection != both:
            _mprotect(address, length, self._protection)
        self.present.add(slot)

    def slot_view(self, slot: int, begin: int, end: int) -> memoryview:
        """Return the memory for bytes ``begin`` to ``end`` of a slot's file.

        Outside the arena it reaches up to a page boundary.
        """
        start = self.offsets[slot]
        end = min(start + _rounded(end, mmap.PAGESIZE), self._ends[slot])
        return memoryview(self._all)[start + begin : end]

    def _arena_slot(self, slot: int, size: int) -> memoryview:
        """Return the memory of a slot in the arena, which is writable for this class."""
        address = self._address + self.offsets[slot]
        return memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    def is_cached(self, slot: int, size: int) -> bool:
        """Return whether a sample of a mapped file's pages is in the page cache."""
        return _is_cached(self._address + self.offsets[slot], size)

    def will_populate(self, slot: int) -> None:
        """Ask the system to use large pages when a mapped file is populated."""
        begin, end = self.offsets[slot], self._ends[slot]
        if end - begin >= _LARGE_PAGE:  # all of the map, because a part would be a map of its own
            _madvise(self._address + begin, end - begin, MADV_HUGEPAGE)

    def populate(self, slot: int, begin: int, end: int) -> None:
        """Map the pages of a range of a file into this process at once, without the GIL.

        Pages that are not in the page cache are read from the disk. A page that cannot be read is an error here; touched
        without this call, it would end the process (SIGBUS).

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        begin -= begin % mmap.PAGESIZE
        start = self.offsets[slot] + begin
        if not _madvise(self._address + start, end - begin, MADV_POPULATE_READ):
            return
        number = ctypes.get_errno()
        if number == errno.EFAULT:  # a read of the page would be SIGBUS
            number = errno.EIO
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number))
        # An old kernel, or another system: read one byte per page.
        bytes(memoryview(self._all)[start : start + end - begin : mmap.PAGESIZE])

    def background_populate(self) -> Callable[[int, int, int], bool]:
        """Return a :meth:`populate` for other threads, which does not keep the memory alive.

        It returns False if a range cannot be populated, or nothing else uses the memory any more.
        """
        # Not above: those who read safetensors files alone need not have it. It releases the interpreter's lock.
        from zlib_ng.zlib_ng import crc32

        memory, address, offsets = weakref.ref(self._all), self._address, self.offsets

        def populate(slot: int, begin: int, end: int) -> bool:
            start, kept = offsets[slot] + begin, memory()
            if kept is None or _madvise(address + start, end - begin, MADV_POPULATE_READ):
                return False
            # A virtual machine gets memory for pages from the disk only when they are touched.
            crc32(memoryview(kept)[start : start + end - begin])
            return True

        return populate


class MappedFile(NamedTuple):
    """A file as memory."""

    data: memoryview
    touch: Callable[[int, int], object]
    """Reads the pages of a range before they are used, so that one that is lost is an OSError and not SIGBUS."""


def mapped_file(descriptor: int, size: int) -> MappedFile:
    """Map an open file of ``size`` bytes; the descriptor may be closed afterwards.

    Raises:
        OSError: the file cannot be mapped.
        BlobstoreError: a limit of the process does not allow that many addresses.
    """
    region = MappedRegion([size])
    region.map(0, descriptor, size)
    return MappedFile(memoryview(region.memory)[:size], partial(region.populate, 0))


def mapped(descriptor: int, size: int) -> memoryview:
    """Return an open file of ``size`` bytes as memory. Raises as :func:`mapped_file`."""
    return mapped_file(descriptor, size).data


def map_file(path: Path, size: int) -> memoryview:
    """Return a file of ``size`` bytes as memory, which outlives the path. Raises as :func:`mapped`."""
    descriptor, _ = open_regular(path, follow=False)
    try:
        return mapped(descriptor, size)
    finally:
        os.close(descriptor)


def new_buffer(size: int) -> memoryview:
    """Return zeros; if there are many, in large pages."""
    if size < _OWN_MAP:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # In small pages, allocating the memory takes as long as reading the bytes.
    use_large_pages(memory)
    return memoryview(memory)


def is_cached(descriptor: int, size: int) -> bool:
    """Return whether a sample of an open file's pages is in the page cache."""
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
        # For files of other users, the system does not tell but reports success and cached pages.
        if _mincore(page, 1, state) == 0 and state.raw == b"\0":
            return False
    return True


def too_many_maps(what: str) -> TooManyMaps | None:
    """Return the error for a lack of memory that comes from the number of maps; None for any other."""
    counts = map_counts()
    if counts is None or counts.present + _NEAR_LIMIT < counts.limit:
        return None
    return TooManyMaps(
        f"{what} cannot be mapped: this process has {counts.present} maps, and vm.max_map_count "
        f"allows {counts.limit}",
        advice="raise that limit with sysctl, or, in Python, open the model with read='pread'",
    )


def _no_memory(size: int) -> BlobstoreError:
    number = ctypes.get_errno()
    what = f"memory for {size} bytes"
    return too_many_maps(what) or BlobstoreError(f"no {what}: {os.strerror(number)}")


def _read_into(descriptor: int, memory: memoryview) -> None:
    """Fill ``memory`` with the beginning of a file."""
    done = 0
    while done < len(memory):
        count = os.preadv(descriptor, [memory[done:]], done)
        if not count:
            raise OSError(errno.EIO, f"it ended at byte {done} of {len(memory)}")
        done += count


def _layout_with_arena(
    sizes: Sequence[int], large_page: int, read_slots: Collection[int]
) -> tuple[list[int], list[int], int]:
    """Return offsets as :func:`_layout`, the end of each slot, and where the arena begins."""
    slots = [slot for slot in range(len(sizes)) if slot not in read_slots]
    mapped_offsets = _layout([sizes[slot] for slot in slots], large_page)
    offsets, ends = [0] * len(sizes), [0] * len(sizes)
    for slot, begin, end in zip(slots, mapped_offsets, mapped_offsets[1:], strict=False):
        offsets[slot], ends[slot] = begin, end
    begin = end = mapped_offsets[-1]
    for slot in sorted(read_slots):
        offsets[slot], ends[slot] = end, end + sizes[slot]
        end += _rounded(sizes[slot], _ALIGNMENT)
    return [*offsets, _rounded(end, mmap.PAGESIZE)], ends, begin


def _layout(sizes: Sequence[int], large_page: int) -> list[int]:
    """Return the offset of each file, and the end of the last one."""
    offsets = []
    end = 0
    for size in sizes:
        begin = _rounded(end, large_page) if size >= large_page else end
        offsets.append(begin)
        end = begin + _rounded(size, mmap.PAGESIZE)
    # Linux aligns maps of whole large pages to such a page.
    is_large = max(sizes, default=0) >= large_page
    return [*offsets, _rounded(end, large_page if is_large else mmap.PAGESIZE)]


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class _Buffer(ctypes.Structure):
    """CPython's ``Py_buffer``: the address, and padding for the other fields."""

    _fields_ = (("address", ctypes.c_void_p), ("rest", ctypes.c_byte * 256))


def _address(memory: mmap.mmap) -> int:
    # from_buffer() of ctypes rejects read-only memory.
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

"""The bytes of an open safetensors file: mapped into memory, or read when they are needed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import mmap
import os
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from blobstore.core.escape import escape
from blobstore.core.files import open_regular, read_exactly
from blobstore.core.mmap import MappedRegion
from blobstore.errors import BlobstoreError, SafetensorError, UnsupportedDType
from blobstore.safetensors.arguments import require
from blobstore.safetensors.header import PREFIX_SIZE, errors_during, header_size
from blobstore.safetensors.table import parse_table, read_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from blobstore.safetensors.slices import Selection
    from blobstore.safetensors.sources import ByteSource
    from blobstore.safetensors.table import Kind, Table

Array = np.ndarray[Any, Any]

_HASHED = 1 << 24
"""Bytes that are read and hashed at once."""
_PIECE = 1 << 20
"""Tensors with fewer bytes than this share memory that was read with one request."""


class Piece(NamedTuple):
    """Some of the tensors of a file, with the memory that has their bytes."""

    rows: Iterable[tuple[str, Kind, int]]
    """Name, kind and the offset in the file of each tensor."""
    memory: Any
    """An array of bytes."""
    shift: int
    """The difference between an offset in the memory and that in the file."""


class Reader(Protocol):
    """Gives the bytes of a file. Threads may use it concurrently."""

    table: Table
    gap: int
    """Ranges with fewer bytes between them are read with one request."""
    request: int
    """Bytes per request, if several are sent at once."""

    def span(self, begin: int, end: int) -> tuple[Any, int]:
        """Return memory that holds bytes ``begin`` to ``end``, and the offset of these in it."""

    def pieces(self) -> Iterator[Piece]:
        """Return all tensors, in the order of their bytes."""

    def elements(
        self, begin: int, dtype: np.dtype[Any], shape: Sequence[int], selection: Selection
    ) -> Array:
        """Return selected elements of the tensor that begins at ``begin``."""

    def fetch(self, begin: int, end: int) -> tuple[Reader, Callable[[int, int], None]]:
        """Prepare to bring bytes ``begin`` to ``end`` into memory.

        Returns:
            A reader of these bytes, and a function that prefetches a part of them. If ``begin`` is
            ``end``, a reader that brings itself what is selected.
        """


class MemoryReader:
    """A file in memory. If it is a private map, views may be written to, and the file does not change."""

    gap = 4096
    request = 4 << 20

    def __init__(
        self,
        memory: Any,
        offset: int,
        table: Table,
        region: MappedRegion | None = None,
        *,
        is_copied: bool = False,
    ) -> None:
        """Take memory in which the file begins at ``offset``.

        Args:
            memory: the memory, of any type that is a buffer.
            offset: where in it the file begins.
            table: the header of the file.
            region: what has mapped the file.
            is_copied: whether :meth:`elements` returns copies, as it cannot be known when views are read.
        """
        # The memory cannot be freed while this array exists, which is what tensors refer to.
        self._memory = np.frombuffer(memory, np.uint8)
        self._offset = offset
        self._region = region
        self._is_copied = is_copied
        self.table = table

    def span(self, begin: int, end: int) -> tuple[Any, int]:  # noqa: ARG002 - what others read
        """Return all of the memory."""
        return self._memory, self._offset + begin

    def pieces(self) -> Iterator[Piece]:
        """Return the file as one piece."""
        yield Piece(self.table.rows(), self._memory, self._offset)

    def elements(
        self, begin: int, dtype: np.dtype[Any], shape: Sequence[int], selection: Selection
    ) -> Array:
        """Return a view of the elements."""
        ranges = selection.ranges
        if not all(ranges):
            return np.empty(selection.shape, dtype)
        strides = _strides(shape, dtype.itemsize)
        start = sum(r[0] * stride for r, stride in zip(ranges, strides, strict=True))
        kept = [
            (len(r), r.step * stride)
            for r, stride, is_kept in zip(ranges, strides, selection.is_kept, strict=True)
            if is_kept
        ]
        view: Array = np.ndarray(
            [count for count, _ in kept],
            dtype,
            self._memory,
            self._offset + begin + start,
            [stride for _, stride in kept],
        )
        return view.copy() if self._is_copied else view

    def fetch(self, begin: int, end: int) -> tuple[Reader, Callable[[int, int], None]]:
        """Let pages of a mapped file be read from the disk; without any, elements are copied."""

        def bring(start: int, stop: int) -> None:
            if self._region is not None:
                self._region.populate(0, start - start % mmap.PAGESIZE, stop)

        if begin < end:
            if self._region is not None:
                # Otherwise each page of 4 KiB becomes an entry of the page table of its own.
                self._region.will_populate(0)
            return self, bring
        copies = MemoryReader(self._memory, self._offset, self.table, is_copied=True)
        return copies, bring


class FileReader:
    """A file whose bytes are read when they are needed."""

    def __init__(self, source: ByteSource) -> None:
        """Read and check the header.

        Raises:
            InvalidHeader: the file breaks the format.
            OSError: the file cannot be read.
        """
        self._source = source
        self.gap = source.gap
        self.request = source.request
        self.table = read_table(lambda begin, end: bytes(self.span(begin, end)[0]), source.size)

    def span(self, begin: int, end: int) -> tuple[Any, int]:
        """Return the bytes, read into new memory."""
        memory = np.empty(end - begin, np.uint8)
        if begin < end:
            self._source.read_into(memory.data, begin)
        return memory, 0

    def fetch(self, begin: int, end: int) -> tuple[Reader, Callable[[int, int], None]]:
        """Allocate memory for bytes of the file; without any, elements are read one by one."""
        if begin == end:
            return self, lambda *_: None
        memory = np.empty(end - begin, np.uint8)

        def bring(start: int, stop: int) -> None:
            self._source.read_into(memory.data[start - begin : stop - begin], start)

        return MemoryReader(memory, -begin, self.table), bring

    def pieces(self) -> Iterator[Piece]:
        """Read large tensors one by one, and small ones together."""
        rows: list[tuple[str, Kind, int]] = []
        end = self.table.data_start + self.table.begins[-1]
        for row in self.table.rows():
            if rows and row[2] - rows[0][2] >= _PIECE:
                yield self._piece(rows, row[2])
                rows = []
            rows.append(row)
        if rows:
            yield self._piece(rows, end)

    def _piece(self, rows: list[tuple[str, Kind, int]], end: int) -> Piece:
        begin = rows[0][2]
        memory, _ = self.span(begin, end)
        return Piece(rows, memory, -begin)

    def elements(
        self, begin: int, dtype: np.dtype[Any], shape: Sequence[int], selection: Selection
    ) -> Array:
        """Return the elements, read into new memory."""
        ranges = selection.ranges
        found = np.empty([len(positions) for positions in ranges], dtype)
        if found.size:
            strides = _strides(shape, dtype.itemsize)
            depth = _request_depth(ranges, strides, dtype.itemsize, self._source.gap)
            block = _Block(ranges[depth:], strides[depth:], dtype)
            for places in itertools.product(*(range(len(r)) for r in ranges[:depth])):
                outer = zip(places, ranges, strides, strict=False)
                start = begin + sum(r[number] * stride for number, r, stride in outer)
                memory, _ = self.span(start + block.begin, start + block.end)
                place: Any = (*places, ...)
                found[place] = block.view(memory)
        return found.reshape(selection.shape)


class _Block:
    """A part of a tensor that is read with one request, and the selected elements in it."""

    def __init__(
        self, ranges: Sequence[range], strides: Sequence[int], dtype: np.dtype[Any]
    ) -> None:
        pairs = list(zip(ranges, strides, strict=True))
        self.begin = sum(min(r[0], r[-1]) * stride for r, stride in pairs)
        self.end = sum(max(r[0], r[-1]) * stride for r, stride in pairs) + dtype.itemsize
        self._first = sum(r[0] * stride for r, stride in pairs) - self.begin
        self._shape = [len(r) for r in ranges]
        self._strides = [r.step * stride for r, stride in pairs]
        self._dtype = dtype

    def view(self, memory: Any) -> Array:
        """Return the selected elements of a block."""
        return np.ndarray(self._shape, self._dtype, memory, self._first, self._strides)


def _strides(shape: Sequence[int], itemsize: int) -> list[int]:
    """Return the distances in bytes between neighbours in each dimension."""
    strides = [itemsize]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return strides[::-1][: len(shape)] if shape else []


def _request_depth(ranges: Sequence[range], strides: Sequence[int], itemsize: int, gap: int) -> int:
    """Return the number of leading dimensions for each of whose elements a request is sent.

    Elements with fewer than ``gap`` bytes between them are read with one.
    """
    depth, inner = 0, itemsize
    for dim in reversed(range(len(ranges))):
        distance = abs(ranges[dim].step) * strides[dim]
        is_far = len(ranges[dim]) > 1 and distance - inner >= gap
        if is_far and not depth:
            depth = dim + 1
        inner += (len(ranges[dim]) - 1) * distance
    return depth


def open_reader(file: Any, backend: str, *, is_writable: bool = False) -> Reader:
    """Open a file and check its header.

    Args:
        file: a path, an ``http`` or ``https`` URL, a binary file object that can seek, or a buffer with the
            bytes of a file.
        backend: ``mmap`` or ``pread``, for paths.
        is_writable: whether views must be writable, so that a read-only buffer is copied.

    Raises:
        SafetensorError: the file breaks the format, or ``backend`` is not ``mmap`` or ``pread``.
        OSError: the file cannot be opened or read.
    """
    require(backend, str, "backend")
    if backend not in ("mmap", "pread"):
        raise SafetensorError(
            f'backend "{escape(backend, 200)}" is invalid (expected one of: "mmap", "pread")'
        )
    with errors_during("Error while deserializing header"):
        if isinstance(file, str | os.PathLike):
            return _open_path(file, backend)
        if hasattr(file, "seek") and hasattr(file, "read") and not isinstance(file, mmap.mmap):
            from blobstore.safetensors.sources import StreamSource

            return FileReader(StreamSource(file))
    try:
        memoryview(file)
    except TypeError:
        raise TypeError(
            f"argument 'filename': expected str, bytes or os.PathLike object, not {type(file).__name__}"
        ) from None
    return open_memory(file, is_writable=is_writable)


def _open_path(path: str | os.PathLike[str], backend: str) -> Reader:
    from blobstore.safetensors.sources import FileSource, UrlSource

    if isinstance(path, str) and path.startswith(("http://", "https://")):
        return FileReader(UrlSource(path))
    descriptor, size = _open(path)
    if backend == "pread":
        return FileReader(FileSource(descriptor, size))
    try:
        table = read_table(lambda begin, end: read_exactly(descriptor, end - begin, begin), size)
        region = MappedRegion([size], writable=True)
        region.map(0, descriptor, size)
        return MemoryReader(region.memory, region.offsets[0], table, region)
    finally:
        os.close(descriptor)


def open_memory(data: Buffer, *, is_writable: bool = False) -> MemoryReader:
    """Check the header of a file in memory, which is copied if it must be writable and is not.

    Raises:
        SafetensorError: the bytes break the format.
        TypeError: ``data`` is no buffer.
    """
    try:
        whole = memoryview(data)
    except TypeError:
        require(data, bytes, "bytes")
        raise
    memory = whole.cast("B") if whole.nbytes else memoryview(b"")
    if is_writable and memory.readonly:
        memory = np.frombuffer(memory, np.uint8).copy().data
    with errors_during("Error while deserializing"):
        size = header_size(memory[:PREFIX_SIZE], len(memory))
        text = bytes(memory[PREFIX_SIZE : PREFIX_SIZE + size])
        return MemoryReader(memory, 0, parse_table(text, len(memory)))


def _open(filename: str | os.PathLike[str]) -> tuple[int, int]:
    path = os.fspath(filename)
    if not isinstance(path, str):
        raise TypeError("argument 'filename': 'bytes' object is not an instance of 'str'")
    try:
        return open_regular(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a NUL or a lone surrogate
        raise FileNotFoundError(f"No such file or directory: {path}") from None
    except BlobstoreError:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), path) from None


def digest(reader: Reader, begin: int, end: int) -> str:
    """Return the sha256 of bytes of a file, as hexadecimal digits."""
    found = hashlib.sha256()
    for start in range(begin, end, _HASHED):
        size = min(_HASHED, end - start)
        memory, offset = reader.span(start, start + size)
        found.update(memory[offset : offset + size])
    return found.hexdigest()


@contextlib.contextmanager
def framework_errors() -> Iterator[None]:
    """Convert errors of types and shapes that a framework does not have."""
    try:
        yield
    except UnsupportedDType as error:
        raise SafetensorError(error.message) from None
    except (OverflowError, ValueError) as error:
        raise SafetensorError(f"the framework cannot hold the shape: {error}") from None

"""The bytes of an open safetensors file: mapped into memory, or read when they are needed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from blobstore.core.escape import escape
from blobstore.core.files import open_regular
from blobstore.core.mmap import MappedRegion
from blobstore.errors import BlobstoreError, SafetensorError, UnsupportedDType
from blobstore.safetensors.arguments import require
from blobstore.safetensors.header import PREFIX_SIZE, errors_during, header_size
from blobstore.safetensors.table import parse_table, read_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from blobstore.safetensors.slices import Selection
    from blobstore.safetensors.table import Kind, Table

Array = np.ndarray[Any, Any]

_PIECE = 1 << 20
"""Tensors with fewer bytes than this share memory that was read with one request."""
_NEAR = 4096
"""Selected elements with fewer bytes between them are read with one request."""


class Piece(NamedTuple):
    """Some of the tensors of a file, with the memory that has their bytes."""

    rows: Iterable[tuple[str, Kind, int]]
    """Name, kind and the offset in the file of each tensor."""
    memory: Any
    """An array of bytes."""
    shift: int
    """What to add to an offset in the file for that in the memory."""


class Reader(Protocol):
    """Gives the bytes of a file. Threads may use it concurrently."""

    table: Table

    def span(self, begin: int, end: int) -> tuple[Any, int]:
        """Return memory that holds bytes ``begin`` to ``end``, and the offset of these in it."""

    def pieces(self) -> Iterator[Piece]:
        """Return all tensors, in the order of their bytes."""

    def elements(
        self, begin: int, dtype: np.dtype[Any], shape: Sequence[int], selection: Selection
    ) -> Array:
        """Return selected elements of the tensor that begins at ``begin``."""


class MemoryReader:
    """A file in memory. If it is a private map, views may be written to, and the file does not change."""

    def __init__(self, memory: Any, offset: int, table: Table) -> None:
        # The memory cannot be freed while this array exists, which is what tensors refer to.
        self._memory = np.frombuffer(memory, np.uint8)
        self._offset = offset
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
        if 0 in shape:
            return np.empty(selection.shape, dtype)
        view: Array = np.ndarray(shape, dtype, self._memory, self._offset + begin)
        part: Array = view[selection.array_index]
        return part


class FileReader:
    """An open file whose bytes are read when they are needed."""

    def __init__(self, descriptor: int, table: Table) -> None:
        self._descriptor = descriptor
        self.table = table

    def __del__(self) -> None:
        os.close(self._descriptor)

    def span(self, begin: int, end: int) -> tuple[Any, int]:
        """Return the bytes, read into new memory."""
        memory = np.empty(end - begin, np.uint8)
        self._read_into(memory.data, begin)
        return memory, 0

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
            depth = _request_depth(ranges, strides, dtype.itemsize)
            block = _Block(ranges[depth:], strides[depth:], dtype)
            for places in itertools.product(*(range(len(r)) for r in ranges[:depth])):
                outer = zip(places, ranges, strides, strict=False)
                start = begin + sum(r[number] * stride for number, r, stride in outer)
                memory, _ = self.span(start + block.begin, start + block.end)
                place: Any = (*places, ...)
                found[place] = block.view(memory)
        return found.reshape(selection.shape)

    def _read_into(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if not count:
                raise SafetensorError("Error while reading: the file has become shorter")
            done += count


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


def _request_depth(ranges: Sequence[range], strides: Sequence[int], itemsize: int) -> int:
    """Return the number of leading dimensions for each of whose elements a request is sent."""
    depth, inner = 0, itemsize
    for dim in reversed(range(len(ranges))):
        distance = abs(ranges[dim].step) * strides[dim]
        is_far = len(ranges[dim]) > 1 and distance - inner >= _NEAR
        if is_far and not depth:
            depth = dim + 1
        inner += (len(ranges[dim]) - 1) * distance
    return depth


def open_reader(filename: str | os.PathLike[str], backend: str) -> Reader:
    """Open a file and check its header.

    Raises:
        SafetensorError: the file breaks the format, or ``backend`` is not ``mmap`` or ``pread``.
        OSError: the file cannot be opened or read.
    """
    require(backend, str, "backend")
    if backend not in ("mmap", "pread"):
        raise SafetensorError(
            f'backend "{escape(backend, 200)}" is invalid (expected one of: "mmap", "pread")'
        )
    descriptor, size = _open(filename)
    try:
        with errors_during("Error while deserializing header"):
            table = read_table(descriptor, size)
        if backend == "mmap":
            region = MappedRegion([size], writable=True)
            region.map(0, descriptor, size)
            return MemoryReader(region.memory, region.offsets[0], table)
        reader, descriptor = FileReader(descriptor, table), -1
        return reader
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def open_memory(data: Buffer) -> MemoryReader:
    """Check the header of a file in memory.

    Raises:
        SafetensorError: the bytes break the format.
        TypeError: ``data`` is no buffer.
    """
    whole = memoryview(data)
    memory = whole.cast("B") if whole.nbytes else memoryview(b"")
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
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"No such file or directory: {path}") from None
    except BlobstoreError:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), path) from None


@contextlib.contextmanager
def framework_errors() -> Iterator[None]:
    """Convert errors of types and shapes that a framework does not have."""
    try:
        yield
    except UnsupportedDType as error:
        raise SafetensorError(error.message) from None
    except (OverflowError, ValueError) as error:
        raise SafetensorError(f"the framework cannot hold the shape: {error}") from None

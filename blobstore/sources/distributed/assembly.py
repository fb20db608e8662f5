"""Yields the bytes of a tensor from its pieces, in the order of the tensor.

A tensor is read row by row. Where one piece has complete rows, its bytes follow each other in the
tensor as in the piece. Where several pieces have parts of every row, some rows of each are gathered in
the caller's buffer. So each piece is read once and from front to back, and no more memory is needed than
the buffer and a second one of its size.
"""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from zlib_ng.zlib_ng import crc32  # at a tenth of the cost of the standard library's

from blobstore.core.escape import quote
from blobstore.errors import DamagedSource
from blobstore.sources.distributed.tiling import slabs
from blobstore.sources.pytorch.gather import gathered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.sources.distributed.pieces import Box, Piece

    Array = np.ndarray[Any, Any]

_MAX_OPEN = 16
"""Files that a tensor keeps open while it is read; those of a tensor in more of them are opened again."""


def read_assembled(
    shape: Sequence[int], itemsize: int, pieces: Sequence[Piece], buffer: memoryview
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in parts, each in ``buffer`` and valid until the next one.

    Args:
        shape: sizes of the dimensions, in elements of ``itemsize`` bytes.
        itemsize: bytes of an element.
        pieces: pieces that tile the tensor; none if it has no elements.
        buffer: memory for the parts, of one element at least.

    Raises:
        DamagedSource: a file was truncated or changed, or a checksum does not match.
    """
    if not pieces:
        return iter(())
    return _read(_Assembly(shape, itemsize, buffer), pieces)


def _read(assembly: _Assembly, pieces: Sequence[Piece]) -> Iterator[memoryview]:
    files = {piece.file for piece in pieces}
    with contextlib.ExitStack() as stack:
        # Where pieces have parts of every row, each file is read once for each part of the tensor.
        opened = {}
        if len(files) <= _MAX_OPEN:
            opened = {file: stack.enter_context(file.opened()) for file in files}
        streams = [
            (_Stream if piece.strided is None else _Gathered)(piece, opened.get(piece.file))
            for piece in pieces
        ]
        yield from assembly.parts(streams, 0)


class _Source(Protocol):
    """A piece being read from front to back."""

    box: Box

    def read_into(self, target: memoryview) -> None:
        """Fill ``target`` with the next bytes."""


class _Stream:
    """A piece whose elements are in C order in its file."""

    def __init__(self, piece: Piece, descriptor: int | None) -> None:
        self.box = piece.box
        self._piece = piece
        self._descriptor = descriptor
        self._done = 0
        self._crc = 0

    def read_into(self, target: memoryview) -> None:
        """See :class:`_Source`."""
        piece = self._piece
        done = 0
        with piece.file.opened(self._descriptor) as descriptor:
            # Before the first bytes are passed on, because the checksum is that of a larger storage.
            if piece.check and not self._done:
                piece.check(descriptor)
            while done < len(target):
                offset = piece.begin + self._done + done
                count = os.preadv(descriptor, [target[done:]], offset)
                if not count:
                    raise DamagedSource(f"{quote(piece.file.path)} is truncated at byte {offset}")
                done += count
        self._done += done
        if piece.crc:
            self._crc = crc32(target, self._crc)
            # Before the last bytes are passed on: no tensor is complete with a wrong checksum.
            if self._done == piece.size and self._crc != piece.crc:
                raise DamagedSource(
                    f"{quote(piece.file.path)}: the {piece.size} bytes from byte {piece.begin} have "
                    f"the CRC {self._crc:08x}, not {piece.crc:08x}: they have been changed"
                )


class _Gathered:
    """A piece whose elements are in another order in its file. It is read completely at first."""

    def __init__(self, piece: Piece, descriptor: int | None) -> None:
        self.box = piece.box
        self._piece = piece
        self._descriptor = descriptor
        self._data = memoryview(b"")
        self._done = 0

    def read_into(self, target: memoryview) -> None:
        """See :class:`_Source`."""
        if not self._done:
            data = bytearray(self._piece.size)
            _Stream(self._piece, self._descriptor).read_into(memoryview(data))
            assert self._piece.strided is not None  # noqa: S101 - for the type checker
            self._data = gathered(self._piece.strided, data)
        end = self._done + len(target)
        target[:] = self._data[self._done : end]
        self._done = end


class _Assembly:
    """A tensor being read."""

    def __init__(self, shape: Sequence[int], itemsize: int, buffer: memoryview) -> None:
        self._shape = shape
        self._buffer = buffer
        self._scratch = memoryview(b"")
        self._row_sizes = [
            math.prod(shape[dimension + 1 :]) * itemsize for dimension in range(len(shape))
        ]
        """Bytes of the tensor for one index of each dimension."""
        self._itemsize = itemsize

    def parts(self, sources: Sequence[_Source], dimension: int) -> Iterator[memoryview]:
        """Yield what sources have of all dimensions from ``dimension`` on."""
        if dimension == len(self._shape):
            yield from self._copied(sources[0], self._itemsize)
            return
        row = self._row_sizes[dimension]
        for start, stop, active in slabs(sources, dimension):
            if len(active) == 1:
                yield from self._copied(active[0], (stop - start) * row)
            elif row <= len(self._buffer):
                step = len(self._buffer) // row
                for first in range(start, stop, step):
                    yield self._interleaved(active, dimension, min(step, stop - first))
            else:
                for _ in range(start, stop):
                    yield from self.parts(active, dimension + 1)

    def _copied(self, source: _Source, size: int) -> Iterator[memoryview]:
        while size:
            part = self._buffer[: min(size, len(self._buffer))]
            source.read_into(part)
            yield part
            size -= len(part)

    def _interleaved(self, sources: Sequence[_Source], dimension: int, rows: int) -> memoryview:
        """Return some rows, of which every source has a part."""
        size = rows * self._row_sizes[dimension]
        target = self._buffer[:size]
        inner = slice(dimension + 1, None)
        out = np.frombuffer(target, np.uint8).reshape(rows, *self._shape[inner], self._itemsize)
        if len(self._scratch) < size:
            self._scratch = memoryview(bytearray(len(self._buffer)))
        for source in sources:
            offsets, sizes = source.box.offsets[inner], source.box.sizes[inner]
            part = self._scratch[: rows * math.prod(sizes) * self._itemsize]
            source.read_into(part)
            places = [slice(o, o + s) for o, s in zip(offsets, sizes, strict=True)]
            taken = np.frombuffer(part, np.uint8).reshape(rows, *sizes, self._itemsize)
            out[(slice(None), *places)] = taken
        return target

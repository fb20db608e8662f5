"""Reads tensors that are spread over shards, and joins and reorders their rows.

Rows are reordered in two cases: in matrices split by columns, every row is in all shards; in heads,
even rows come before odd ones. Both are read in blocks as stored in the shards, and the rows are
gathered in the caller's buffer. If a row is longer than the buffer, or a head larger than a block, rows
are read one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from blobstore.core.escape import quote
from blobstore.errors import DamagedSource
from blobstore.sources import base

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.sources.meta.layout import Joined

    Array = np.ndarray[Any, Any]

_BLOCK_SIZE = 1 << 22
"""Most bytes to reorder at once: a head of the largest Llama."""
_COMPARED_SIZE = 1 << 16


class Shard(base.Shard, Protocol):
    """A shard of which parts of tensors can be read, too."""

    values: Any
    """See :class:`Checkpoint`."""

    def read_range(
        self, name: str, begin: int, end: int, buffer: memoryview
    ) -> Iterator[memoryview]:
        """Yield bytes ``begin`` to ``end`` of a tensor, as :meth:`read` does."""


class _Range(NamedTuple):
    """Bytes of one part of a tensor."""

    part: int
    begin: int
    end: int


class _Block(NamedTuple):
    """Ranges to read one after the other, and the order of their rows if it differs."""

    ranges: Sequence[_Range]
    order: Array | None = None


def read_joined(
    shards: Sequence[Shard], files: Sequence[object], tensor: Joined, buffer: memoryview
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in pieces, each in ``buffer`` and valid until the next one.

    Args:
        shards: the open shards.
        files: the names of the shards, for messages.
        tensor: the tensor to read.
        buffer: memory for the pieces.

    Raises:
        DamagedSource: a shard cannot be read, or copies in two shards differ.
    """
    return _Reading(shards, files, tensor, buffer).pieces()


class _Reading:
    """One tensor being read."""

    def __init__(
        self,
        shards: Sequence[Shard],
        files: Sequence[object],
        tensor: Joined,
        buffer: memoryview,
    ) -> None:
        self._shards = shards
        self._files = files
        self._tensor = tensor
        self._buffer = buffer
        self._scratch = np.empty(0, np.uint8)
        self._row = 0
        """Bytes of a row to gather: of the tensor, or of a part with some columns."""
        if tensor.head_rows or tensor.by_columns:
            parts = len(tensor.parts) if tensor.by_columns else 1
            self._row = tensor.spec.nbytes // (tensor.spec.shape[0] * parts)

    def pieces(self) -> Iterator[memoryview]:
        if self._tensor.by_columns:
            blocks = self._interleaved()
        elif self._tensor.head_rows:
            blocks = self._heads()
        else:
            blocks = iter([_Block(list(self._along_rows(0, self._tensor.spec.nbytes)))])
        row = self._row
        for block in blocks:
            if block.order is None:
                for place in block.ranges:
                    yield from self._read(place)
                continue
            size = sum(place.end - place.begin for place in block.ranges)
            if len(self._scratch) < size:
                self._scratch = np.empty(size, np.uint8)
            done = 0
            for place in block.ranges:
                for piece in self._read(place):
                    self._scratch[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                    done += len(piece)
            rows = self._scratch[:size].reshape(-1, row)
            step = len(self._buffer) // row
            for start in range(0, len(block.order), step):
                chosen = block.order[start : start + step]
                target = self._buffer[: len(chosen) * row]
                out = np.frombuffer(target, np.uint8).reshape(-1, row)
                np.take(rows, chosen, axis=0, out=out, mode="clip")  # "raise" would copy again
                yield target

    def _interleaved(self) -> Iterator[_Block]:
        """Yield blocks of as many rows as fit the buffer, or the parts of every row."""
        parts, row = len(self._tensor.parts), self._row
        rows = self._tensor.spec.shape[0]
        step = min(_BLOCK_SIZE, len(self._buffer)) // (row * parts)
        for first in range(0, rows, max(step, 1)):
            last = min(first + max(step, 1), rows)
            ranges = [_Range(part, first * row, last * row) for part in range(parts)]
            order = np.arange(parts * (last - first)).reshape(parts, -1).T.ravel()
            yield _Block(ranges, order if step else None)

    def _heads(self) -> Iterator[_Block]:
        """Yield complete heads, or single rows."""
        rows, row = self._tensor.head_rows, self._row
        order = np.concatenate([np.arange(0, rows, 2), np.arange(1, rows, 2)])
        is_gathered = rows * row <= _BLOCK_SIZE and row <= len(self._buffer)
        for begin in range(0, self._tensor.spec.nbytes, rows * row):
            if is_gathered:
                yield _Block(list(self._along_rows(begin, begin + rows * row)), order)
                continue
            for index in map(int, order):
                start = begin + index * row
                yield _Block(list(self._along_rows(start, start + row)))

    def _along_rows(self, begin: int, end: int) -> Iterator[_Range]:
        """Yield the places of some bytes of a tensor whose parts follow each other."""
        size = self._tensor.part_bytes
        while begin < end:
            part, offset = divmod(begin, size)
            count = min(end - begin, size - offset)
            yield _Range(part, offset, offset + count)
            begin += count

    def _read(self, place: _Range) -> Iterator[memoryview]:
        """Yield the bytes of a range, after comparing them with the copies in other shards."""
        chosen, *others = self._tensor.parts[place.part]
        begin = place.begin
        pieces = self._shards[chosen].read_range(
            self._tensor.source, begin, place.end, self._buffer
        )
        for piece in pieces:
            for other in others:
                self._compare(chosen, other, begin, piece)
            yield piece
            begin += len(piece)

    def _compare(self, chosen: int, other: int, begin: int, piece: memoryview) -> None:
        scratch = memoryview(bytearray(min(len(piece), _COMPARED_SIZE)))
        done = 0
        copies = self._shards[other].read_range(
            self._tensor.source, begin, begin + len(piece), scratch
        )
        for copy in copies:
            if not np.array_equal(copy, piece[done : done + len(copy)]):
                raise DamagedSource(
                    f"tensor {quote(self._tensor.source)} differs between "
                    f"{quote(self._files[chosen])} and {quote(self._files[other])}, which should "
                    "have copies of it: these are not the shards of one model"
                )
            done += len(copy)

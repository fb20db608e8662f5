"""Rules that quantize a tensor of the base: what comes out predicts a part of a blob.

If a file was quantized without an importance matrix, to a type whose blocks follow from their weights alone,
the prediction is the part itself. Rules give the same bits on every machine (:mod:`blobstore.gguf.quantize`).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.scratch import scratch
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged
from blobstore.gguf.quantize import QUANTIZED, quantize
from blobstore.gguf.types import TYPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

    from blobstore.gguf.types import GgufType

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAX_HEAD: Final = 1 << 22
"""Elements of an attention head at most, because its rows are read together."""
_VERSION: Final = 1
_READ: Final = 1 << 22
"""Bytes of a base that are read at once at most, unless its rows are permuted."""
_RECORD: Final = struct.Struct("<BBBBII")
RULE_SIZE: Final = _RECORD.size
_SOURCES: Final = {0: DType.F32, 1: DType.F16, 30: DType.BF16}
"""The types of weights, by their numbers in GGUF files."""
_NUMPY_TYPES: Final = {DType.F32: "<f4", DType.F16: "<f2", DType.BF16: "<u2"}
_NUMBERS: Final = {kind.name: number for number, kind in TYPES.items() if kind.name in QUANTIZED}


class QuantRule(NamedTuple):
    """How blocks are computed from elements of a base."""

    type_name: str
    """The type of the blocks, one of :data:`~blobstore.gguf.quantize.QUANTIZED`."""
    dtype: DType
    """The type of the base's elements: F32, F16 or BF16."""
    columns: int = 0
    """Elements of a row; 0 if rows are not permuted."""
    head: int = 0
    """Rows of an attention head. Row 2i + j of each head is row i + j * head / 2 of the base's, because
    llama.cpp interleaves what rotary embeddings turn together. 0 if rows are not permuted."""

    @property
    def kind(self) -> GgufType:
        """The type of the blocks."""
        return TYPES[_NUMBERS[self.type_name]]

    @property
    def source_width(self) -> int:
        """Bytes of an element of the base."""
        return self.dtype.bits // 8

    def source_size(self, size: int) -> int:
        """Return how many bytes of the base become ``size`` bytes of blocks."""
        return size // self.kind.size * self.kind.weights * self.source_width

    def is_possible(self, size: int) -> bool:
        """Return whether ``size`` bytes can be whole blocks, and whole heads if rows are permuted."""
        if size % self.kind.size:
            return False
        if not self.head:
            return not self.columns
        head = self.head * self.columns
        if self.head % 2 or not 0 < head <= MAX_HEAD:
            return False
        return self.source_size(size) % (head * self.source_width) == 0

    def pack(self) -> bytes:
        """Return the rule as bytes of a table."""
        source = next(number for number, dtype in _SOURCES.items() if dtype is self.dtype)
        number = _NUMBERS[self.type_name]
        return _RECORD.pack(number, _VERSION, source, 0, self.columns, self.head)

    @classmethod
    def unpack(cls, record: bytes | memoryview) -> QuantRule:
        """Return the rule that bytes of a table hold.

        Raises:
            ColdDamaged: there is no such rule.
        """
        number, version, source, reserved, columns, head = _RECORD.unpack(record)
        kind = TYPES.get(number)
        if version != _VERSION or kind is None or kind.name not in QUANTIZED:
            raise ColdDamaged(
                f"blocks of type {number} quantized by version {version} of its rule are unknown; a newer "
                "program may know them"
            )
        if source not in _SOURCES or reserved:
            raise ColdDamaged(f"blocks cannot be quantized from type {source}, {reserved}")
        return cls(kind.name, _SOURCES[source], columns, head)

    def predict(self, read: Callable[[int, int], Bytes], offset: int, size: int) -> Bytes:
        """Return ``size`` bytes of blocks from ``offset`` on.

        The result is valid until this thread's next call.

        Args:
            read: returns bytes of the base's elements, from an offset on and as many as asked for, valid
                until its next call.
            offset: a multiple of the size of a block.
            size: a multiple of the size of a block.
        """
        out = scratch("quantized", size)
        if self.head:
            weights = self._permuted(read, self.source_size(offset), self.source_size(size))
            return quantize(self.type_name, weights, out)
        row = self.kind.weights * self.source_width
        step = _READ // row
        for begin in range(0, size // self.kind.size, step):
            end = min(begin + step, size // self.kind.size)
            weights = read(self.source_size(offset) + begin * row, (end - begin) * row)
            blocks = out[begin * self.kind.size : end * self.kind.size]
            quantize(self.type_name, weights.view(_NUMPY_TYPES[self.dtype]), blocks)
        return out

    def _permuted(self, read: Callable[[int, int], Bytes], begin: int, size: int) -> Bytes:
        """Return elements in the order of the blocks: those of whole heads are read at once."""
        head = self.head * self.columns * self.source_width
        first = begin // head * head
        last = -(-(begin + size) // head) * head
        dtype = np.dtype(_NUMPY_TYPES[self.dtype])
        found = scratch("heads", last - first).view(dtype)
        rows = found.reshape(-1, self.head // 2, 2, self.columns)
        for number, at in enumerate(range(first, last, head)):
            weights = read(at, head).view(dtype)
            rows[number] = weights.reshape(2, -1, self.columns).swapaxes(0, 1)
        return found[(begin - first) // dtype.itemsize :][: size // dtype.itemsize]

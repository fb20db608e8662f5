"""Rules that quantize a tensor of the base: what comes out predicts a part of a blob.

If a file was quantized without an importance matrix, to a type whose blocks follow from their weights alone,
the prediction is the part itself (:mod:`blobstore.gguf.quantize`). If scales were searched for, the part keeps
them, and the codes follow from these and the weights (:mod:`blobstore.gguf.fill_codes`). Rules give the same
bits on every machine.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.scratch import scratch
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged
from blobstore.gguf.fill_codes import CODED, codes_of, fill_codes
from blobstore.gguf.quantize import QUANTIZED, quantize
from blobstore.gguf.types import TYPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final

    from blobstore.gguf.types import GgufType

    Array = np.ndarray[Any, Any]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAX_HEAD: Final = 1 << 22
"""Elements of an attention head at most, because its rows are read together."""
_HEADS: Final = 16
"""A chunk of permuted rows has one weight at least for so many of a head, which may be read as a whole for it."""
MAX_CODED: Final = 1 << 20
"""Weights of a chunk whose scales are kept at most, because they are read together."""
_VERSIONS: Final = {1: QUANTIZED, 2: CODED}
"""The types of each version of rules: the second one keeps scales."""
_READ: Final = 1 << 22
"""Bytes of a base that are read at once at most, unless its rows are permuted."""
_RECORD: Final = struct.Struct("<BBBBII")
RULE_SIZE: Final = _RECORD.size
SOURCES: Final = {0: DType.F32, 1: DType.F16, 30: DType.BF16}
"""The types of weights, by their numbers in GGUF files."""
NUMPY_TYPES: Final = {DType.F32: "<f4", DType.F16: "<f2", DType.BF16: "<u2"}
SOURCE_NUMBERS: Final = {dtype: number for number, dtype in SOURCES.items()}
_NUMBERS: Final = {kind.name: number for number, kind in TYPES.items()}


def to_float32(weights: Array) -> Array:
    """Return a copy of weights as float32; uint16 has the bits of bfloat16."""
    if weights.dtype == np.uint16:
        return (weights.astype(np.uint32) << 16).view(np.float32)
    return weights.astype(np.float32)


def rounded(values: Array, dtype: DType) -> Array:
    """Return float32 rounded to F32, F16 or BF16, the latter as uint16; overwrites ``values``."""
    if dtype is DType.BF16:
        bits = values.view(np.uint32)
        bits += (bits >> 16 & 1) + np.uint32(0x7FFF)
        return (bits >> 16).astype("<u2")
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(NUMPY_TYPES[dtype], copy=False)


def weights_of(data: bytes, dtype: DType) -> Array:
    """Return the weights that bytes of a tensor hold, as float32."""
    return to_float32(np.frombuffer(data, NUMPY_TYPES[dtype]))


class QuantRule(NamedTuple):
    """How blocks are computed from elements of a base."""

    type_name: str
    """The type of the blocks: one of :data:`~blobstore.gguf.fill_codes.CODED` if the rule keeps scales, else
    of :data:`~blobstore.gguf.quantize.QUANTIZED`."""
    dtype: DType
    """The type of the base's elements: F32, F16 or BF16."""
    columns: int = 0
    """Elements of a row; 0 if rows are not permuted."""
    head: int = 0
    """Rows of an attention head. Row 2i + j of each head is row i + j * head / 2 of the base's, because
    llama.cpp interleaves what rotary embeddings turn together. 0 if rows are not permuted."""
    keeps_scales: bool = False
    """Whether the part has the scales of its blocks, and only their codes are computed."""
    cast: DType = DType.F32
    """The type that the weights had before they were quantized: F32, or F16 or BF16 if they were rounded to it.
    Only rules that keep scales round."""

    @property
    def kind(self) -> GgufType:
        """The type of the blocks."""
        return TYPES[self.number]

    @property
    def number(self) -> int:
        """The number of this type in GGUF files."""
        return _NUMBERS[self.type_name]

    @property
    def source_width(self) -> int:
        """Bytes of an element of the base."""
        return self.dtype.bits // 8

    def source_size(self, size: int) -> int:
        """Return how many bytes of the base become ``size`` bytes of blocks."""
        return size // self.kind.size * self.kind.weights * self.source_width

    def kept_size(self, size: int) -> int:
        """Return how many bytes of ``size`` bytes of blocks are not predicted."""
        if not self.keeps_scales:
            return 0
        kept = self.kind.size - len(codes_of(self.type_name))
        return size // self.kind.size * kept

    def is_possible(self, size: int, chunk_size: int = 0) -> bool:
        """Return whether ``size`` bytes can be whole blocks, and whole heads if rows are permuted.

        So can be chunks of ``chunk_size`` bytes, whose weights are not too many, and not too few for a head.
        """
        if size % self.kind.size or chunk_size % self.kind.size:
            return False
        weights = chunk_size // self.kind.size * self.kind.weights
        if self.keeps_scales and weights > MAX_CODED:
            return False
        if not self.head:
            return not self.columns
        head = self.head * self.columns
        if self.head % 2 or not 0 < head <= MAX_HEAD or (chunk_size and _HEADS * weights < head):
            return False
        return self.source_size(size) % (head * self.source_width) == 0

    def pack(self) -> bytes:
        """Return the rule as bytes of a table."""
        version = 2 if self.keeps_scales else 1
        source, cast = SOURCE_NUMBERS[self.dtype], SOURCE_NUMBERS[self.cast]
        return _RECORD.pack(self.number, version, source, cast, self.columns, self.head)

    @classmethod
    def unpack(cls, record: bytes | memoryview) -> QuantRule:
        """Return the rule that bytes of a table hold.

        Raises:
            ColdDamaged: there is no such rule.
        """
        number, version, source, cast, columns, head = _RECORD.unpack(record)
        kind = TYPES.get(number)
        if kind is None or kind.name not in _VERSIONS.get(version, ()):
            raise ColdDamaged(
                f"blocks of type {number} quantized by version {version} of its rule are unknown; a newer "
                "program may know them"
            )
        keeps_scales = version > 1
        if source not in SOURCES or cast not in (SOURCES if keeps_scales else (0,)):
            raise ColdDamaged(f"blocks cannot be quantized from type {source}, {cast}")
        return cls(kind.name, SOURCES[source], columns, head, keeps_scales, cast=SOURCES[cast])

    def weights(self, read: Callable[[int, int], Bytes], offset: int, size: int) -> Array:
        """Return the weights of ``size`` bytes of blocks from ``offset`` on, as :meth:`predict` takes them.

        The result is float32 or float16, or uint16 with the bits of bfloat16, and valid until this thread's
        next call.
        """
        begin, count = self.source_size(offset), self.source_size(size)
        if self.head:
            found: Array = self._permuted(read, begin, count)
        else:
            found = read(begin, count).view(NUMPY_TYPES[self.dtype])
        if self.cast in (DType.F32, self.dtype):
            return found
        return rounded(to_float32(found), self.cast)

    def expect(self, read: Callable[[int, int], Bytes], offset: int, blocks: Bytes) -> Bytes:
        """Return what is predicted for ``blocks`` from ``offset`` on, of which scales that are kept are known.

        Takes what :meth:`predict` takes.
        """
        if not self.keeps_scales:
            return self.predict(read, offset, len(blocks))
        expected = blocks.copy()
        weights = self.weights(read, offset, len(blocks))
        fill_codes(self.type_name, weights, expected.reshape(-1, self.kind.size))
        return expected

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
            return quantize(self.type_name, self.weights(read, offset, size), out)
        row = self.kind.weights * self.source_width
        step = _READ // row
        for begin in range(0, size // self.kind.size, step):
            end = min(begin + step, size // self.kind.size)
            weights = read(self.source_size(offset) + begin * row, (end - begin) * row)
            blocks = out[begin * self.kind.size : end * self.kind.size]
            quantize(self.type_name, weights.view(NUMPY_TYPES[self.dtype]), blocks)
        return out

    def _permuted(self, read: Callable[[int, int], Bytes], begin: int, size: int) -> Bytes:
        """Return elements in the order of the blocks: those of whole heads are read at once."""
        head = self.head * self.columns * self.source_width
        first = begin // head * head
        last = -(-(begin + size) // head) * head
        dtype = np.dtype(NUMPY_TYPES[self.dtype])
        found = scratch("heads", last - first).view(dtype)
        rows = found.reshape(-1, self.head // 2, 2, self.columns)
        for number, at in enumerate(range(first, last, head)):
            weights = read(at, head).view(dtype)
            rows[number] = weights.reshape(2, -1, self.columns).swapaxes(0, 1)
        return found[(begin - first) // dtype.itemsize :][: size // dtype.itemsize]

"""Rules that quantize a tensor of the base: what comes out predicts a part of a blob.

If a file was quantized without an importance matrix, to a type whose blocks follow from their weights alone,
the prediction is the part itself (:mod:`blobstore.gguf.quantize`). If scales were searched for, the part keeps
them, and the codes follow from these and the weights (:mod:`blobstore.gguf.fill_codes`). Rules give the same
bits on every machine.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.compression.scratch import scratch
from blobstore.core.tensor import DType
from blobstore.gguf.dequantize import dequantize
from blobstore.gguf.fill_codes import CODED, codes_of, fill_codes
from blobstore.gguf.quantize import QUANTIZED, quantize
from blobstore.gguf.types import NUMBERS, TYPES

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Final, Self

    from blobstore.gguf.types import GgufType

    Array = np.ndarray[Any, Any]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Read = Callable[[int, int], Bytes]

MAX_HEAD: Final = 1 << 22
"""Elements of an attention head at most, because its rows are read together."""
_HEADS: Final = 16
"""A chunk of permuted rows has one weight at least for so many of a head, which may be read as a whole for it."""
MAX_CODED: Final = 1 << 20
"""Weights that are computed at once at most, and those of a chunk from version 2 on."""
_VERSIONS: Final = {1: QUANTIZED, 2: CODED}
"""The types of each version of rules: the second one keeps scales."""
RECORD: Final = struct.Struct("<BBBBII")
RULE_SIZE: Final = RECORD.size
Q8_0: Final = TYPES[8]
SOURCES: Final = {0: DType.F32, 1: DType.F16, 8: DType.U8, 30: DType.BF16}
"""The types of weights, by their numbers in GGUF files. Bytes are blocks of Q8_0."""
NUMPY_TYPES: Final = {DType.F32: "<f4", DType.F16: "<f2", DType.BF16: "<u2", DType.U8: "u1"}
_SOURCE_NUMBERS: Final = {dtype: number for number, dtype in SOURCES.items()}


def size_of_weights(dtype: DType, count: int) -> int:
    """Return how many bytes weights of a type take."""
    if dtype is DType.U8:
        return count // Q8_0.weights * Q8_0.size
    return count * dtype.bits // 8


def to_float32(weights: Array) -> Array:
    """Return a copy of weights as float32; uint16 has the bits of bfloat16, and uint8 blocks of Q8_0."""
    if weights.dtype == np.uint16:
        return (weights.astype(np.uint32) << 16).view(np.float32)
    if weights.dtype == np.uint8:
        return dequantize(Q8_0.name, weights)
    return weights.astype(np.float32)


def rounded(values: Array, dtype: DType) -> Array:
    """Return float32 rounded to a type, as :func:`to_float32` takes it; overwrites ``values``."""
    if dtype is DType.BF16:
        bits = values.view(np.uint32)
        bits += (bits >> 16 & 1) + np.uint32(0x7FFF)
        return (bits >> 16).astype("<u2")
    if dtype is DType.U8:
        return quantize(Q8_0.name, values)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(NUMPY_TYPES[dtype], copy=False)


def weights_of(data: bytes, dtype: DType) -> Array:
    """Return the weights that bytes of a tensor hold, as float32."""
    return to_float32(np.frombuffer(data, NUMPY_TYPES[dtype]))


class Rule(ABC):
    """How bytes of a part are computed from elements of a base."""

    dtype: DType
    """The type of the base's elements: F32, F16, BF16, or U8 for blocks of Q8_0."""
    cast: DType
    """The type that values are rounded to before: F32 if they are not."""
    keeps_scales = False
    """Whether the part has the scales of its blocks, and only their codes are computed."""

    @property
    def number(self) -> int:
        """What the record has for the type of blocks."""
        return 0

    @property
    def kept(self) -> int:
        """Bytes of a block that are not predicted."""
        return 0

    @property
    @abstractmethod
    def kind(self) -> GgufType:
        """The weights that bytes of the part are computed from together, and how many bytes these are."""

    @property
    @abstractmethod
    def _fields(self) -> tuple[int, int, int]:
        """The version, and the last two fields of the record."""

    @classmethod
    @abstractmethod
    def of(cls, fields: tuple[int, ...], dtype: DType, cast: DType) -> Self | None:
        """Return the rule with the types and the other fields of a record; None if no rule has them."""

    @abstractmethod
    def predict(self, read: Read, offset: int, size: int) -> Array:
        """Return what ``size`` bytes from ``offset`` on are compared with.

        These are bytes, or the weights of blocks if scales are kept: contiguous float32 or float16, or uint16 with
        the bits of bfloat16. The result is valid until this thread's next call.

        Args:
            read: returns bytes of the base's elements, from an offset on and as many as asked for, valid
                until its next call.
            offset: a multiple of the size of a block.
            size: a multiple of the size of a block.
        """

    def pack(self) -> bytes:
        """Return the rule as bytes of a table."""
        types = _SOURCE_NUMBERS[self.dtype], _SOURCE_NUMBERS[self.cast]
        version, columns, head = self._fields
        return RECORD.pack(self.number, version, *types, columns, head)

    def source_size(self, size: int) -> int:
        """Return how many bytes of the base become ``size`` bytes of the part."""
        return size_of_weights(self.dtype, size // self.kind.size * self.kind.weights)

    def expect(self, read: Read, offset: int, known: Bytes) -> Bytes:
        """Return what is predicted for bytes from ``offset`` on, of which scales that are kept are known.

        Takes ``read`` as :meth:`predict`.
        """
        return self.predict(read, offset, len(known))

    def is_possible(self, size: int, chunk_size: int = 0) -> bool:
        """Return whether a part can have ``size`` bytes, and chunks of ``chunk_size``."""
        if size % self.kind.size or chunk_size % self.kind.size:
            return False
        return chunk_size // self.kind.size * self.kind.weights <= MAX_CODED


@dataclass(frozen=True)
class QuantRule(Rule):
    """How blocks are computed from elements of a base."""

    type_name: str
    """The type of the blocks: one of :data:`~blobstore.gguf.fill_codes.CODED` if the rule keeps scales, else
    of :data:`~blobstore.gguf.quantize.QUANTIZED`."""
    dtype: DType
    columns: int = 0
    """Elements of a row; 0 if rows are not permuted."""
    head: int = 0
    """Rows of an attention head. Row 2i + j of each head is row i + j * head / 2 of the base's, because
    llama.cpp interleaves what rotary embeddings turn together. 0 if rows are not permuted."""
    keeps_scales: bool = False
    cast: DType = DType.F32
    """The type that the weights had before they were quantized. Only rules that keep scales round."""

    @property
    def kind(self) -> GgufType:
        """The type of the blocks."""
        return TYPES[self.number]

    @property
    def number(self) -> int:
        """The number of this type in GGUF files."""
        return NUMBERS[self.type_name]

    @property
    def _fields(self) -> tuple[int, int, int]:
        return 2 if self.keeps_scales else 1, self.columns, self.head

    @classmethod
    def of(cls, fields: tuple[int, ...], dtype: DType, cast: DType) -> Self | None:
        """Return the rule with the types and the other fields of a record; None if no rule has them."""
        number, version, columns, head = fields
        kind, keeps_scales = TYPES.get(number), version > 1
        if kind is None or kind.name not in _VERSIONS[version]:
            return None
        if cast is not DType.F32 and not keeps_scales:
            return None
        return cls(kind.name, dtype, columns, head, keeps_scales, cast)

    @property
    def kept(self) -> int:
        """Bytes of a block that are not predicted."""
        return self.kind.size - len(codes_of(self.type_name)) if self.keeps_scales else 0

    def is_possible(self, size: int, chunk_size: int = 0) -> bool:
        """Return whether ``size`` bytes can be whole blocks, and whole heads if rows are permuted.

        So can be chunks of ``chunk_size`` bytes, whose weights are not too many, and not too few for a head.
        """
        weights = chunk_size // self.kind.size * self.kind.weights
        is_bounded = super().is_possible(size, chunk_size if self.keeps_scales else 0)
        if not is_bounded or chunk_size % self.kind.size:
            return False
        if not self.head:
            return not self.columns
        head = self.head * self.columns
        if self.head % 2 or not 0 < head <= MAX_HEAD or (chunk_size and _HEADS * weights < head):
            return False
        # Files with blocks of Q8_0 have rows in the same order.
        is_whole = size // self.kind.size * self.kind.weights % head == 0
        return is_whole and self.dtype is not DType.U8

    def predict(self, read: Read, offset: int, size: int) -> Array:
        """Return ``size`` bytes of blocks from ``offset`` on, or their weights if scales are kept."""
        if self.keeps_scales:
            return self._weights(read, offset, size)
        out = scratch("quantized", size)
        step = size if self.head else MAX_CODED // self.kind.weights * self.kind.size
        for begin in range(0, size, step):
            part = out[begin : begin + step]
            quantize(self.type_name, self._weights(read, offset + begin, len(part)), part)
        return out

    def expect(self, read: Read, offset: int, known: Bytes) -> Bytes:
        """Return what is predicted for blocks from ``offset`` on, of which scales that are kept are known."""
        found = self.predict(read, offset, len(known))
        if not self.keeps_scales:
            return found
        expected = known.copy()
        fill_codes(self.type_name, found, expected.reshape(-1, self.kind.size))
        return expected

    def _weights(self, read: Read, offset: int, size: int) -> Array:
        """Return the weights of ``size`` bytes of blocks from ``offset`` on."""
        begin, count = self.source_size(offset), self.source_size(size)
        if self.head:
            found: Array = self._permuted(read, begin, count)
        else:
            found = read(begin, count).view(NUMPY_TYPES[self.dtype])
        if self.cast not in (DType.F32, self.dtype):
            found = rounded(to_float32(found), self.cast)
        return to_float32(found) if found.dtype == np.uint8 else found

    def _permuted(self, read: Read, begin: int, size: int) -> Bytes:
        """Return elements in the order of the blocks: those of whole heads are read at once."""
        head = size_of_weights(self.dtype, self.head * self.columns)
        first = begin // head * head
        last = -(-(begin + size) // head) * head
        dtype = np.dtype(NUMPY_TYPES[self.dtype])
        found = scratch("heads", last - first).view(dtype)
        rows = found.reshape(-1, self.head // 2, 2, self.columns)
        for number, at in enumerate(range(first, last, head)):
            weights = read(at, head).view(dtype)
            rows[number] = weights.reshape(2, -1, self.columns).swapaxes(0, 1)
        return found[(begin - first) // dtype.itemsize :][: size // dtype.itemsize]

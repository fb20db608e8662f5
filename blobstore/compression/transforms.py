"""The registry of transforms: how a chunk is split into planes, and which transforms suit a type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.block_fields import FIELDS
from blobstore.compression.coded_blocks import CodedBlocks
from blobstore.compression.delta import codec as delta
from blobstore.compression.float_planes import (
    FloatTransform,
    decode_e4m3,
    e4m3_sizes,
    encode_e4m3,
)
from blobstore.compression.scratch import scratch
from blobstore.core.tensor import DType
from blobstore.gguf.fill_codes import CODED
from blobstore.gguf.types import NUMBERS, TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Final

    from blobstore.compression.block_fields import BlockFields

    Array = np.ndarray[Any, Any]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Sizes = Callable[[int], tuple[int, ...]]
    Encode = Callable[[Bytes, Array | None], Sequence[Bytes] | None]
    Decode = Callable[[Sequence[Bytes], Bytes, Array | None], None]


class Transform(NamedTuple):
    """A reversible way to split chunks into planes."""

    number: int
    """Its number in files."""
    width: int
    """Bytes per element."""
    sizes: Sizes
    """Returns the size of each plane for a number of elements; ``-n`` means at most ``n`` bytes.

    Returns no sizes if the transform is not applicable.
    """
    encode: Encode
    """Takes a chunk and the base's bytes, or the weights of blocks if the transform's number is at least
    ``FIRST_CODED``; returns the planes, or None if it is not applicable."""
    decode: Decode
    """Takes the planes, the memory for the chunk, and what ``encode`` took."""
    needs_base: bool = False
    min_gain: int = 1 << 8
    """At level ``fast``, a later transform replaces this one only if it saves one byte in so many."""


def _identity(width: int) -> Transform:
    """Return the transform whose only plane is the chunk itself."""

    def encode(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes]:
        return (chunk,)

    def decode(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
        np.copyto(out, planes[0])

    return Transform(0, width, lambda elements: (elements * width,), encode, decode)


def _bytewise(number: int, width: int) -> Transform:
    """Return the transform with one plane per byte of an element, the lowest byte first."""
    dtype = np.dtype(f"<u{width}")

    def encode(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes]:
        values = chunk.view(dtype)
        wide = scratch("bytewise", len(chunk)).view(dtype)
        planes = [scratch(f"byte {place}", len(values)) for place in range(width)]
        for place, plane in enumerate(planes):
            np.right_shift(values, place * 8, out=wide)
            np.copyto(plane, wide, casting="unsafe")
        return planes

    def decode(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
        values = out.view(dtype)
        wide = scratch("bytewise", len(out)).view(dtype)
        np.copyto(values, planes[0])
        for place in range(1, width):
            np.copyto(wide, planes[place])
            np.multiply(wide, dtype.type(1 << place * 8), out=wide)  # faster than numpy's shift
            np.bitwise_or(values, wide, out=values)

    return Transform(number, width, lambda elements: (elements,) * width, encode, decode)


def _fields(number: int, fields: BlockFields) -> Transform:
    """Return the transform with the fields of blocks of GGUF as planes."""
    return Transform(FIRST_BLOCKS + number, 1, fields.sizes, fields.encode, fields.decode)


def _float(number: int, width: int, *, paired: bool, split_low: bool = False) -> Transform:
    planes = FloatTransform(width, paired, split_low)
    return Transform(number, width, planes.sizes, planes.encode, planes.decode)


WIDTHS: Final = (1, 2, 4, 8)
"""Possible widths of an element in bytes."""
IDENTITY: Final = {width: _identity(width) for width in WIDTHS}
"""The transform that changes nothing, by width; its number is 0."""
BYTES_2: Final = _bytewise(1, 2)
BYTES_4: Final = _bytewise(2, 4)
BYTES_8: Final = _bytewise(3, 8)
BF16: Final = _float(4, 2, paired=False)
BF16_PAIRS: Final = _float(5, 2, paired=True)
F32: Final = _float(6, 4, paired=False)
F32_PAIRS: Final = _float(7, 4, paired=True)
F32_BYTES: Final = _float(8, 4, paired=False, split_low=True)
E4M3: Final = Transform(9, 1, e4m3_sizes, encode_e4m3, decode_e4m3, min_gain=1 << 6)
F32_BYTE_PAIRS: Final = _float(10, 4, paired=True, split_low=True)

_F32: Final = ((F32_PAIRS, F32), (F32_BYTE_PAIRS, F32_BYTES), (BYTES_4,), (IDENTITY[4],))
_BY_TYPE: Final = {
    DType.BF16: ((BF16_PAIRS, BF16), (IDENTITY[2],)),
    DType.F16: ((BYTES_2,), (IDENTITY[2],)),
    DType.F32: _F32,
    DType.C64: _F32,
    DType.F64: ((BYTES_8,), (IDENTITY[8],)),
    DType.F8_E4M3: ((E4M3,), (IDENTITY[1],)),
    DType.F8_E4M3FNUZ: ((E4M3,), (IDENTITY[1],)),
    DType.I16: ((IDENTITY[2],), (BYTES_2,)),
    DType.U16: ((IDENTITY[2],), (BYTES_2,)),
    DType.I32: ((IDENTITY[4],), (BYTES_4,)),
    DType.U32: ((IDENTITY[4],), (BYTES_4,)),
    DType.I64: ((IDENTITY[8],), (BYTES_8,)),
    DType.U64: ((IDENTITY[8],), (BYTES_8,)),
}
_UNTYPED: Final = ((IDENTITY[1],),)
FIRST_BLOCKS: Final = 64
"""The numbers from here on are those of types of GGUF, plus this one."""
FIRST_CODED: Final = 128
"""The same for transforms that keep only scales."""
_BLOCKS: Final = {fields.kind.name: _fields(number, fields) for number, fields in FIELDS.items()}
_DELTA_NUMBERS: Final = {
    DType.U8: 32,
    DType.F8_E4M3: 33,
    DType.F8_E5M2: 34,
    DType.U16: 35,
    DType.F16: 36,
    DType.BF16: 37,
    DType.U32: 38,
    DType.F32: 39,
    DType.U64: 40,
}
"""Numbers of the delta transforms, by the type as which they treat the elements."""
_TREATED_AS: Final = {
    DType.F8_E4M3FNUZ: DType.F8_E4M3,
    DType.F8_E5M2FNUZ: DType.F8_E5M2,
    DType.I16: DType.U16,
    DType.I32: DType.U32,
    DType.C64: DType.F32,
    DType.F64: DType.U64,
    DType.I64: DType.U64,
}
"""Types whose deltas are those of another type; all other types are treated as U8."""


def width_of(dtype: DType | None) -> int:
    """Return the bytes per element as which a type is compressed; None is untyped bytes."""
    return _delta_type(dtype).bits // 8


def transforms_for(dtype: DType | None, blocks: str = "") -> tuple[tuple[Transform, ...], ...]:
    """Return groups of transforms that may compress a type, the preferred ones first.

    Only the first applicable transform of each group is worth trying.

    Args:
        dtype: the type of elements.
        blocks: the type of GGUF whose blocks these bytes are, if they are.
    """
    if blocks in _BLOCKS:
        return (_BLOCKS[blocks],), *_UNTYPED
    return _BY_TYPE.get(dtype, _UNTYPED) if dtype is not None else _UNTYPED


def delta_transform(
    dtype: DType | None, settings: delta.DeltaSettings, coded: str = ""
) -> Transform:
    """Return the transform to differences from the base for elements of a type.

    Args:
        dtype: the type of elements.
        settings: the effort to make.
        coded: the type of GGUF whose blocks these bytes are, if only their codes follow from the base.
    """
    return _coded(coded, settings) if coded else _delta(_delta_type(dtype), settings)


def transform_of(number: int, width: int) -> Transform | None:
    """Return the transform with a number for elements of ``width`` bytes, or None."""
    transform = _BY_NUMBER.get(number) if number else IDENTITY.get(width)
    return transform if transform is not None and transform.width == width else None


def needs_base(number: int) -> bool:
    """Return whether chunks of a transform are decoded against the base."""
    return number in _BY_NUMBER and _BY_NUMBER[number].needs_base


def predicted_type(number: int) -> DType | None:
    """Return the type of a delta transform's elements, or None for other transforms."""
    return next((dtype for dtype, known in _DELTA_NUMBERS.items() if known == number), None)


def _coded(type_name: str, settings: delta.DeltaSettings) -> Transform:
    number = NUMBERS[type_name]
    blocks = CodedBlocks(TYPES[number], settings)
    return Transform(
        FIRST_CODED + number, 1, blocks.sizes, blocks.encode, blocks.decode, needs_base=True
    )


def _delta_type(dtype: DType | None) -> DType:
    if dtype is None:
        return DType.U8
    treated_as = _TREATED_AS.get(dtype, dtype)
    return treated_as if treated_as in _DELTA_NUMBERS else DType.U8


def _delta(dtype: DType, settings: delta.DeltaSettings) -> Transform:
    width = dtype.bits // 8

    def encode(chunk: Bytes, base: Bytes | None) -> Sequence[Bytes] | None:
        if base is None:
            return None
        elements = delta.as_elements(chunk, dtype), delta.as_elements(base, dtype)
        return (np.frombuffer(delta.encode_chunk(*elements, dtype, settings), np.uint8),)

    def decode(planes: Sequence[Bytes], out: Bytes, base: Bytes | None) -> None:
        predicted = delta.as_elements(base, dtype)
        delta.decode_chunk(planes[0].data, predicted, dtype, out.view(predicted.dtype))

    return Transform(
        _DELTA_NUMBERS[dtype],
        width,
        lambda elements: (-elements * width,),
        encode,
        decode,
        needs_base=True,
    )


_BY_NUMBER: Final = {
    transform.number: transform
    for transform in (
        BYTES_2,
        BYTES_4,
        BYTES_8,
        BF16,
        BF16_PAIRS,
        F32,
        F32_PAIRS,
        F32_BYTES,
        E4M3,
        F32_BYTE_PAIRS,
        *_BLOCKS.values(),
        *(_delta(dtype, delta.FAST) for dtype in _DELTA_NUMBERS),
        *(_coded(type_name, delta.FAST) for type_name in CODED),
    )
}

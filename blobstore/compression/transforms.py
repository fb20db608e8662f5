"""Every layout by its number, and which of them suit elements of a type."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression import float_planes
from blobstore.compression.delta import codec as delta
from blobstore.compression.scratch import scratch
from blobstore.core.tensor import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Final

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Sizes = Callable[[int], tuple[int, ...]]
    Split = Callable[[Bytes, Bytes | None], Sequence[Bytes] | None]
    Merge = Callable[[Sequence[Bytes], Bytes, Bytes | None], None]


class Transform(NamedTuple):
    """One way to split chunks."""

    number: int
    """What a file states."""
    width: int
    """Bytes of an element."""
    sizes: Sizes
    """Bytes of each plane of so many elements; ``-n`` means any number up to n.

    None at all if the layout does not suit so many.
    """
    split: Split
    merge: Merge
    needs_base: bool = False
    worth: int = 1 << 8
    """Where speed counts it is taken unless a later one saves one byte in so many."""


_UINTS: Final[dict[int, np.dtype[Any]]] = {width: np.dtype(f"<u{width}") for width in (2, 4, 8)}


def whole(number: int, width: int) -> Transform:
    """Return the layout of one plane that is the chunk as it is."""
    return Transform(number, width, lambda elements: (elements * width,), _same, _copy)


def bytewise(number: int, width: int) -> Transform:
    """Return the layout of a plane for each byte of an element, the lowest byte first."""
    dtype = _UINTS[width]
    return Transform(
        number,
        width,
        lambda elements: (elements,) * width,
        partial(_split, dtype),
        partial(_merge, dtype),
    )


def _same(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes]:
    return (chunk,)


def _copy(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    np.copyto(out, planes[0])


def _split(dtype: np.dtype[Any], chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes]:
    values = chunk.view(dtype)
    wide = scratch("bytewise", len(chunk)).view(dtype)
    planes = [scratch(f"byte {place}", len(values)) for place in range(dtype.itemsize)]
    for place, plane in enumerate(planes):
        np.right_shift(values, place * 8, out=wide)
        np.copyto(plane, wide, casting="unsafe")
    return planes


def _merge(dtype: np.dtype[Any], planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    values = out.view(dtype)
    wide = scratch("bytewise", len(out)).view(dtype)
    np.copyto(values, planes[0])
    for place in range(1, dtype.itemsize):
        np.copyto(wide, planes[place])
        np.multiply(wide, dtype.type(1 << place * 8), out=wide)  # faster than numpy's shift
        np.bitwise_or(values, wide, out=values)


WIDTHS: Final = (1, 2, 4, 8)
"""Bytes that an element may have."""
WHOLE: Final = {width: whole(0, width) for width in WIDTHS}
"""The layout of chunks as they are, for every width; its number is 0."""
BYTES_2: Final = bytewise(1, 2)
BYTES_4: Final = bytewise(2, 4)
BYTES_8: Final = bytewise(3, 8)
BF16: Final = Transform(
    4, 2, float_planes.bf16_sizes, float_planes.split_bf16, float_planes.merge_bf16
)
BF16_PAIRS: Final = Transform(
    5, 2, float_planes.bf16_pair_sizes, float_planes.split_bf16_pairs, float_planes.merge_bf16_pairs
)
F32: Final = Transform(6, 4, float_planes.f32_sizes, float_planes.split_f32, float_planes.merge_f32)
F32_PAIRS: Final = Transform(
    7, 4, float_planes.f32_pair_sizes, float_planes.split_f32_pairs, float_planes.merge_f32_pairs
)
F32_BYTES: Final = Transform(
    8, 4, float_planes.f32_byte_sizes, float_planes.split_f32_bytes, float_planes.merge_f32_bytes
)
E4M3: Final = Transform(
    9, 1, float_planes.e4m3_sizes, float_planes.split_e4m3, float_planes.merge_e4m3, worth=1 << 6
)
F32_BYTE_PAIRS: Final = Transform(
    10,
    4,
    float_planes.f32_byte_pair_sizes,
    float_planes.split_f32_byte_pairs,
    float_planes.merge_f32_byte_pairs,
)
_F32: Final = ((F32_PAIRS, F32), (F32_BYTE_PAIRS, F32_BYTES), (BYTES_4,), (WHOLE[4],))
_SUITABLE: Final = {
    DType.BF16: ((BF16_PAIRS, BF16), (WHOLE[2],)),
    DType.F16: ((BYTES_2,), (WHOLE[2],)),
    DType.F32: _F32,
    DType.C64: _F32,
    DType.F64: ((BYTES_8,), (WHOLE[8],)),
    DType.F8_E4M3: ((E4M3,), (WHOLE[1],)),
    DType.F8_E4M3FNUZ: ((E4M3,), (WHOLE[1],)),
    DType.I16: ((WHOLE[2],), (BYTES_2,)),
    DType.U16: ((WHOLE[2],), (BYTES_2,)),
    DType.I32: ((WHOLE[4],), (BYTES_4,)),
    DType.U32: ((WHOLE[4],), (BYTES_4,)),
    DType.I64: ((WHOLE[8],), (BYTES_8,)),
    DType.U64: ((WHOLE[8],), (BYTES_8,)),
}
_BYTES: Final = ((WHOLE[1],),)
_DELTAS: Final = {
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
"""Numbers of the layouts that are differences from a base, by what they take elements for."""
_LIKE: Final = {
    DType.F8_E4M3FNUZ: DType.F8_E4M3,
    DType.F8_E5M2FNUZ: DType.F8_E5M2,
    DType.I16: DType.U16,
    DType.I32: DType.U32,
    DType.C64: DType.F32,
    DType.F64: DType.U64,
    DType.I64: DType.U64,
}
"""Types whose differences are those of another; all others of 8 bits are like U8."""


def width_of(dtype: DType | None) -> int:
    """Return how many bytes an element has that is coded; None is for bytes without a type."""
    return _plain(dtype).bits // 8


def suitable(dtype: DType | None) -> tuple[tuple[Transform, ...], ...]:
    """Return the layouts that may make elements of a type small, those to prefer first.

    Of several in one tuple only the first is thought of that suits.
    """
    return _SUITABLE.get(dtype, _BYTES) if dtype is not None else _BYTES


def difference(dtype: DType | None, effort: delta.Effort) -> Transform:
    """Return the layout of differences between elements of a type."""
    return _difference(_plain(dtype), effort)


def layout_of(number: int, width: int) -> Transform | None:
    """Return the layout of a number for elements of ``width`` bytes, None if there is none."""
    layout = _BY_NUMBER.get(number) if number else WHOLE.get(width)
    return layout if layout is not None and layout.width == width else None


def predicted_type(number: int) -> DType | None:
    """Return the type of elements that a layout is the differences of, None if it is none."""
    return next((dtype for dtype, known in _DELTAS.items() if known == number), None)


def _plain(dtype: DType | None) -> DType:
    if dtype is None:
        return DType.U8
    like = _LIKE.get(dtype, dtype)
    return like if like in _DELTAS else DType.U8


def _difference(dtype: DType, effort: delta.Effort) -> Transform:
    width = dtype.bits // 8
    split = partial(_split_difference, dtype, effort)
    return Transform(
        _DELTAS[dtype],
        width,
        lambda elements: (-elements * width,),
        split,
        partial(_merge_difference, dtype),
        needs_base=True,
    )


def _split_difference(
    dtype: DType, effort: delta.Effort, chunk: Bytes, base: Bytes | None
) -> Sequence[Bytes] | None:
    if base is None:
        return None
    elements = delta.as_elements(chunk, dtype), delta.as_elements(base, dtype)
    return (np.frombuffer(delta.encode_chunk(*elements, dtype, effort), np.uint8),)


def _merge_difference(
    dtype: DType, planes: Sequence[Bytes], out: Bytes, base: Bytes | None
) -> None:
    start = delta.as_elements(base, dtype)
    delta.decode_chunk(planes[0].data, start, dtype, out.view(start.dtype))


_BY_NUMBER: Final = {
    layout.number: layout
    for layout in (
        *(
            BYTES_2,
            BYTES_4,
            BYTES_8,
            BF16,
            BF16_PAIRS,
            F32,
            F32_PAIRS,
            F32_BYTES,
            F32_BYTE_PAIRS,
            E4M3,
        ),
        *(_difference(dtype, delta.Effort.FAST) for dtype in _DELTAS),
    )
}

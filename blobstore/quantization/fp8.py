"""Weights of 8-bit floats and the scales beside them, as plain bfloat16 numbers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from blobstore.core.tensor import DType
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from typing import Final

    Array = np.ndarray[Any, Any]

_TYPES: Final = {
    DType.F8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.F8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
}
_NAN: Final = 0x7FC0
_CHUNK_ELEMENTS: Final = 1 << 16
"""Elements that are computed at once; their temporary numbers stay in a processor's cache."""


def decode(
    weight: Array,
    scales: Array,
    block: tuple[int, int],
    dtype: DType = DType.F8_E4M3,
) -> Array:
    """Return every 8-bit float times the scale of its block, as bfloat16.

    The product is a float32, rounded once, to the nearest bfloat16 and to even between two. What is
    no number in weight or scale is the one positive quiet NaN in the result, on every processor.

    Args:
        weight: of shape ``(rows, columns)``, of an 8-bit float type or its bits as uint8.
        scales: floats, one a block: ``ceil(rows / block[0])`` rows, or more, which are not looked
            at, of ``ceil(columns / block[1])``.
        block: rows and columns that share a scale; those at the edges may be cut short.
        dtype: the type of a ``weight`` that is given as bits.

    Raises:
        UsageError: the shapes do not fit, or the type is no 8-bit float that is known.
    """
    _check(weight, scales, block)
    rows, columns = weight.shape
    height, width = min(block[0], max(rows, 1)), min(block[1], max(columns, 1))
    values = _values(dtype if weight.dtype == np.uint8 else _dtype_of(weight))
    codes = weight.view(np.uint8)
    factors = scales.astype(np.float32)
    result = np.empty((rows, columns), np.uint16)
    chunk = max(_CHUNK_ELEMENTS // max(columns, 1), 1)
    # Products may overflow to infinity, as they do in every other reader of such weights.
    with np.errstate(all="ignore"):
        for row in range(0, rows, chunk):
            end = min(row + chunk, rows)
            products = values.take(codes[row:end], mode="clip")  # no code is too large
            _scale(products, factors[np.arange(row, end) // height], width)
            _round(products, result[row:end])
    return result.view(ml_dtypes.bfloat16)


def _check(weight: Array, scales: Array, block: tuple[int, int]) -> None:
    is_known = (weight.ndim, scales.ndim) == (2, 2) and min(block) >= 1
    if is_known:
        rows, columns = (-(-size // part) for size, part in zip(weight.shape, block, strict=True))
        is_known = len(scales) >= rows and scales.shape[1] == columns
    if not is_known:
        raise UsageError(
            f"scales of shape {list(scales.shape)} do not fit a weight of shape "
            f"{list(weight.shape)} in blocks of {list(block)}"
        )


def _dtype_of(weight: Array) -> DType | None:
    return next((dtype for dtype, known in _TYPES.items() if known == weight.dtype), None)


@cache
def _values(dtype: DType | None) -> Array:
    """Return the numbers that the 256 codes of a type stand for."""
    if dtype not in _TYPES:
        raise UsageError(
            f"cannot decode {dtype.value if dtype else 'a type that is no 8-bit float'}"
        )
    values: Array = np.arange(256, dtype=np.uint8).view(_TYPES[dtype]).astype(np.float32)
    values.setflags(write=False)
    return values


def _scale(products: Array, factors: Array, width: int) -> None:
    """Multiply in place: each row of ``factors`` has one for every ``width`` columns."""
    whole = products.shape[1] // width
    blocks = products[:, : whole * width].reshape(len(products), whole, width)
    blocks *= factors[:, :whole, np.newaxis]
    rest = products[:, whole * width :]
    rest *= factors[:, whole:]


def _round(products: Array, result: Array) -> None:
    """Write the upper halves of float32 numbers, rounded; the numbers are used up.

    In integers, for these loops let other threads run, and ml_dtypes' conversions do not.
    """
    is_nan = np.isnan(products)
    bits = products.view(np.uint32)
    to_even = bits >> 16
    to_even &= 1
    to_even += 0x7FFF
    bits += to_even
    bits >>= 16
    result[...] = bits
    result[is_nan] = _NAN

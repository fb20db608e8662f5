"""Decodes weights of 8-bit floats and their scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from blobstore.core.tensor import DType
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from typing import Final

    from blobstore.quantization.formats import Float8Layout

    Array = np.ndarray[Any, Any]

TYPES: Final = {
    DType.F8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.F8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
}
_VALUES: Final[dict[DType | None, Array]] = {
    dtype: np.arange(256, dtype=np.uint8).view(known).astype(np.float32)
    for dtype, known in TYPES.items()
}
"""The values of the 256 codes of each type."""
_BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_NAN: Final = 0x7FC0
_CHUNK_ELEMENTS: Final = 1 << 16
"""Elements that are computed at once, so that intermediate values stay in the cache."""


def decode(
    weight: Array,
    scales: Array,
    block: tuple[int, int],
    dtype: DType = DType.F8_E4M3,
    *,
    first_row: int = 0,
    result_dtype: str = "bfloat16",
) -> Array:
    """Return every 8-bit float times the scale of its block.

    The product is a float32, rounded once to the nearest value, ties to even. A NaN in weight or scale
    becomes the same positive quiet NaN on every processor.

    Args:
        weight: of shape ``(rows, columns)``, of an 8-bit float type or its bits as uint8.
        scales: floats, one per block, of shape ``(ceil(rows / block[0]), ceil(columns / block[1]))``;
            more rows of scales are ignored.
        block: rows and columns that share a scale; blocks at the edges may be smaller.
        dtype: the type of the bits, if ``weight`` is uint8.
        first_row: the row of its block that the weight begins with.
        result_dtype: ``bfloat16``, ``float16`` or ``float32``.

    Raises:
        UsageError: the shapes do not fit, or the type is not a known 8-bit float.
    """
    is_known = (weight.ndim, scales.ndim) == (2, 2) and min(block) >= 1
    if is_known:
        shape = (first_row + len(weight) if len(weight) else 0, weight.shape[1])
        wanted = [-(-size // part) for size, part in zip(shape, block, strict=True)]
        is_known = len(scales) >= wanted[0] and scales.shape[1] == wanted[1]
    if not is_known:
        raise UsageError(
            f"scales of shape {list(scales.shape)} do not fit a weight of shape "
            f"{list(weight.shape)} in blocks of {list(block)}"
        )
    rows, columns = weight.shape
    height, width = min(block[0], first_row + max(rows, 1)), min(block[1], max(columns, 1))
    own = next((code for code, known in TYPES.items() if known == weight.dtype), None)
    kind = dtype if weight.dtype == np.uint8 else own
    if kind not in _VALUES:
        raise UsageError(
            f"cannot decode {kind.value if kind else 'a type that is not an 8-bit float'}"
        )
    codes = weight.view(np.uint8)
    factors = scales.astype(np.float32)
    result = np.empty((rows, columns), np.dtype(result_dtype))
    chunk = max(_CHUNK_ELEMENTS // max(columns, 1), 1)
    # Products may overflow to infinity, as in every other reader of such weights.
    with np.errstate(all="ignore"):
        for row in range(0, rows, chunk):
            end = min(row + chunk, rows)
            products = _VALUES[kind].take(codes[row:end], mode="clip")  # no code is out of range
            _scale(products, factors[np.arange(first_row + row, first_row + end) // height], width)
            if result.dtype == _BFLOAT16:
                _round(products, result[row:end].view(np.uint16))
            else:
                products[np.isnan(products)] = np.nan
                result[row:end] = products
    return result


def decode_stack(weight: Array, scale: Array, layout: Float8Layout, result_dtype: str) -> Array:
    """Return a matrix or a stack of matrices of 8-bit floats, decoded as by :func:`decode`.

    Args:
        weight: the weight or a part of it; see :meth:`Float8Layout.blocks`.
        scale: its scales, or one for all.
        layout: how the weight is stored.
        result_dtype: ``bfloat16``, ``float16`` or ``float32``.
    """
    if not weight.size:
        return np.empty(weight.shape, np.dtype(result_dtype))
    block, grid = layout.blocks(weight.shape)
    scales = np.broadcast_to(scale.reshape(grid if scale.size > 1 else ()), grid)
    flat = weight.reshape(-1, weight.shape[-1])
    return decode(flat, scales, block, result_dtype=result_dtype).reshape(weight.shape)


def _scale(products: Array, factors: Array, width: int) -> None:
    """Multiply in place; each row of ``factors`` has one value per ``width`` columns.

    A function, because views that outlive a step of the loop would keep its memory out of reuse.
    """
    whole = products.shape[1] // width
    blocks = products[:, : whole * width].reshape(len(products), whole, width)
    blocks *= factors[:, :whole, np.newaxis]
    rest = products[:, whole * width :]
    rest *= factors[:, whole:]


def _round(products: Array, result: Array) -> None:
    """Write float32 values rounded to their upper halves; overwrites ``products``.

    Uses integers, because these loops release the GIL and ml_dtypes' conversions do not.
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

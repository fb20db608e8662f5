"""Quantized weights of a mapped blob, dequantized a few rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.quantization.fp8 import decode
from blobstore.quantization.quantize_numpy import dequantize
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE
from blobstore.quantization.tiles import TILE_ROWS
from blobstore.safetensors.numpy import as_array

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator

    import numpy as np

    from blobstore.models.frameworks import FloatName
    from blobstore.models.tensors import StoredTensor
    from blobstore.quantization.formats import Float8Layout

    Array = np.ndarray[Any, Any]

_PIECE_ELEMENTS = 1 << 20


def rows_at_once(columns: int) -> int:
    """Return how many rows of ``columns`` elements a piece has; the last may have fewer."""
    return max(_PIECE_ELEMENTS // max(columns, 1), 1)


def plain_pieces(
    stored: StoredTensor,
    memory: mmap.mmap | memoryview,
    dtype: FloatName,
    part: int | None = None,
    *,
    order: Array | None = None,
) -> Iterator[Array]:
    """Yield the dequantized rows of a tensor, in pieces of shape ``(rows, columns)``.

    Args:
        stored: a tensor of a known quantization type.
        memory: its blob, from the first byte.
        dtype: the element type of the pieces.
        part: an index in the first dimension, to yield only the rows of one expert.
        order: the numbers of the rows in the order in which they are yielded; not for 8-bit floats.
    """
    item = stored.item
    assert item is not None  # noqa: S101 - see Args
    start = stored.header.data_start
    arrays = {
        suffix: as_array(memory, start + entry.begin, entry.spec)
        for suffix, entry in {"": stored.entry, **stored.qparams}.items()
    }
    if item.float8 is not None:
        rows_of_all = arrays[""].reshape(-1, stored.shape[-1])
        first, last = 0, len(rows_of_all)
        if part is not None:
            first, last = part * stored.shape[1], (part + 1) * stored.shape[1]
        yield from _float8_pieces(rows_of_all, arrays[SCALE], item.float8, dtype, (first, last))
        return
    scalar = arrays.pop(GLOBAL_SCALE, None)
    global_scale = None if scalar is None else float(scalar.reshape(-1)[0])
    rows = {
        suffix: (array if part is None else array[part]).reshape(-1, array.shape[-1])
        for suffix, array in arrays.items()
    }
    count = len(rows[""])
    height = rows_at_once(stored.shape[-1])
    if item.is_tiled:
        height = -(-height // TILE_ROWS) * TILE_ROWS
    for row in range(0, count, height):
        chosen = slice(row, row + height) if order is None else order[row : row + height]
        piece = {suffix: array[chosen] for suffix, array in rows.items()}
        yield dequantize(
            piece[""],
            piece.get(SCALE),
            piece.get(BIAS),
            item,
            stored.group_size,
            dtype,
            global_scale,
        )


def _float8_pieces(
    weight: Array, scale: Array, layout: Float8Layout, dtype: FloatName, bounds: tuple[int, int]
) -> Iterator[Array]:
    """Yield some rows of a matrix of 8-bit floats, decoded."""
    height, width = layout.block
    columns = weight.shape[1]
    scales = scale.reshape(-1, -(-columns // width))
    step = rows_at_once(columns)
    for row in range(*bounds, step):
        piece = weight[row : min(row + step, bounds[1])]
        yield decode(
            piece, scales[row // height :], layout.block, first_row=row % height, result_dtype=dtype
        )


def transposed_pieces(
    stored: StoredTensor, memory: mmap.mmap | memoryview, dtype: FloatName, part: int | None = None
) -> Iterator[Array]:
    """Yield the dequantized matrices of a tensor, each transposed. Args as :func:`plain_pieces`."""
    import numpy as np

    is_stack = part is None and len(stored.shape) > 2  # more than a matrix
    for place in range(stored.shape[0]) if is_stack else (part,):
        pieces = list(plain_pieces(stored, memory, dtype, place))
        yield np.ascontiguousarray(np.concatenate(pieces).T)

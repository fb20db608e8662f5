"""Quantized weights of a mapped blob, dequantized a few rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.quantization.numpy import dequantize
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE
from blobstore.safetensors.numpy import as_array

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator

    import numpy as np

    from blobstore.models.frameworks import FloatName
    from blobstore.models.tensors import StoredTensor

_PIECE_ELEMENTS = 1 << 20


def rows_at_once(columns: int) -> int:
    """Return how many rows of ``columns`` elements a piece has; the last may have fewer."""
    return max(_PIECE_ELEMENTS // max(columns, 1), 1)


def plain_pieces(
    stored: StoredTensor, memory: mmap.mmap | memoryview, dtype: FloatName, part: int | None = None
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the dequantized rows of a tensor, in pieces of shape ``(rows, columns)``.

    Args:
        stored: a tensor of a known quantization type.
        memory: its blob, from the first byte.
        dtype: the element type of the pieces.
        part: an index in the first dimension, to yield only the rows of one expert.
    """
    item = stored.item
    assert item is not None  # noqa: S101 - see Args
    start = stored.header.data_start
    arrays = {
        suffix: as_array(memory, start + entry.begin, entry.spec)
        for suffix, entry in {"": stored.entry, **stored.companions}.items()
    }
    scalar = arrays.pop(GLOBAL_SCALE, None)
    global_scale = None if scalar is None else float(scalar.reshape(-1)[0])
    rows = {
        suffix: (array if part is None else array[part]).reshape(-1, array.shape[-1])
        for suffix, array in arrays.items()
    }
    count = len(rows[""])
    height = rows_at_once(stored.shape[-1])
    for row in range(0, count, height):
        piece = {suffix: array[row : row + height] for suffix, array in rows.items()}
        yield dequantize(
            piece[""], piece[SCALE], piece.get(BIAS), item, stored.group_size, dtype, global_scale
        )


def transposed_pieces(
    stored: StoredTensor, memory: mmap.mmap | memoryview, dtype: FloatName, part: int | None = None
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the dequantized matrices of a tensor, each transposed. Args as :func:`plain_pieces`."""
    import numpy as np

    is_stack = part is None and len(stored.shape) > 2  # noqa: PLR2004 - more than a matrix
    for place in range(stored.shape[0]) if is_stack else (part,):
        pieces = list(plain_pieces(stored, memory, dtype, place))
        yield np.ascontiguousarray(np.concatenate(pieces).T)

"""Which factors predict a tensor from its base best, for what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.archive.delta import Effort, encode_chunk
from blobstore.archive.delta_prediction import (
    MAX_SIDE,
    Factors,
    Prediction,
    can_predict,
    pack,
    quantized,
)
from blobstore.tensor import DType

if TYPE_CHECKING:
    from typing import Final

    Array = np.ndarray[Any, Any]

_RANKS: Final = (1, 2, 4, 8, 16, 32)
_MARGIN: Final = 8
"""Directions that are followed beside those wanted, so that these are found well."""
_ROUNDS: Final = 2
_PER_DOUBLING: Final = 0.01
"""The part of its bytes that a tensor must save for products that take twice the time."""
_LEAST_SIDE: Final = 32
_SAMPLE_ELEMENTS: Final = 1 << 24
"""Elements whose rows tell the directions."""
_TRIED_ELEMENTS: Final = 1 << 16
"""Elements that ranks are compared on, in some blocks of rows."""
_TRIED_BLOCKS: Final = 8
_BLOCK_ELEMENTS: Final = 1 << 20
_LIMITS: Final = (15, 31, 63, 127)
"""The largest integer of a factor: fine ones where coarse ones leave much of what is predictable."""


def fit(tensor: Array, base: Array, dtype: DType, columns: int) -> Factors | None:
    """Return factors with which ``tensor`` takes less room beside ``base`` than without, if any.

    Args:
        tensor: elements as :func:`~blobstore.archive.delta.as_elements` gives them, by rows.
        base: as many of the base.
        dtype: the type of both.
        columns: elements of a row.
    """
    rows = len(tensor) // max(columns, 1)
    sides = sorted((rows, columns))
    if not can_predict(dtype) or sides[0] < _LEAST_SIDE or sides[1] > MAX_SIDE:
        return None
    pair = tensor.reshape(rows, columns), base.reshape(rows, columns)
    directions = _directions(*pair, dtype)
    if directions is None:
        return None
    lengths = _lengths(*pair, dtype, directions)
    plain = _size(*pair, dtype, None)
    best: tuple[float, Factors | None] = (plain, None)
    for rank in (rank for rank in _RANKS if rank <= len(directions)):
        found = quantized(lengths[:, :rank], directions[:rank], _LIMITS[0])
        best = min(best, _judged(*pair, dtype, found), key=_first)
    if best[1] is not None:
        rank = best[1].rank
        for limit in _LIMITS[1:]:
            found = quantized(lengths[:, :rank], directions[:rank], limit)
            best = min(best, _judged(*pair, dtype, found), key=_first)
    return best[1]


def _first(judged: tuple[float, Factors | None]) -> float:
    return judged[0]


def _judged(
    tensor: Array, base: Array, dtype: DType, factors: Factors | None
) -> tuple[float, Factors | None]:
    """Return the bytes that the tensor takes with factors, and more for the time they take."""
    if factors is None:
        return float("inf"), None
    size = _size(tensor, base, dtype, factors)
    return size * (1 + _PER_DOUBLING * factors.rank.bit_length()), factors


def _size(tensor: Array, base: Array, dtype: DType, factors: Factors | None) -> float:
    """Return the bytes of the tensor and its factors, from some blocks of rows."""
    rows, columns = tensor.shape
    height = min(max(_TRIED_ELEMENTS // _TRIED_BLOCKS // columns, 1), rows)
    count = min(_TRIED_BLOCKS, rows // height)
    starts = [number * (rows - height) // max(count - 1, 1) for number in range(count)]
    prediction = None if factors is None else Prediction(factors, dtype)
    chunk = np.concatenate([tensor[start : start + height].ravel() for start in starts])
    parts = []
    for start in starts:
        part = base[start : start + height].ravel()
        if prediction is not None:
            part = prediction.predict(part, start * columns).copy()
        parts.append(part)
    size = len(encode_chunk(chunk, np.concatenate(parts), dtype, Effort.SMALL))
    whole = float(size * (rows / (height * count)))
    return whole + (0 if factors is None else len(pack(factors)))


def _directions(tensor: Array, base: Array, dtype: DType) -> Array | None:
    """Return what rows of the difference are mostly made of, the largest first, by power iteration."""
    rows, columns = tensor.shape
    step = -(-rows * columns // _SAMPLE_ELEMENTS)
    difference = _difference(tensor[::step], base[::step], dtype)
    if not difference.any():
        return None
    count = min(_RANKS[-1] + _MARGIN, *difference.shape)
    basis = np.random.default_rng(0).standard_normal((columns, count), np.float32)
    for _ in range(_ROUNDS):
        basis = np.linalg.qr(difference.T @ np.linalg.qr(difference @ basis)[0])[0]
    inner = difference @ basis
    _, turned = np.linalg.eigh((inner.T @ inner).astype(np.float64))
    found: Array = (basis @ turned[:, ::-1].astype(np.float32)).T
    return found[: _RANKS[-1]]


def _lengths(tensor: Array, base: Array, dtype: DType, directions: Array) -> Array:
    """Return how far each row of the difference goes in each direction."""
    height = max(_BLOCK_ELEMENTS // tensor.shape[1], 1)
    return np.concatenate(
        [
            _difference(tensor[start : start + height], base[start : start + height], dtype)
            @ directions.T
            for start in range(0, len(tensor), height)
        ]
    )


def _difference(tensor: Array, base: Array, dtype: DType) -> Array:
    """Return what was added, as float32; 0 where that is no number that factors could reach."""
    with np.errstate(all="ignore"):
        difference: Array = _values(tensor, dtype) - _values(base, dtype)
    difference[~(np.abs(difference) < np.float32(2.0**60))] = 0
    return difference


def _values(elements: Array, dtype: DType) -> Array:
    if dtype is DType.BF16:
        return (elements.astype(np.uint32) << 16).view(np.float32)
    if dtype is DType.F16:
        return elements.view(np.float16).astype(np.float32)
    return elements.view(np.float32)

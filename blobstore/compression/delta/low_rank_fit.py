"""Finds the low-rank factors that predict a tensor from its base best for their size.

The rows of the difference are read in blocks, several times, so memory grows only by some hundred bytes
per row and per column. Products are computed in tiles that are too small for BLAS to start other threads,
because our own threads are busy. So the result does not depend on the number of processors. Other types
of processors may round sums differently and find slightly different factors; both are valid, and decode
identically everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.delta.codec import estimate_bits
from blobstore.compression.delta.low_rank import (
    MAX_SIDE,
    Factors,
    LowRankPredictor,
    can_predict,
    pack,
    quantized,
)
from blobstore.core.tensor import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Final

    from blobstore.compression.level import Level

    Array = np.ndarray[Any, Any]
    Reader = Callable[[int, int], Array]
    """Returns the elements of a base from one to before another, good until it is asked again."""

_RANKS: Final = (1, 2, 4, 8, 16)
_MORE_RANKS: Final = (32, 64)
"""Ranks that are tried if there are more directions."""
_LEAST_STEP: Final = 8
"""There are more directions if the last one has so many times the mean energy of the others."""
_MARGIN: Final = 8
"""Additional directions of the power iteration, for the accuracy of the wanted ones."""
_PER_DOUBLING: Final = 0.01
"""The part of its bytes that a tensor must save for products that take twice the time."""
_LEAST_SIDE: Final = 32
_KEPT_ELEMENTS: Final = 1 << 20
"""Elements of a tensor whose difference is kept while the directions are searched."""
_SAMPLED_BLOCKS: Final = 8
"""Blocks of rows of a sample, at most."""
_BLOCK_ELEMENTS: Final = 1 << 19
"""Elements of the rows that are looked at together, about."""
_TILE_ROWS: Final = 64
_SERIAL_PRODUCTS: Final = 1 << 18
"""Multiplications that BLAS does in the thread that asks."""
_LEAST_ENERGY: Final = 1e-13
"""The part of the largest direction's energy below which there is only what rounding has left."""
_TESTED_ROWS: Final = 8
_TESTED_COLUMNS: Final = 1 << 10
"""Rows per block, and columns, of the sample that shows whether a difference has low rank."""
_LARGE: Final = 1 << 20
"""Elements of a tensor that is worth the time for twice as many rows."""
_LEAST_RATIO: Final = 10.0
"""The least ratio of all energy to that of the weaker half of the directions."""
_MOST_EVEN: Final = 0.61
"""The largest ratio of the squared sum of all energies to their number times the sum of their squares, if half
of the directions have at most a tenth of the energy. It needs no decomposition."""
_MOST: Final = np.float32(2.0**40)
"""Larger differences are left out."""
_LIMITS: Final = (31, 63, 127)
"""The largest integers of factors. Finer ones are tried as long as each saves more than the one before."""


class _Effort(NamedTuple):
    """How thoroughly factors are searched."""

    rounds: int
    """Of the power iteration."""
    sampled: int
    """About how many elements the directions are searched in."""
    tried: int
    """Elements that ranks are compared on, in some blocks of rows."""


_EFFORTS: Final[dict[Level, _Effort]] = {
    "fast": _Effort(1, 1 << 19, 1 << 14),
    "small": _Effort(2, 1 << 24, 1 << 16),
}


class Fit(NamedTuple):
    """Factors, and the bytes that they save."""

    factors: Factors
    ratio: float
    """The ratio of the size with factors, which are included, to the size without."""


def fit(tensor: Array, base: Reader, dtype: DType, columns: int, level: Level) -> Fit | None:
    """Return factors that save space when ``tensor`` is encoded against ``base``, or None.

    Ranks are tried from the largest one on, as long as they get better.

    Args:
        tensor: elements as :func:`~blobstore.compression.delta.codec.as_elements` gives them, by rows.
        base: reads the elements of the base.
        dtype: the type of both.
        columns: elements of a row.
        level: ``fast`` to search with less effort.
    """
    if not can_fit(len(tensor), dtype, columns):
        return None
    pair = _Pair(tensor, base, dtype, columns)
    effort = _EFFORTS[level]
    best = _Best(pair, effort)
    ranks: tuple[int, ...] = _RANKS
    found = _found(pair, ranks[-1], effort)
    if found is None:
        return None
    if found.has_more:
        found, ranks = _found(pair, _MORE_RANKS[-1], effort) or found, _RANKS + _MORE_RANKS
    for rank in reversed([rank for rank in ranks if rank <= len(found.directions)]):
        if not best.judge(found.of(rank, _LIMITS[0])):
            break
    if best.factors is not None:
        rank = best.factors.rank
        for limit in _LIMITS[1:]:
            if not best.judge(found.of(rank, limit)):
                break
    return best.result()


def can_fit(elements: int, dtype: DType, columns: int) -> bool:
    """Return whether factors support the type and shape of a tensor."""
    sides = sorted((elements // max(columns, 1), columns))
    return can_predict(dtype) and sides[0] >= _LEAST_SIDE and sides[1] <= MAX_SIDE


def is_promising(tensor: Array, base: Reader, dtype: DType, columns: int) -> bool:
    """Estimate quickly from a sample whether :func:`fit` may find useful factors.

    It may if a few directions have nearly all energy of the difference, as after merging an adapter.
    The arguments are those of :func:`fit`.
    """
    if not can_fit(len(tensor), dtype, columns):
        return False
    pair = _Pair(tensor, base, dtype, columns)
    height = _TESTED_ROWS * (2 if len(tensor) >= _LARGE else 1)
    chosen = np.linspace(0, columns - 1, min(columns, _TESTED_COLUMNS)).astype(np.intp)
    _, *sides = zip(*_samples(pair, _SAMPLED_BLOCKS * height * columns), strict=True)
    mine, theirs = (np.concatenate(side).reshape(-1, columns)[:, chosen] for side in sides)
    sample = _difference(mine, theirs, dtype)
    products = _times(sample, sample.T).astype(np.float64)
    if np.trace(products) ** 2 > _MOST_EVEN * len(products) * np.square(products).sum():
        return False
    energies = np.linalg.eigvalsh(products)
    rest = float(energies[: len(energies) // 2].sum())
    return float(energies.sum()) > _LEAST_RATIO * max(rest, 0.0)


class _Pair(NamedTuple):
    """A tensor and its base, by rows."""

    tensor: Array
    base: Reader
    dtype: DType
    columns: int

    @property
    def rows(self) -> int:
        return len(self.tensor) // self.columns

    def rows_of(self, begin: int, end: int) -> tuple[Array, Array]:
        """Return elements of both."""
        first, last = begin * self.columns, end * self.columns
        return self.tensor[first:last], self.base(first, last)

    def difference(self, begin: int, end: int, step: int) -> Array:
        """Return the difference of every ``step``-th row."""
        sides = self.rows_of(begin, end)
        mine, theirs = (side.reshape(-1, self.columns)[::step] for side in sides)
        return _difference(mine, theirs, self.dtype)

    def blocks(self, step: int = 1) -> Iterator[Array]:
        """Yield the difference of every ``step``-th row, in blocks."""
        height = max(_BLOCK_ELEMENTS // self.columns // step, 1) * step
        for begin in range(0, self.rows, height):
            yield self.difference(begin, min(begin + height, self.rows), step)


class _Best:
    """The best factors so far: they save most bytes in relation to their time."""

    def __init__(self, pair: _Pair, effort: _Effort) -> None:
        self.factors: Factors | None = None
        self._pair = pair
        rows, tensors, bases = zip(*_samples(pair, effort.tried), strict=True)
        self._rows, self._chunk, self._base = map(np.concatenate, (rows, tensors, bases))
        self._scale = len(pair.tensor) / len(self._chunk)
        self._cost = self._size = float("inf")

    def judge(self, factors: Factors | None) -> bool:
        """Keep factors if they are better; return whether they are."""
        if factors is None:
            return False
        bits = estimate_bits(self._chunk, self._predicted(factors))
        size = bits / 8 * self._scale + len(pack(factors))
        cost = size * (1 + _PER_DOUBLING * factors.rank.bit_length())
        if cost >= self._cost:
            return False
        self._cost, self._size, self.factors = cost, size, factors
        return True

    def result(self) -> Fit | None:
        """Return the best factors if they save space."""
        if self.factors is None:
            return None
        plain = estimate_bits(self._chunk, self._base) / 8 * self._scale
        return Fit(self.factors, self._size / plain) if self._cost < plain else None

    def _predicted(self, factors: Factors) -> Array:
        sampled = factors._replace(left=factors.left[:, self._rows])
        return LowRankPredictor(sampled, self._pair.dtype).predict(self._base, 0)


def _samples(pair: _Pair, elements: int) -> Iterator[tuple[Array, Array, Array]]:
    """Yield the numbers of some rows in blocks, and the elements of both sides."""
    height = min(max(elements // _SAMPLED_BLOCKS // pair.columns, 1), pair.rows)
    count = min(_SAMPLED_BLOCKS, pair.rows // height)
    for number in range(count):
        begin = number * (pair.rows - height) // max(count - 1, 1)
        tensor, base = pair.rows_of(begin, begin + height)
        yield np.arange(begin, begin + height), tensor, base.copy()


class _Found(NamedTuple):
    """The lengths of rows along the directions, the largest first."""

    lengths: Array
    """Of shape (directions, rows)."""
    directions: Array
    """Of shape (directions, columns)."""
    has_more: bool
    """Whether the next directions stand out from the others, too."""

    def of(self, rank: int, limit: int) -> Factors | None:
        """Return factors of the first directions."""
        return quantized(self.lengths[:rank], self.directions[:rank], limit)


def _found(pair: _Pair, rank: int, effort: _Effort) -> _Found | None:
    """Return the directions in which most of the difference lies, if there is any."""
    step = -(-len(pair.tensor) // effort.sampled)
    count = min(rank + _MARGIN, -(-pair.rows // step), pair.columns)
    basis = np.random.default_rng(0).standard_normal((pair.columns, count), np.float32)
    kept = list(pair.blocks()) if len(pair.tensor) <= _KEPT_ELEMENTS else None
    for _ in range(effort.rounds):  # the power iteration
        turned = np.zeros(basis.shape)
        for block in (some[::step] for some in kept) if kept else pair.blocks(step):
            turned += _times_transposed(block, _times(block, basis))
        if not turned.any():
            return None
        basis = _orthonormal(turned)
    energy = 0.0
    parts = []
    for block in kept or pair.blocks():
        parts.append(_times(block, basis))
        energy += float(np.square(block).sum())
    lengths = np.concatenate(parts)
    energies, turns = _turns(lengths)
    rest = max(energy - float(energies.sum()), 0) / max(min(pair.rows, pair.columns) - count, 1)
    turns = turns[:, :rank]
    has_more = len(energies) > rank and float(energies[-1]) > _LEAST_STEP * rest
    return _Found(np.ascontiguousarray(_times(lengths, turns).T), _times(basis, turns).T, has_more)


def _turns(sides: Array) -> tuple[Array, Array]:
    """Return the rotation that makes columns orthogonal, after their energies, the largest first."""
    # For as many rows, LAPACK's eigh wakes other threads and waits for them.
    turns, energies, _ = np.linalg.svd(_times_transposed(sides, sides))
    return energies, turns.astype(np.float32)


def _orthonormal(sides: Array) -> Array:
    """Return columns of length 1, at right angles, that span what is worth spanning."""
    for _ in range(2):  # once more for accuracy, because the columns may be far from orthogonal
        energies, turns = _turns(sides)
        kept = energies > _LEAST_ENERGY * energies[0]
        sides = _times(sides, turns[:, kept]) / np.sqrt(energies[kept])
    return sides.astype(np.float32)


def _times(block: Array, basis: Array) -> Array:
    """Return ``block @ basis``, made in this thread."""
    count = basis.shape[1]
    found = np.zeros((len(block), count), block.dtype)
    whole = len(block) - len(block) % _TILE_ROWS
    tiles = block[:whole].reshape(-1, _TILE_ROWS, block.shape[1])
    parts = found[:whole].reshape(-1, _TILE_ROWS, count)
    width = max(_SERIAL_PRODUCTS // _TILE_ROWS // count, 1)
    for begin in range(0, block.shape[1], width):
        wanted = basis[begin : begin + width]
        parts += np.matmul(tiles[:, :, begin : begin + width], wanted)
        if whole < len(block):
            found[whole:] += np.matmul(block[whole:, begin : begin + width], wanted)
    return found


def _times_transposed(block: Array, lengths: Array) -> Array:
    """Return ``block.T @ lengths``, made in this thread, summed up in double precision."""
    count = lengths.shape[1]
    found = np.empty((block.shape[1], count))
    whole = len(block) - len(block) % _TILE_ROWS
    tiles = block[:whole].reshape(-1, _TILE_ROWS, block.shape[1]).transpose(0, 2, 1)
    parts = lengths[:whole].reshape(-1, _TILE_ROWS, count)
    width = max(_SERIAL_PRODUCTS // _TILE_ROWS // count, 1)
    for begin in range(0, block.shape[1], width):
        some = slice(begin, begin + width)
        found[some] = np.matmul(tiles[:, some], parts).sum(0, dtype=np.float64)
        if whole < len(block):
            found[some] += np.matmul(block[whole:, some].T, lengths[whole:])
    return found


def _difference(tensor: Array, base: Array, dtype: DType) -> Array:
    """Return the difference as float32, with 0 for non-finite and very large values."""
    found = _values(tensor, dtype)
    with np.errstate(all="ignore"):
        found -= _values(base, dtype)
    if not (found.max() < _MOST and found.min() > -_MOST):  # one of both is NaN if a value is
        found[~(np.abs(found) < _MOST)] = 0
    return found


def _values(elements: Array, dtype: DType) -> Array:
    """Return a copy of the elements as float32."""
    if dtype is DType.BF16:
        wide = elements.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return elements.view(np.float16 if dtype is DType.F16 else np.float32).astype(np.float32)

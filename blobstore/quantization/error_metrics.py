"""Error metrics of a tensor against a base, summed over blocks. Pure computation.

The sums are always finite: elements that are infinite, NaN, or so large that their squares might
overflow are counted and left out, unless both sides are the same. A group without an error has the
relative error 0, even if the base has only zeros. A group with an error has an infinite relative
error if the base has only zeros.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

_LARGEST = 2.0**480
"""Values from here on count as infinite."""


class WorstGroup(NamedTuple):
    """The group of elements with the largest relative error; the first of several."""

    relative_error: float
    """Infinite if the base has only zeros."""
    row: int
    """The row, with all dimensions but the last flattened."""
    column: int
    """The column of its first element."""
    size: int


class ErrorStats:
    """The errors of a tensor, added block by block."""

    def __init__(self, group_size: int) -> None:
        self.squared_error = 0.0
        self.squared_base = 0.0
        self.max_abs_error = 0.0
        self.nonfinite = 0
        """Elements that were left out of the sums."""
        self.worst: WorstGroup | None = None
        """None if there was no error."""
        self._group_size = group_size

    def add(self, row: int, column: int, values: Array, base: Array) -> None:
        """Add the errors of a block.

        Args:
            row: first row of the block in the tensor.
            column: first column; a group starts there.
            values: the values of the model, in two dimensions.
            base: the values of the base.
        """
        values, base = _wide(values), _wide(base)
        with np.errstate(all="ignore"):
            error, size = np.abs(values - base), np.abs(base)
            is_odd = ~(np.maximum(error, size) < _LARGEST)  # true for NaN too
        if is_odd.any():
            is_same = (values == base) | (np.isnan(values) & np.isnan(base))
            self.nonfinite += int(np.count_nonzero(is_odd & ~is_same))
            error[is_odd] = size[is_odd] = 0
        largest = float(error.max(initial=0))
        self.max_abs_error = max(self.max_abs_error, largest)
        bases = _squares(size, self._group_size)
        self.squared_base += float(bases.sum())
        if largest:
            errors = _squares(error, self._group_size)
            self.squared_error += float(errors.sum())
            with np.errstate(all="ignore"):
                ratios = np.where(errors > 0, errors / bases, 0)
            place, group = divmod(int(ratios.argmax()), ratios.shape[1])
            found = math.sqrt(ratios[place, group])
            if found > (self.worst.relative_error if self.worst else 0):
                first = group * self._group_size
                count = min(self._group_size, error.shape[1] - first)
                self.worst = WorstGroup(found, row + place, column + first, count)


def relative_error(squared_error: float, squared_base: float) -> float:
    """Return the norm of the error divided by the norm of the base; infinite if only that is 0."""
    if not squared_error:
        return 0.0
    return math.sqrt(squared_error) / math.sqrt(squared_base) if squared_base else math.inf


def snr_db(squared_error: float, squared_base: float) -> float:
    """Return the signal-to-noise ratio in decibels; infinite if there is no error."""
    if not squared_error:
        return math.inf
    if not squared_base:
        return -math.inf
    return 10 * (math.log10(squared_base) - math.log10(squared_error))


def _wide(values: Array) -> Array:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _squares(values: Array, group_size: int) -> Array:
    """Return the sum of squares of each group of each row. The last group may be shorter."""
    rows, columns = values.shape
    complete = columns - columns % group_size
    groups = values[:, :complete].reshape(rows, -1, group_size)
    sums: Array = np.einsum("rgi,rgi->rg", groups, groups)
    if complete == columns:
        return sums
    rest = values[:, complete:]
    return np.concatenate([sums, np.einsum("ri,ri->r", rest, rest)[:, None]], axis=1)

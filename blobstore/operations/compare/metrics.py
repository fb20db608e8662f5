"""How far numbers are from those that they should be: errors added up over blocks of a tensor. Pure.

Whatever the numbers are, the sums are finite: elements that are infinite, not a number, or so large
that their squares might overflow are counted and left out, unless they are the same on both sides.
A group without any error has the relative error 0, also where the base has only zeros; one with an
error where the base has only zeros is infinitely wrong.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

_LARGEST = 2.0**480
"""Numbers from here on count as infinite."""


class WorstGroup(NamedTuple):
    """The group of elements with the largest relative error; the first of several."""

    relative_error: float
    """Infinite where the base has only zeros and the other side has not."""
    row: int
    """With all dimensions but the last counted as one."""
    column: int
    """Of its first element."""
    size: int


class ErrorStats:
    """The errors of a tensor, from as many blocks of it as there are."""

    def __init__(self, group_size: int) -> None:
        self.squared_error = 0.0
        self.squared_base = 0.0
        self.max_abs_error = 0.0
        self.nonfinite = 0
        """Elements that were left out."""
        self.worst: WorstGroup | None = None
        """None where there was no error."""
        self._group_size = group_size

    def add(self, row: int, column: int, numbers: Array, base: Array) -> None:
        """Add the errors of a block: its first row and column, which begins a group, and both sides."""
        numbers, base = _wide(numbers), _wide(base)
        with np.errstate(all="ignore"):
            error, size = np.abs(numbers - base), np.abs(base)
            is_odd = ~(np.maximum(error, size) < _LARGEST)  # so also where it is not a number
        if is_odd.any():
            is_same = (numbers == base) | (np.isnan(numbers) & np.isnan(base))
            self.nonfinite += int(np.count_nonzero(is_odd & ~is_same))
            error[is_odd] = size[is_odd] = 0
        largest = float(error.max(initial=0))
        self.max_abs_error = max(self.max_abs_error, largest)
        bases = _squares(size, self._group_size)
        self.squared_base += float(bases.sum())
        if largest:
            errors = _squares(error, self._group_size)
            self.squared_error += float(errors.sum())
            self._note_worst(row, column, errors, bases, error.shape[1])

    def _note_worst(self, row: int, column: int, errors: Array, bases: Array, width: int) -> None:
        with np.errstate(all="ignore"):
            ratios = np.where(errors > 0, errors / bases, 0)
        place, group = divmod(int(ratios.argmax()), ratios.shape[1])
        found = math.sqrt(ratios[place, group])
        if found > (self.worst.relative_error if self.worst else 0):
            first = group * self._group_size
            size = min(self._group_size, width - first)
            self.worst = WorstGroup(found, row + place, column + first, size)


def relative_error(squared_error: float, squared_base: float) -> float:
    """Return the norm of an error by that of the base; infinite where only the base is zero."""
    if not squared_error:
        return 0.0
    return math.sqrt(squared_error) / math.sqrt(squared_base) if squared_base else math.inf


def snr_db(squared_error: float, squared_base: float) -> float:
    """Return the signal-to-noise ratio in decibels; infinite where there is no error."""
    if not squared_error:
        return math.inf
    if not squared_base:
        return -math.inf
    return 10 * (math.log10(squared_base) - math.log10(squared_error))


def _wide(numbers: Array) -> Array:
    return numbers.astype(np.complex128 if numbers.dtype.kind == "c" else np.float64)


def _squares(numbers: Array, group_size: int) -> Array:
    """Return the sum of squares of each group of each row; the last group may be shorter."""
    rows, columns = numbers.shape
    whole = columns - columns % group_size
    groups = numbers[:, :whole].reshape(rows, -1, group_size)
    sums: Array = np.einsum("rgi,rgi->rg", groups, groups)
    if whole == columns:
        return sums
    rest = numbers[:, whole:]
    return np.concatenate([sums, np.einsum("ri,ri->r", rest, rest)[:, None]], axis=1)

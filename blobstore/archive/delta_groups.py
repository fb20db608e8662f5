"""The order in which the differences of a chunk are coded: by the size of the number they start from.

An update of one size is many units in the last place of a small weight and few of a large one, so
how far differences spread is told by the exponent of the number that they start from, which the
decoder has. Elements are put into classes by that exponent, and the differences of a class are
coded together: each of its blocks has one narrow distribution.

Sorting is what costs, so it is not elements that are sorted but pairs of neighbours, by both their
classes: half as many keys, half as many moves. In the sorted pairs the first elements of a class
are one run, the second ones a run for each class of the first; slices bring a class together.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.archive.scratch import scratch
from blobstore.tensor import DType

if TYPE_CHECKING:
    from typing import Final

    Array = np.ndarray[Any, Any]

MAX_CLASSES: Final = 16
"""Classes at most, for two of them are a key of eight bits."""
_EXPONENTS: Final = {
    DType.F8_E4M3: (3, 0xF),
    DType.F8_E4M3FNUZ: (3, 0xF),
    DType.F8_E5M2: (2, 0x1F),
    DType.F8_E5M2FNUZ: (2, 0x1F),
    DType.F16: (10, 0x1F),
    DType.BF16: (7, 0xFF),
    DType.F32: (23, 0xFF),
}
"""Where the exponent of a type begins, and its bits."""
_PAIRS: Final = {1: np.dtype("<u2"), 2: np.dtype("<u4"), 4: np.dtype("<u8")}


class Classes(NamedTuple):
    """Exponents from ``first`` on are a class each, but the ends hold all beyond them."""

    first: int
    count: int


class Groups(NamedTuple):
    """How the elements of a chunk become runs of one class."""

    order: Array
    """The pairs in order of their keys."""
    runs: list[tuple[int, int, int]]
    """Lane, start and end in the sorted pairs, in the order in which they are coded."""
    sizes: list[int]
    """Elements in each class."""


def has_classes(dtype: DType) -> bool:
    """Tell whether elements of ``dtype`` can be told apart by an exponent."""
    return dtype in _EXPONENTS


def choose_classes(base: Array, dtype: DType, count: int) -> Classes:
    """Return classes that tell apart all but the largest hundredth of ``base`` and the smallest numbers."""
    sample = _exponents(base[:: max(len(base) >> 13, 1)], dtype)
    totals = np.bincount(sample, minlength=1).cumsum()
    top = int(np.searchsorted(totals, 0.99 * totals[-1]))
    return Classes(max(top - count + 1, 0), min(count, top + 1))


def group(base: Array, dtype: DType, classes: Classes) -> Groups:
    """Return the groups of an even number of elements, valid until the thread asks again."""
    keys = _keys(base, dtype, classes)
    order = keys.argsort(kind="stable")
    bounds = [*keys.searchsorted(_probes(classes.count), sorter=order).tolist(), len(keys)]
    return Groups(order, *_runs(bounds, classes.count))


@cache
def _probes(count: int) -> Array:
    return np.array([a << 4 | b for a in range(count) for b in range(count)], np.uint8)


def _runs(bounds: list[int], count: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    runs: list[tuple[int, int, int]] = []
    sizes = []
    for number in range(count):
        here = [(0, bounds[number * count], bounds[(number + 1) * count])]
        here += [(1, *bounds[at : at + 2]) for at in range(number, count * count, count)]
        runs += [run for run in here if run[1] < run[2]]
        sizes.append(sum(end - start for _, start, end in here))
    return runs, sizes


def gather(elements: Array, groups: Groups, out: Array) -> None:
    """Write ``elements`` to ``out`` class by class."""
    pair = _PAIRS[elements.itemsize]
    pairs = scratch("delta sorted", elements.nbytes).view(pair)
    elements.view(pair).take(groups.order, out=pairs, mode="wrap")
    lanes = _lanes(elements)
    np.copyto(lanes[0], pairs, casting="unsafe")
    np.right_shift(pairs, 8 * elements.itemsize, out=pairs)
    np.copyto(lanes[1], pairs, casting="unsafe")
    at = 0
    for lane, start, end in groups.runs:
        out[at : at + end - start] = lanes[lane][start:end]
        at += end - start


def scatter(stream: Array, groups: Groups, out: Array) -> None:
    """Undo :func:`gather`."""
    lanes = _lanes(stream)
    at = 0
    for lane, start, end in groups.runs:
        lanes[lane][start:end] = stream[at : at + end - start]
        at += end - start
    pair = _PAIRS[stream.itemsize]
    pairs = scratch("delta sorted", stream.nbytes).view(pair)
    np.copyto(pairs, lanes[1])
    np.left_shift(pairs, 8 * stream.itemsize, out=pairs)
    np.bitwise_or(pairs, lanes[0], out=pairs)
    out.view(pair)[groups.order] = pairs


def _lanes(elements: Array) -> Array:
    return scratch("delta lanes", elements.nbytes).view(elements.dtype).reshape(2, -1)


def _keys(base: Array, dtype: DType, classes: Classes) -> Array:
    exponents = _exponents(base, dtype)
    last = classes.first + classes.count - 1
    exponents.clip(classes.first, last, out=exponents)  # many times faster than minimum and maximum
    np.subtract(exponents, classes.first, out=exponents)
    pairs = exponents.view("<u2")
    keys = scratch("delta keys", len(pairs) * 3)
    first, second = keys[: 2 * len(pairs)].view(np.uint16), keys[2 * len(pairs) :]
    np.right_shift(pairs, 8, out=first)
    np.left_shift(pairs, 4, out=pairs)
    np.bitwise_or(pairs, first, out=pairs)
    np.copyto(second, pairs, casting="unsafe")
    return second


def _exponents(base: Array, dtype: DType) -> Array:
    shift, mask = _EXPONENTS[dtype]
    shifted = scratch("delta shifted", base.nbytes).view(base.dtype)
    exponents = scratch("delta exponents", len(base))
    np.right_shift(base, shift, out=shifted)
    np.copyto(exponents, shifted, casting="unsafe")  # keeps the lowest eight bits
    if mask != 0xFF:  # noqa: PLR2004 - all that is kept
        np.bitwise_and(exponents, mask, out=exponents)
    return exponents

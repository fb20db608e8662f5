"""Orders the differences of a chunk by the exponent of the predicted value.

An update of one size is many units in the last place of a small weight, and few of a large one. So the
exponent of the prediction, which the decoder knows, shows how widely the differences spread. Elements
are assigned to classes by that exponent, and the differences of a class are encoded together: each of
its blocks has one narrow distribution.

Sorting is the expensive part. Therefore pairs of neighbours are sorted by both their classes instead of
elements: half as many keys, half as many moves. In the sorted pairs, the first elements of a class are
one run, and its second elements are one run for each class of the first. Slices bring a class together.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.scratch import scratch
from blobstore.core.tensor import DType

if TYPE_CHECKING:
    from typing import Final

    Array = np.ndarray[Any, Any]

MAX_CLASSES: Final = 16
"""Maximum number of classes: two of them make a key of eight bits."""
_EXPONENTS: Final = {
    DType.F8_E4M3: (3, 0xF),
    DType.F8_E4M3FNUZ: (3, 0xF),
    DType.F8_E5M2: (2, 0x1F),
    DType.F8_E5M2FNUZ: (2, 0x1F),
    DType.F16: (10, 0x1F),
    DType.BF16: (7, 0xFF),
    DType.F32: (23, 0xFF),
}
"""Shift and mask of the exponent of a type."""
_PAIRS: Final[dict[int, np.dtype[Any]]] = {
    1: np.dtype("<u2"),
    2: np.dtype("<u4"),
    4: np.dtype("<u8"),
}
_ALL: Final = 0xFF
"""The mask of an 8-bit exponent, which needs no masking in a byte."""
_SAMPLE: Final = 1 << 13
_TOP: Final = 0.99
"""The quantile above which exponents are too rare for their own class."""


class Classes(NamedTuple):
    """One class per exponent from ``first`` on; the classes at the ends include all beyond."""

    first: int
    many: int


class Groups(NamedTuple):
    """The rearrangement of a chunk's elements into classes."""

    order: Array
    """The indexes of the pairs, sorted by key."""
    runs: list[tuple[int, int]]
    """Ranges in the first elements of the sorted pairs followed by the second, class by class."""
    sizes: list[int]
    """Number of elements in each class."""


def has_classes(dtype: DType) -> bool:
    """Return whether elements of ``dtype`` have an exponent."""
    return dtype in _EXPONENTS


def choose_classes(base: Array, dtype: DType, many: int) -> Classes:
    """Return classes that separate all values except the largest hundredth and the smallest ones."""
    exponents = _exponents(base[:: max(len(base) // _SAMPLE, 1)], dtype)
    totals = np.bincount(exponents, minlength=1).cumsum()
    top = int(np.searchsorted(totals, _TOP * totals[-1]))
    return Classes(max(top - many + 1, 0), min(many, top + 1))


def classes_of(base: Array, dtype: DType, classes: Classes) -> Array:
    """Return the class of every element, valid until this thread's next call."""
    exponents = _exponents(base, dtype)
    # The bounds have the array's type, because numpy is many times slower with other types.
    first, last = np.uint8(classes.first), np.uint8(classes.first + classes.many - 1)
    exponents.clip(first, last, out=exponents)
    return np.subtract(exponents, first, out=exponents)


def group(base: Array, dtype: DType, classes: Classes) -> Groups:
    """Group an even number of elements by class."""
    # A key has the two classes of a pair, the first in the upper half.
    pairs = classes_of(base, dtype, classes).view("<u2")
    np.multiply(pairs, 0x1001, out=pairs)
    np.right_shift(pairs, 8, out=pairs)
    keys = scratch("delta keys", len(pairs))
    np.copyto(keys, pairs, casting="unsafe")
    order = keys.argsort(kind="stable")
    bounds = keys.searchsorted(_probes(classes.many), sorter=order).tolist()
    bounds.append(len(keys))
    runs, sizes, many = [], [], classes.many
    for number in range(many):
        start, end = bounds[number * many], bounds[(number + 1) * many]
        runs.append((start, end))
        size = end - start
        for place in range(number, many * many, many):
            start, end = bounds[place], bounds[place + 1]
            if start != end:
                runs.append((len(keys) + start, len(keys) + end))
                size += end - start
        sizes.append(size)
    return Groups(order, runs, sizes)


@cache
def _probes(many: int) -> Array:
    return np.array([one << 4 | two for one in range(many) for two in range(many)], np.uint8)


def gather(elements: Array, groups: Groups, out: Array) -> None:
    """Write ``elements`` to ``out`` class by class."""
    pair = _PAIRS[elements.itemsize]
    pairs = scratch("delta sorted", elements.nbytes).view(pair)
    elements.view(pair).take(groups.order, out=pairs, mode="wrap")
    lanes = scratch("delta lanes", elements.nbytes).view(elements.dtype)
    first, second = lanes.reshape(2, -1)
    np.copyto(first, pairs, casting="unsafe")
    np.right_shift(pairs, 8 * elements.itemsize, out=pairs)
    np.copyto(second, pairs, casting="unsafe")
    target, source = out.data, lanes.data  # slicing memoryviews is faster than slicing arrays
    at = 0
    for start, end in groups.runs:
        last = at + end - start
        target[at:last] = source[start:end]
        at = last


def scatter(stream: Array, groups: Groups, out: Array) -> None:
    """Reverse :func:`gather`."""
    lanes = scratch("delta lanes", stream.nbytes).view(stream.dtype)
    target, source = lanes.data, stream.data
    at = 0
    for start, end in groups.runs:
        last = at + end - start
        target[start:end] = source[at:last]
        at = last
    first, second = lanes.reshape(2, -1)
    pair = _PAIRS[stream.itemsize]
    pairs = scratch("delta sorted", stream.nbytes).view(pair)
    np.copyto(pairs, second)
    np.left_shift(pairs, 8 * stream.itemsize, out=pairs)
    np.bitwise_or(pairs, first, out=pairs)
    out.view(pair)[groups.order] = pairs


def indexes_of(ranks: Array, groups: Groups) -> Array:
    """Return the indexes of elements by their numbers in the order of :func:`gather`, ascending.

    An odd last element, which is behind the groups, keeps its number.
    """
    starts, ends = np.array(groups.runs).reshape(-1, 2).T
    behind = np.cumsum(ends - starts)
    many = len(groups.order)
    grouped = ranks[: ranks.searchsorted(2 * many)]
    runs = behind.searchsorted(grouped, "right")
    lanes = grouped + (ends - behind)[runs]
    is_second = lanes >= many
    lanes -= many * is_second
    return np.append(2 * groups.order[lanes] + is_second, ranks[len(grouped) :])


def _exponents(base: Array, dtype: DType) -> Array:
    shift, mask = _EXPONENTS[dtype]
    shifted = scratch("delta shifted", base.nbytes).view(base.dtype)
    exponents = scratch("delta exponents", len(base))
    np.right_shift(base, shift, out=shifted)
    np.copyto(exponents, shifted, casting="unsafe")  # keeps the lowest eight bits
    if mask != _ALL:
        np.bitwise_and(exponents, mask, out=exponents)
    return exponents

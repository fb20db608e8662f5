"""The order in which the differences of a chunk are coded: by the size of the number they start from.

An update of one size is many units in the last place of a small weight and few of a large one, so
how far differences spread is told by the exponent of the number that they start from, which the
decoder has. Elements are put into classes by that exponent, and the differences of a class are
coded together: each of its blocks has one narrow distribution.

Sorting is what costs, so it is not elements that are sorted but two or four neighbours together, by
the classes of all: that many fewer keys and moves. In the sorted units the first elements of a class
are one run, the second ones a run for each class of the first, and so on; slices bring a class
together.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.archive.scratch import scratch
from blobstore.tensor import DType

if TYPE_CHECKING:
    from typing import Final

    Array = np.ndarray[Any, Any]
    Thresholds = tuple[int, ...]

MAX_CLASSES: Final = 16
"""Classes at most, for two of them are a key of eight bits."""
_FEW: Final = 4
"""Classes of which four are a key of eight bits."""
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
_SAMPLE: Final = 1 << 13
_TOP: Final = 0.99
"""The part of a tensor above which exponents are too rare for a class."""
_DEPTH: Final = 10
"""Exponents below the top that a threshold may be."""


class Groups(NamedTuple):
    """How the elements of a chunk become runs of one class."""

    order: Array
    """The units in order of their keys."""
    lanes: int
    """Elements of a unit."""
    runs: list[tuple[int, int, int]]
    """Lane, start and end in the sorted units, in the order in which they are coded."""
    sizes: list[int]
    """Elements in each class."""


def has_classes(dtype: DType) -> bool:
    """Tell whether elements of ``dtype`` can be told apart by an exponent."""
    return dtype in _EXPONENTS


def exponent_bits(dtype: DType) -> int:
    """Return how many bits the exponents of a type with classes have."""
    return _EXPONENTS[dtype][1].bit_length()


def lanes_of(width: int, classes: int) -> int:
    """Return how many neighbours are sorted together, of elements of ``width`` bytes."""
    return 4 if classes <= _FEW and width <= 2 else 2  # noqa: PLR2004 - 4 of 2 bytes are a word


def choose_thresholds(base: Array, dtype: DType, classes: int) -> Thresholds:
    """Return the exponents where classes begin: the class of an element is how many it reaches.

    Few classes are cut where exponents differ least within each, as means do; of many, each but the
    first is one exponent. Numbers larger than nearly all others are of the last class.
    """
    exponents = _exponents(base[:: max(len(base) // _SAMPLE, 1)], dtype)
    counts = np.bincount(exponents, minlength=256)
    totals = counts.cumsum()
    top = int(np.searchsorted(totals, _TOP * totals[-1]))
    if classes > _FEW:
        return tuple(range(max(top - classes + 2, 1), top + 1))
    places = range(max(top - _DEPTH, 1), top + 1)
    count = min(classes - 1, len(places))
    return min(combinations(places, count), key=_spread(counts, max(top - _DEPTH, 0)))


def _spread(counts: Array, least: int) -> Any:
    """Return what tells how much exponents of at least ``least`` differ within classes."""
    numbers = np.arange(len(counts)).clip(least)
    sums = [
        np.concatenate([[0], (counts * power).cumsum()]).tolist()
        for power in (numbers**0, numbers, numbers * numbers)
    ]

    def spread(thresholds: Thresholds) -> float:
        total = 0.0
        for start, end in pairwise((0, *thresholds, len(counts))):
            count, first, second = (part[end] - part[start] for part in sums)
            total += second - first * first / count if count else 0
        return total

    return spread


def classes_of(base: Array, dtype: DType, thresholds: Thresholds = ()) -> Array:
    """Return the class of every element, or its exponent if there are no thresholds."""
    exponents = _exponents(base, dtype)
    return (_classes(exponents, thresholds) if thresholds else exponents).copy()


def group(base: Array, dtype: DType, thresholds: Thresholds) -> Groups:
    """Return the groups of whole units of elements."""
    classes = len(thresholds) + 1
    lanes = lanes_of(base.itemsize, classes)
    keys = _keys(_classes(_exponents(base, dtype), thresholds), lanes)
    order = keys.argsort(kind="stable")
    bounds = keys.searchsorted(_probes(classes, lanes), sorter=order).tolist()
    bounds.append(len(keys))
    return Groups(order, lanes, *_runs(bounds, classes, lanes))


@cache
def _probes(classes: int, lanes: int) -> Array:
    keys = np.zeros(1, np.int64)
    for _ in range(lanes):
        keys = (keys[:, None] << 8 // lanes | np.arange(classes)).ravel()
    return keys.astype(np.uint8)


@cache
def _blocks(classes: int, lanes: int) -> list[list[tuple[int, int, int]]]:
    """Return for every class its lanes, and where their runs begin and end among the probes."""
    blocks: list[list[tuple[int, int, int]]] = [[] for _ in range(classes)]
    for lane in range(lanes):
        size = classes ** (lanes - 1 - lane)
        for number in range(classes ** (lane + 1)):
            blocks[number % classes].append((lane, number * size, (number + 1) * size))
    return blocks


def _runs(
    bounds: list[int], classes: int, lanes: int
) -> tuple[list[tuple[int, int, int]], list[int]]:
    runs: list[tuple[int, int, int]] = []
    sizes = []
    for blocks in _blocks(classes, lanes):
        size = 0
        for lane, first, last in blocks:
            start, end = bounds[first], bounds[last]
            if start != end:
                runs.append((lane, start, end))
                size += end - start
        sizes.append(size)
    return runs, sizes


def gather(elements: Array, groups: Groups, out: Array) -> None:
    """Write ``elements`` to ``out`` class by class."""
    units = _units(elements, groups)
    _view(elements, groups).take(groups.order, out=units, mode="wrap")
    lanes = _lanes(elements, groups)
    for number, lane in enumerate(lanes):
        if number:
            np.right_shift(units, 8 * elements.itemsize, out=units)
        np.copyto(lane, units, casting="unsafe")
    at = 0
    for number, start, end in groups.runs:
        last = at + end - start
        out[at:last] = lanes[number][start:end]
        at = last


def scatter(stream: Array, groups: Groups, out: Array) -> None:
    """Undo :func:`gather`."""
    lanes = _lanes(stream, groups)
    at = 0
    for number, start, end in groups.runs:
        last = at + end - start
        lanes[number][start:end] = stream[at:last]
        at = last
    units = _units(stream, groups)
    np.copyto(units, lanes[-1])
    for lane in lanes[-2::-1]:
        np.left_shift(units, 8 * stream.itemsize, out=units)
        np.bitwise_or(units, lane, out=units)
    _view(out, groups)[groups.order] = units


def _view(elements: Array, groups: Groups) -> Array:
    return elements.view(f"<u{elements.itemsize * groups.lanes}")


def _units(elements: Array, groups: Groups) -> Array:
    return scratch("delta sorted", elements.nbytes).view(f"<u{elements.itemsize * groups.lanes}")


def _lanes(elements: Array, groups: Groups) -> list[Array]:
    lanes = scratch("delta lanes", elements.nbytes).view(elements.dtype)
    return list(lanes.reshape(groups.lanes, -1))


def _keys(classes: Array, lanes: int) -> Array:
    """Return the classes of each unit as one number, the first of them uppermost."""
    bits, unit = 8 // lanes, np.dtype(f"<u{lanes}")
    factor = sum(1 << (8 + bits) * (lanes - 1 - lane) for lane in range(lanes))
    units = classes.view(unit)
    np.multiply(units, unit.type(factor & ((1 << 8 * lanes) - 1)), out=units)
    np.right_shift(units, 8 * (lanes - 1), out=units)
    keys = scratch("delta keys", len(units))
    np.copyto(keys, units, casting="unsafe")
    return keys


def _classes(exponents: Array, thresholds: Thresholds) -> Array:
    """Replace exponents by the numbers of their classes."""
    first, last = thresholds[0] - 1, thresholds[-1]
    if last - first == len(thresholds):
        # Bounds of the array's own type: with others numpy compares many times slower.
        exponents.clip(np.uint8(first), np.uint8(last), out=exponents)
        return np.subtract(exponents, np.uint8(first), out=exponents)
    classes = scratch("delta classes", 2 * len(exponents)).reshape(2, -1)
    np.greater_equal(exponents, thresholds[0], out=classes[0].view(np.bool))
    for threshold in thresholds[1:]:
        np.greater_equal(exponents, threshold, out=classes[1].view(np.bool))
        np.add(*classes, out=classes[0])
    return classes[0]


def _exponents(base: Array, dtype: DType) -> Array:
    shift, mask = _EXPONENTS[dtype]
    shifted = scratch("delta shifted", base.nbytes).view(base.dtype)
    exponents = scratch("delta exponents", len(base))
    np.right_shift(base, shift, out=shifted)
    np.copyto(exponents, shifted, casting="unsafe")  # keeps the lowest eight bits
    if mask != 0xFF:  # noqa: PLR2004 - all that is kept
        np.bitwise_and(exponents, mask, out=exponents)
    return exponents

"""Slices of tensors: the elements that an index selects, and the offsets of their bytes."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from blobstore.core.escape import escape, quote
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.core.tensor import TensorSpec

_Item = SupportsIndex | slice | EllipsisType
Index = _Item | tuple[_Item, ...]
"""An index of a tensor: integers, slices of step 1, ``...``, or a tuple of these."""


class Selection(NamedTuple):
    """A slice of a tensor: start and stop in each dimension."""

    ranges: tuple[tuple[int, int], ...]
    is_kept: tuple[bool, ...]
    """False for a dimension that an integer index removes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slice."""
        kept = zip(self.ranges, self.is_kept, strict=True)
        return tuple(stop - start for (start, stop), is_kept in kept if is_kept)

    @property
    def array_index(self) -> tuple[int | slice, ...]:
        """The index that selects the slice from an array of the whole tensor."""
        kept = zip(self.ranges, self.is_kept, strict=True)
        return tuple(slice(*bounds) if is_kept else bounds[0] for bounds, is_kept in kept)

    def with_last(self, start: int, stop: int) -> Selection:
        """Return the selection with other bounds in the last dimension."""
        return self._replace(ranges=(*self.ranges[:-1], (start, stop)))


class Runs(NamedTuple):
    """The bytes of a slice: runs of equal length at regular distances."""

    begin: int
    length: int
    repeats: tuple[tuple[int, int], ...]
    """Count and stride in bytes per loop over the runs, outermost loop first."""

    @property
    def offsets(self) -> list[int]:
        """The offset of each run, in the order of the slice's elements."""
        found = [self.begin]
        for count, stride in self.repeats:
            found = [start + number * stride for start in found for number in range(count)]
        return found


def select(spec: TensorSpec, index: Index) -> Selection:
    """Return the elements that an index selects; out-of-range slices are clipped as in Python.

    Raises:
        UsageError: the index has another type, too many dimensions, or an integer out of range.
    """
    rank = len(spec.shape)
    full = expand(index, rank)
    if len(full) > rank:
        raise UsageError(
            f"tensor {quote(spec.name)} has {rank} dimensions; the index "
            f"{escape(repr(index), 200)} has more"
        )
    bounds = [_bounds(spec.name, item, size) for item, size in zip(full, spec.shape, strict=True)]
    return Selection(tuple(bounds), tuple(isinstance(item, slice) for item in full))


def expand(index: Any, rank: int) -> tuple[Any, ...]:
    """Return an index with an item per dimension: ``...`` and absent items become full slices.

    It has more items than ``rank`` if the index has. It keeps an ellipsis if the index has several.
    """
    items = index if isinstance(index, tuple) else (index,)
    gap = next((position for position, item in enumerate(items) if item is ...), len(items))
    rest = items[gap + 1 :]
    return (*items[:gap], *(slice(None),) * (rank - gap - len(rest)), *rest)


def byte_runs(spec: TensorSpec, selection: Selection) -> Runs:
    """Return the byte offsets of a selection within its tensor.

    Raises:
        UsageError: the selection starts or ends within a byte.
    """
    begin, length, stride = 0, spec.dtype.bits, spec.dtype.bits
    repeats: list[tuple[int, int]] = []
    is_contiguous = True
    for (start, stop), size in zip(reversed(selection.ranges), reversed(spec.shape), strict=True):
        begin += start * stride
        if is_contiguous:
            length *= stop - start
        elif stop - start != 1:
            repeats.append((stop - start, stride))
        is_contiguous = is_contiguous and stop - start == size
        stride *= size
    if any(bits % 8 for bits in (begin, length, *(distance for _, distance in repeats))):
        raise UsageError(
            f"tensor {quote(spec.name)} cannot be sliced there: its elements have "
            f"{spec.dtype.bits} bits, and a slice must start and end at a whole byte"
        )
    in_bytes = tuple((count, distance // 8) for count, distance in reversed(repeats))
    return Runs(begin // 8, length // 8, in_bytes)


def _bounds(name: str, item: object, size: int) -> tuple[int, int]:
    try:
        if isinstance(item, slice) and item.step in (None, 1):
            start, stop, _ = item.indices(size)
            return start, max(start, stop)
        number = operator.index(item) if not isinstance(item, bool) else None  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise UsageError(
            f"tensor {quote(name)} can be indexed by integers and slices of step 1, "
            f"got {escape(repr(item), 200)}"
        )
    if not -size <= number < size:
        raise UsageError(
            f"tensor {quote(name)} has {size} elements in a dimension; index {number} is out of range"
        )
    start = number % size
    return start, start + 1

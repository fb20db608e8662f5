"""Parts of tensors: what an index asks for, and where its bytes lie. Pure."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

from blobstore.core.escape import escape, quote
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from blobstore.core.tensor import TensorSpec

_Item = SupportsIndex | slice | EllipsisType
Index = _Item | tuple[_Item, ...]
"""What is taken of a tensor: whole numbers, slices of step 1, ``...``, or a tuple of these."""


class Selection(NamedTuple):
    """A part of a tensor: from where to where it goes in each dimension."""

    ranges: tuple[tuple[int, int], ...]
    is_kept: tuple[bool, ...]
    """False for a dimension of which one number was asked, which the part has no more."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        kept = zip(self.ranges, self.is_kept, strict=True)
        return tuple(stop - start for (start, stop), is_kept in kept if is_kept)

    @property
    def taken(self) -> tuple[int | slice, ...]:
        """What to index an array of the whole tensor with."""
        kept = zip(self.ranges, self.is_kept, strict=True)
        return tuple(slice(*bounds) if is_kept else bounds[0] for bounds, is_kept in kept)

    def with_last(self, start: int, stop: int) -> Selection:
        """Return the cut with other bounds in the last dimension."""
        return self._replace(ranges=(*self.ranges[:-1], (start, stop)))


class Runs(NamedTuple):
    """Where a part's bytes lie: runs of equal length at regular distances."""

    begin: int
    length: int
    repeats: tuple[tuple[int, int], ...]
    """How often what lies deeper is there, and the bytes from one to the next; outermost first."""

    @property
    def offsets(self) -> list[int]:
        """Where each run begins, in the order of the part's elements."""
        found = [self.begin]
        for count, stride in self.repeats:
            found = [start + number * stride for start in found for number in range(count)]
        return found


def select(spec: TensorSpec, index: Index) -> Selection:
    """Return the part of a tensor that an index asks for; slices are clipped as Python does.

    Raises:
        UsageError: the index asks for something else than a part, or for what is not there.
    """
    items = index if isinstance(index, tuple) else (index,)
    rank, gaps = len(spec.shape), sum(item is ... for item in items)
    if gaps > 1 or len(items) - gaps > rank:
        raise UsageError(
            f"tensor {quote(spec.name)} has {rank} dimensions; {_shown(index)} asks for more"
        )
    place = next((place for place, item in enumerate(items) if item is ...), len(items))
    rest = (slice(None),) * (rank - len(items) + gaps)
    whole = (*items[:place], *rest, *items[place + 1 :])
    bounds = [_bounds(spec.name, item, size) for item, size in zip(whole, spec.shape, strict=True)]
    return Selection(tuple(bounds), tuple(isinstance(item, slice) for item in whole))


def byte_runs(spec: TensorSpec, part: Selection) -> Runs:
    """Return where the bytes of a part lie in those of its tensor.

    Raises:
        UsageError: elements of less than a byte would have to be cut apart.
    """
    begin, length, stride = 0, spec.dtype.bits, spec.dtype.bits
    repeats: list[tuple[int, int]] = []
    is_whole = True
    for (start, stop), size in zip(reversed(part.ranges), reversed(spec.shape), strict=True):
        begin += start * stride
        if is_whole:
            length *= stop - start
        elif stop - start != 1:
            repeats.append((stop - start, stride))
        is_whole = is_whole and stop - start == size
        stride *= size
    if any(bits % 8 for bits in (begin, length, *(distance for _, distance in repeats))):
        raise UsageError(
            f"tensor {quote(spec.name)} cannot be cut there: its elements have {spec.dtype.bits} "
            "bits, and the part must begin and end at whole bytes"
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
            f"a part of tensor {quote(name)} is asked for with whole numbers and slices of step 1, "
            f"got {_shown(item)}"
        )
    if not -size <= number < size:
        raise UsageError(
            f"tensor {quote(name)} has {size} elements in a dimension, and no number {number}"
        )
    start = number % size
    return start, start + 1


def _shown(index: object) -> str:
    return escape(repr(index), 200)

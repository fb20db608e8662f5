"""Which bytes of tensors go from which rank to which, and when. Pure arithmetic.

Each blob has an owner, the rank that hashes and writes it. The blobs of an owner are one stream of bytes, which is
divided into windows. In each round every owner gets its next window, from all ranks that hold a part of it. Shapes are
those of bytes: the last dimension counts bytes, not elements, so that no type of an element matters.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class Box(NamedTuple):
    """A part of a tensor: where it begins in each dimension, and how far it reaches."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """Return what two boxes have in common; None if that is nothing."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, map(operator.add, *self), map(operator.add, *other))
        sizes = tuple(map(operator.sub, ends, offsets))
        return Box(offsets, sizes) if min(sizes) > 0 else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of the box in an array that has the bytes of ``outer``."""
        begins = tuple(map(operator.sub, self.offsets, outer.offsets))
        return tuple(map(slice, begins, map(operator.add, begins, self.sizes)))


def box_of_bytes(offsets: Sequence[int], sizes: Sequence[int], itemsize: int) -> Box:
    """Return the box of a part of a tensor, given by its elements."""
    if not sizes:  # a number
        return Box((0,), (itemsize,))
    return Box(
        (*offsets[:-1], offsets[-1] * itemsize),
        (*sizes[:-1], sizes[-1] * itemsize),
    )


def begin_of_rows(box: Box, shape: tuple[int, ...]) -> int | None:
    """Return where a part begins in the bytes of its tensor; None if it is not contiguous there."""
    begin, stride, is_all = 0, 1, True
    for offset, size, all_of_it in zip(
        reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True
    ):
        if size != 1 and not is_all:
            return None
        is_all = is_all and size == all_of_it
        begin, stride = begin + offset * stride, stride * all_of_it
    return begin


class Window(NamedTuple):
    """A part of a tensor that is contiguous in memory."""

    key: str
    box: Box


def windows_of(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Yield the parts of at most ``limit`` bytes that a tensor consists of, in the order of its bytes."""
    if not math.prod(shape):
        return
    first, rest = shape[0], shape[1:]
    row = Box((0,) * len(rest), rest)
    step = max(1, limit // row.nbytes)
    for begin in range(0, first, step):
        # A row that is too large is divided itself.
        for part in [row] if row.nbytes <= limit else windows_of(rest, limit):
            yield Box((begin, *part.offsets), (min(step, first - begin), *part.sizes))


def rounds_of(tensors: Iterable[tuple[str, tuple[int, ...]]], limit: int) -> Iterator[list[Window]]:
    """Yield what an owner gets in each round: windows of its tensors in order, at most ``limit`` bytes of them."""
    found: list[Window] = []
    left = limit
    for key, shape in tensors:
        for box in windows_of(shape, limit):
            if found and box.nbytes > left:
                yield found
                found, left = [], limit
            found.append(Window(key, box))
            left -= box.nbytes
    if found:
        yield found


class Part(NamedTuple):
    """What one rank has of a window."""

    key: str
    box: Box
    window: Box
    chunk: Box
    """The part of the tensor that the rank has."""


def parts_of(windows: Iterable[Window], chunks: Mapping[str, Sequence[Box]]) -> Iterator[Part]:
    """Yield the parts of some windows that one rank has in its chunks, in the order in which it sends them."""
    for key, box in windows:
        for chunk in chunks.get(key, ()):
            found = box.intersection(chunk)
            if found is not None:
                yield Part(key, found, box, chunk)


def choose_owners(
    sizes: Mapping[str, int], held: Mapping[str, Mapping[int, int]], world: int
) -> dict[str, int]:
    """Return the owner of each blob, of ``sizes`` bytes: a rank that has the most bytes of it, as few as possible travel.

    ``held`` is how many bytes of each blob the ranks have. All of the ``world`` ranks get about as much to write.
    """
    loads = [0] * world
    owners = {}
    # Large ones first, which balances best; names decide, so that the result is always the same.
    for blob in sorted(sizes, key=lambda name: (-sizes[name], name)):
        holders = held[blob]
        most = max(holders.values(), default=0)
        candidates = [rank for rank in range(world) if holders.get(rank, 0) == most]
        owner = min(candidates, key=lambda rank: (loads[rank], rank))
        owners[blob] = owner
        loads[owner] += sizes[blob]
    return owners

"""Checks that boxes tile a tensor: that they cover every element of it exactly once."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Protocol, TypeVar

from blobstore.errors import DamagedSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.sources.distributed.pieces import Box

    class _Boxed(Protocol):
        @property
        def box(self) -> Box: ...

    _T = TypeVar("_T", bound=_Boxed)

_STEPS = 64
"""Limit of the work of a check, in numbers of boxes. A grid needs one step per dimension and box."""
_SPARE_STEPS = 10_000


def check_tiling(shape: Sequence[int], pieces: Sequence[_Boxed]) -> None:
    """Check that pieces, none of which is empty, tile a tensor that has elements.

    Raises:
        DamagedSource: a piece leaves the tensor, two overlap, or there is a hole; or the pieces are
            cut so irregularly that the check would take too long.
    """
    for piece in pieces:
        offsets, sizes = piece.box
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise DamagedSource(
                f"a piece has {len(offsets)} offsets and {len(sizes)} sizes for the "
                f"{len(shape)} dimensions of the tensor"
            )
        if any(o + s > size for o, s, size in zip(offsets, sizes, shape, strict=True)):
            raise DamagedSource(
                f"the piece of {_shown(sizes)} at {_shown(offsets)} is not inside the tensor's "
                f"{_shown(shape)}"
            )
    total, elements = sum(math.prod(piece.box.sizes) for piece in pieces), math.prod(shape)
    if total != elements:
        what = "leave a hole" if total < elements else "overlap"
        raise DamagedSource(
            f"its {len(pieces)} pieces {what}: they have {total} elements, the tensor has {elements}"
        )
    # Equal sums do not suffice: two pieces may overlap by as much as the hole has.
    _Check(shape, _STEPS * len(pieces) + _SPARE_STEPS).covers(pieces, 0)


def slabs(pieces: Sequence[_T], dimension: int) -> Iterator[tuple[int, int, list[_T]]]:
    """Cut a dimension wherever a piece begins or ends; yield start, stop and the pieces in between.

    Ranges that no piece covers are yielded too, without pieces.
    """
    by_start = sorted(pieces, key=lambda piece: piece.box.offsets[dimension])
    starts = [piece.box.offsets[dimension] for piece in by_start]
    stops = [piece.box.offsets[dimension] + piece.box.sizes[dimension] for piece in by_start]
    # Sorted and not a set: integers of a file could be chosen such that their hashes collide.
    cuts = sorted(starts + stops)
    active: list[_T] = []
    following = 0
    for start, stop in itertools.pairwise(cuts):
        if start == stop:
            continue
        active = [
            piece
            for piece in active
            if piece.box.offsets[dimension] + piece.box.sizes[dimension] > start
        ]
        while following < len(starts) and starts[following] == start:
            active.append(by_start[following])
            following += 1
        yield start, stop, active


class _Check:
    """A check of one tensor, with the steps that are left."""

    def __init__(self, shape: Sequence[int], steps: int) -> None:
        self._shape = shape
        self._steps = steps

    def covers(self, pieces: Sequence[_Boxed], dimension: int) -> None:
        """Check that pieces cover all dimensions from ``dimension`` on exactly once."""
        if dimension == len(self._shape):
            if len(pieces) > 1:
                raise DamagedSource(f"{len(pieces)} of its pieces overlap")
            return
        reached = 0
        for start, stop, active in slabs(pieces, dimension):
            self._steps -= len(active) + 1
            if self._steps < 0:
                raise DamagedSource("its pieces are cut too irregularly to check that they fit")
            if start != reached or not active:
                raise DamagedSource(
                    f"its pieces leave a hole at index {min(start, reached)} of dimension {dimension}"
                )
            reached = stop
            self.covers(active, dimension + 1)
        if reached != self._shape[dimension]:
            raise DamagedSource(
                f"its pieces leave a hole at index {reached} of dimension {dimension}"
            )


def _shown(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"

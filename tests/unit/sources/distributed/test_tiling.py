"""Boxes tile a tensor if they cover every element of it exactly once."""

from __future__ import annotations

import contextlib
import itertools
from random import Random
from typing import NamedTuple

import pytest

from blobstore.errors import DamagedSource
from blobstore.sources.distributed.pieces import Box
from blobstore.sources.distributed.tiling import check_tiling, slabs


class Boxed(NamedTuple):
    box: Box


def boxed(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Boxed]:
    return [Boxed(Box(*box)) for box in boxes]


def is_tiled(shape: tuple[int, ...], pieces: list[Boxed]) -> bool:
    """Count how often each element is covered."""
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for offsets, sizes in (piece.box for piece in pieces):
        ranges = [range(o, o + s) for o, s in zip(offsets, sizes, strict=True)]
        for index in itertools.product(*ranges):
            counts[index] += 1
    return set(counts.values()) == {1}


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [
        ((), boxed(((), ()))),
        ((3,), boxed(((0,), (3,)))),
        ((4, 4), boxed(((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2)))),
        # A pinwheel: no cut goes through all of the tensor.
        (
            (3, 3),
            boxed(
                ((0, 0), (1, 2)),
                ((0, 2), (2, 1)),
                ((2, 1), (1, 2)),
                ((1, 0), (2, 1)),
                ((1, 1), (1, 1)),
            ),
        ),
    ],
)
def test_accepts_boxes_that_tile(shape: tuple[int, ...], pieces: list[Boxed]) -> None:
    assert is_tiled(shape, pieces)
    check_tiling(shape, pieces)
    check_tiling(shape, pieces[::-1])


@pytest.mark.parametrize(
    ("shape", "pieces", "message"),
    [
        ((4,), [], "0 pieces leave a hole: they have 0 elements, the tensor has 4"),
        ((), boxed(((), ()), ((), ())), "2 pieces overlap: they have 2 elements, the tensor has 1"),
        ((4,), boxed(((0,), (3,))), "leave a hole"),
        ((4,), boxed(((0,), (3,)), ((2,), (2,))), "overlap"),
        ((4,), boxed(((1,), (4,))), r"\[4\] at \[1\] is not inside the tensor's \[4\]"),
        ((4,), boxed(((0, 0), (4, 1))), "2 offsets and 2 sizes for the 1 dimensions"),
        ((4,), boxed(((0,), (2,)), ((0,), (2,))), "hole at index 2 of dimension 0|overlap"),
        ((4,), boxed(((0,), (1,)), ((1,), (1,)), ((1,), (1,)), ((3,), (1,))), "overlap"),
        ((4,), boxed(((1,), (3,)), ((3,), (1,))), "hole at index 0 of dimension 0"),
        ((4,), boxed(((0,), (2,)), ((0,), (1,)), ((3,), (1,))), "hole|overlap"),
        (
            (2, 2),
            boxed(((0, 0), (2, 1)), ((0, 0), (2, 1))),
            "hole at index 1 of dimension 1|overlap",
        ),
    ],
)
def test_refuses_others(shape: tuple[int, ...], pieces: list[Boxed], message: str) -> None:
    with pytest.raises(DamagedSource, match=message):
        check_tiling(shape, pieces)


def cut(box: Box, random: Random) -> list[Box]:
    """Cut a box in two at a random place, and the parts again."""
    dimension = random.randrange(len(box.sizes))
    size = box.sizes[dimension]
    if size == 1 or random.random() < 0.2:
        return [box]
    at = random.randrange(1, size)
    sizes = [list(box.sizes), list(box.sizes)]
    sizes[0][dimension], sizes[1][dimension] = at, size - at
    offsets = list(box.offsets)
    offsets[dimension] += at
    parts = Box(box.offsets, tuple(sizes[0])), Box(tuple(offsets), tuple(sizes[1]))
    return [piece for part in parts for piece in cut(part, random)]


def test_agrees_with_counting() -> None:
    random = Random(3)
    shape = (4, 3, 2)
    seen = []
    for _ in range(300):
        boxes = cut(Box((0, 0, 0), shape), random)
        if random.random() < 0.5:
            # One box that is replaced by another of its size often leaves a hole and an overlap.
            index = random.randrange(len(boxes))
            sizes = boxes[index].sizes
            offsets = tuple(random.randint(0, n - s) for n, s in zip(shape, sizes, strict=True))
            boxes[index] = Box(offsets, sizes)
        pieces = [Boxed(box) for box in boxes]
        random.shuffle(pieces)
        expected = is_tiled(shape, pieces)
        seen.append(expected)
        with contextlib.nullcontext() if expected else pytest.raises(DamagedSource):
            check_tiling(shape, pieces)
    assert 50 < seen.count(False) < 250


def test_gives_up_on_boxes_that_are_cut_too_irregularly() -> None:
    # A staircase: each row ends at another column, and a second box continues it.
    count = 400
    boxes = []
    for row in range(count):
        boxes += [Box((0, row), (row + 1, 1)), Box((row + 1, row), (count - row, 1))]
    pieces = [Boxed(box) for box in boxes]
    with pytest.raises(DamagedSource, match="its pieces are cut too irregularly"):
        check_tiling((count + 1, count), pieces)
    few = [Boxed(box) for box in boxes if box.offsets[1] < 3]
    check_tiling((count + 1, 3), few)


def test_cuts_a_dimension_where_boxes_begin_and_end() -> None:
    left, right = boxed(((0,), (3,)), ((5,), (2,)))
    assert list(slabs([right, left], 0)) == [(0, 3, [left]), (3, 5, []), (5, 7, [right])]

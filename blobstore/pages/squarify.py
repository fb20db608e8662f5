"""Treemap layout: rectangles whose areas are in proportion to sizes, and whose shapes are near squares.

The algorithm is the squarified treemap of Bruls, Huizing and van Wijk (2000).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Rectangle(NamedTuple):
    """A rectangle by its left upper corner, width and height."""

    x: float
    y: float
    width: float
    height: float


def squarify(sizes: Sequence[float], outer: Rectangle) -> list[Rectangle]:
    """Return a rectangle within ``outer`` for each size, in the order of ``sizes``.

    Their areas have the ratios of the sizes, and fill ``outer``. A size of 0 gets an empty rectangle.
    """
    total = sum(sizes)
    found = [Rectangle(outer.x, outer.y, 0.0, 0.0)] * len(sizes)
    if not total or not outer.width or not outer.height:
        return found
    scale = outer.width * outer.height / total
    order = sorted((index for index, size in enumerate(sizes) if size), key=lambda i: -sizes[i])
    areas = [sizes[index] * scale for index in order]
    free, first = outer, 0
    while first < len(areas):
        side = min(free.width, free.height)
        end, row = first + 1, areas[first]
        # A row takes the next area as long as that makes its worst shape better.
        while end < len(areas):
            wider = row + areas[end]
            now = _worst(areas[first], areas[end - 1], row, side)
            if _worst(areas[first], areas[end], wider, side) > now:
                break
            row, end = wider, end + 1
        depth = row / side if side else 0.0
        along = 0.0
        for index in range(first, end):
            length = areas[index] / depth if depth else 0.0
            if free.width >= free.height:
                shape = Rectangle(free.x, free.y + along, depth, length)
            else:
                shape = Rectangle(free.x + along, free.y, length, depth)
            found[order[index]] = shape
            along += length
        if free.width >= free.height:
            free = Rectangle(free.x + depth, free.y, max(free.width - depth, 0.0), free.height)
        else:
            free = Rectangle(free.x, free.y + depth, free.width, max(free.height - depth, 0.0))
        first = end
    return found


def _worst(largest: float, smallest: float, row: float, side: float) -> float:
    """Return the largest ratio of two sides in a row of these areas."""
    if not side or not smallest:
        return float("inf")
    return max(side * side * largest / (row * row), row * row / (side * side * smallest))


def nested(groups: Sequence[Sequence[float]], outer: Rectangle) -> list[list[Rectangle]]:
    """Return a rectangle for each size of each group; those of a group are side by side."""
    areas = squarify([sum(group) for group in groups], outer)
    return [squarify(group, area) for group, area in zip(groups, areas, strict=True)]

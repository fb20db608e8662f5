from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.pages.squarify import Rectangle, nested, squarify

OUTER = Rectangle(10, 20, 600, 400)


@pytest.mark.slow
@given(st.lists(st.integers(0, 10**12), max_size=40))
def test_areas_are_in_proportion_to_sizes_and_stay_inside(sizes: list[int]) -> None:
    found = squarify(sizes, OUTER)

    total = sum(sizes)
    assert len(found) == len(sizes)
    for size, shape in zip(sizes, found, strict=True):
        expected = OUTER.width * OUTER.height * size / total if total else 0
        assert shape.width * shape.height == pytest.approx(expected, rel=1e-3, abs=0.01)
        # A hundredth of a pixel is lost to rounding.
        assert shape.x >= OUTER.x - 0.01
        assert shape.y >= OUTER.y - 0.01
        assert shape.x + shape.width <= OUTER.x + OUTER.width + 0.01
        assert shape.y + shape.height <= OUTER.y + OUTER.height + 0.01


@pytest.mark.slow
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=12))
def test_rectangles_do_not_overlap(sizes: list[int]) -> None:
    found = squarify(sizes, OUTER)

    for number, one in enumerate(found):
        for other in found[:number]:
            width = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            height = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert width < 0.01 or height < 0.01


def test_the_example_of_the_paper_has_its_layout() -> None:
    # Bruls et al., figure 4: 6, 6, 4, 3, 2, 2, 1 in a rectangle of 6 by 4.
    found = squarify([6, 6, 4, 3, 2, 2, 1], Rectangle(0, 0, 6, 4))

    expected = [
        *((0, 0, 3, 2), (0, 2, 3, 2)),
        *((3, 0, 12 / 7, 7 / 3), (3 + 12 / 7, 0, 9 / 7, 7 / 3)),
        *((3, 7 / 3, 1.2, 5 / 3), (4.2, 7 / 3, 1.2, 5 / 3), (5.4, 7 / 3, 0.6, 5 / 3)),
    ]
    assert [pytest.approx(shape) for shape in found] == expected


def test_the_sizes_of_a_group_are_side_by_side() -> None:
    (first, second), (third,) = nested([[1, 1], [2]], Rectangle(0, 0, 2, 1))

    assert first[0] == second[0] == 0
    assert first.height == second.height == 0.5
    assert third == (1, 0, 1, 1)

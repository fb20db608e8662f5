from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from blobstore.integrations.torch_checkpoint.windows import (
    Box,
    Part,
    Window,
    begin_of_rows,
    box_of_bytes,
    choose_owners,
    parts_of,
    rounds_of,
    windows_of,
)

SHAPES = [(1,), (7,), (3, 5), (4, 1, 9), (2, 3, 4, 5), (1, 100), (100, 1)]


@pytest.mark.parametrize("limit", [1, 4, 7, 20, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows_are_the_bytes_of_a_tensor_in_order(shape: tuple[int, ...], limit: int) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    whole = Box((0,) * len(shape), shape)
    found = list(windows_of(shape, limit))
    assert all(box.nbytes <= limit for box in found)
    joined = [array[box.within(whole)].reshape(-1) for box in found]
    assert np.concatenate(joined).tolist() == array.reshape(-1).tolist()
    # As few as rows of this shape allow: each two neighbours would not fit together, or are of two rows.
    assert len(found) <= math.prod(shape)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)], ids=str)
def test_a_tensor_without_bytes_has_no_windows(shape: tuple[int, ...]) -> None:
    assert list(windows_of(shape, 10)) == []


def test_rounds_join_small_tensors_and_divide_large_ones() -> None:
    tensors = [("a", (3,)), ("b", (2, 2)), ("c", (5, 4)), ("d", (1,))]
    rounds = list(rounds_of(tensors, 8))
    assert [[(key, box.nbytes) for key, box in one] for one in rounds] == [
        [("a", 3), ("b", 4)],
        [("c", 8)],
        [("c", 8)],
        [("c", 4), ("d", 1)],
    ]


def test_parts_are_what_a_rank_has_of_windows() -> None:
    one, other = Box((0, 0), (4, 3)), Box((0, 6), (4, 2))
    windows = [Window("a", Box((1, 0), (2, 8))), Window("b", Box((0,), (5,)))]
    assert list(parts_of(windows, {"a": [one, other]})) == [
        Part("a", Box((1, 0), (2, 3)), windows[0].box, one),
        Part("a", Box((1, 6), (2, 2)), windows[0].box, other),
    ]


def test_a_box_counts_bytes_in_its_last_dimension() -> None:
    assert box_of_bytes((1, 2), (3, 4), 8) == Box((1, 16), (3, 32))
    assert box_of_bytes((), (), 4) == Box((0,), (4,))


def test_a_rank_that_has_all_of_a_blob_owns_it() -> None:
    held = {"mine": {2: 10}, "most": {0: 1, 1: 9}, "empty": {}}
    owners = choose_owners({"mine": 10, "most": 10, "empty": 5}, held, 3)
    assert owners == {"mine": 2, "most": 1, "empty": 0}


def test_owners_have_about_as_much_to_write() -> None:
    sizes = {f"t{index:02}": 1 + index % 5 for index in range(40)}
    held = {name: dict.fromkeys(range(4), 1) for name in sizes}
    owners = choose_owners(sizes, held, 4)
    loads = [sum(sizes[name] for name, owner in owners.items() if owner == it) for it in range(4)]
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_parts_whose_bytes_lie_together(shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape)
    whole = Box((0,) * len(shape), shape)
    ranges = [[(a, b - a) for a in range(size) for b in range(a + 1, size + 1)] for size in shape]
    for part in itertools.islice(itertools.product(*ranges), 0, None, 7):
        offsets, sizes = zip(*part, strict=True)
        box = Box(offsets, sizes)
        found = array[box.within(whole)].reshape(-1).tolist()
        is_together = found == list(range(found[0], found[0] + len(found)))
        assert begin_of_rows(box, shape) == (found[0] if is_together else None)

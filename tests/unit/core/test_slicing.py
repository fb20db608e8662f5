from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.slicing import byte_runs, select
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UsageError


def spec_of(*shape: int, dtype: DType = DType.U16) -> TensorSpec:
    return TensorSpec("x", dtype, shape)


def bounds(size: int) -> st.SearchStrategy[Any]:
    end = st.none() | st.integers(-size - 2, size + 2)
    return st.builds(slice, end, end, st.sampled_from([None, 1]))


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    items = [
        draw(bounds(size) | st.integers(-size, size - 1) if size else bounds(size))
        for size in shape[: draw(st.integers(0, len(shape)))]
    ]
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), ...)
        # After the ellipsis the items stand for the last dimensions, whose sizes are others.
        place = items.index(...)
        items[place + 1 :] = [
            draw(bounds(size)) for size in shape[len(shape) - len(items) + place + 1 :]
        ]
    if len(items) == 1 and draw(st.booleans()):
        return shape, items[0]
    return shape, tuple(items)


@pytest.mark.slow
@given(parts())
def test_selects_the_same_elements_as_numpy(example: tuple[tuple[int, ...], Any]) -> None:
    shape, index = example
    array = np.arange(np.prod(shape, dtype=int), dtype=np.uint16).reshape(shape)
    expected = array[index]
    spec = spec_of(*shape)
    part = select(spec, index)
    assert part.shape == expected.shape
    np.testing.assert_array_equal(array[(*part.array_index, ...)], expected)
    where = byte_runs(spec, part)
    data = array.tobytes()
    found = b"".join(data[start : start + where.length] for start in where.offsets)
    assert found == expected.tobytes()


def test_adjacent_bytes_are_one_run() -> None:
    spec = spec_of(8, 4, 6)
    assert byte_runs(spec, select(spec, slice(2, 5))) == (96, 144, ())
    assert byte_runs(spec, select(spec, (3, slice(1, 3)))) == (156, 24, ())
    assert byte_runs(spec, select(spec, ...)) == (0, 384, ())
    assert byte_runs(spec, select(spec, (slice(0, 2), slice(1, 3)))) == (12, 24, ((2, 48),))
    assert byte_runs(spec, select(spec, (..., slice(0, 3)))) == (0, 6, ((8, 48), (4, 12)))


def test_accepts_integers_of_numpy() -> None:
    part = select(spec_of(4, 4), (np.int64(-1), slice(np.int32(1), None)))
    assert part.ranges == ((3, 4), (1, 4))
    assert part.shape == (3,)


@pytest.mark.parametrize(
    ("index", "what"),
    [
        (4, "has 4 elements in a dimension; index 4 is out"),
        (-5, "has 4 elements in a dimension; index -5 is out"),
        ((0, 0, 0), "has 2 dimensions; the index .* has more"),
        ((..., ...), "slices of step 1, got Ellipsis"),
        (slice(0, 4, 2), r"slices of step 1, got slice\(0, 4, 2\)"),
        (slice(None, None, -1), "slices of step 1"),
        (slice("a"), "slices of step 1"),
        (True, "slices of step 1, got True"),
        (None, "slices of step 1, got None"),
        ([0, 1], r"slices of step 1, got \[0, 1\]"),
        (1.0, "slices of step 1"),
        ("\n", r"slices of step 1, got '\\n'"),
    ],
)
def test_rejects_other_indexes(index: Any, what: str) -> None:
    with pytest.raises(UsageError, match=f"tensor 'x'.*{what}"):
        select(spec_of(4, 4), index)


def test_a_scalar_can_be_selected_only_as_a_whole() -> None:
    assert select(spec_of(), ...).shape == select(spec_of(), ()).shape == ()
    assert byte_runs(spec_of(), select(spec_of(), ())) == (0, 2, ())
    with pytest.raises(UsageError, match="has 0 dimensions"):
        select(spec_of(), 0)


def test_rejects_slices_that_start_or_end_within_a_byte() -> None:
    spec = spec_of(4, 6, dtype=DType.F4)
    assert byte_runs(spec, select(spec, (slice(1, 3), slice(2, 4)))) == (4, 1, ((2, 3),))
    assert byte_runs(spec, select(spec, 1)) == (3, 3, ())
    for index in ((..., slice(1, 3)), (..., slice(0, 3)), (0, 0)):
        with pytest.raises(UsageError, match="'x' cannot be sliced there: .* 4 bits"):
            byte_runs(spec, select(spec, index))
    odd = spec_of(2, 3, dtype=DType.F4)
    with pytest.raises(UsageError, match="cannot be sliced there"):
        byte_runs(odd, select(odd, 1))

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blobstore.compression import exponents
from blobstore.errors import ColdDamaged

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def array(*values: int) -> Bytes:
    return np.array(values, np.uint8)


def there_and_back(values: Bytes) -> tuple[Bytes, Bytes] | None:
    packed = exponents.pack(values)
    if packed is None:
        return None
    listed, pairs = (item.copy() for item in packed)
    back = np.empty_like(values)
    exponents.unpack(listed, pairs, back)
    assert back.tolist() == values.tolist()
    return listed, pairs


def test_packs_two_to_a_byte_from_either_half() -> None:
    packed = there_and_back(array(100, 101, 102, 103, 104, 115))
    assert packed is not None
    assert packed[0].tolist() == [100]
    assert packed[1].tolist() == [0 + 16 * 3, 1 + 16 * 4, 2 + 16 * 15]


def test_lists_what_lies_outside_the_window() -> None:
    values = np.full(1024, 120, np.uint8)
    values[[3, 700]] = 121, 90
    packed = there_and_back(values)
    assert packed is not None
    assert packed[0].tolist() == [106, 700 & 255, 700 >> 8, 90]


def test_bridges_long_ways_to_the_next_outside() -> None:
    values = np.full(1 << 18, 120, np.uint8)
    values[200_000] = 3
    packed = there_and_back(values)
    assert packed is not None
    assert 200_000 in np.cumsum(packed[0][1 : 1 + 2 * (len(packed[0]) // 3)].view("<u2"))
    assert len(packed[0]) <= exponents.list_limit(1 << 18)


def test_moves_the_window_where_a_few_are_very_large() -> None:
    values = np.random.default_rng(0).integers(100, 112, 4096).astype(np.uint8)
    values[5] = 250
    packed = there_and_back(values)
    assert packed is not None
    assert len(packed[0]) == 4


def test_refuses_what_fits_no_window() -> None:
    assert exponents.pack(np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)) is None


@pytest.mark.parametrize("value", [0, 7, 255])
def test_packs_the_ends_of_the_range(value: int) -> None:
    assert there_and_back(np.full(64, value, np.uint8)) is not None


@pytest.mark.slow
@given(
    hnp.arrays(
        np.uint8, st.integers(1, 300).map(lambda half: 2 * half), elements=st.integers(98, 116)
    ),
    st.integers(0, 255),
)
def test_everything_that_is_packed_comes_back(values: Bytes, odd: int) -> None:
    values[len(values) // 3] = odd
    packed = there_and_back(values)
    assert packed is None or len(packed[0]) <= exponents.list_limit(len(values))


@pytest.mark.parametrize(
    "listed",
    [array(), array(1, 2), array(1, 2, 3), array(1, 4, 0, 9), array(1, 0, 0, 1, 255, 255, 2)],
)
def test_rejects_a_list_of_no_such_places(listed: Bytes) -> None:
    with pytest.raises(ColdDamaged, match="a list of exponents"):
        exponents.unpack(listed, array(0, 0), np.empty(4, np.uint8))

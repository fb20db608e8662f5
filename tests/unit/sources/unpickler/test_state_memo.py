from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.sources.unpickler.state import Memo


@given(st.lists(st.tuples(st.integers(0, 12) | st.just(2**32 - 1), st.integers())))
def test_is_what_a_dict_is(puts: list[tuple[int, int]]) -> None:
    memo, expected = Memo(), {}
    for slot, value in puts:
        memo[slot] = expected[slot] = value
        assert len(memo) == len(expected)
    for slot in {*range(14), 2**32 - 1}:
        if slot in expected:
            assert memo[slot] == expected[slot]
        else:
            with pytest.raises(KeyError):
                memo[slot]


def test_numbers_that_are_counted_up_are_kept_in_a_list() -> None:
    memo = Memo()
    for slot in range(5):
        memo[slot] = slot
    memo[2] = "anew"
    assert memo.items == [0, 1, "anew", 3, 4]
    assert not memo.others


def test_a_gap_is_filled() -> None:
    memo = Memo()
    for slot in [0, 2, 1, 2]:
        memo[slot] = slot
    assert memo.items == [0, 1, 2]
    assert not memo.others


def test_a_number_with_a_gap_before_it_takes_no_room_for_the_gap() -> None:
    memo = Memo()
    memo[2**32 - 1] = "far"
    assert not memo.items
    assert list(memo.others.values()) == ["far"]

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import UsageError
from blobstore.models.sharding import shard_names

PLACES = {
    "c": ("U8", (10,), 0, 0),
    "a": ("U8", (10,), 0, 10),
    "b": ("F32", (5,), 1, 0),
    "d": ("U8", (0,), 1, 20),
    "e": ("U8", (40,), 2, 0),
}


def test_is_in_the_order_of_the_bytes() -> None:
    assert shard_names(list(PLACES), PLACES, "file", (0, 1)) == ["c", "a", "b", "d", "e"]
    assert shard_names(["e", "b", "a"], PLACES, "file", (0, 1)) == ["a", "b", "e"]


def test_is_in_the_order_of_the_alphabet() -> None:
    assert shard_names(list(PLACES), PLACES, "name", (0, 1)) == ["a", "b", "c", "d", "e"]


def test_ranks_have_about_equal_bytes() -> None:
    assert shard_names(list(PLACES), PLACES, "file", (0, 2)) == ["c", "a", "b"]
    assert shard_names(list(PLACES), PLACES, "file", (1, 2)) == ["d", "e"]
    assert shard_names(list(PLACES), PLACES, "name", (0, 2)) == ["a", "b", "c"]


@given(st.lists(st.integers(0, 100)), st.integers(1, 9))
def test_all_ranks_together_have_every_tensor_once(sizes: list[int], world: int) -> None:
    places = {str(slot): ("U8", (size,), slot, 0) for slot, size in enumerate(sizes)}
    shares = [shard_names(list(places), places, "file", (rank, world)) for rank in range(world)]
    assert [name for share in shares for name in share] == list(places)
    fair = sum(sizes) / world
    for share in shares:
        assert sum(sizes[int(name)] for name in share) <= fair + max(sizes, default=0)


@pytest.mark.parametrize("shard", [(1, 1), (-1, 2), (0, 0), (3, 2)])
def test_a_rank_that_there_is_not_is_a_wrong_argument(shard: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="shard must be a rank and a world"):
        shard_names(list(PLACES), PLACES, "file", shard)


def test_an_unknown_order_is_a_wrong_argument() -> None:
    with pytest.raises(UsageError, match="order must be file or name, got 'size'"):
        shard_names(list(PLACES), PLACES, "size", (0, 1))

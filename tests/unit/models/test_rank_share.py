"""The shares of tensors that ranks read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import UsageError
from blobstore.models.header_index import TensorIndex
from blobstore.models.rank_share import rank_share

SHARDED = TensorIndex(
    {
        "c": ("U8", (10,), 0, 0),
        "a": ("U8", (10,), 0, 10),
        "b": ("F32", (5,), 1, 0),
        "d": ("U8", (0,), 1, 20),
        "e": ("U8", (40,), 2, 0),
    },
    blobs=[],
    quantized={},
    is_cached=False,
)


def test_a_shard_is_in_the_order_of_the_bytes() -> None:
    assert rank_share(SHARDED, "abcde", "file", (0, 1)) == ["c", "a", "b", "d", "e"]
    assert rank_share(SHARDED, "eba", "file", (0, 1)) == ["a", "b", "e"]


def test_a_shard_can_be_sorted_by_name() -> None:
    assert rank_share(SHARDED, "cabde", "name", (0, 1)) == ["a", "b", "c", "d", "e"]


def test_ranks_have_about_equal_bytes() -> None:
    assert rank_share(SHARDED, "abcde", "file", (0, 2)) == ["c", "a", "b"]
    assert rank_share(SHARDED, "abcde", "file", (1, 2)) == ["d", "e"]
    assert rank_share(SHARDED, "abcde", "name", (0, 2)) == ["a", "b", "c"]


@pytest.mark.slow
@given(st.lists(st.integers(0, 100)), st.integers(1, 9))
def test_every_tensor_belongs_to_one_rank(sizes: list[int], world: int) -> None:
    entries = {str(slot): ("U8", (size,), slot, 0) for slot, size in enumerate(sizes)}
    index = TensorIndex(dict(entries), [], {}, is_cached=False)
    shares = [rank_share(index, entries, "file", (rank, world)) for rank in range(world)]
    assert [name for share in shares for name in share] == list(entries)
    fair = sum(sizes) / world
    for share in shares:
        assert sum(sizes[int(name)] for name in share) <= fair + max(sizes, default=0)


@pytest.mark.parametrize("shard", [(1, 1), (-1, 2), (0, 0), (3, 2)])
def test_rejects_a_rank_out_of_range(shard: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="shard must be a rank and a world"):
        rank_share(SHARDED, "abc", "file", shard)


def test_rejects_an_unknown_order() -> None:
    with pytest.raises(UsageError, match="order must be file or name, got 'size'"):
        rank_share(SHARDED, "abc", "size", (0, 1))

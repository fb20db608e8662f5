"""Tensors dealt out among the processes of a server."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.models.index import Place


def shard_names(
    names: Sequence[str], places: Mapping[str, Place], order: str, shard: tuple[int, int]
) -> list[str]:
    """Return the share of one rank of the tensors ``names``, in ``order``.

    The ranks' shares are runs of neighbours in the order of the bytes, of about equal bytes.

    Raises:
        UsageError: an unknown order, or no such rank.
    """
    rank, world = shard
    if not 0 <= rank < world:
        raise UsageError(
            f"shard must be a rank and a world with 0 <= rank < world, got {rank} of {world}"
        )
    if order not in ("file", "name"):
        raise UsageError(f"order must be file or name, got {quote(order)}")
    in_file = sorted(names, key=lambda name: places[name][2:])
    sizes = [_nbytes(places[name]) for name in in_file]
    total = max(sum(sizes), 1)
    # A tensor belongs to the rank in whose part of the bytes its middle lies.
    middles = (end - size / 2 for size, end in zip(sizes, itertools.accumulate(sizes), strict=True))
    mine = [
        name
        for name, middle in zip(in_file, middles, strict=True)
        if min(int(middle * world / total), world - 1) == rank
    ]
    return mine if order == "file" else sorted(mine)


def _nbytes(place: Place) -> int:
    dtype, shape, _, _ = place
    return TensorSpec("", DTYPES[dtype], tuple(shape)).nbytes

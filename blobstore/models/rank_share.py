"""Which tensors of a model one rank of several reads."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blobstore.models.header_index import TensorIndex


def rank_share(
    index: TensorIndex, names: Iterable[str], order: str, shard: tuple[int, int]
) -> list[str]:
    """Return one rank's share of the tensors ``names``.

    The tensors are split into runs of about equal bytes, in the order of the files, so that
    each tensor belongs to one rank.

    Args:
        index: where the tensors lie.
        names: the tensors to distribute.
        order: ``file`` to return the share in the order of the bytes, ``name`` to sort it.
        shard: the rank, and the number of ranks.

    Raises:
        UsageError: an unknown order, or a rank out of range.
    """
    rank, world = shard
    if not 0 <= rank < world:
        raise UsageError(
            f"shard must be a rank and a world with 0 <= rank < world, got {rank} of {world}"
        )
    if order not in ("file", "name"):
        raise UsageError(f"order must be file or name, got {quote(order)}")
    in_file = sorted(names, key=lambda name: index.entries[name][2:])
    sizes = [index.nbytes(name) for name in in_file]
    total = max(sum(sizes), 1)
    # A tensor belongs to the rank whose part of the bytes contains the tensor's middle.
    share = []
    for name, size, end in zip(in_file, sizes, itertools.accumulate(sizes), strict=True):
        if min(int((end - size / 2) * world / total), world - 1) == rank:
            share.append(name)
    return share if order == "file" else sorted(share)

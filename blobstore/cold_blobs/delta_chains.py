"""Chooses bases that may have bases themselves, where a read may need several: in archives and remotes.

The steps of a training run differ most from the first one, and least from their neighbours. So each step
is a delta against the one next to it. A store has no such chains: there, a read needs one base.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from blobstore.compression.delta import MAX_WRITTEN_CHAIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Final

    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Reference

    Fits = Mapping[Reference, Mapping[Reference, "Fit"]]
    """How well others serve as the bases of models."""

_PER_LINK: Final = 1 / 8
"""The share by which a delta counts as larger for each delta that its base needs."""


class Fit(NamedTuple):
    """How well a model serves as the base of another."""

    saved: float
    """About the bytes that it saves."""
    left: float
    """About the bytes of the delta."""


def choose_chains(fits: Fits) -> dict[Reference, Reference]:
    """Return a base for each model, except for those that chains begin with.

    As in Prim's algorithm, the model whose delta is the smallest comes next, each time. A chain begins with
    the model that saves most as the base of all others.

    Args:
        fits: the possible bases of each model.
    """
    users: dict[Reference, list[Reference]] = defaultdict(list)
    totals = dict.fromkeys(fits, 0.0)
    for one, others in fits.items():
        for other, fit in others.items():
            users[other].append(one)
            totals[other] = totals.get(other, 0.0) + fit.saved
    bases: dict[Reference, Reference] = {}
    lengths: dict[Reference, int] = {}
    # Models that need no base come first: they are cold already.
    for first in sorted(totals, key=lambda one: (one in fits, -totals[one], one)):
        if first not in lengths:
            _grow(first, fits, users, bases, lengths)
    return bases


def _grow(
    first: Reference,
    fits: Fits,
    users: Mapping[Reference, Sequence[Reference]],
    bases: dict[Reference, Reference],
    lengths: dict[Reference, int],
) -> None:
    """Add the chains that begin with a model, and the number of deltas that each of their models needs."""
    lengths[first], last = 0, first
    nearest: list[tuple[float, Reference, Reference]] = []
    while True:
        for one in users.get(last, ()) if lengths[last] < MAX_WRITTEN_CHAIN else ():
            left = fits[one][last].left * (1 + lengths[last] * _PER_LINK)
            heapq.heappush(nearest, (left, one, last))
        while nearest and nearest[0][1] in lengths:
            heapq.heappop(nearest)
        if not nearest:
            return
        _, last, base = heapq.heappop(nearest)
        bases[last], lengths[last] = base, lengths[base] + 1


class Chains:
    """The bases of blobs, which make no cycles and no chains that are too long."""

    def __init__(self, bases: Mapping[Digest, Digest]) -> None:
        """Take the bases that some blobs have; none of these has a base."""
        self._bases = dict(bases)
        self._heights = dict.fromkeys(bases.values(), 1)
        """The longest chain of deltas that a blob is the base of."""

    def add(self, blob: Digest, base: Digest) -> bool:
        """Give a blob without a base one; return False if it cannot have that."""
        chain = [base]
        while chain[-1] in self._bases:
            chain.append(self._bases[chain[-1]])
        height = self._heights.get(blob, 0)
        if blob in chain or height + len(chain) > MAX_WRITTEN_CHAIN:
            return False
        self._bases[blob] = base
        for length, one in enumerate(chain, start=height + 1):
            self._heights[one] = max(self._heights.get(one, 0), length)
        return True

"""Which models of a cache go first: those that were not used for the longest time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping


class Cached(Protocol):
    """A model of a cache, or other files there."""

    @property
    def used(self) -> float:
        """When it was last used, in seconds since the epoch."""
        ...

    @property
    def blobs(self) -> Mapping[str, int]:
        """Bytes of its blobs by their hex digests."""
        ...

    @property
    def other_size(self) -> int:
        """Bytes of its files other than blobs of the store."""
        ...


Model = TypeVar("Model", bound=Cached)


def choose_evicted(
    models: Iterable[Model],
    own: Collection[str],
    most: int,
    freed: Callable[[Model, set[str]], set[str] | None],
) -> tuple[list[tuple[Model, set[str]]], int]:
    """Choose the models to remove so that at most ``most`` bytes are left.

    Args:
        models: the models of the cache.
        own: hex digests of blobs that other models have. They stay, and do not count.
        most: the limit.
        freed: returns which of the blobs that only this model has would go with it; None if the model stays.

    Returns:
        the models, each with the blobs that go with it, and the bytes in excess even then.
    """
    ordered = sorted(models, key=lambda one: one.used)
    users = Counter(blob for one in ordered for blob in one.blobs)
    sizes = {blob: size for one in ordered for blob, size in one.blobs.items() if blob not in own}
    total = sum(sizes.values()) + sum(one.other_size for one in ordered)
    chosen = []
    for one in ordered:
        if total <= most:
            break
        going = freed(one, {blob for blob in one.blobs if users[blob] == 1 and blob in sizes})
        if going is not None:
            chosen.append((one, going))
            # A blob that several models share goes with the last of them.
            users.subtract(one.blobs.keys())
            total -= sum(map(sizes.__getitem__, going)) + one.other_size
    return chosen, max(total - most, 0)

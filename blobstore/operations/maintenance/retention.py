"""Rules of retention, which select the models to remove: all but the last few of each name, or old ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from blobstore.errors import UsageError
from blobstore.store.catalog import read_entries
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Reference


def expired_models(
    references: Iterable[str | Reference],
    *,
    keep_last: int | None = None,
    older_than: float | None = None,
    store: StoreLike = None,
) -> list[Reference]:
    """Return which of some models may be removed, the oldest first. Nothing is removed.

    Models are grouped by name without the tag. Tags of one manifest count as one model, as old as the newest
    of them. A manifest that cannot be read is kept.

    Args:
        references: the models to choose from.
        keep_last: keep the newest so many models of each name.
        older_than: keep models whose names were written less than so many seconds ago.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.

    Raises:
        ModelNotFound: the store has no such model.
        StoreError: the store cannot be read.
        UsageError: neither rule is given, or ``keep_last`` is below 0.
    """
    if keep_last is None and older_than is None:
        raise UsageError("give keep_last or older_than")
    if keep_last is not None and keep_last < 0:
        raise UsageError(f"keep_last must be at least 0, got {keep_last}")
    groups: dict[tuple[str, ...], dict[Digest, list[tuple[float, Reference]]]] = {}
    for entry in read_entries(LocalStore.of(store), references):
        if entry.digest is not None:
            tags = groups.setdefault(entry.reference.parts[:-1], {})
            tags.setdefault(entry.digest, []).append((entry.modified, entry.reference))
    limit = time.time() - (older_than or 0)
    expired: list[tuple[float, Reference]] = []
    for tags in groups.values():
        models = sorted(tags.values(), key=max, reverse=True)
        for names in models[keep_last or 0 :]:
            if older_than is None or max(names)[0] < limit:
                expired += names
    return [reference for _, reference in sorted(expired)]

"""Rules of retention, which select the models to remove: all but the last few of each name, or old ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from blobstore.errors import UsageError
from blobstore.store.catalog import read_catalog, read_entries
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

    Models are grouped by name without the tag. If several tags of a name have one manifest, the oldest chosen one
    is the model's own, and the others are aliases, such as ``best``: they do not count, and neither they nor their
    models are removed. A manifest that cannot be read is kept.

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
    store = LocalStore.of(store)
    chosen = {entry.reference for entry in read_entries(store, references)}
    # Aliases protect a model whether they are among the chosen ones or not.
    tags: dict[tuple[tuple[str, ...], Digest], list[tuple[float, Reference]]] = {}
    for entry in read_catalog(store).of_repositories(chosen):
        if entry.digest is not None:
            named = entry.modified, entry.reference
            tags.setdefault((entry.reference.parts[:-1], entry.digest), []).append(named)
    groups: dict[tuple[str, ...], list[tuple[float, Reference, bool]]] = {}
    for (repository, _), names in tags.items():
        own = min((one for one in names if one[1] in chosen), default=None)
        if own is not None:
            groups.setdefault(repository, []).append((*own, len(names) > 1))
    limit = time.time() - (older_than or 0)
    expired: list[tuple[float, Reference]] = []
    for models in groups.values():
        for modified, reference, has_alias in sorted(models, reverse=True)[keep_last or 0 :]:
            if not has_alias and (older_than is None or modified < limit):
                expired.append((modified, reference))
    return [reference for _, reference in sorted(expired)]

"""The models that a page describes: all of them, or the largest of a store that has very many."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from blobstore.operations.describe.disk_usage import read_disk, usage_of
from blobstore.pages.text import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.operations.describe.disk_usage import ModelUsage, StoreDisk, StoreUsage
    from blobstore.store.local import LocalStore

MAX_MODELS: Final = 1000
_MAX_REPOSITORIES: Final = 200


def read_largest(
    store: LocalStore, references: Collection[Reference] = ()
) -> tuple[StoreDisk, StoreUsage, dict[str, Any]]:
    """Read a store, and return what a page describes of it: those models that were asked for, damaged ones, the largest.

    The last value counts the other models, and has the bytes of each repository of these. Raises StoreError.
    """
    disk = read_disk(store)
    usage = usage_of(disk)
    asked = set(references)

    def order(model: ModelUsage) -> tuple[bool, bool, int]:
        is_intact = model.error is None and not model.faults
        return model.reference not in asked, is_intact, -model.size

    largest = sorted(usage.models, key=order)[: max(MAX_MODELS, len(asked))]
    names = {model.reference for model in largest}
    others = [model for model in usage.models if model.reference not in names]
    return (
        replace(disk, entries={name: one for name, one in disk.entries.items() if name in names}),
        replace(usage, models=tuple(one for one in usage.models if one.reference in names)),
        {"models": len(others), "repositories": _by_repository(others)},
    )


def _by_repository(models: Sequence[ModelUsage]) -> list[list[Any]]:
    """Return names, counts of models, their bytes, and the bytes that a removal of one of them frees, most models first."""
    found: dict[str, list[ModelUsage]] = defaultdict(list)
    for model in models:
        found[str(model.reference).rpartition(":")[0]].append(model)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    first, last = ordered[:_MAX_REPOSITORIES], ordered[_MAX_REPOSITORIES:]
    if last:
        rest = [model for _, others in last for model in others]
        first.append((f"and {len(last):,} more", rest))
    return [
        [shown(name), len(some), sum(one.size for one in some), sum(one.unique for one in some)]
        for name, some in first
    ]

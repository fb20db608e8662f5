"""Rules of retention, which select the models to remove: all but the last few of each name, or old ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from blobstore.errors import UsageError
from blobstore.manifests.reference import is_alias_of, own_first
from blobstore.manifests.step_record import is_state, step_of
from blobstore.store.catalog import read_catalog, read_entries
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

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

    Models are grouped by name without the tag. If several tags of a name have one manifest, the first chosen one
    with a number, or else the oldest, is the model's own, and those that differ from it in more than numbers are aliases, such as ``best``: they do
    not count, and neither they nor their models are removed. A training step and its state, ``run:step-1`` and ``run:step-1.state``, count as one model
    that is as new as the newer one, and an alias protects both. A manifest that cannot be read is kept.

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
    groups: dict[tuple[str, ...], list[list[_Named]]] = {}
    steps, protected = _steps(store, chosen)
    for step, names in steps.items():
        groups.setdefault(step.parts[:-1], []).append(sorted(names, reverse=True))
    limit = time.time() - (older_than or 0)
    expired: list[_Named] = []
    for group in groups.values():
        for names in sorted(group, reverse=True)[keep_last or 0 :]:
            is_old = older_than is None or names[0].modified < limit
            if is_old and step_of(names[0].reference) not in protected:
                expired += names
    return [one.reference for one in sorted(expired)]


class _Named(NamedTuple):
    """A name, and when it was given."""

    modified: float
    reference: Reference


def _steps(
    store: LocalStore, chosen: Collection[Reference]
) -> tuple[dict[Reference, list[_Named]], set[Reference]]:
    """Return the chosen names of each step, without aliases, and the steps that an alias protects."""
    named: dict[tuple[tuple[str, ...], Digest], list[_Named]] = {}
    # Aliases protect a model whether they are among the chosen ones or not.
    for entry in read_catalog(store).of_repositories(chosen):
        if entry.digest is not None:
            found = _Named(entry.modified, entry.reference)
            named.setdefault((entry.reference.parts[:-1], entry.digest), []).append(found)

    def own_name(names: list[_Named]) -> Reference:
        wanted = [one for one in names if one.reference in chosen] or names
        return min(own_first(one.reference, one.modified) for one in wanted)[-1]

    first = set(map(own_name, named.values()))
    # A name with a state of its own is a step, even if another step has the same weights.
    with_state = {step_of(reference) for reference in first if is_state(reference)}
    steps: dict[Reference, list[_Named]] = {}
    protected: set[Reference] = set()
    for names in named.values():
        model = own_name(names)
        own = [one for one in names if one.reference in with_state] or [
            one for one in names if not is_alias_of(one.reference, model)
        ]
        for one in own:
            if one.reference in chosen:
                steps.setdefault(step_of(one.reference), []).append(one)
            if len(own) < len(names):
                protected.add(step_of(one.reference))
    return steps, protected

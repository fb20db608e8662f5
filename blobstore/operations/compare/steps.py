"""The steps of a run, each of which is compared with the one before or with one base."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.errors import UsageError
from blobstore.manifests.reference import by_numbers, is_alias_of, own_first
from blobstore.manifests.step_record import is_state
from blobstore.store.catalog import read_entries

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


def steps_of(store: LocalStore, references: Iterable[Reference]) -> list[Reference]:
    """Return models in the order of the numbers in their names; of a model, not its aliases, and not its state.

    If there are states alone, these are returned.

    Raises:
        ModelNotFound: the store has no such model.
        UsageError: there are fewer than two models, however many names they have.
    """
    names = list(references)
    models = [name for name in names if not is_state(name)]
    entries = sorted(
        read_entries(store, models or names), key=lambda one: own_first(one.reference, one.modified)
    )
    own: dict[object, Reference] = {}
    steps = [
        entry.reference
        for entry in entries  # using a manifest that cannot be read is the error
        if not is_alias_of(
            entry.reference, own.setdefault(entry.digest or entry.reference, entry.reference)
        )
    ]
    if len(own) < 2:
        raise UsageError(
            "there are fewer than two different models to compare",
            advice="name two steps of a run or more",
        )
    return sorted(steps, key=by_numbers)

"""The operations ``cp``, ``mv`` and ``rm``: copy, rename and remove model names. No blob is copied.

All changes are made under the store's exclusive lock, which is held only while the sizes of a model's
blobs are checked. So a name cannot be taken between the check and the change, and blobs cannot be
collected before the new name references them; no lease is needed. A new name is durable before the old
one is removed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

from blobstore.core import interrupts
from blobstore.core.arguments import seconds_of
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import (
    InvalidManifest,
    InvalidReference,
    ModelNotFound,
    NameConflict,
    UsageError,
)
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference, is_alias_of, own_first
from blobstore.manifests.step_record import is_state_of, state_of
from blobstore.operations.maintenance.lost_manifests import GRACE
from blobstore.operations.maintenance.retention import expired_models
from blobstore.store.catalog import lost_entry, read_catalog, read_entries
from blobstore.store.holdings import Holdings
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models
from blobstore.store.names import ABSENT, NewModel
from blobstore.store.partial import FULL

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from blobstore.manifests.reference import Names
    from blobstore.store.catalog import CatalogEntry

_NOT_KEPT: Final = "the disk is full, so 'restore' cannot bring back what is removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A model that was given a name."""

    source: Reference
    target: Reference
    digest: Digest
    """The digest of the manifest's bytes."""
    replaced: bool
    """Whether the name belonged to another model before."""
    is_new: bool = True
    """Whether the name did not have this manifest already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedModels:
    """Names that were removed, or would be, and the blobs that this leaves behind."""

    names: tuple[CatalogEntry, ...]
    blobs: int
    """Blobs in the store that no other name needs."""
    size: int
    """Bytes of these blobs, which a garbage collection frees."""
    removable: float
    """When the youngest of these is old enough for that by default, in seconds since the epoch."""
    is_last: bool
    """Whether no other name is left, so that a garbage collection needs ``force``."""
    bases: int
    """Blobs that no other name references, but that are bases of other names' blobs: they stay."""
    bases_size: int
    coded: tuple[Reference, ...]
    """The names whose blobs are delta-encoded against these bases."""
    unreadable: tuple[CatalogEntry, ...]
    """Remaining names whose manifest cannot be read; they prevent a garbage collection."""
    kept: int = 0
    """Names that ``keep_last`` or ``older_than`` kept."""
    notices: tuple[str, ...] = ()


def copy_model(
    source: str | Reference,
    target: str | Reference,
    *,
    store: StoreLike = None,
    force: bool = False,
) -> Named:
    """Give a model a second name, durably. The manifest is copied byte for byte.

    A tag is an alias if its model has a tag of its own of the same name, as ``run:500`` is that of ``run:best``. An
    alias moves to another model of that name without ``force``: no model loses its own name. Within a name, the
    state of a step goes with it: a copy of ``run:500`` and ``run:500.state`` is ``run:best`` and ``run:best.state``.

    Args:
        source: the model's name.
        target: the name to give it.
        store: the store or its path; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        force: take the name from another model that has it.

    Returns:
        the name, the digest of the model, and whether another model had the name.

    Raises:
        ModelNotFound: the store has no such model.
        InvalidManifest, BlobMissing, BlobDamaged: the model is not intact, judged by sizes.
        NameTaken: the name belongs to another model.
        NameConflict: another name of the store differs only in case.
        StoreBusy: the store's lock could not be acquired in time.
        StoreError: the store cannot be written.
        UsageError: both are the same name.
    """
    return _rename(source, target, LocalStore.of(store), force=force, keeps_source=True)


def rename_model(
    source: str | Reference,
    target: str | Reference,
    *,
    store: StoreLike = None,
    force: bool = False,
) -> Named:
    """Rename a model. If the process is killed in between, both names remain.

    Args:
        source: the name that is given up.
        target: the new name.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        force: take the name from another model.

    Returns:
        the name, the digest of the model, and whether another model had the name.

    Raises:
        BlobstoreError: as :func:`copy_model`.
    """
    return _rename(source, target, LocalStore.of(store), force=force, keeps_source=False)


def remove_models(
    references: Names,
    *,
    keep_last: int | None = None,
    older_than: float | str | None = None,
    store: StoreLike = None,
    dry_run: bool = False,
) -> RemovedModels:
    """Remove names durably: all of them, or none. Blobs stay until they are collected.

    Until then, names can be restored. A name whose manifest cannot be read is removed for good.
    With ``keep_last`` or ``older_than``, only the models that :func:`expired_models` returns are removed.

    Args:
        references: the names, or globs such as ``run:*``.
        keep_last: keep the newest so many tags of each name.
        older_than: keep models that were written less than so many seconds ago, or a text such as ``30d``.
        store: the store or its path; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        dry_run: remove nothing; report what would be left behind.

    Returns:
        the names, and the bytes that ``gc`` can free.

    Raises:
        ModelNotFound: a name does not exist; nothing is removed.
        InvalidManifest: a manifest is a folder; nothing is removed.
        StoreBusy: the store's lock could not be acquired in time.
        StoreError: the store cannot be read or written.
        UsageError: ``keep_last`` is negative, or ``older_than`` is no time.
    """
    store = LocalStore.of(store)
    names = chosen = named_models(store, references)
    if keep_last is not None or older_than is not None:
        age = None if older_than is None else seconds_of(older_than, "older_than")
        names = tuple(expired_models(chosen, keep_last=keep_last, older_than=age, store=store))
    entries = _removable(store, names)
    left = replace(_left_behind(store, entries), kept=len(chosen) - len(names))
    unreadable = {one.reference for one in entries if one.error is not None}
    if entries and not dry_run:
        with store.writing(), store.exclusive_lock():
            _removable(store, names)  # others may have removed one since
            try:
                store.names.keep_former(
                    name for name in names if store.is_gone(name) or name not in unreadable
                )
            except OSError as error:
                # A full disk must not keep names from being removed, and so free space.
                if error.errno not in FULL:
                    raise
                left = replace(left, notices=(_NOT_KEPT,))
            # All names or none: a request to stop waits until the last one is removed.
            with interrupts.deferred():
                store.names.remove(*(entry.reference for entry in entries))
    return left


def _rename(
    source: str | Reference,
    target: str | Reference,
    store: LocalStore,
    *,
    force: bool,
    keeps_source: bool,
) -> Named:
    source, target = Reference.of(source), Reference.of(target)
    if source == target:
        raise UsageError(f"{quote(source)} has that name already")
    reader = LocalStore.to_read(store) if keeps_source else store
    reader.read_manifest(source)  # fails before a lock is created in a store that does not exist
    with store.writing(), store.exclusive_lock():
        data, manifest = _read(reader, source)
        # On a file system that ignores case, removing the old name would remove the new one.
        if not keeps_source and source.full.casefold() == target.full.casefold():
            raise NameConflict(
                f"{quote(source)} and {quote(target)} differ only in case; rename the model to a "
                "third name first"
            )
        digest, before = Digest.of(data), store.names.version(target)
        is_alias = (
            keeps_source and isinstance(before, Digest) and _is_alias(store, source, target, before)
        )
        force = force or is_alias
        state = _state(store, source, manifest, target, force=force)
        update = store.names.claim(target, digest, force=force)
        is_new = before != digest or any(
            store.names.version(one.update.reference) != Digest.of(one.data) for one in state
        )
        with interrupts.deferred():
            if not state and before not in (ABSENT, digest):
                drop_state(store, target, manifest)
            store.names.place(*state, NewModel(update, data, manifest.blobs))
            # The new names are durable by now, so a crash leaves at least one of each two.
            if not keeps_source:
                store.names.remove(*(state_of(source) for _ in state), source)
    return Named(
        source=source,
        target=target,
        digest=digest,
        replaced=before not in (ABSENT, digest),
        is_new=is_new,
    )


def _read(store: LocalStore, reference: Reference) -> tuple[bytes, Manifest]:
    data = store.read_manifest(reference)
    try:
        return data, Manifest.from_bytes(data)
    except InvalidManifest as error:
        raise error.at(quote(store.manifest_path(reference))) from None


def _state(
    store: LocalStore, source: Reference, manifest: Manifest, target: Reference, *, force: bool
) -> list[NewModel]:
    """Return the state of a step with the name that it gets, if it stays in its run: it goes where the model goes."""
    if target.parts[:-1] != source.parts[:-1]:
        return []
    with contextlib.suppress(InvalidReference, ModelNotFound):  # the name would be too long
        data, state = _read(store, state_of(source))
        if is_state_of(state, manifest):
            update = store.names.claim(state_of(target), Digest.of(data), force=force)
            return [NewModel(update, data, state.blobs)]
    return []


def drop_state(store: LocalStore, step: Reference, model: Manifest) -> None:
    """Remove the state of the model that a step had, if it can get another one: they could be equal."""
    for blob in model.blobs:
        store.check_size(blob.digest, blob.size)
    with contextlib.suppress(InvalidReference, InvalidManifest, ModelNotFound):
        store.read_manifest(state_of(step))
        store.names.keep_former([state_of(step)])
        store.names.remove(state_of(step))


def _is_alias(store: LocalStore, source: Reference, target: Reference, digest: Digest) -> bool:
    """Return whether the target is a tag of the source's name, and its model has a tag of its own there."""
    if target.parts[:-1] != source.parts[:-1]:
        return False
    entries = read_entries(store, store.tags(source))
    tags = [own_first(one.reference, one.modified) for one in entries if one.digest == digest]
    return is_alias_of(target, min(tags)[-1] if tags else target)


def _removable(store: LocalStore, references: Sequence[Reference]) -> list[CatalogEntry]:
    lost = dict.fromkeys(filter(store.is_gone, references))
    entries = read_entries(store, (name for name in references if name not in lost))
    entries += [lost_entry(name) for name in lost]
    for entry in entries:
        if entry.error is not None and store.manifest_path(entry.reference).is_dir():
            raise entry.error
    return entries


def _left_behind(store: LocalStore, entries: Sequence[CatalogEntry]) -> RemovedModels:
    """Return the blobs that would be garbage without these names."""
    gone = {entry.reference for entry in entries}
    catalog = read_catalog(store)
    holdings = Holdings(store, catalog)
    freed = set(holdings.freed(gone))
    known = [one.known for name in gone if (one := catalog.get(name)) and one.known]
    # Blobs of these names that stay only because others are deltas against them.
    own = Counter(chain.from_iterable(item.blobs for item in known))
    uses = catalog.references.uses(one.row for one in catalog.known()) if own else ()
    bases = {n for n, count in own.items() if uses[n] == count}.difference(freed)
    held: dict[Reference, Collection[int]] = {}
    if bases:  # but not what only the cache of remote models keeps
        others = (other for other in catalog if other.reference not in gone)
        held = {other.reference: holdings.by(other.known) for other in others}
        bases.intersection_update(chain.from_iterable(held.values()))
    files = [found for number in freed if (found := holdings.files(number))]
    sizes = [sum(item.st_size for item in holdings.files(number)) for number in bases]
    return RemovedModels(
        names=tuple(entries),
        blobs=len(files),
        size=sum(item.st_size for found in files for item in found),
        removable=max((item.st_mtime + GRACE for found in files for item in found), default=0),
        is_last=not any(other.reference not in gone for other in catalog),
        bases=sum(size > 0 for size in sizes),
        bases_size=sum(sizes),
        coded=tuple(name for name, numbers in held.items() if not bases.isdisjoint(numbers)),
        unreadable=tuple(one for one in catalog.unreadable() if one.reference not in gone),
    )

"""Workflow: names given, changed and taken away. No byte of a blob moves.

Whoever copies or renames looks whether the new name is free and takes it in one step, and whoever takes
a name away must not do so while somebody counts on it. So all of it happens with the store's lock alone,
which takes as long as looking at a model's blobs: what has been found then cannot be collected before
the new name holds it, and no lease is needed. A new name is durable before the old one goes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import (
    InvalidManifest,
    NameConflict,
    NameTaken,
    UsageError,
)
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.store.catalog import read_catalog, read_entries
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from blobstore.store.catalog import CatalogEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A model that got a name."""

    source: Reference
    target: Reference
    digest: Digest
    """Of the manifest's bytes."""
    replaced: bool
    """Whether the name was another model's before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedModels:
    """Names that were taken away, or would be, and what that leaves behind."""

    names: tuple[CatalogEntry, ...]
    blobs: int
    """Blobs in the store that no other name needs."""
    size: int
    """Bytes of these: what a collection gives back."""
    bases: int
    """Blobs that no other name needs, but cold blobs of other names are coded by them: they stay."""
    bases_size: int
    coded: tuple[Reference, ...]
    """Those other names."""
    unreadable: tuple[CatalogEntry, ...]
    """Names that are left and whose manifest cannot be read; they keep garbage from being collected."""


def copy_model(
    source: str | Reference,
    target: str | Reference,
    *,
    store: LocalStore | None = None,
    force: bool = False,
) -> Named:
    """Give a model a second name, durably. The manifest is copied byte for byte.

    Args:
        source: the model's name.
        target: the name to give it.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        force: take the name from another model that has it.

    Raises:
        ModelNotFound: the store has no such model.
        InvalidManifest, BlobMissing, BlobDamaged: the model is not whole, judged by sizes.
        NameTaken: another model has the name.
        NameConflict: a name of the store differs from it in case only.
        StoreBusy: others have kept the store's lock all the time.
        StoreError: the store cannot be written.
        UsageError: both are the same name.
    """
    return _rename(source, target, store or LocalStore(), force=force, keeps_source=True)


def rename_model(
    source: str | Reference,
    target: str | Reference,
    *,
    store: LocalStore | None = None,
    force: bool = False,
) -> Named:
    """Give a model another name. Args and raises as :func:`copy_model`.

    A process that is killed in between leaves both names.
    """
    return _rename(source, target, store or LocalStore(), force=force, keeps_source=False)


def remove_models(
    references: Sequence[str | Reference],
    *,
    store: LocalStore | None = None,
    dry_run: bool = False,
) -> RemovedModels:
    """Take names away, durably; blobs stay until they are collected. All of the names, or none.

    A name goes also if its manifest cannot be read.

    Args:
        references: the names.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        dry_run: remove nothing, and tell what would be left behind.

    Raises:
        ModelNotFound: the store has no such name; nothing is removed.
        InvalidManifest: a folder is in the place of a manifest; nothing is removed.
        StoreBusy: others have kept the store's lock all the time.
        StoreError: the store cannot be read or written.
    """
    store = store or LocalStore()
    names = [_parsed(reference) for reference in references]
    entries = _removable(store, names)
    left = _left_behind(store, entries)
    if entries and not dry_run:
        with store.writing(), store.exclusive_lock():
            _removable(store, names)  # others may have removed one since
            for entry in entries:
                store.remove(entry.reference)
    return left


def _parsed(reference: str | Reference) -> Reference:
    return Reference.parse(reference) if isinstance(reference, str) else reference


# Giving


def _rename(
    source: str | Reference,
    target: str | Reference,
    store: LocalStore,
    *,
    force: bool,
    keeps_source: bool,
) -> Named:
    source, target = _parsed(source), _parsed(target)
    if source == target:
        raise UsageError(f"{quote(source)} and {quote(target)} are the same name")
    store.read_manifest(source)  # before a lock is made where nothing is
    with store.writing(), store.exclusive_lock():
        data = store.read_manifest(source)
        manifest = _checked(store, source, data)
        _check_case(source, target, keeps_source=keeps_source)
        is_taken = store.is_taken(target, data)
        if is_taken and not force:
            raise NameTaken(f"another model has the name {quote(target)}; replace it with --force")
        # Also where the name has these bytes already, for who wrote them may not have synced them.
        store.place(target, data, manifest.blobs)
        if not keeps_source:
            store.remove(source)
    return Named(source=source, target=target, digest=Digest.of(data), replaced=is_taken)


def _checked(store: LocalStore, reference: Reference, data: bytes) -> Manifest:
    try:
        return Manifest.from_bytes(data)
    except InvalidManifest as error:
        raise error.at(quote(store.manifest_path(reference))) from None


def _check_case(source: Reference, target: Reference, *, keeps_source: bool) -> None:
    if not keeps_source and source.full.casefold() == target.full.casefold():
        raise NameConflict(
            f"{quote(source)} and {quote(target)} differ only in case; give the model a third "
            "name first, and then the second"
        )


# Taking away


def _removable(store: LocalStore, references: Iterable[Reference]) -> list[CatalogEntry]:
    entries = read_entries(store, references)
    for entry in entries:
        if entry.error is not None and store.manifest_path(entry.reference).is_dir():
            raise entry.error
    return entries


def _left_behind(store: LocalStore, entries: Sequence[CatalogEntry]) -> RemovedModels:
    """Return what would be garbage without some names."""
    garbage = {digest for entry in entries for digest in entry.blobs}
    gone = {entry.reference for entry in entries}
    others = [other for other in read_catalog(store) if other.reference not in gone]
    for other in others:
        garbage -= other.blobs.keys()
    cold = store.cold_files()
    # What is cold and left is coded by them.
    left = {digest: status for digest, status in cold.items() if digest not in garbage}
    coded = store.cold_bases(left) if garbage else {}
    coded = {digest: base for digest, base in coded.items() if base in garbage}
    bases = set(coded.values())
    sizes = [size for digest in garbage - bases if (size := _size(store, digest)) is not None]
    kept = [size for digest in bases if (size := _size(store, digest)) is not None]
    return RemovedModels(
        names=tuple(entries),
        blobs=len(sizes),
        size=sum(sizes),
        bases=len(kept),
        bases_size=sum(kept),
        coded=tuple(
            other.reference for other in others if not coded.keys().isdisjoint(other.blobs)
        ),
        unreadable=tuple(other for other in others if other.error is not None),
    )


def _size(store: LocalStore, digest: Digest) -> int | None:
    """Return the bytes that a blob takes, hot and cold; None if it is missing."""
    sizes = []
    for path in (store.blob_path(digest), store.cold_path(digest)):
        with contextlib.suppress(OSError):
            sizes.append(os.lstat(path).st_size)
    return sum(sizes) if sizes else None

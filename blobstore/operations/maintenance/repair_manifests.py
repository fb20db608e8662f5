"""Restores damaged and missing manifests: from their second links, another store, or a remote with the same models.

A damaged manifest is replaced only by one that its config confirms. That is of the same model if the damaged
manifest still contains one of its two halves: the digest of the config, or the list of layers, whose digest
the config holds. A missing manifest is that of the same name. Second links are asked first, which need no other place.
"""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, InvalidManifest, NameConflict
from blobstore.manifests.layers_digest import check_layers, listed
from blobstore.manifests.model import Manifest
from blobstore.operations.sign.require_trust import read_policy
from blobstore.remotes.signatures import SelectedSignatures
from blobstore.store.names import NameUpdate, NewModel
from blobstore.store.quarantine import quarantine_copy

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence
    from pathlib import Path

    from blobstore.manifests.reference import Reference
    from blobstore.operations.maintenance.repair_sources import OtherModels
    from blobstore.store.local import LocalStore
    from blobstore.store.published import Published


class Restored(NamedTuple):
    """A manifest that was restored, or would be."""

    reference: Reference
    manifest: Manifest
    quarantined: Path | None
    """The new place of the damaged file; None if there was none, or nothing was changed."""
    signatures: int = 0
    """Signatures that the other place has of it, and that are kept."""


def restore_manifests(
    store: LocalStore, other: OtherModels | None, chosen: Sequence[Reference], *, is_dry: bool
) -> Iterator[Restored]:
    """Restore the missing and damaged manifests that the store or another place has intact.

    A manifest is missing if the store knows that it is lost, or if the other place has it and the store has its blobs.
    Without names in ``chosen``, those that were removed from the store are not missing.

    Raises:
        RemoteError: the other place cannot be reached.
        StoreBusy: the store's lock could not be acquired in time.
        StoreError: one of the stores cannot be read, or ``store`` cannot be written.
    """
    there: set[bytes] = set()
    places = (store.names.published, *(() if other is None else (other,)))
    lost = store.names.published.lost(on_error=lambda _: None)
    own = chain(store.references(), lost)
    for reference in chosen or chain(own, _lost(store, other, there) if other else ()):
        damaged = _damaged(store, reference)
        is_own = damaged is not None or store.is_gone(reference)
        place, intact = _find(store, places, reference, damaged, is_own=is_own)
        if intact is None:
            with contextlib.suppress(BlobstoreError):
                there.add(store.read_manifest(reference).removesuffix(b"\n"))
            continue
        there.add(intact.removesuffix(b"\n"))
        manifest = Manifest.from_bytes(intact)
        if is_dry:
            yield Restored(reference, manifest, None)
            continue
        old = store.names.version(reference) if damaged is None else Digest.of(damaged)
        new = Digest.of(intact)
        # Durable before the name, so that no policy finds the model without them.
        signatures = SelectedSignatures.of(
            other.signatures(new) if other else (), new, read_policy(store)
        )
        for data in signatures.data:
            store.keep_signature(new, data, is_verified=signatures.is_verified)
        with store.writing(), store.exclusive_lock():
            # It was read without the lock, so another process may have restored or replaced it.
            if store.names.version(reference) != old:
                continue
            quarantined = None if damaged is None else quarantine_copy(store, damaged)
            update = NameUpdate(reference, old, new)
            # Blobs of a name that is the store's are repaired once its manifest lists them.
            model = NewModel(update, intact, () if is_own else manifest.blobs)
            try:
                store.names.place(model, is_brought=place is other)
            except (NameConflict, BlobMissing, BlobDamaged):  # it stays lost
                continue
        yield Restored(reference, manifest, quarantined, len(signatures.data))


def _find(
    store: LocalStore,
    places: Sequence[OtherModels | Published],
    reference: Reference,
    damaged: bytes | None,
    *,
    is_own: bool,
) -> tuple[object, bytes | None]:
    """Return the place that has the missing or damaged manifest of a name intact, and the manifest; None if none has.

    A name that the store does not know (not ``is_own``) is complete or absent, so it needs all of its blobs.
    """
    for place in places:
        if damaged is not None:
            found = _find_intact(place, reference, damaged)
        else:
            found = None if store.has_model(reference) else _intact(place, reference)
        if found and (is_own or store.has_blobs(Manifest.from_bytes(found).blobs)):
            return place, found
    return None, None


def _lost(store: LocalStore, other: OtherModels, there: Container[bytes]) -> Iterator[Reference]:
    """Yield the names that another place has, and the store has lost though it has their blobs.

    Other names of manifests that are ``there`` are no loss.
    """
    for reference in other.references():
        with contextlib.suppress(BlobstoreError):
            data = other.read_manifest(reference)
            if not store.has_model(reference) and data.removesuffix(b"\n") not in there:
                former = (one.data for one in store.names.former(reference))
                if store.has_blobs(Manifest.from_bytes(data).blobs) and data not in former:
                    yield reference


def _damaged(store: LocalStore, reference: Reference) -> bytes | None:
    """Return the bytes of a manifest that its config does not confirm; None if it is intact or unreadable."""
    try:
        data = store.read_manifest(reference)
    except BlobstoreError:
        return None
    # A manifest that does not parse is damaged as well.
    with contextlib.suppress(InvalidManifest):
        if store.check_manifest(data, Manifest.from_bytes(data)):
            return None
    return data


def _find_intact(
    other: OtherModels | Published, reference: Reference, damaged: bytes
) -> bytes | None:
    """Return the intact manifest of the same model, preferably the one with the same name.

    Returns None if the other place has no such manifest, or if ``damaged`` equals it: then only the
    config blob is damaged.
    """
    for name in chain([reference], other.references()):
        data = _intact(other, name, damaged)
        if data is not None:
            is_equal = data.removesuffix(b"\n") == damaged.removesuffix(b"\n")
            return None if is_equal else data
    return None


def _intact(
    other: OtherModels | Published, name: Reference, damaged: bytes | None = None
) -> bytes | None:
    """Return a manifest if it is not changed, and of the model of ``damaged``, if that is given."""
    with contextlib.suppress(BlobstoreError, OSError):
        data = other.read_manifest(name)
        manifest = Manifest.from_bytes(data)
        config = other.read_blob(manifest.config.digest, manifest.config.size)
        is_confirmed = check_layers(data, config)
        if damaged is None:  # a config of Ollama's confirms nothing, and the name is the same
            return data
        halves = [str(manifest.config.digest).encode()]
        halves += [listed(manifest.layers)] if manifest.layers else []  # "[]" may be anywhere
        if is_confirmed and any(half in damaged for half in halves):
            return data
    return None

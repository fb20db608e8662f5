"""Restores damaged manifests from another store that has the same models.

Only a manifest that its config confirms is used. It is of the same model if the damaged manifest still
contains one of its two halves: the digest of the config, or the list of layers, whose digest the config
holds.
"""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError, InvalidManifest
from blobstore.manifests.check import check_layers
from blobstore.manifests.model import Manifest, listed
from blobstore.store.names import NameUpdate
from blobstore.store.quarantine import quarantine_copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


class Restored(NamedTuple):
    """A manifest that was restored, or would be."""

    reference: Reference
    manifest: Manifest
    quarantined: Path | None
    """The new place of the damaged file; None if nothing was changed."""


def restore_manifests(
    store: LocalStore, other: LocalStore, references: Iterable[Reference], *, is_dry: bool
) -> Iterator[Restored]:
    """Restore the damaged manifests that another store has intact.

    Raises:
        StoreBusy: the store's lock could not be acquired in time.
        StoreError: one of the stores cannot be read, or ``store`` cannot be written.
    """
    for reference in references:
        damaged = _damaged(store, reference)
        intact = None if damaged is None else _find_intact(other, reference, damaged)
        if damaged is None or intact is None:
            continue
        manifest = Manifest.from_bytes(intact)
        if is_dry:
            yield Restored(reference, manifest, None)
            continue
        with store.writing(), store.exclusive_lock():
            # It was read without the lock, so another process may have restored or replaced it.
            if _damaged(store, reference) != damaged:
                continue
            quarantined = quarantine_copy(store, damaged)
            update = NameUpdate(reference, Digest.of(damaged), Digest.of(intact))
            # Blobs are not checked: they are repaired once the manifest lists them.
            store.names.place(update, intact, ())
        yield Restored(reference, manifest, quarantined)


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


def _find_intact(other: LocalStore, reference: Reference, damaged: bytes) -> bytes | None:
    """Return the intact manifest of the same model, preferably the one with the same name.

    Returns None if the other store has no such manifest, or if ``damaged`` equals it: then only the
    config blob is damaged.
    """
    for name in chain([reference], other.references()):
        with contextlib.suppress(BlobstoreError, OSError):
            data, manifest = other.parse(name)
            config = other.read_blob(manifest.config.digest, manifest.config.size)
            halves = [str(manifest.config.digest).encode()]
            halves += [listed(manifest.layers)] if manifest.layers else []  # "[]" may be anywhere
            is_same = any(half in damaged for half in halves)
            if is_same and check_layers(data, config):
                is_equal = data.removesuffix(b"\n") == damaged.removesuffix(b"\n")
                return None if is_equal else data
    return None

"""Damaged manifests put back, from another store that has the same models.

Only a manifest that its config proves is taken. That it is of the same model is told by the damaged one,
of which a half is left at least: the digest of the config, or the list of layers that the config holds
the digest of.
"""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.files import write_file
from blobstore.errors import BlobstoreError, InvalidManifest
from blobstore.manifests.check import check_layers
from blobstore.manifests.model import Manifest, listed
from blobstore.store.quarantine import quarantine_copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


class Restored(NamedTuple):
    """A manifest that was put back, or would be."""

    reference: Reference
    manifest: Manifest
    aside: Path | None
    """Where the damaged file is now; None where nothing was changed."""


def restore_manifests(
    store: LocalStore, other: LocalStore, references: Iterable[Reference], *, is_dry: bool
) -> Iterator[Restored]:
    """Put back those of the manifests that are damaged and that another store has whole.

    Raises:
        StoreBusy: others have kept the store's lock all the time.
        StoreError: a store cannot be read, or the store not be written.
    """
    for reference in references:
        damaged = _damaged(store, reference)
        whole = None if damaged is None else _whole(other, reference, damaged)
        if damaged is None or whole is None:
            continue
        manifest = Manifest.from_bytes(whole)
        if is_dry:
            yield Restored(reference, manifest, None)
            continue
        with store.writing(), store.exclusive_lock():
            if _damaged(store, reference) != damaged:
                continue
            path = store.manifest_path(reference)
            aside = quarantine_copy(store, damaged)
            # Whatever is wrong with the blobs: they are mended when it is known which they are. And
            # whatever other names there are: this one has been among them.
            write_file(path, [whole], mode=0o644, temporary=store.folder("temporary"))
        yield Restored(reference, manifest, aside)


def _damaged(store: LocalStore, reference: Reference) -> bytes | None:
    """Return the bytes of a manifest that is not proven; None if it is, or not there to be read."""
    try:
        data = store.read_manifest(reference)
    except BlobstoreError:
        return None
    with contextlib.suppress(InvalidManifest):
        if store.check_manifest(data, Manifest.from_bytes(data)):
            return None
    return data


def _whole(other: LocalStore, reference: Reference, damaged: bytes) -> bytes | None:
    """Return the manifest of the same model, by preference the one of the same name.

    None if there is none, or if ``damaged`` is that one: then only its config is damaged.
    """
    for name in chain([reference], other.references()):
        with contextlib.suppress(BlobstoreError, OSError):
            data, manifest = other.parse(name)
            config = other.read_blob(manifest.config.digest, manifest.config.size)
            halves = [str(manifest.config.digest).encode()]
            halves += [listed(manifest.layers)] if manifest.layers else []  # "[]" may be anywhere
            is_same = any(half in damaged for half in halves)
            if is_same and check_layers(data, config):
                is_whole = data.removesuffix(b"\n") == damaged.removesuffix(b"\n")
                return None if is_whole else data
    return None

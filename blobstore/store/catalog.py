"""Every name of a store with its manifest, or with why that cannot be read. No blob is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, InvalidManifest, ModelNotFound
from blobstore.manifests.model import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A name of a store. It has either a manifest and its digest, or an error."""

    reference: Reference
    modified: float
    """When the manifest was written, in seconds since the epoch; 0 if nobody can say."""
    digest: Digest | None = None
    """Of the manifest's bytes."""
    manifest: Manifest | None = None
    error: BlobstoreError | None = None
    """Why the manifest cannot be read."""

    @property
    def blobs(self) -> dict[Digest, int]:
        """Sizes of the blobs that it needs, as far as that is known."""
        blobs = self.manifest.blobs if self.manifest is not None else ()
        return {blob.digest: blob.size for blob in blobs}


def read_catalog(store: LocalStore) -> Iterator[CatalogEntry]:
    """Yield every name of a store, sorted; a name that vanishes meanwhile is passed over.

    Raises:
        StoreError: the store is not a folder or cannot be read.
    """
    for reference in store.references():
        try:
            yield read_entry(store, reference)
        except ModelNotFound:
            continue


def read_entries(store: LocalStore, references: Iterable[Reference]) -> list[CatalogEntry]:
    """Return what is known of some names, each once.

    Raises:
        ModelNotFound: the store has no such name.
        StoreError: the store is not a folder.
    """
    store.check_root()
    return [read_entry(store, reference) for reference in dict.fromkeys(references)]


def read_entry(store: LocalStore, reference: Reference) -> CatalogEntry:
    """Return what is known of a name.

    Raises:
        ModelNotFound: the store has no such name.
    """
    path = store._layout.manifest(reference)
    modified = _modified(path)
    try:
        data = store.read_manifest(reference)
        manifest = _parse(data, path)
    except ModelNotFound:
        raise
    except BlobstoreError as error:
        return CatalogEntry(reference=reference, modified=modified, error=error)
    return CatalogEntry(
        reference=reference, modified=modified, digest=Digest.of(data), manifest=manifest
    )


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # reading it says why
        return 0


def _parse(data: bytes, path: Path) -> Manifest:
    try:
        return Manifest.from_bytes(data)
    except InvalidManifest as error:
        raise error.at(quote(path)) from None

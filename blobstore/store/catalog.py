"""The names of a store with their manifests, or with the error of reading them. No blob is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError, ModelNotFound
from blobstore.manifests.descriptor import PlainDescriptors
from blobstore.manifests.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from blobstore.errors import StoreError
    from blobstore.manifests.model import Manifest
    from blobstore.store.local import LocalStore


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A name in a store. It has either a manifest and its digest, or an error."""

    reference: Reference
    modified: float
    """When the manifest was written, in seconds since the epoch; 0 if that is unknown."""
    digest: Digest | None = None
    """The digest of the manifest's bytes."""
    manifest: Manifest | None = field(default=None, repr=False)
    error: BlobstoreError | None = None
    """Why the manifest cannot be read."""

    @property
    def blobs(self) -> dict[Digest, int]:
        """The sizes of the blobs that the manifest references; empty if it cannot be read."""
        if self.manifest is None:
            return {}
        return {blob.digest: blob.size for blob in (self.manifest.config, *self.manifest.layers)}


def read_catalog(
    store: LocalStore, *, on_error: Callable[[StoreError], object] | None = None
) -> Iterator[CatalogEntry]:
    """Yield an entry for every name of a store, sorted; names that another process removes are skipped.

    ``on_error`` is as in :meth:`LocalStore.references`.

    Raises:
        StoreError: the store is not a folder or cannot be read.
    """
    known = PlainDescriptors()
    for reference in store.references(on_error=on_error):
        try:
            yield read_entry(store, reference, known)
        except ModelNotFound:
            continue


def read_entries(store: LocalStore, references: Iterable[str | Reference]) -> list[CatalogEntry]:
    """Return the entries of some names, each once.

    Raises:
        ModelNotFound: the store has no such name.
        StoreError: the store is not a folder.
    """
    store.check_root()
    known = PlainDescriptors()
    return [read_entry(store, name, known) for name in dict.fromkeys(map(Reference.of, references))]


def read_entry(
    store: LocalStore, reference: str | Reference, known: PlainDescriptors | None = None
) -> CatalogEntry:
    """Return the entry of a name. ``known`` is as for :meth:`Manifest.from_bytes`.

    Raises:
        ModelNotFound: the store has no such name.
    """
    reference = Reference.of(reference)
    try:
        modified = store.manifest_path(reference).stat().st_mtime
    except OSError:  # reading the manifest reports the error
        modified = 0
    try:
        data, manifest = store.parse(reference, known)
    except ModelNotFound:
        raise
    except BlobstoreError as error:
        return CatalogEntry(reference=reference, modified=modified, error=error)
    return CatalogEntry(
        reference=reference, modified=modified, digest=Digest.of(data), manifest=manifest
    )

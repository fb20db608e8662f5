"""The names of a store with what their manifests reference, or with the error of reading them. No blob is read.

A manifest is parsed only if this user has not read it before; see :mod:`blobstore.store.references`.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import FileVersion
from blobstore.errors import BlobstoreError, InvalidManifest, ModelNotFound
from blobstore.manifests.descriptor import PlainDescriptors
from blobstore.manifests.reference import Reference
from blobstore.store.references import KnownManifest, References

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from blobstore.errors import StoreError
    from blobstore.manifests.model import Manifest
    from blobstore.store.local import LocalStore


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A name in a store. It has either what its manifest references, or an error."""

    reference: Reference
    modified: float
    """When the manifest was written, in seconds since the epoch; 0 if that is unknown."""
    error: BlobstoreError | None = None
    """Why the manifest cannot be read."""
    known: KnownManifest | None = field(default=None, repr=False)
    """The digest of the manifest and the numbers of its blobs; None if it cannot be read."""
    references: References = field(repr=False)
    """What the numbers stand for; entries that were read together have it in common."""
    read: Callable[[], Manifest | None] = field(repr=False)

    @property
    def digest(self) -> Digest | None:
        """The digest of the manifest's bytes; None if it cannot be read."""
        return None if self.known is None else self.known.digest

    @cached_property
    def blobs(self) -> dict[Digest, int]:
        """The sizes of the blobs that the manifest references; empty if it cannot be read."""
        if self.known is None:
            return {}
        sizes = self.references.sizes_in(self.known)
        return dict(zip(map(self.references.digest, self.known.blobs), sizes, strict=True))

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest; None if it cannot be read, or was replaced since."""
        return self.read() if self.error is None else None


def read_catalog(
    store: LocalStore, *, on_error: Callable[[StoreError], object] | None = None
) -> list[CatalogEntry]:
    """Return an entry for every name of a store, sorted; names that another process removes are skipped.

    ``on_error`` is as in :meth:`LocalStore.references`.

    Raises:
        StoreError: the store is not a folder or cannot be read.
    """
    reader = _Reader(store, store.known_references())
    entries = []
    for reference in store.references(on_error=on_error):
        try:
            entries.append(reader.entry(reference))
        except ModelNotFound:
            continue
    reader.references.save(reader.versions)
    return entries


def read_entries(store: LocalStore, references: Iterable[str | Reference]) -> list[CatalogEntry]:
    """Return the entries of some names, each once.

    Raises:
        ModelNotFound: the store has no such name.
        StoreError: the store is not a folder.
    """
    store.check_root()
    reader = _Reader(store, References())
    return [reader.entry(name) for name in dict.fromkeys(map(Reference.of, references))]


def lost_entry(reference: Reference) -> CatalogEntry:
    """Return the entry of a name whose manifest is lost."""
    error = InvalidManifest(f"the manifest of {quote(reference)} is lost")
    return CatalogEntry(
        reference=reference, modified=0, error=error, references=References(), read=lambda: None
    )


def read_entry(store: LocalStore, reference: str | Reference) -> CatalogEntry:
    """Return the entry of a name.

    Raises:
        ModelNotFound: the store has no such name.
    """
    return _Reader(store, References()).entry(Reference.of(reference))


class _Reader:
    """Reads entries, and the manifests among them that are not known yet."""

    def __init__(self, store: LocalStore, references: References) -> None:
        self._store = store
        self._descriptors = PlainDescriptors()
        self.references = references
        self.versions: list[FileVersion] = []
        """Those of the files of all manifests that were asked for."""

    def entry(self, reference: Reference) -> CatalogEntry:
        """Return the entry of a name. Raises ModelNotFound."""
        try:
            # Before the file is read: one that is replaced in between is read again next time.
            status = os.stat(self._store.manifest_path(reference))  # noqa: PTH116 - there are thousands
        except OSError:  # reading the manifest reports the error
            version = known = None
            modified = 0.0
        else:
            version, modified = FileVersion.of_status(status), status.st_mtime
            self.versions.append(version)
            known = self.references.known(version)
        error = None
        if known is None:
            try:
                known = self._read(reference, version)
            except ModelNotFound:
                raise
            except BlobstoreError as found:
                error = found
        return CatalogEntry(
            reference=reference,
            modified=modified,
            error=error,
            known=known,
            references=self.references,
            read=partial(self._manifest, reference, known),
        )

    def _read(self, reference: Reference, version: FileVersion | None) -> KnownManifest:
        digest = Digest.of(self._store.read_manifest(reference))
        if known := self.references.copied(version, digest):
            return known
        data, manifest = self._parse(reference)
        config = None
        with contextlib.suppress(BlobstoreError):  # reported where the model is used
            config = self._store.checked_config(data, manifest)
        return self.references.add(version, Digest.of(data), manifest, config=config)

    def _manifest(self, reference: Reference, known: KnownManifest | None) -> Manifest | None:
        try:
            data, manifest = self._parse(reference)
        except BlobstoreError:
            return None
        return manifest if known is not None and Digest.of(data) == known.digest else None

    def _parse(self, reference: Reference) -> tuple[bytes, Manifest]:
        self._descriptors.forget()
        return self._store.parse(reference, self._descriptors)

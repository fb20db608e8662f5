"""The names of a store with what their manifests reference, or with the error of reading them. No blob is read.

A manifest is parsed only if this user has not read it before; see :mod:`blobstore.store.references`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import starmap
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import FileVersion
from blobstore.core.fork import cached_property
from blobstore.core.gc_pause import gc_paused
from blobstore.core.progress import reporting
from blobstore.errors import BlobstoreError, InvalidManifest, ModelNotFound, StoreError
from blobstore.manifests.reference import Reference, is_path
from blobstore.store.references import KnownManifest, References

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from blobstore.manifests.model import Manifest
    from blobstore.store.local import LocalStore

_FEW: Final = 32
"""So many manifests are parsed, whether they are known or not."""


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
    store: LocalStore | None = field(default=None, repr=False)
    """The store that has it; None if it is lost."""

    @cached_property
    def digest(self) -> Digest | None:
        """The digest of the manifest's bytes; None if it cannot be read."""
        return None if self.known is None else self.known.digest

    @cached_property
    def blobs(self) -> dict[Digest, int]:
        """The sizes of the blobs that the manifest references; empty if it cannot be read."""
        if self.known is None:
            return {}
        digests = map(self.known.references.digest, self.known.blobs)
        return dict(zip(digests, self.known.sizes, strict=True))

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest; None if it cannot be read, or was replaced since."""
        if self.store is not None and self.known is not None:
            with contextlib.suppress(BlobstoreError):
                data, manifest = self.store.parse(self.reference)
                return manifest if Digest.of(data) == self.known.digest else None
        return None


class _Found(NamedTuple):
    """A manifest's file."""

    version: FileVersion | None
    """None if it cannot be known."""
    known: KnownManifest | None = None
    error: BlobstoreError | None = None


class Catalog:
    """The entries of a store, sorted by name. They are made when they are asked for, because there may be very many."""

    def __init__(self, store: LocalStore, references: References) -> None:
        """Read nothing yet."""
        self._store = store
        self.references = references
        """What the numbers of blobs stand for."""
        self._root = f"{store.folder('manifests')}/"
        self._found: dict[str, _Found] = {}

    def paths(self, on_error: Callable[[StoreError], object] | None) -> Iterator[str]:
        """Yield the paths of the names of the store, sorted by name, as their folders are listed. Raises StoreError."""
        listings = self.references.listings
        for parts, tags in self._store.repositories(on_error=on_error, listings=listings):
            folder = "/".join(parts)
            # Others are files of something else.
            yield from filter(is_path, (f"{folder}/{tag}" for tag in tags))

    def read_all(self, paths: Iterable[str]) -> None:
        """Read the manifests of all names. Raises StoreError."""
        with gc_paused():  # it would look at what is found again and again
            self._read(paths)
        self.references.save()

    def each(self, paths: Iterable[str]) -> Iterator[CatalogEntry]:
        """Yield the entries of all names, each read when it is asked for and then forgotten. Raises StoreError."""
        for path in paths:
            self._read([path])
            if (found := self._found.pop(path, None)) is not None:
                yield self._entry(path, found)
        self.references.save()

    def read(self, references: Iterable[Reference]) -> None:
        """Read the manifests of some names. Those that do not exist have no entry."""
        self._read("/".join(reference.parts) for reference in references)

    def _read(self, paths: Iterable[str]) -> None:
        """Read the manifests that are not known."""
        unknown: dict[str, FileVersion | None] = {}
        for path in paths:
            try:
                # Before the file is read: one that is replaced in between is read again next time.
                version = FileVersion.of(self._root + path)
            except StoreError:  # reading the manifest reports it
                version = None
            known = None if version is None else self.references.known(version)
            self._found[path] = _Found(version, known)  # in the order of names
            if known is None:
                unknown[path] = version
        for path in reporting("manifests read", unknown):
            self._read_one(path, unknown[path])

    def _read_one(self, path: str, version: FileVersion | None) -> None:
        """Read a manifest, or forget one that is gone by now."""
        reference = Reference(*path.split("/"))
        known = None
        error: BlobstoreError | None = None
        try:
            data = self._store.read_manifest(reference)
            try:
                known, _ = self.references.read(version, data, self._config)
            except InvalidManifest as found:
                error = found.at(quote(self._root + path))
        except ModelNotFound:
            del self._found[path]
            return
        except BlobstoreError as found:
            error = found
        self._found[path] = _Found(version, known, error)

    def _config(self, data: bytes, manifest: Manifest) -> bytes | None:
        with contextlib.suppress(BlobstoreError):  # reported where the model is used
            return self._store.checked_config(data, manifest)
        return None

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[CatalogEntry]:
        return starmap(self._entry, self._found.items())

    def of_repositories(self, repositories: Collection[Reference]) -> Iterator[CatalogEntry]:
        """Yield the entries of all tags of some repositories."""
        wanted = {"/".join(one.parts[:-1]) for one in repositories}
        found = self._found.items()
        return (self._entry(*one) for one in found if one[0].rpartition("/")[0] in wanted)

    def get(self, reference: Reference) -> CatalogEntry | None:
        """Return the entry of a name; None if the store has no such name."""
        path = "/".join(reference.parts)
        return self._entry(path, self._found[path]) if path in self._found else None

    def known(self) -> Iterator[KnownManifest]:
        """Yield what is known of each name whose manifest can be read, sorted by name."""
        return (one.known for one in self._found.values() if one.known is not None)

    def files(self) -> tuple[int, int]:
        """Return the number of the manifests, and their bytes."""
        sizes = [one.version.size for one in self._found.values() if one.version is not None]
        return len(sizes), sum(sizes)

    def unreadable(self) -> list[CatalogEntry]:
        """Return the entries with an error."""
        return [self._entry(*one) for one in self._found.items() if one[1].error is not None]

    def named(self, digest: Digest) -> list[Reference]:
        """Return the names of a manifest, sorted."""
        rows = self.references.rows_of(digest)
        return [
            Reference(*path.split("/"))
            for path, one in self._found.items()
            if one.known is not None and one.known.row in rows
        ]

    def _entry(self, path: str, found: _Found) -> CatalogEntry:
        reference = Reference(*path.split("/"))
        version, known, error = found
        seconds, rest = divmod(0 if version is None else version.modified, 10**9)
        return CatalogEntry(
            reference=reference,
            modified=seconds + 1e-9 * rest,  # as os.stat computes it
            error=error,
            known=known,
            store=self._store,
        )


def read_catalog(
    store: LocalStore, *, on_error: Callable[[StoreError], object] | None = None
) -> Catalog:
    """Return an entry for every name of a store; names that another process removes are skipped.

    ``on_error`` is as in :meth:`LocalStore.references`.

    Raises:
        StoreError: the store is not a folder or cannot be read.
    """
    catalog = Catalog(store, store.known_references())
    catalog.read_all(catalog.paths(on_error))
    return catalog


def read_some(store: LocalStore, references: Collection[Reference]) -> Catalog:
    """Return the entries of some names alone; those that do not exist have none."""
    # What is known of all others takes as long to read as these manifests.
    catalog = Catalog(store, References() if len(references) <= _FEW else store.known_references())
    catalog.read(references)
    return catalog


def read_entries(store: LocalStore, references: Iterable[str | Reference]) -> list[CatalogEntry]:
    """Return the entries of some names, each once.

    Raises:
        ModelNotFound: the store has no such name.
        StoreError: the store is not a folder.
    """
    store.check_root()
    names = list(map(Reference.of, references))
    catalog = read_some(store, names)
    for name in names:
        if catalog.get(name) is None:
            raise store.not_found(name)
    return list(catalog)


def lost_entry(reference: Reference) -> CatalogEntry:
    """Return the entry of a name whose manifest is lost."""
    error = InvalidManifest(f"the manifest of {quote(reference)} is lost")
    return CatalogEntry(reference=reference, modified=0, error=error)


def read_entry(store: LocalStore, reference: str | Reference) -> CatalogEntry:
    """Return the entry of a name.

    Raises:
        ModelNotFound: the store has no such name.
    """
    return read_entries(store, [reference])[0]

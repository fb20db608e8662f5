"""The operation ``du``: the disk usage of models and of the whole store.

Sizes are those of the files on disk, not those in manifests. No blob is read.
"""

from __future__ import annotations

import stat
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blobstore.errors import BlobstoreError
from blobstore.manifests.reference import Reference
from blobstore.store.catalog import read_catalog, read_entries
from blobstore.store.local import LocalStore
from blobstore.store.scan import digest_of, walk_files

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.core.digest import Digest
    from blobstore.store.catalog import CatalogEntry


class Space(NamedTuple):
    """A number of files and their total bytes."""

    files: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
    """The disk usage of a model. Each blob counts once; the config is included."""

    reference: Reference
    blobs: int
    """Blobs in the manifest."""
    size: int
    """Bytes of the blobs that exist."""
    unique: int
    """Bytes of the blobs that no other name needs; they are freed once the name is removed."""
    faults: tuple[BlobstoreError, ...]
    """Errors of blobs that are missing, have a wrong size, or are not regular files."""
    error: BlobstoreError | None
    """Why the manifest cannot be read."""

    @property
    def shared(self) -> int:
        """Bytes of the blobs that other names need too."""
        return self.size - self.unique


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """The disk usage of a store. Every file counts in exactly one space."""

    models: tuple[ModelUsage, ...]
    """The requested models."""
    together: Space
    """The blobs of the requested models, each once."""
    together_unique: Space
    """The blobs among these that no other name needs."""
    cold: Space
    """Cold blobs, including those with a hot form. They also count in the other spaces."""
    saved: int
    """Bytes that compression saves, counted for blobs that are only cold."""
    names: int
    """Names in the whole store."""
    unreadable: tuple[BlobstoreError, ...]
    """Errors of manifests of the whole store. Their blobs count as unreferenced."""
    referenced: Space
    """Blobs that manifests reference."""
    without_sharing: int
    """Bytes that the referenced blobs would take if every name had its own copy."""
    bases: Space
    """Unreferenced blobs that are bases of referenced ones."""
    unreferenced: Space
    """Other unreferenced blobs: garbage, unless a process is about to use them."""
    foreign: Space
    """Files in the folder of blobs that are not blobs, such as unfinished downloads of Ollama."""
    manifests: Space
    temporary: Space
    """Temporary files of running and dead processes."""
    quarantine: Space
    """Damaged files that were replaced."""
    caches: Space
    """The header index, verification results and leases."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        blobs = (self.referenced, self.bases, self.unreferenced, self.foreign)
        others = (self.manifests, self.temporary, self.quarantine, self.caches)
        return sum(space.size for space in blobs + others)

    @property
    def dedup_ratio(self) -> float | None:
        """The ratio of the size without sharing to the size; None if there are no blobs."""
        return self.without_sharing / self.referenced.size if self.referenced.size else None

    @property
    def hot(self) -> int:
        """Bytes of hot blobs."""
        every = self.referenced.size + self.bases.size + self.unreferenced.size
        return every - self.cold.size

    @property
    def saved_share(self) -> float | None:
        """The share of the bytes of all blobs that compression saves; None if there are no blobs."""
        total = self.hot + self.cold.size + self.saved
        return self.saved / total if total else None


def measure_usage(
    references: Sequence[str | Reference] = (),
    *,
    store: LocalStore | str | os.PathLike[str] | None = None,
) -> StoreUsage:
    """Return the disk usage of models and of the whole store.

    Args:
        references: the models to list; none means all of the store.
        store: the store or its path; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.

    Raises:
        ModelNotFound: a model in ``references`` does not exist.
        StoreError: the store is not a folder or cannot be read.
    """
    store = LocalStore.of(store)
    asked = dict.fromkeys(map(Reference.of, references))
    read_entries(store, asked)  # fails if one of them does not exist
    entries = {entry.reference: entry for entry in read_catalog(store)}
    chosen = [entries[name] for name in asked or entries if name in entries]
    return _Measuring(store, list(entries.values())).result(chosen)


class _Measuring:
    """Measures the files of a store, and counts which models need them."""

    def __init__(self, store: LocalStore, entries: Sequence[CatalogEntry]) -> None:
        self._store = store
        self._entries = entries
        self._uses = Counter(digest for entry in entries for digest in entry.blobs)
        self._sizes: dict[Digest, int] = {}
        self._foreign: list[int] = []
        for entry, status in _files(store.folder("blobs")):
            digest = digest_of(entry.name)
            if digest is None or not stat.S_ISREG(status.st_mode):
                self._foreign.append(status.st_size)
            else:
                self._sizes[digest] = status.st_size
        self._cold = {digest: found.st_size for digest, found in store.cold_files().items()}
        for entry, status in _files(store.folder("bases")):
            digest = digest_of(entry.name)
            if digest is not None and digest not in self._sizes:  # otherwise it is the same file
                self._cold[digest] = self._cold.get(digest, 0) + status.st_size
        self._saved = 0
        self._bases: set[Digest] = set()
        for digest in self._cold:
            self._add_cold(digest)
        for digest, size in self._cold.items():
            self._sizes[digest] = self._sizes.get(digest, 0) + size

    def _add_cold(self, digest: Digest) -> None:
        """Add what a cold blob saves, and its base."""
        try:
            blob = self._store.open_cold(digest)
        except BlobstoreError:  # reported with the model that needs it
            return
        if digest not in self._sizes:
            self._saved += blob.size - self._cold[digest]
        if blob.base is not None and digest in self._uses:
            self._bases.add(blob.base)

    def result(self, chosen: Sequence[CatalogEntry]) -> StoreUsage:
        folder = self._store.folder
        together = Counter(digest for entry in chosen for digest in entry.blobs)
        alone = [digest for digest, count in together.items() if count == self._uses[digest]]
        models = tuple(map(self._model, chosen))
        return StoreUsage(
            models=models,
            together=self._space(together),
            together_unique=self._space(alone),
            cold=_total(self._cold.values()),
            saved=self._saved,
            names=len(self._entries),
            unreadable=tuple(entry.error for entry in self._entries if entry.error is not None),
            referenced=self._space(self._uses),
            without_sharing=sum(
                self._sizes.get(digest, 0) * count for digest, count in self._uses.items()
            ),
            bases=self._space(self._bases - self._uses.keys()),
            unreferenced=self._space(self._sizes.keys() - self._uses.keys() - self._bases),
            foreign=_total(self._foreign),
            manifests=_space_of(folder("manifests")),
            temporary=_space_of(folder("temporary")),
            quarantine=_space_of(folder("quarantine")),
            caches=_space_of(
                folder("headers").parent,
                without=(
                    folder("temporary"),
                    folder("quarantine"),
                    folder("cold"),
                    folder("bases"),
                ),
            ),
        )

    def _model(self, entry: CatalogEntry) -> ModelUsage:
        blobs = entry.blobs
        return ModelUsage(
            reference=entry.reference,
            blobs=len(blobs),
            size=self._space(blobs).size,
            unique=self._space(digest for digest in blobs if self._uses[digest] == 1).size,
            faults=tuple(self._faults(blobs)),
            error=entry.error,
        )

    def _space(self, digests: Iterable[Digest]) -> Space:
        return _total(self._sizes[digest] for digest in digests if digest in self._sizes)

    def _faults(self, blobs: Mapping[Digest, int]) -> Iterator[BlobstoreError]:
        for digest, size in blobs.items():
            if self._sizes.get(digest) != size or digest in self._cold:
                try:
                    self._store.check_size(digest, size)
                except BlobstoreError as error:
                    yield error


def _total(sizes: Iterable[int]) -> Space:
    found = list(sizes)
    return Space(len(found), sum(found))


def _space_of(folder: Path, without: Collection[Path] = ()) -> Space:
    return _total(status.st_size for _, status in _files(folder, without))


def _files(
    folder: Path, without: Collection[Path] = ()
) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield the files below a folder; files that vanish are skipped."""
    for entry in walk_files(folder, set(map(str, without))):
        try:
            yield entry, entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue

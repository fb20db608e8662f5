"""Workflow: where the bytes of a store are, by model and in all. Files are looked at, none is read.

What counts is the size of a file as it is on disk, not as a manifest has it.
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
    """Files, and their bytes in all."""

    files: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
    """A name of the store and the bytes of its blobs, config included, each blob once."""

    reference: Reference
    blobs: int
    """Blobs that its manifest lists."""
    size: int
    """Bytes of those that are there."""
    unique: int
    """Bytes of those that no other name needs: what is given back once the name is removed."""
    faults: tuple[BlobstoreError, ...]
    """Blobs that are missing, of another size than the manifest says, or no files."""
    error: BlobstoreError | None
    """Why the manifest cannot be read."""

    @property
    def shared(self) -> int:
        """Bytes of its blobs that other names need too."""
        return self.size - self.unique


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """Where the bytes of a store are. Every file counts in one of the spaces."""

    models: tuple[ModelUsage, ...]
    """Those that were asked for."""
    together: Space
    """The blobs of these models, each once."""
    together_unique: Space
    """Those of them that no other name needs."""
    cold: Space
    """Blobs that are coded, whether they are there as files too; they count in the spaces above."""
    saved: int
    """Bytes that those take less than they would as files, of blobs that are cold only."""
    names: int
    """Names in the whole store."""
    unreadable: tuple[BlobstoreError, ...]
    """What is wrong with manifests of the whole store; what they need counts as unreferenced."""
    referenced: Space
    """Blobs that manifests reach."""
    without_sharing: int
    """Bytes that they would take if every name had its own."""
    bases: Space
    """Blobs that no manifest reaches, and by which some are coded that one does."""
    unreferenced: Space
    """Other blobs that no manifest reaches: garbage, if no process is about to use them."""
    foreign: Space
    """Files among the blobs that are none, such as unfinished downloads of Ollama's."""
    manifests: Space
    temporary: Space
    """Files without a name, of processes that live or have died."""
    quarantine: Space
    """Damaged files that were put aside."""
    caches: Space
    """Header index, notes and leases."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        blobs = (self.referenced, self.bases, self.unreferenced, self.foreign)
        others = (self.manifests, self.temporary, self.quarantine, self.caches)
        return sum(space.size for space in blobs + others)

    @property
    def dedup_ratio(self) -> float | None:
        """How many times the space would be needed without sharing; None if there is nothing."""
        return self.without_sharing / self.referenced.size if self.referenced.size else None

    @property
    def hot(self) -> int:
        """Bytes of blobs that are files of their own."""
        every = self.referenced.size + self.bases.size + self.unreferenced.size
        return every - self.cold.size

    @property
    def saved_share(self) -> float | None:
        """What part of the bytes of all blobs coding saves; None if there are none."""
        total = self.hot + self.cold.size + self.saved
        return self.saved / total if total else None


def measure_usage(
    references: Sequence[str | Reference] = (), *, store: LocalStore | None = None
) -> StoreUsage:
    """Return where the bytes of a store are.

    Args:
        references: the models to tell about one by one; none means all of the store.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.

    Raises:
        ModelNotFound: a model that was asked for does not exist.
        StoreError: the store is not a folder or cannot be read.
    """
    store = store or LocalStore()
    asked = dict.fromkeys(_parsed(reference) for reference in references)
    read_entries(store, asked)  # says which of them are not there
    entries = {entry.reference: entry for entry in read_catalog(store)}
    chosen = [entries[name] for name in asked or entries if name in entries]
    return _Measuring(store, list(entries.values())).result(chosen)


def _parsed(reference: str | Reference) -> Reference:
    return Reference.parse(reference) if isinstance(reference, str) else reference


class _Measuring:
    """What is on disk, and who needs it."""

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
            if digest is not None and digest not in self._sizes:  # else it is the same file
                self._cold[digest] = self._cold.get(digest, 0) + status.st_size
        self._saved = 0
        self._bases: set[Digest] = set()
        for digest in self._cold:
            self._look_at(digest)
        for digest, size in self._cold.items():
            self._sizes[digest] = self._sizes.get(digest, 0) + size

    def _look_at(self, digest: Digest) -> None:
        """Note what a cold blob saves, and what it needs."""
        try:
            blob = self._store.open_cold(digest)
        except BlobstoreError:  # told of a model that needs it
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
    """Yield the files below a folder; those that are removed meanwhile are skipped."""
    for entry in walk_files(folder, set(map(str, without))):
        try:
            yield entry, entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue

"""The operation ``du``: the disk usage of models and of the whole store.

Sizes are those of the files on disk, not those in manifests. No blob is read. Of cold blobs, only those
are opened that the index of cold blobs does not list, or that no manifest references.
"""

from __future__ import annotations

import contextlib
import itertools
import stat
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.files import allocated
from blobstore.errors import BlobstoreError
from blobstore.manifests.reference import Reference
from blobstore.store.catalog import read_catalog, read_entries
from blobstore.store.copies import copies
from blobstore.store.holdings import Holdings
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.partial_lock import SUFFIX as PARTIAL_LOCK
from blobstore.store.scan import digest_of, walk_files

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Names
    from blobstore.store.catalog import CatalogEntry
    from blobstore.store.layout import Folder


class Space(NamedTuple):
    """A number of files and their total bytes."""

    files: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
    """The disk usage of a model. Each blob counts once; the config and bases of frozen blobs are included."""

    reference: Reference
    blobs: int
    """Blobs in the manifest."""
    size: int
    """Bytes of the blobs that exist, and of the bases that they are deltas against."""
    unique: int
    """Bytes of those that nothing else needs; they are freed once the name is removed."""
    faults: tuple[BlobstoreError, ...]
    """Errors of blobs that are missing, have a wrong size, or are not regular files."""
    error: BlobstoreError | None
    """Why the manifest cannot be read."""

    @property
    def shared(self) -> int:
        """Bytes of those that other names need too."""
        return self.size - self.unique


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """The disk usage of a store. Every file counts in exactly one space."""

    models: tuple[ModelUsage, ...]
    """The requested models."""
    together: Space
    """The blobs of the requested models and their bases, each once."""
    together_unique: Space
    """The blobs among these that nothing else needs; they are freed once all of the names are removed."""
    cold: Space
    """Cold blobs, including those with a hot file. They also count in the other spaces."""
    saved: int
    """Bytes that compression saves, counted for blobs that are only cold."""
    names: int
    """Names in the whole store."""
    unreadable: tuple[BlobstoreError, ...]
    """Errors of manifests of the whole store. Their blobs count as unreferenced."""
    referenced: Space
    """Blobs that manifests reference, and their bases."""
    without_sharing: int
    """Bytes that these would take if every name had its own copy."""
    bases: Space
    """Bases among these that no manifest references. They also count in ``referenced``."""
    unreferenced: Space
    """Other blobs: garbage, unless a process is about to use them."""
    foreign: Space
    """Files in the folder of blobs that are not blobs, such as unfinished downloads of Ollama."""
    manifests: Space
    temporary: Space
    """Temporary files of running and dead processes."""
    partial: Space
    """Unfinished downloads."""
    quarantine: Space
    """Damaged files that were replaced."""
    caches: Space
    """The header index, verification results, leases, and blobs of remote models alone."""
    copies: Space
    """Copies for servers that ``run`` has started, outside of the store."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        blobs = (self.referenced, self.unreferenced, self.foreign)
        others = (self.manifests, self.temporary, self.partial, self.quarantine, self.caches)
        return sum(space.size for space in (*blobs, *others, self.copies))

    @property
    def dedup_ratio(self) -> float | None:
        """The ratio of the size without sharing to the size; None if there are no blobs."""
        return self.without_sharing / self.referenced.size if self.referenced.size else None

    @property
    def hot(self) -> int:
        """Bytes of hot blobs."""
        return self.referenced.size + self.unreferenced.size - self.cold.size

    @property
    def saved_share(self) -> float | None:
        """The share of the bytes of all blobs that compression saves; None if there are no blobs."""
        total = self.hot + self.cold.size + self.saved
        return self.saved / total if total else None


def measure_usage(
    references: Names = (),
    *,
    store: StoreLike = None,
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
    asked = Reference.all_of(references)
    read_entries(store, asked)  # fails if one of them does not exist
    return usage_of(read_disk(store), asked)


class StoreDisk(NamedTuple):
    """The manifests of a store and the files of its blobs, as they were at one time."""

    store: LocalStore
    entries: Mapping[Reference, CatalogEntry]
    needs: Mapping[Reference, Mapping[Digest, int]]
    """The blobs of each manifest with their sizes in it; none if it cannot be read."""
    holdings: Holdings
    blobs: DiskBlobs

    def owners(self) -> dict[Digest, list[int]]:
        """Return the positions in :attr:`entries` of the names whose manifests list each blob."""
        return self._places(self.needs)

    def holders(self) -> dict[Digest, list[int]]:
        """Return the positions of the names that keep each blob, those that need it as a base included."""
        return self._places(self.holdings.of)

    def _places(self, blobs_of: Mapping[Reference, Iterable[Digest]]) -> dict[Digest, list[int]]:
        found: dict[Digest, list[int]] = {}
        for place, name in enumerate(self.entries):
            for digest in blobs_of[name]:
                found.setdefault(digest, []).append(place)
        return found


def read_disk(store: LocalStore) -> StoreDisk:
    """Read all manifests and the sizes of all blobs.

    Raises:
        StoreError: the store is not a folder or cannot be read.
    """
    entries = {entry.reference: entry for entry in read_catalog(store)}
    needs = {name: entry.blobs for name, entry in entries.items()}
    holdings = Holdings(store, entries.values())
    blobs = _measure_blobs(store, _expected_sizes(needs.values()))
    return StoreDisk(store, entries, needs, holdings, blobs)


def usage_of(disk: StoreDisk, references: Sequence[Reference] = ()) -> StoreUsage:
    """Return the disk usage of some models, or all, of a store that was read."""
    store, entries, needs, holdings, blobs = disk
    chosen = [entries[name] for name in references or entries if name in entries]
    held = set().union(*holdings.of.values())
    together = set().union(*(holdings.of[entry.reference] for entry in chosen))
    downloads: list[int] = []
    locks: list[int] = []
    for entry, status in _files(store.folder("partial")):
        sizes = locks if entry.name.endswith(PARTIAL_LOCK) else downloads
        sizes.append(allocated(status))
    downloads += (allocated(status) for _, status in _files(store.folder("downloads")))
    names: tuple[Folder, ...] = ("temporary", "partial", "downloads", "quarantine", "cold", "bases")
    parts = {name: store.folder(name) for name in names}
    return StoreUsage(
        models=tuple(
            ModelUsage(
                reference=entry.reference,
                blobs=len(needed),
                size=blobs.space(holdings.of[entry.reference]).size,
                unique=blobs.space(holdings.freed([entry.reference])).size,
                faults=tuple(_faults(store, blobs, needed)),
                error=entry.error,
            )
            for entry in chosen
            for needed in [needs[entry.reference]]
        ),
        together=blobs.space(together),
        together_unique=blobs.space(holdings.freed(entry.reference for entry in chosen)),
        cold=_total(blobs.cold.values()),
        saved=blobs.saved,
        names=len(entries),
        unreadable=tuple(entry.error for entry in entries.values() if entry.error is not None),
        referenced=blobs.space(held),
        without_sharing=sum(blobs.space(held).size for held in holdings.of.values()),
        bases=blobs.space(held.difference(*needs.values())),
        unreferenced=blobs.space(blobs.sizes.keys() - holdings.counts.keys()),
        foreign=_total(blobs.foreign),
        manifests=_space_of(store.folder("manifests")),
        temporary=_space_of(parts["temporary"]),
        partial=_total(downloads),
        quarantine=_space_of(parts["quarantine"]),
        caches=_total(
            [
                *_sizes(store.folder("headers").parent, parts.values()),
                *locks,
                *(blobs.sizes.get(digest, 0) for digest in holdings.cached - held),
            ]
        ),
        copies=_total(size for folder in copies(store.root) for size in _sizes(folder)),
    )


class DiskBlobs(NamedTuple):
    """The content of the folders of blobs."""

    sizes: Mapping[Digest, int]
    """Bytes of all blobs, hot and cold."""
    cold: Mapping[Digest, int]
    """Bytes of the cold blobs, and of bases whose hot file is gone."""
    saved: int
    doubtful: AbstractSet[Digest]
    """Referenced blobs that may be missing, or of another size than a manifest says."""
    foreign: Sequence[int]
    """Bytes of each file that is not a blob."""

    def space(self, digests: Iterable[Digest]) -> Space:
        """Return the space of those blobs that exist."""
        found = map(self.sizes.get, digests)
        return _total(size for size in found if size is not None)


def _expected_sizes(needs: Iterable[Mapping[Digest, int]]) -> dict[Digest, int | None]:
    """Return the sizes of the referenced blobs in the manifests; None if these disagree."""
    pairs = set(itertools.chain.from_iterable(needed.items() for needed in needs))
    sizes: dict[Digest, int | None] = dict(pairs)
    if len(sizes) != len(pairs):
        counts = Counter(digest for digest, _ in pairs)
        sizes |= {digest: None for digest, count in counts.items() if count > 1}
    return sizes


def _measure_blobs(store: LocalStore, expected: Mapping[Digest, int | None]) -> DiskBlobs:
    known = {digest.file_name: digest for digest in expected}  # faster than parsing names
    hot: dict[Digest, int] = {}
    foreign: list[int] = []
    for entry, status in _files(store.folder("blobs")):
        digest = known.get(entry.name) or digest_of(entry.name)
        if digest is None or not stat.S_ISREG(status.st_mode):
            foreign.append(status.st_size)
        else:
            hot[digest] = status.st_size
    cold_files = store.cold_files()
    cold = {digest: found.st_size for digest, found in cold_files.items()}
    for entry, status in _files(store.folder("bases")):
        digest = digest_of(entry.name)
        if digest is not None and digest not in hot:  # otherwise it is the same file
            cold[digest] = cold.get(digest, 0) + status.st_size
    sizes = hot | {digest: hot.get(digest, 0) + size for digest, size in cold.items()}
    saved = 0
    intact = {}
    for digest, status in cold_files.items():
        with contextlib.suppress(BlobstoreError):  # reported with the model that needs it
            base = store.base_of(digest, status)
            size = expected.get(digest)
            if digest not in hot:
                if size is None or not store.cold_index.has(digest, status):
                    size = store.open_cold(digest).size
                elif base is None or base in sizes:
                    intact[digest] = size
                saved += size - cold[digest]
    doubtful = {
        digest
        for digest, size in expected.items()
        if size is None or size != (intact if digest in cold else sizes).get(digest)
    }
    return DiskBlobs(sizes, cold, saved, doubtful, foreign)


def _faults(
    store: LocalStore, found: DiskBlobs, blobs: Mapping[Digest, int]
) -> Iterator[BlobstoreError]:
    for digest, size in blobs.items() if found.doubtful else ():
        if digest in found.doubtful:
            try:
                store.check_size(digest, size)
            except BlobstoreError as error:
                yield error


def _total(sizes: Iterable[int]) -> Space:
    found = list(sizes)
    return Space(len(found), sum(found))


def _space_of(folder: Path) -> Space:
    return _total(_sizes(folder))


def _sizes(folder: Path, without: Collection[Path] = ()) -> Iterator[int]:
    return (status.st_size for _, status in _files(folder, without))


def _files(
    folder: Path, without: Collection[Path] = ()
) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield the files below a folder; files that vanish are skipped."""
    for entry in walk_files(folder, set(map(str, without))):
        try:
            yield entry, entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue

"""The operation ``du``: the disk usage of models and of the whole store.

Sizes are those of the files on disk, not those in manifests. No blob is read. Of cold blobs, only those
are opened that the index of cold blobs does not list, or that no manifest references.
"""

from __future__ import annotations

import contextlib
import stat
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.files import allocated
from blobstore.errors import BlobstoreError
from blobstore.manifests.reference import Reference
from blobstore.store.catalog import lost_entry, read_catalog, read_entries
from blobstore.store.copies import copies
from blobstore.store.holdings import Holdings
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.partial_lock import SUFFIX as PARTIAL_LOCK
from blobstore.store.scan import digest_of, each_file, walk_files

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Names
    from blobstore.store.catalog import CatalogEntry
    from blobstore.store.layout import Folder
    from blobstore.store.references import References


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


@dataclass(frozen=True, kw_only=True)
class StoreDisk:
    """The manifests of a store and the files of its blobs, as they were at one time."""

    store: LocalStore
    entries: Mapping[Reference, CatalogEntry]
    holdings: Holdings
    blobs: DiskBlobs
    lost: Sequence[BlobstoreError] = ()
    """The errors of names whose manifests are lost."""

    @cached_property
    def needs(self) -> Mapping[Reference, Mapping[Digest, int]]:
        """The blobs of each manifest with their sizes in it; none if it cannot be read."""
        return {name: entry.blobs for name, entry in self.entries.items()}

    def owners(self) -> dict[Digest, list[int]]:
        """Return the positions in :attr:`entries` of the names whose manifests list each blob."""
        return self._places({name: _blobs(entry) for name, entry in self.entries.items()})

    def holders(self) -> dict[Digest, list[int]]:
        """Return the positions of the names that keep each blob, those that need it as a base included."""
        return self._places(self.holdings.of)

    def _places(self, blobs_of: Mapping[Reference, Iterable[int]]) -> dict[Digest, list[int]]:
        found: dict[int, list[int]] = {}
        for place, name in enumerate(self.entries):
            for number in blobs_of[name]:
                found.setdefault(number, []).append(place)
        return {self.holdings.references.digest(number): places for number, places in found.items()}


def read_disk(store: LocalStore) -> StoreDisk:
    """Read all manifests and the sizes of all blobs.

    Raises:
        StoreError: the store is not a folder or cannot be read.
    """
    entries = read_catalog(store)
    holdings = Holdings(store, entries)
    return StoreDisk(
        store=store,
        entries={entry.reference: entry for entry in entries},
        holdings=holdings,
        blobs=_measure_blobs(store, holdings.references, entries),
        lost=_lost_names(store),
    )


def _lost_names(store: LocalStore) -> list[BlobstoreError]:
    """Return the errors of names whose manifests are lost."""
    errors: list[BlobstoreError] = []
    lost = store.names.published.lost(on_error=errors.append)
    return [*(error for name in lost if (error := lost_entry(name).error)), *errors]


def usage_of(disk: StoreDisk, references: Sequence[Reference] = ()) -> StoreUsage:
    """Return the disk usage of some models, or all, of a store that was read."""
    store, entries, holdings, blobs = disk.store, disk.entries, disk.holdings, disk.blobs
    chosen = [entries[name] for name in references or entries if name in entries]
    held = set[int]().union(*holdings.of.values())
    needed = set[int]().union(*map(_blobs, entries.values()))
    together = set[int]().union(*(holdings.of[entry.reference] for entry in chosen))
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
                blobs=len(_blobs(entry)),
                size=blobs.space(holdings.of[entry.reference]).size,
                unique=blobs.space(holdings.freed([entry.reference])).size,
                faults=tuple(_faults(store, blobs, entry)),
                error=entry.error,
            )
            for entry in chosen
        ),
        together=blobs.space(together),
        together_unique=blobs.space(holdings.freed(entry.reference for entry in chosen)),
        cold=_total(blobs.cold_sizes.values()),
        saved=blobs.saved,
        names=len(entries),
        unreadable=(
            *(entry.error for entry in entries.values() if entry.error is not None),
            *disk.lost,
        ),
        referenced=blobs.space(held),
        without_sharing=sum(blobs.space(held).size for held in holdings.of.values()),
        bases=blobs.space(held - needed),
        unreferenced=blobs.space(blobs.all_sizes.keys() - holdings.counts.keys()),
        foreign=_total(blobs.foreign),
        manifests=_space_of(store.folder("manifests")),
        temporary=_space_of(parts["temporary"]),
        partial=_total(downloads),
        quarantine=_space_of(parts["quarantine"]),
        caches=_total(
            [
                *_sizes(
                    # Links to manifests take no space.
                    store.folder("headers").parent,
                    (*parts.values(), store.folder("published")),
                ),
                *locks,
                *(blobs.all_sizes.get(number, 0) for number in holdings.cached - held),
            ]
        ),
        copies=_total(size for folder in copies(store.root) for size in _sizes(folder)),
    )


@dataclass(frozen=True, kw_only=True)
class DiskBlobs:
    """The content of the folders of blobs. Blobs have the numbers of the store's manifests."""

    references: References
    all_sizes: Mapping[int, int]
    """Bytes of all blobs, hot and cold."""
    cold_sizes: Mapping[int, int]
    """Bytes of the cold blobs, and of bases whose hot file is gone."""
    saved: int
    doubtful: AbstractSet[int]
    """Referenced blobs that may be missing, or of another size than a manifest says."""
    foreign: Sequence[int]
    """Bytes of each file that is not a blob."""

    @cached_property
    def sizes(self) -> Mapping[Digest, int]:
        """The same as ``all_sizes`` by digest."""
        return {self.references.digest(number): size for number, size in self.all_sizes.items()}

    @cached_property
    def cold(self) -> Mapping[Digest, int]:
        """The same as ``cold_sizes`` by digest."""
        return {self.references.digest(number): size for number, size in self.cold_sizes.items()}

    def space(self, numbers: Iterable[int]) -> Space:
        """Return the space of those blobs that exist."""
        found = map(self.all_sizes.get, numbers)
        return _total([size for size in found if size is not None])


def _blobs(entry: CatalogEntry) -> Sequence[int]:
    """Return the numbers of the blobs of a manifest; none if it cannot be read."""
    return entry.known.blobs if entry.known is not None else ()


def _measure_blobs(
    store: LocalStore, references: References, entries: Sequence[CatalogEntry]
) -> DiskBlobs:
    number = references.number
    hot: dict[int, int] = {}
    foreign: list[int] = []
    known = references.by_file_name()
    for entry, status in _status_of(each_file(store.folder("blobs"))):
        blob = known[entry.name] if entry.name in known else _number_of(entry.name, references)
        if blob is None or not stat.S_ISREG(status.st_mode):
            foreign.append(status.st_size)
        else:
            hot[blob] = status.st_size
    cold_files = {number(digest): (digest, found) for digest, found in store.cold_files().items()}
    cold = {blob: found.st_size for blob, (_, found) in cold_files.items()}
    for entry, status in _files(store.folder("bases")):
        digest = digest_of(entry.name)
        if digest is not None and number(digest) not in hot:  # otherwise it is the same file
            cold[number(digest)] = cold.get(number(digest), 0) + status.st_size
    sizes = hot
    if cold:
        sizes = hot | {blob: hot.get(blob, 0) + size for blob, size in cold.items()}
    expected = set[int]().union(*map(_blobs, entries))
    disputed = {blob for entry in entries if entry.known for blob in entry.known.other_sizes}
    saved = 0
    intact = {}
    for blob, (digest, status) in cold_files.items():
        with contextlib.suppress(BlobstoreError):  # reported with the model that needs it
            base = store.base_of(digest, status)
            if blob not in hot:
                size = references.sizes[blob]  # those of other blobs are unknown
                is_known = blob in expected and blob not in disputed
                if not is_known or not store.cold_index.has(digest, status):
                    size = store.open_cold(digest).size
                elif base is None or number(base) in sizes:
                    intact[blob] = size
                saved += size - cold[blob]
    doubtful = {
        blob
        for blob in expected
        if blob in disputed
        or references.sizes[blob] != (intact if blob in cold else sizes).get(blob)
    }
    return DiskBlobs(
        references=references,
        all_sizes=sizes,
        cold_sizes=cold,
        saved=saved,
        doubtful=doubtful,
        foreign=foreign,
    )


def _number_of(name: str, references: References) -> int | None:
    """Return the number of the blob whose file has a name; None if that is not the file of a blob."""
    digest = digest_of(name)
    return None if digest is None else references.number(digest)


def _faults(store: LocalStore, found: DiskBlobs, entry: CatalogEntry) -> Iterator[BlobstoreError]:
    if entry.known is None or not found.doubtful:
        return
    sizes = found.references.sizes_in(entry.known)
    for number, size in zip(entry.known.blobs, sizes, strict=True):
        if number in found.doubtful:
            try:
                store.check_size(found.references.digest(number), size)
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
    return _status_of(walk_files(folder, set(map(str, without))))


def _status_of(
    files: Iterable[os.DirEntry[str]],
) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield files with their status; files that vanish are skipped."""
    for entry in files:
        try:
            yield entry, entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue

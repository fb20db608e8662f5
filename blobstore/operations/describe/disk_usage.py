"""The operation ``du``: the disk usage of models and of the whole store.

Sizes are those of the files on disk, not those in manifests. No blob is read. Of cold blobs, only those
are opened that the index of cold blobs does not list, or that no manifest references.
"""

from __future__ import annotations

import contextlib
import stat
from array import array
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import gt, mul, not_
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.files import allocated, status_of
from blobstore.core.fork import cached_property
from blobstore.core.gc_pause import gc_paused
from blobstore.errors import BlobstoreError
from blobstore.store.catalog import lost_entry, read_catalog, read_entries
from blobstore.store.copies import copies
from blobstore.store.holdings import Holdings
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models
from blobstore.store.partial_lock import SUFFIX as PARTIAL_LOCK
from blobstore.store.scan import ABSENT, digest_of, each_name, file_sizes, walk_files

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Names, Reference
    from blobstore.store.catalog import Catalog, CatalogEntry
    from blobstore.store.layout import Folder
    from blobstore.store.references import KnownManifest, References


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
class ModelsUsage:
    """The disk usage of some models."""

    models: tuple[ModelUsage, ...]
    together: Space
    """The blobs of the models and their bases, each once."""
    together_unique: Space
    """The blobs among these that nothing else needs; they are freed once all of the names are removed."""
    unreadable: tuple[BlobstoreError, ...]
    """Errors of manifests of the whole store. Their blobs count as unreferenced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage(ModelsUsage):
    """The disk usage of a store, and of the requested models. Every file counts in exactly one space."""

    cold: Space
    """Cold blobs, including those with a hot file. They also count in the other spaces."""
    saved: int
    """Bytes that compression saves, counted for blobs that are only cold."""
    names: int
    """Names in the whole store."""
    referenced: Space
    """Blobs that manifests reference, and their bases."""
    without_sharing: int
    """Bytes that these would take if every name had its own copy."""
    bases: Space
    """Bases among these that no manifest references. They also count in ``referenced``."""
    below: Space
    """Blobs that manifests reference and only the shared store has. They count nowhere else."""
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
    asked = named_models(store, references)
    store = store.holder(*asked)
    read_entries(store, asked)  # fails if one of them does not exist
    with gc_paused():  # it would look at all entries again and again
        return usage_of(read_disk(store), asked)


def measure_models(references: Names, *, store: StoreLike = None) -> ModelsUsage:
    """Return the disk usage of models alone; only their own blobs are looked at.

    Raises as :func:`measure_usage`.
    """
    store = LocalStore.of(store)
    asked = named_models(store, references)
    store = store.holder(*asked)
    read_entries(store, asked)  # fails if one of them does not exist
    catalog = read_catalog(store)
    holdings = Holdings(store, catalog)
    entries = [entry for name in asked if (entry := catalog.get(name))]
    found = _Files(array("q", [ABSENT]) * len(catalog.references), [], {}, {})
    for number in set[int]().union(*(holdings.by(entry.known) for entry in entries)):
        digest = catalog.references.digest(number)
        if hot := status_of(store.blob_path(digest)):
            found.hot[number] = hot.st_size
        if base := status_of(store.base_path(digest)):
            found.bases[number] = base.st_size
        if cold := status_of(store.cold_path(digest)):
            found.cold[digest] = cold
    expected = set[int]().union(*(_blobs(entry.known) for entry in entries))
    blobs = _measure_blobs(store, catalog.references, expected, found)
    return _models_usage(store, catalog, holdings, blobs, entries)


@dataclass(frozen=True, kw_only=True)
class StoreDisk:
    """The manifests of a store and the files of its blobs, as they were at one time."""

    store: LocalStore
    catalog: Catalog
    holdings: Holdings
    blobs: DiskBlobs
    entries: Mapping[Reference, CatalogEntry]
    """The names that are described, sorted."""
    lost: Sequence[BlobstoreError] = ()
    """The errors of names whose manifests are lost."""

    @cached_property
    def needs(self) -> Mapping[Reference, Mapping[Digest, int]]:
        """The blobs of each manifest with their sizes in it; none if it cannot be read."""
        return {name: entry.blobs for name, entry in self.entries.items()}

    @cached_property
    def sizes(self) -> Mapping[Digest, int]:
        """Bytes on disk of the blobs that :attr:`entries` keep, without those that are not there."""
        found = ((number, self.blobs.all_sizes[number]) for number in self.holders)
        return {self.blobs.references.digest(number): size for number, size in found if size >= 0}

    @cached_property
    def owners(self) -> Mapping[Digest, list[int]]:
        """The positions in :attr:`entries` of the names whose manifests list each blob."""
        found = self._places(_blobs)
        return {self.blobs.references.digest(number): places for number, places in found.items()}

    @cached_property
    def holders(self) -> Mapping[int, list[int]]:
        """The positions of the names that keep each blob, those that need it as a base included."""
        return self._places(self.holdings.by)

    def _places(
        self, blobs_of: Callable[[KnownManifest | None], Iterable[int]]
    ) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for place, entry in enumerate(self.entries.values()):
            for number in blobs_of(entry.known):
                found.setdefault(number, []).append(place)
        return found


def read_disk(store: LocalStore) -> StoreDisk:
    """Read all manifests and the sizes of all blobs.

    Raises:
        StoreError: the store is not a folder or cannot be read.
    """
    catalog = read_catalog(store)
    holdings = Holdings(store, catalog)
    references = catalog.references
    uses = references.uses(known.row for known in catalog.known())
    expected = list(compress(range(len(uses)), uses))
    return StoreDisk(
        store=store,
        catalog=catalog,
        holdings=holdings,
        blobs=_measure_blobs(store, references, expected, _list_files(store, references)),
        entries={entry.reference: entry for entry in catalog},
        lost=_lost_names(store),
    )


def _lost_names(store: LocalStore) -> list[BlobstoreError]:
    """Return the errors of names whose manifests are lost."""
    errors: list[BlobstoreError] = []
    lost = store.names.published.lost(on_error=errors.append)
    return [*(error for name in lost if (error := lost_entry(name).error)), *errors]


def usage_of(disk: StoreDisk, references: Sequence[Reference] = ()) -> StoreUsage:
    """Return the disk usage of some models, or all, of a store that was read."""
    store, catalog, holdings, blobs = disk.store, disk.catalog, disk.holdings, disk.blobs
    chosen = [disk.entries[name] for name in references or disk.entries if name in disk.entries]
    models = _models_usage(store, catalog, holdings, blobs, chosen)
    counts, by_names = holdings.counts, holdings.uses(catalog.known())
    direct = catalog.references.uses(known.row for known in catalog.known())
    downloads: list[int] = []
    locks: list[int] = []
    for entry, status in _files(store.folder("partial")):
        kind = locks if entry.name.endswith(PARTIAL_LOCK) else downloads
        kind.append(allocated(status))
    downloads += (allocated(status) for _, status in _files(store.folder("downloads")))
    names: tuple[Folder, ...] = ("temporary", "partial", "downloads", "quarantine", "cold", "bases")
    parts = {name: store.folder(name) for name in names}
    return StoreUsage(
        models=models.models,
        together=models.together,
        together_unique=models.together_unique,
        unreadable=(*models.unreadable, *disk.lost),
        cold=_total(blobs.cold_sizes.values()),
        saved=blobs.saved,
        names=len(catalog),
        referenced=blobs.space_if(by_names),
        without_sharing=sum(map(mul, by_names, blobs.all_sizes))
        + sum(compress(by_names, map(ABSENT.__eq__, blobs.all_sizes))),
        bases=blobs.space_if(map(gt, map(not_, direct), map(not_, by_names))),
        below=_total(
            catalog.references.sizes[number]
            for number, uses in enumerate(direct if store.shared is not None else ())
            if uses
            and blobs.all_sizes[number] == ABSENT
            and store.is_shared(catalog.references.digest(number))
        ),
        unreferenced=blobs.space_if(chain(map(not_, counts), repeat(True))),
        foreign=_total(blobs.foreign),
        manifests=Space(*catalog.files()),
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
                blobs.space(one for one in holdings.cached if not by_names[one]).size,
            ]
        ),
        copies=_total(size for folder in copies(store.root) for size in _sizes(folder)),
    )


def _models_usage(
    store: LocalStore,
    catalog: Catalog,
    holdings: Holdings,
    blobs: DiskBlobs,
    entries: Sequence[CatalogEntry],
) -> ModelsUsage:
    counts = holdings.counts
    uses = holdings.uses(entry.known for entry in entries if entry.known is not None)
    sizes, own, unique = [0] * len(uses), [0] * len(uses), list[int]()
    columns = (range(len(uses)), blobs.all_sizes, uses, counts)
    for number, size, use, count in zip(*(compress(one, uses) for one in columns), strict=True):
        if use == count:
            unique.append(size)
        if size != ABSENT:
            sizes[number] = size
            own[number] = size if count == 1 else 0
    held = [holdings.by(entry.known) for entry in entries]
    # Without loops in Python: there may be millions of references.
    return ModelsUsage(
        models=tuple(
            ModelUsage(
                reference=entry.reference,
                blobs=0 if entry.known is None else entry.known.record.length,
                size=sum(map(sizes.__getitem__, kept)),
                unique=sum(map(own.__getitem__, kept)),
                faults=tuple(_faults(store, blobs, entry)),
                error=entry.error,
            )
            for entry, kept in zip(entries, held, strict=True)
        ),
        together=blobs.space_if(uses),
        together_unique=_total(unique),
        unreadable=tuple(one.error for one in catalog.unreadable() if one.error is not None),
    )


@dataclass(frozen=True, kw_only=True)
class DiskBlobs:
    """The content of the folders of blobs. Blobs have the numbers of the store's manifests."""

    references: References
    all_sizes: Sequence[int]
    """Bytes of all blobs by number, hot and cold; below 0 for those that are not there."""
    cold_sizes: Mapping[int, int]
    """Bytes of the cold blobs, and of bases whose hot file is gone."""
    saved: int
    doubtful: AbstractSet[int]
    """Referenced blobs that may be missing, or of another size than a manifest says."""
    foreign: Sequence[int]
    """Bytes of each file that is not a blob."""

    def space(self, numbers: Iterable[int]) -> Space:
        """Return the space of those blobs that exist."""
        return _total(map(self.all_sizes.__getitem__, numbers))

    def space_if(self, selectors: Iterable[object]) -> Space:
        """Return the space of those blobs that exist and have a true selector, by number."""
        return _total(compress(self.all_sizes, selectors))


class _Files(NamedTuple):
    """The files of blobs."""

    hot: array[int]
    """Bytes by number; ``ABSENT`` for those that are not there."""
    foreign: list[int]
    bases: dict[int, int]
    """Bytes of second links by number."""
    cold: dict[Digest, os.stat_result]


def _blobs(known: KnownManifest | None) -> Sequence[int]:
    """Return the numbers of the blobs of a manifest; none if it cannot be read."""
    return known.blobs if known is not None else ()


def _list_files(store: LocalStore, references: References) -> _Files:
    """List the files of all blobs; those that the manifests do not reference get numbers."""
    folder, foreign = store.folder("blobs"), list[int]()
    hot = file_sizes(folder, references.file_names())
    unknown: dict[Digest, int] = {}
    # Looking up every name would take a third of the time of the calls.
    names = each_name(folder)
    if len(names) != len(hot) - hot.count(ABSENT):
        others = set(names)
        others.difference_update(compress(references.file_names(), map(ABSENT.__ne__, hot)))
        for name in others:
            status = status_of(folder / name)
            if status is None:
                continue
            digest = digest_of(name)
            if stat.S_ISDIR(status.st_mode):
                foreign += _sizes(folder / name)
            elif digest is not None and stat.S_ISREG(status.st_mode):
                unknown[digest] = status.st_size
            else:
                foreign.append(status.st_size)
    links = {digest_of(one.name): status.st_size for one, status in _files(store.folder("bases"))}
    bases = {digest: size for digest, size in links.items() if digest is not None}
    cold = store.cold_files()
    numbers = references.numbers({*unknown, *bases, *cold})
    hot.extend([ABSENT] * (len(references) - len(hot)))
    for digest, size in unknown.items():
        hot[numbers[digest]] = size
    return _Files(hot, foreign, {numbers[one]: size for one, size in bases.items()}, cold)


def _measure_blobs(
    store: LocalStore, references: References, expected: Collection[int], files: _Files
) -> DiskBlobs:
    """Return the sizes of blobs; ``expected`` are those that manifests reference."""
    hot, numbers = files.hot, references.numbers(files.cold)
    cold = {numbers[digest]: status.st_size for digest, status in files.cold.items()}
    for number, size in files.bases.items():
        if hot[number] == ABSENT:  # otherwise it is the same file
            cold[number] = cold.get(number, 0) + size
    sizes = array("q", hot)
    for number, size in cold.items():
        sizes[number] = max(hot[number], 0) + size
    disputed = {number for others in references.other_sizes.values() for number in others}
    saved = 0
    right = array("q", hot)
    """The bytes that blobs have when they are decoded, as far as that is known."""
    is_expected = bytearray(len(hot))
    for number in expected if cold else ():
        is_expected[number] = number not in disputed
    for digest, status in files.cold.items():
        number = numbers[digest]
        with contextlib.suppress(BlobstoreError):  # reported with the model that needs it
            base = store.base_of(digest, status)
            if hot[number] == ABSENT:
                size = references.sizes[number]  # those of other blobs are unknown
                if not is_expected[number] or not store.cold_index.has(digest, status):
                    size = store.open_cold(digest).size
                elif base is None or sizes[references.number(base)] != ABSENT:
                    right[number] = size
                saved += size - cold[number]
    doubtful = {
        number
        for number in expected
        if references.sizes[number] != right[number] or number in disputed
    }
    return DiskBlobs(
        references=references,
        all_sizes=sizes,
        cold_sizes=cold,
        saved=saved,
        doubtful=doubtful,
        foreign=files.foreign,
    )


def _faults(store: LocalStore, found: DiskBlobs, entry: CatalogEntry) -> Iterator[BlobstoreError]:
    if entry.known is None or not found.doubtful:
        return
    for number, size in zip(entry.known.blobs, entry.known.sizes, strict=True):
        if number in found.doubtful:
            try:
                store.check_size(found.references.digest(number), size)
            except BlobstoreError as error:
                yield error


def _total(sizes: Iterable[int]) -> Space:
    found = list(sizes)  # sums without a loop in Python: there may be very many
    absent = found.count(ABSENT)
    return Space(len(found) - absent, sum(found) - ABSENT * absent)


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

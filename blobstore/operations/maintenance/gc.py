"""The operation ``gc``: deletes blobs that no manifest references, and files of dead processes.

First, all manifests are read without a lock. Then blobs are removed in batches, each under the store's
exclusive lock: leases are read, manifests that have changed are read again, and blobs that are still
garbage are removed. Leases are read before manifests: a process that has released its lease has already
published the manifest that references its blobs. The work is linear in blobs and layers.

The base of a delta-encoded blob is kept as long as that blob, even if no manifest references the base.
Delta-encoded blobs are removed before their bases, so that no delta ever lacks its base.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.files import read_regular, sync_folder
from blobstore.errors import BlobstoreError, UsageError
from blobstore.manifests.check import MAX_CONFIG_SIZE, promise
from blobstore.store.local import LocalStore
from blobstore.store.reachability import ReachableBlobs
from blobstore.store.scan import digest_of, list_names, scan_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

GRACE: Final = 3600.0
"""The default age in seconds from which blobs are removed; other programs hold no leases."""
_BATCH = 1000
"""Files that are removed before the lock is released for other processes."""
_PREFIX = Digest("").file_name


class Removed(NamedTuple):
    """A file that was removed, or would be."""

    path: Path
    """Below the root of the store."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The result of :func:`collect_garbage`."""

    blobs: tuple[Removed, ...] = field(repr=False)
    """Blobs that no manifest references, hot and cold."""
    leftovers: tuple[Removed, ...] = field(repr=False)
    """Temporary files and leases of dead processes, and caches of removed models."""
    folders: tuple[Path, ...]
    """Empty folders of manifests, below the root."""
    kept: int
    """Blobs that no manifest references, but that are leased or too young."""
    kept_size: int
    """Bytes of these."""
    bases: int = 0
    """Blobs that no manifest references, but that are bases of delta-encoded blobs."""
    bases_size: int = 0
    """Bytes of these."""

    @property
    def size(self) -> int:
        """Bytes that were freed, or would be."""
        return sum(item.size for item in (*self.blobs, *self.leftovers))


def collect_garbage(
    store: LocalStore | str | os.PathLike[str] | None = None,
    *,
    older_than: float = GRACE,
    dry_run: bool = False,
) -> Collected:
    """Remove blobs that no manifest references, files of dead processes, and empty folders.

    Blobs that a running import, copy or load has leased are never removed.

    Args:
        store: the store or its path; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        older_than: keep blobs that were written within this many seconds.
        dry_run: remove nothing; report what would be removed.

    Raises:
        InvalidManifest: a manifest is damaged, so that the blobs it needs are unknown. Nothing is
            removed.
        StoreBusy: the store's lock could not be acquired in time.
        StoreError: the store cannot be read or written.
        UsageError: ``older_than`` is negative.
    """
    if not older_than >= 0:
        raise UsageError(f"older_than must be 0 seconds or more, got {older_than}")
    store = LocalStore.of(store)
    store.check_root()
    if not store.root.exists():
        return Collected(blobs=(), leftovers=(), folders=(), kept=0, kept_size=0)
    with store.writing():
        collection = _Collection(store, older_than, dry_run=dry_run)
        deltas, others = collection.candidates()
        blobs = [*collection.sweep(deltas), *collection.sweep(others)]
        with collection.lock():
            leftovers = tuple(collection.remove_leftovers())
            folders = tuple(collection.remove_empty_folders())
    return Collected(
        blobs=tuple(blobs),
        leftovers=leftovers,
        folders=folders,
        kept=len(collection.kept),
        kept_size=sum(collection.kept),
        bases=len(collection.kept_bases),
        bases_size=sum(collection.kept_bases),
    )


class _Needed(NamedTuple):
    """The hex digests of needed blobs, in separate sets: a union would be copied for each batch."""

    reached: set[str]
    leased: set[str]
    bases: set[str]
    """Bases of delta-encoded blobs that are needed or too young."""

    def has(self, hex_digest: str) -> bool:
        """Return whether a blob is needed."""
        return self.has_itself(hex_digest) or hex_digest in self.bases

    def has_itself(self, hex_digest: str) -> bool:
        """Return whether a blob is needed for itself, and not only as a base."""
        return hex_digest in self.reached or hex_digest in self.leased


class _Collection:
    """The steps of a collection, in order, and what they share."""

    def __init__(self, store: LocalStore, older_than: float, *, dry_run: bool) -> None:
        self._store = store
        self._older_than = older_than
        self._is_dry = dry_run
        self._marks = ReachableBlobs(store)
        self.kept: list[int] = []
        """The sizes of unreferenced blobs that are leased or too young."""
        self.kept_bases: list[int] = []
        self._gone: set[str] = set()
        """Cold blobs that a dry run would have removed."""
        self._keeps_bases = False
        """Whether a needed blob is missing. Any base may be its base, so all bases are kept."""

    def candidates(self) -> tuple[list[Path], list[Path]]:
        """Return the files of unreferenced blobs: first delta-encoded blobs, then all others."""
        self._marks.update()
        reached = self._marks.reached()
        cold, hot = self._store.folder("cold"), self._store.folder("blobs")
        names = {folder: list_names(folder) for folder in (cold, hot)}
        if list_names(self._store.folder("bases")):
            # A referenced blob is missing, for example, if a disk is not mounted.
            there = {name.removeprefix(_PREFIX) for found in names.values() for name in found}
            self._keeps_bases = not reached <= there
        coded = self._store.cold_bases()
        deltas: list[Path] = []
        others: list[Path] = []
        for folder, found in names.items():
            for name in found:
                if name.removeprefix(_PREFIX) not in reached:
                    digest = digest_of(name)
                    if digest is not None:
                        is_delta = folder == cold and digest in coded
                        (deltas if is_delta else others).append(folder / name)
        return deltas, others

    def sweep(self, candidates: Iterable[Path]) -> Iterator[Removed]:
        """Remove those candidates that are garbage still, in batches."""
        rest = iter(candidates)
        while batch := list(islice(rest, _BATCH)):
            with self.lock():
                leased = self._store.read_leases().digests
                self._marks.update()
                needed = self._needed(leased)
                lost = self._marks.lost()
                for path in batch:
                    try:
                        status = path.lstat()
                    except FileNotFoundError:
                        continue
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    hex_digest = path.name.removeprefix(_PREFIX)
                    is_needed = needed.has(hex_digest) or bool(lost and _promise_of(path) in lost)
                    if is_needed or _age(status) < self._older_than:
                        is_base = hex_digest in needed.bases
                        (self.kept_bases if is_base else self.kept).append(status.st_size)
                        continue
                    if self._is_dry and path.parent == self._store.folder("cold"):
                        self._gone.add(path.name)
                    yield self._remove(path, status.st_size)
                if not self._is_dry:
                    for folder in dict.fromkeys(path.parent for path in batch):
                        sync_folder(folder)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Return the lock under which files are removed."""
        return self._store.reading_lock() if self._is_dry else self._store.exclusive_lock()

    def remove_leftovers(self) -> Iterator[Removed]:
        """Remove files of dead processes. The lock keeps others from publishing a manifest."""
        folder = self._store.folder
        leased = self._store.read_leases()
        self._marks.update()
        temporary = [
            entry
            for entry in scan_folder(folder("temporary"))
            if entry.name.rpartition("-")[0] not in leased.names
        ]
        known = {digest.hex for digest in self._marks.manifests()}
        caches = [entry for entry in scan_folder(folder("headers")) if entry.name not in known]
        caches += [entry for entry in scan_folder(folder("headers").parent) if entry.name[0] == "."]
        bases = {f"{_PREFIX}{base}" for base in self._needed(leased.digests).bases}
        links = [entry for entry in scan_folder(folder("bases")) if entry.name not in bases]
        # Caches are written without the lock, so young ones are kept.
        ages = [(path, 0.0) for path in leased.dead]
        for entries, age in ((temporary, 0.0), (caches, self._older_than), (links, 0.0)):
            ages += [(Path(entry.path), age) for entry in entries]
        ages += [(path, 0.0) for path in self._store.lost_history()]
        for path, age in ages:
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if _age(status) >= age:
                    yield self._remove(path, status.st_size)

    def remove_empty_folders(self) -> Iterator[Path]:
        """Remove empty folders of manifests; a folder with only empty folders is empty too."""
        empty: set[str] = set()
        for folder, inner, files in os.walk(self._store.folder("manifests"), topdown=False):
            full = [name for name in inner if str(Path(folder, name)) not in empty]
            if full or files or folder == str(self._store.folder("manifests")):
                continue
            empty.add(folder)
            with contextlib.suppress(OSError):  # Ollama has just written something there
                if not self._is_dry:
                    Path(folder).rmdir()
                yield Path(folder).relative_to(self._store.root)

    def _needed(self, leased: Iterable[Digest]) -> _Needed:
        """Return the needed blobs, including the bases of all delta-encoded blobs that stay."""
        needed = _Needed(self._marks.reached(), {digest.hex for digest in leased}, set())
        for digest, status in self._store.cold_files().items():
            if digest.file_name not in self._gone:
                # An unreadable base matters only if the blob is needed and has no hot form.
                must_be_known = needed.has_itself(digest.hex) and not self._store.has_hot(digest)
                base = self._store.base_of(digest, status, must_be_known=must_be_known)
                needed.bases.update([base.hex] if base is not None else [])
        if self._keeps_bases:
            links = map(digest_of, list_names(self._store.folder("bases")))
            needed.bases.update(link.hex for link in links if link is not None)
        return needed

    def _remove(self, path: Path, size: int) -> Removed:
        if not self._is_dry:
            path.unlink(missing_ok=True)
        return Removed(path.relative_to(self._store.root), size)


def _promise_of(path: Path) -> str | None:
    """Return the digest of the layer list that a config blob holds; None for other blobs."""
    try:
        return promise(read_regular(path, MAX_CONFIG_SIZE))
    except (BlobstoreError, OSError):
        return None


def _age(status: os.stat_result) -> float:
    # If the clock was set back, a file may be from the future: its age is 0.
    return max(0.0, time.time() - status.st_mtime)

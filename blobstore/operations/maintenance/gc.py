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
from dataclasses import dataclass
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

    blobs: tuple[Removed, ...]
    """Blobs that no manifest references, hot and cold."""
    leftovers: tuple[Removed, ...]
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
        return _Collection(store, older_than, dry_run=dry_run).run()


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
    def __init__(self, store: LocalStore, older_than: float, *, dry_run: bool) -> None:
        self._store = store
        self._older_than = older_than
        self._is_dry = dry_run
        self._marks = ReachableBlobs(store)
        self._kept: list[int] = []
        self._kept_bases: list[int] = []
        self._gone: set[str] = set()
        """Cold blobs that a dry run would have removed."""
        self._keeps_bases = False
        """Whether a needed blob is missing. Any base may be its base, so all bases are kept."""

    def run(self) -> Collected:
        self._marks.update()
        self._keeps_bases = self._is_any_missing()
        deltas, others = self._unreached()
        blobs = [*self._sweep(deltas), *self._sweep(others)]
        with self._lock():
            leftovers = [*self._leftovers()]
            folders = [*self._empty_folders()]
        return Collected(
            blobs=tuple(blobs),
            leftovers=tuple(leftovers),
            folders=tuple(folders),
            kept=len(self._kept),
            kept_size=sum(self._kept),
            bases=len(self._kept_bases),
            bases_size=sum(self._kept_bases),
        )

    def _is_any_missing(self) -> bool:
        """Return whether a referenced blob is missing, for example because a disk is not mounted."""
        if not list_names(self._store.folder("bases")):
            return False  # there are no bases to lose
        there = {*list_names(self._store.folder("blobs")), *list_names(self._store.folder("cold"))}
        return not self._marks.reached() <= {name.removeprefix(_PREFIX) for name in there}

    def _unreached(self) -> tuple[list[Path], list[Path]]:
        """Return the files of unreferenced blobs: first delta-encoded blobs, then all others."""
        reached = self._marks.reached()
        deltas = self._store.cold_bases()
        found: tuple[list[Path], list[Path]] = ([], [])
        for folder in (self._store.folder("cold"), self._store.folder("blobs")):
            for name in list_names(folder):
                if name.removeprefix(_PREFIX) not in reached:
                    digest = digest_of(name)
                    if digest is not None:  # not a blob
                        is_delta = folder == self._store.folder("cold") and digest in deltas
                        found[not is_delta].append(folder / name)
        return found

    def _needed(self, leased: Iterable[Digest]) -> _Needed:
        needed = _Needed(self._marks.reached(), {digest.hex for digest in leased}, set())
        needed.bases.update([base.hex for base in self._needed_bases(needed)])
        return needed

    def _needed_bases(self, needed: _Needed) -> Iterator[Digest]:
        """Yield the bases of all delta-encoded blobs that stay."""
        if self._keeps_bases:
            for name in list_names(self._store.folder("bases")):
                digest = digest_of(name)
                if digest is not None:
                    yield digest
        for digest, status in self._store.cold_files().items():
            if digest.file_name not in self._gone:
                # An unreadable base matters only if the blob is needed and has no hot form.
                must_be_known = needed.has_itself(digest.hex) and not self._store.has_hot(digest)
                base = self._store.base_of(digest, status, must_be_known=must_be_known)
                if base is not None:
                    yield base

    def _sweep(self, candidates: Iterable[Path]) -> Iterator[Removed]:
        rest = iter(candidates)
        while batch := list(islice(rest, _BATCH)):
            with self._lock():
                leased = self._store.read_leases().digests
                self._marks.update()
                needed = self._needed(leased)
                lost = self._marks.lost()
                for path in batch:
                    hex_digest = path.name.removeprefix(_PREFIX)
                    is_needed = needed.has(hex_digest) or bool(lost and _promise_of(path) in lost)
                    is_base = hex_digest in needed.bases
                    yield from self._remove_blob(path, is_needed=is_needed, is_base=is_base)
                if not self._is_dry:
                    for folder in dict.fromkeys(path.parent for path in batch):
                        sync_folder(folder)

    def _lock(self) -> contextlib.AbstractContextManager[None]:
        return self._store.reading_lock() if self._is_dry else self._store.exclusive_lock()

    def _remove_blob(self, path: Path, *, is_needed: bool, is_base: bool) -> Iterator[Removed]:
        try:
            status = path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode):
            return
        if is_needed or _age(status) < self._older_than:
            (self._kept_bases if is_base else self._kept).append(status.st_size)
        else:
            if self._is_dry and path.parent == self._store.folder("cold"):
                self._gone.add(path.name)
            yield self._remove(path, status.st_size)

    def _leftovers(self) -> Iterator[Removed]:
        """Remove files of dead processes. The lock keeps others from publishing a manifest."""
        leased = self._store.read_leases()
        self._marks.update()
        temporary = [
            entry
            for entry in scan_folder(self._store.folder("temporary"))
            if entry.name.rpartition("-")[0] not in leased.names
        ]
        known = {digest.hex for digest in self._marks.manifests()}
        caches = [
            entry for entry in scan_folder(self._store.folder("headers")) if entry.name not in known
        ]
        caches += [
            entry
            for entry in scan_folder(self._store.folder("headers").parent)
            if entry.name[0] == "."
        ]
        caches = [entry for entry in caches if self._is_old(entry)]
        bases = {base.file_name for base in self._needed_bases(self._needed(leased.digests))}
        pins = [
            entry for entry in scan_folder(self._store.folder("bases")) if entry.name not in bases
        ]
        for path in (*leased.dead, *(Path(entry.path) for entry in (*temporary, *caches, *pins))):
            with contextlib.suppress(FileNotFoundError):  # caches are written without the lock
                yield self._remove(path, path.lstat().st_size)

    def _is_old(self, entry: os.DirEntry[str]) -> bool:
        try:
            return _age(entry.stat(follow_symlinks=False)) >= self._older_than
        except FileNotFoundError:
            return False

    def _empty_folders(self) -> Iterator[Path]:
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

"""The operation ``gc``: deletes blobs that no manifest references, and files of dead processes.

First, without a lock, the file of references says which blobs may be garbage, and all manifests are
searched for these. Then blobs are removed in batches, each under the store's exclusive lock: leases are
read, manifests that have changed are read again, and blobs that are still garbage are removed. Leases
are read before manifests: a process that has released its lease has already published the manifest that
references its blobs. A batch ends after a fraction of a second, so that no other process waits longer.

The base of a delta-encoded blob is kept as long as that blob, even if no manifest references the base.
Delta-encoded blobs are removed before their bases, so that no delta ever lacks its base.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core import interrupts
from blobstore.core.arguments import seconds_of
from blobstore.core.digest import Digest
from blobstore.core.files import FileVersion, allocated, is_there, sync_folder
from blobstore.core.untrusted_folder import Folder
from blobstore.errors import BlobDamaged, ImplausibleGarbage
from blobstore.operations.maintenance.collected import Collected, KeptBlob, Removed
from blobstore.operations.maintenance.lost_manifests import GRACE, age_of, implausible, promise_of
from blobstore.operations.sign.require_trust import unusable_signatures
from blobstore.store.copies import remove_copies
from blobstore.store.fetched import BROUGHT, brought_name
from blobstore.store.leases import Leases
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.locks import try_lock
from blobstore.store.notes import repository_key
from blobstore.store.partial_lock import SUFFIX as PARTIAL_LOCK
from blobstore.store.published import hex_digests_of
from blobstore.store.reachability import ReachableBlobs
from blobstore.store.scan import (
    digest_of,
    digests_of,
    each_file,
    each_name,
    files_without,
    scan_folder,
    walk_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import TypeVar

    from blobstore.manifests.reference import Reference
    from blobstore.operations.maintenance.collected import Reason

    Result = TypeVar("Result")

PARTIAL_GRACE: Final = 7 * 86400.0
"""The same for unfinished downloads, which the next pull of the model continues."""
_HOLD = 0.2
"""Seconds after which the lock is released for other processes, or as many as it took to read what changed."""
_PAUSE = 0.02
"""Seconds until it is taken again: longer than waiting processes sleep between two tries."""
_OLD = re.compile(r"(upload|lock)-|references-[0-9]+-[0-9a-f]{64}")
"""Files about remotes that are removed by their age."""
_PREFIX = Digest("").file_name


def collect_garbage(
    *,
    store: StoreLike = None,
    older_than: float | str | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> Collected:
    """Remove blobs that no manifest references, files of dead processes, and empty folders.

    Blobs that a running import, copy or load has leased are never removed.

    Args:
        store: the store or its path; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        older_than: keep files that were written within this many seconds, or within a text such as ``1h``;
            by default an hour for blobs, and a week for unfinished downloads.
        dry_run: remove nothing; report what would be removed.
        force: remove blobs even if there are no manifests, if over 90 % of all blobs would go, or if they are
            those of names whose manifests are lost; such names are forgotten.

    Returns:
        what was removed or kept, with sizes in bytes.

    Raises:
        ImplausibleGarbage: so much would be removed that manifests may be missing. Nothing is removed.
        InvalidManifest: a manifest is damaged, so that the blobs it needs are unknown. Nothing is
            removed.
        StoreBusy: the store's lock could not be acquired in time.
        StoreError: the store cannot be read or written.
        UsageError: ``older_than`` is negative, or no time.
    """
    age = None if older_than is None else seconds_of(older_than, "older_than")
    store = LocalStore.of(store)
    store.check_root()
    if not store.root.exists():
        return Collected()
    with store.writing(is_dry=dry_run):
        collection = _Collection(store, age, dry_run=dry_run, force=force)
        deltas, others = collection.candidates()
        refusal = "" if force else collection.refusal([*deltas, *others])
        if refusal and not dry_run:
            advice = "if the models were removed on purpose, run gc with force=True"
            if collection.has_lost:
                advice = f"'blobstore repair' restores lost manifests; {advice}"
            raise ImplausibleGarbage(refusal, advice=advice)
        blobs = [*collection.sweep(deltas), *collection.sweep(others)]
        collection.look_for_leftovers()
        with collection.lock():
            leftovers = tuple(collection.remove_leftovers())
            folders = tuple(collection.remove_empty_folders())
            if not dry_run:
                store.names.published.update(forget_lost=force)
        removed = remove_copies(store.root, is_dry=dry_run)
        leftovers += tuple(map(Removed._make, removed))
        if not dry_run:
            store.prune_signatures()
        collection.save()
    return Collected(
        blobs=tuple(blobs),
        leftovers=leftovers,
        folders=folders,
        kept_blobs=tuple(collection.kept),
        refusal=refusal,
    )


def remove_blobs(store: LocalStore, digests: Collection[str]) -> Counter[str]:
    """Remove those of some blobs that nothing references and nobody uses, complete or not; return the bytes of each.

    Temporary files and leases of dead processes are removed, too.

    Args:
        store: the store.
        digests: hex digests.

    Raises as :func:`collect_garbage`, but never ImplausibleGarbage.
    """
    with store.writing():
        collection = _Collection(store, 0.0, dry_run=False)
        found = collection.candidates(digests)
        removed = [item for part in found for item in collection.sweep(part)]
        with collection.lock():
            removed += collection.remove_unfinished(digests)
    freed = Counter[str]()
    for item in removed:
        freed[item.path.name.removeprefix(_PREFIX)[:64]] += item.size
    return freed


class _Candidate(NamedTuple):
    """The file of an unreferenced blob."""

    folder: Path
    below: Path
    """The folder within the store."""
    name: str
    digest: Digest


class _Collection:
    """The steps of a collection, in order, and what they share."""

    def __init__(
        self, store: LocalStore, older_than: float | None, *, dry_run: bool, force: bool = False
    ) -> None:
        self._store = store
        self._root = Folder(store.root)
        self._force = force
        self.older_than = GRACE if older_than is None else older_than
        self._partial_age = PARTIAL_GRACE if older_than is None else older_than
        self._is_dry = dry_run
        self._marks = ReachableBlobs(store)
        self._history = store.names.whole_history()
        self._lost: dict[Reference, bytes] = {}
        """The manifests that were lost before the collection."""
        self._lost_blobs: set[str] = set()
        self._suspects: set[Digest] = set()
        """Manifests with signatures that nobody can use."""
        self._leases = Leases({}, {})
        self.kept: list[KeptBlob] = []
        self._blob_count = 0
        """Files of blobs, hot and cold."""
        self._gone: set[Digest] = set()
        """Cold blobs that a dry run would have removed."""
        self._cold: dict[Digest, os.stat_result] = {}
        self._deltas: dict[Digest, list[Digest]] = {}
        """The delta-encoded blobs by their bases."""
        self._unreadable: dict[Digest, BlobDamaged] = {}
        """Cold blobs whose base is unknown, and why."""
        self._cold_version: list[FileVersion | None] = []
        """Identifies the content of the folder of cold blobs."""
        self._possible_bases: set[Digest] = set()
        """All bases, if a needed blob is missing: any of them may be its base."""

    @property
    def has_lost(self) -> bool:
        """Whether names have lost their manifests."""
        return bool(self._lost)

    def candidates(
        self, only: Collection[str] | None = None
    ) -> tuple[list[_Candidate], list[_Candidate]]:
        """Return the files of unreferenced blobs, or ``only`` of these: first delta-encoded blobs, then all others."""
        self._marks.update()
        self._find_deltas()
        self._lost = {} if self._force else self._store.names.published.lost()
        self._lost_blobs = hex_digests_of(self._lost)
        cold, hot = self._store.folder("cold"), self._store.folder("blobs")
        garbage = {folder: self._unreached(folder, only) for folder in (cold, hot)}
        digests = digests_of(chain.from_iterable(garbage.values()))
        links = digests_of(each_name(self._store.folder("bases")))
        # Such a link may be the base of a missing blob, and any manifest may reference that.
        is_doubtful = not all(map(self._is_base, links))
        if digests or is_doubtful or any(self._store.signed_manifests()):
            self._marks.prove(None if is_doubtful else {digest.hex for digest in digests})
        reached = self._marks.reached()
        if links and not reached <= self._there(reached):
            # A referenced blob is missing, for example, because a disk is not mounted.
            self._possible_bases = links
        coded = {delta for deltas in self._deltas.values() for delta in deltas}
        deltas: list[_Candidate] = []
        others: list[_Candidate] = []
        for folder, unreached in garbage.items():
            below = folder.relative_to(self._store.root)
            for name in unreached:
                digest = digest_of(name)
                if digest is not None and digest.hex not in reached:
                    is_delta = folder == cold and digest in coded
                    item = _Candidate(folder, below, name, digest)
                    (deltas if is_delta else others).append(item)
        return deltas, others

    def _unreached(self, folder: Path, only: Collection[str] | None) -> list[str]:
        """Return the files of a folder that no manifest seems to reference, sorted, and count all of them."""
        reached, found = self._marks.reached(), []
        if only is not None:
            names = (_PREFIX + digest for digest in sorted(only) if digest not in reached)
            return [name for name in names if is_there(folder / name)]
        for entry in each_file(folder):  # a list of all would take more memory than the references
            self._blob_count += 1
            if entry.name.removeprefix(_PREFIX) not in reached:
                found.append(entry.name)
        return sorted(found)

    def refusal(self, candidates: list[_Candidate]) -> str:
        """Return why removing so many blobs is implausible; empty if it is not.

        A folder of manifests that is empty because its disk is not mounted looks like one without models.
        """
        count = len(candidates)
        if not self._implausible(count):
            return ""
        self._leases = self._store.read_leases()
        for item in candidates:
            path = item.folder / item.name
            with contextlib.suppress(FileNotFoundError):
                is_young = age_of(path.lstat()) < self.older_than
                count -= is_young or bool(self._leases_of(item.digest))
        return self._implausible(count)

    def _implausible(self, count: int) -> str:
        has_models = bool(self._marks.by_path())
        return implausible(self._store, count, self._blob_count, has_models=has_models)

    def sweep(self, candidates: list[_Candidate]) -> list[Removed]:
        """Remove those candidates that are garbage still, in batches, durably."""
        removed: list[Removed] = []
        remaining = candidates[::-1]
        while remaining:
            with self.lock():
                begin = time.monotonic()
                self._update()
                end = time.monotonic() + _hold(time.monotonic() - begin)
                # The lock is given up now and then, so that imports need not wait for all of it.
                while remaining:
                    interrupts.check()
                    removed += self._visit(remaining.pop())
                    if time.monotonic() >= end:
                        break
                # The removals of this process change the folder too, and are no reason to read it
                # again.
                self._cold_version = self._version_of_cold()
            if remaining and not self._is_dry:
                interrupts.sleep(_PAUSE)
        if not self._is_dry:
            # Without the lock: a removal that a power cut takes back leaves garbage, as before.
            for folder in dict.fromkeys(item.folder for item in candidates):
                sync_folder(folder)
        return removed

    def _visit(self, item: _Candidate) -> list[Removed]:
        """Remove the file of a blob if it is garbage; return it."""
        path = f"{item.folder}/{item.name}"
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return []
        if not stat.S_ISREG(status.st_mode) or item.digest.hex in self._marks.reached():
            return []
        below = item.below / item.name
        leases = self._leases_of(item.digest)
        reason = "in use" if leases else self._reason(item, status)
        if reason is not None:
            removable = status.st_mtime + self.older_than
            self._keep(below, status.st_size, reason, leases, removable)
            return []
        if not self._is_dry:
            os.unlink(path)  # noqa: PTH108 - there are many
        elif item.folder == self._store.folder("cold"):
            self._gone.add(item.digest)
        return [Removed(below, status.st_size)]

    def _keep(
        self, path: Path, size: int, reason: Reason, leases: list[str], removable: float
    ) -> None:
        starts = [name.partition("-")[0] for name in leases]
        processes = tuple(int(start) for start in starts if start.isdecimal())
        self.kept.append(KeptBlob(path, size, reason, processes, removable))

    def _reason(self, item: _Candidate, status: os.stat_result) -> Reason | None:
        """Return why a blob that is not in use must stay; None if it is garbage."""
        if self._is_base(item.digest):
            return "base"
        # The damaged part of a manifest may be the digest of its config, so a config is kept if it
        # confirms the layers.
        lost = self._marks.lost()
        if lost and promise_of(item.folder / item.name) in lost:
            return "damaged manifest"
        if item.digest.hex in self._lost_blobs:
            return "lost manifest"
        return "young" if age_of(status) < self.older_than else None

    def _leases_of(self, digest: Digest) -> list[str]:
        """Return the names of the leases that hold a blob."""
        return [name for name, digests in self._leases.held.items() if digest in digests]

    def _is_base(self, digest: Digest) -> bool:
        """Return whether a blob is the base of a cold blob that still exists."""
        return digest in self._possible_bases or any(
            delta not in self._gone and self._store.has_cold(delta)
            for delta in self._deltas.get(digest, ())
        )

    def _update(self) -> None:
        """Read what other processes may have changed: leases, then manifests, and the cold blobs.

        Raises:
            BlobDamaged: a cold blob that is needed is not in the index and cannot be read, so its base is unknown.
        """
        # In this order: a lease that has ended by now ended after its manifest was published.
        self._leases = self._store.read_leases()
        if not self._is_dry:
            self._marks.update()
        if self._version_of_cold() != self._cold_version:
            self._find_deltas()
        for digest, error in self._unreadable.items():
            is_needed = digest.hex in self._marks.reached() or self._leases_of(digest)
            if is_needed and not self._store.has_hot(digest) and self._store.has_cold(digest):
                raise error

    def _find_deltas(self) -> None:
        """Find out which blobs are bases of cold blobs."""
        self._cold_version = self._version_of_cold()
        self._deltas, self._unreadable = {}, {}
        self._cold = self._store.cold_files()
        for digest, status in self._cold.items():
            try:
                base = self._store.base_of(digest, status)
            except BlobDamaged as error:
                self._unreadable[digest] = error
            else:
                if base is not None:
                    self._deltas.setdefault(base, []).append(digest)

    def _version_of_cold(self) -> list[FileVersion | None]:
        # Two changes of a folder within a tick of the clock look like one. The index grows before a
        # cold blob gets its name.
        versions: list[FileVersion | None] = []
        for path in (self._store.folder("cold"), self._store.cold_index.path):
            try:
                versions.append(FileVersion.of_status(path.stat()))
            except FileNotFoundError:
                versions.append(None)
        return versions

    def save(self) -> None:
        """Keep what was read of manifests, at last: on a full disk that might need what others need more."""
        self._marks.references.save()

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Return the lock under which files are removed."""
        return contextlib.nullcontext() if self._is_dry else self._store.exclusive_lock()

    def _there(self, blobs: set[str]) -> set[str]:
        """Return the hex digests of those of some blobs that the store has, hot or cold."""
        folders = (self._store.folder("blobs"), self._store.folder("cold")) if blobs else ()
        files = chain.from_iterable(map(each_file, folders))
        return {digest for one in files if (digest := one.name.removeprefix(_PREFIX)) in blobs}

    def look_for_leftovers(self) -> None:
        """Read without the lock what takes long and seldom changes: signatures, and former manifests."""
        self._history.update()
        signed = self._store.signed_manifests()
        unusable = unusable_signatures(self._store, signed)
        self._suspects = {Digest(kept.path.parent.name) for kept in unusable}

    def remove_leftovers(self) -> Iterator[Removed]:
        """Remove files of dead processes. The lock keeps others from publishing a manifest."""
        self._update()
        # Removes the entries of lost cold blobs, under the lock because freeze appends to the file.
        if self._cold and not self._is_dry:
            self._store.cold_index.rewrite(self._cold)
        # All are found before any is removed.
        yield from self._remove_old(
            *self._dead_files(),
            *self._unneeded_files(),
            *self._lost_manifests(),
            *self._lost_signatures(),
        )
        yield from self._remove_partial()
        for folder in (self._store.folder("arrivals"), *self._store.folder("downloads").glob("*")):
            yield from self._remove_downloads(folder)
        yield from self._remove_uploads()

    def remove_unfinished(self, digests: Collection[str]) -> list[Removed]:
        """Remove unfinished downloads of blobs, then files of dead processes. Call it under the lock."""
        self._update()
        return [*self._remove_partial(digests), *self._remove_old(*self._dead_files())]

    def _remove_old(self, *found: tuple[Path, float]) -> Iterator[Removed]:
        for path, age in found:
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if age_of(status) >= age:
                    # A second link frees nothing, and a blob was counted where it was removed.
                    is_link = path.parent == self._store.folder("bases")
                    yield self._remove(path, 0 if is_link else status.st_size)

    def _dead_files(self) -> Iterator[tuple[Path, float]]:
        """Yield temporary files and leases of dead processes, and the age at which each is removed."""
        # Each name begins with that of a lease. Without a living lease, the process is dead.
        for entry in scan_folder(self._store.folder("temporary")):
            if entry.name.rpartition("-")[0] not in self._leases.held:
                yield Path(entry.path), 0.0
        yield from ((path, 0.0) for path in self._leases.dead)

    def _unneeded_files(self) -> Iterator[tuple[Path, float]]:
        """Yield caches and links that are not needed, and the age at which each is removed."""
        folder = self._store.folder
        caches = files_without(scan_folder(folder("headers")), self._marks.manifests())
        if caches:
            names = map(self._store.reference_of, map(Path, self._marks.by_path()))
            keys = {repository_key(name) for name in names if name is not None}
            caches = files_without(caches, keys)
        if notes := [it for it in scan_folder(folder("pulled")) if it.name.startswith(BROUGHT)]:
            kept = {brought_name(Digest.of(data)) for data in self._store.names.every_manifest()}
            caches += [entry for entry in notes if entry.name not in kept]
        # Files that begin with a dot are caches that were being written when their process died.
        for parent in (folder("headers").parent, folder("remotes")):
            caches += [entry for entry in scan_folder(parent) if entry.name[0] == "."]
        # Caches are written without the lock, so young ones are kept.
        yield from ((Path(entry.path), self.older_than) for entry in caches)
        for link in scan_folder(folder("bases")):
            if (digest := digest_of(link.name)) is None or not self._is_base(digest):
                yield Path(link.path), 0.0

    def _lost_manifests(self) -> Iterator[tuple[Path, float]]:
        """Yield former manifests without their blobs, and the age at which each is removed."""
        self._history.update()
        there = self._there(self._history.blobs())
        yield from ((path, 0.0) for path in self._history.lost(there))

    def _lost_signatures(self) -> Iterator[tuple[Path, float]]:
        """Yield signatures of lost manifests, and unusable ones, and the age at which each is removed."""
        if not self._marks.lost():  # else a damaged manifest may be the one that was signed
            # An import stores signatures before it publishes their manifest.
            manifests = self._marks.manifests() | self._history.manifests()
            manifests |= set(map(Digest.of, self._lost.values()))
            unsigned = self._store.lost_signatures(manifests)
            yield from ((path, self.older_than) for path in unsigned)
            self._suspects &= manifests
        for kept in unusable_signatures(self._store, self._suspects):
            yield kept.path, 0.0 if kept.data is None else self.older_than

    def _remove_partial(self, chosen: Collection[str] | None = None) -> Iterator[Removed]:
        """Remove unfinished downloads, or those of ``chosen``, that no process continues; young ones are kept."""
        for entry in scan_folder(self._store.folder("partial")):
            # The name of a partial file or its lock begins with the hex digest of the blob.
            digest = entry.name.partition("-")[0]
            if chosen is not None and digest not in chosen:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                size = allocated(status)
                leases = self._leases_of(Digest(digest))
                if not leases and age_of(status) >= self._partial_age:
                    yield self._remove(Path(entry.path), size)
                    continue
                if entry.name.endswith(PARTIAL_LOCK):
                    continue
                below = Path(entry.path).relative_to(self._store.root)
                removable = status.st_mtime + self._partial_age
                self._keep(below, size, "in use" if leases else "partial", leases, removable)

    def _remove_downloads(self, folder: Path) -> Iterator[Removed]:
        """Remove old files that no process fetches any more: one that does has locked their folder."""
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = self._at(folder, lambda last, at: os.open(last, flags, dir_fd=at))
        except FileNotFoundError:
            return
        try:
            if not try_lock(descriptor, fcntl.LOCK_EX, self._store.root):
                return
            for entry in walk_files(folder):
                status = entry.stat(follow_symlinks=False)
                if age_of(status) >= self._partial_age:
                    yield self._remove(Path(entry.path), allocated(status))
            for inner, _, _ in () if self._is_dry else os.walk(folder, topdown=False):
                # A server that starts now has opened the folder of arrivals, and will lock it.
                if inner != str(self._store.folder("arrivals")):
                    with contextlib.suppress(OSError):  # it has files that are young
                        self._at(Path(inner), lambda last, at: os.rmdir(last, dir_fd=at))
        finally:
            os.close(descriptor)

    def _remove_uploads(self) -> Iterator[Removed]:
        """Remove old entries of uploads, their locks, and what lists of remotes reference, unless a process holds them."""
        folder = self._store.folder("remotes")
        for entry in chain(scan_folder(folder), scan_folder(folder.parent)):
            if not _OLD.match(entry.name):
                continue
            with contextlib.suppress(OSError):  # it is gone, or another user's
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode) or age_of(status) < self._partial_age:
                    continue
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    # A push keeps its lock file locked. The age of entries, never locked, decides.
                    if try_lock(descriptor, fcntl.LOCK_EX, self._store.root):
                        yield self._remove(Path(entry.path), status.st_size)
                finally:
                    os.close(descriptor)

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

    def _at(self, path: Path, act: Callable[[str, int], Result]) -> Result:
        """Call ``act`` with a name in the store and the open folder that it is in, to which no link leads. Raises OSError.

        Another user may set a link in place of a folder at any time, and what is behind it is not the store's.
        """
        return self._root.at(str(path.relative_to(self._store.root)), act)

    def _remove(self, path: Path, size: int) -> Removed:
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder:  # of an import that was killed
            size = sum(entry.stat(follow_symlinks=False).st_size for entry in walk_files(path))
        if not self._is_dry:
            remove: Callable[[str, int], None] = (
                (lambda last, at: shutil.rmtree(last, dir_fd=at))
                if is_folder
                else (lambda last, at: os.unlink(last, dir_fd=at))
            )
            with contextlib.suppress(FileNotFoundError):
                self._at(path, remove)
        return Removed(path.relative_to(self._store.root), size)


def _hold(update: float) -> float:
    """Return the seconds for removals: no fewer than the update took, or gc would mostly read many names."""
    return max(_HOLD, update)

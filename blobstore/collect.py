"""Workflow: giving back the space of what no model reaches.

Manifests are read without a lock first, which takes the time that it takes. Then, with the store's lock
to itself and a batch at a time, leases are read, manifests that have changed are read again, and what
is still garbage is removed. Leases come before manifests: who has ended a lease by then had given its
blobs a manifest before. It is linear in blobs and layers.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.digest import Digest
from blobstore.errors import (
    BlobstoreError,
    InvalidDigest,
    InvalidManifest,
    StoreError,
    UsageError,
)
from blobstore.files import read_regular, sync_folder
from blobstore.manifests.check import ADVICE, MAX_CONFIG_SIZE, promise
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest, layers_digest
from blobstore.store.local import LocalStore
from blobstore.store.locks import read_leases
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

GRACE: Final = 3600.0
"""Seconds for which a blob is kept by default after it was written: others have no leases."""
_BATCH = 1000
"""Files that are removed before others may have the lock."""
_PREFIX = Digest("").file_name


class Removed(NamedTuple):
    """A file that was removed, or would be."""

    path: Path
    """Below the root of the store."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection found."""

    blobs: tuple[Removed, ...]
    """Blobs that no manifest reaches."""
    leftovers: tuple[Removed, ...]
    """What dead processes left: files without a name, leases; and caches of removed models."""
    folders: tuple[Path, ...]
    """Empty folders of names, below the root."""
    kept: int
    """Blobs that no manifest reaches, but are too young, or leased."""
    kept_size: int
    """Bytes of these."""

    @property
    def size(self) -> int:
        """Bytes that were given back, or would be."""
        return sum(item.size for item in (*self.blobs, *self.leftovers))


def collect_garbage(
    store: LocalStore | None = None, *, older_than: float = GRACE, dry_run: bool = False
) -> Collected:
    """Remove blobs that no manifest reaches, what dead processes left, and empty folders.

    What a running import, copy or load has leased is never removed.

    Args:
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        older_than: seconds since a blob was written, before which it is kept.
        dry_run: remove nothing, and tell what would be.

    Raises:
        InvalidManifest: a file in the place of manifests is none, or was changed since it was
            written, so that nobody knows which blobs it needs. Nothing is removed then.
        StoreBusy: others have kept the store's lock all the time.
        StoreError: the store cannot be read or written.
        UsageError: ``older_than`` is negative.
    """
    if not older_than >= 0:
        message = f"older_than must be 0 seconds or more, got {older_than}"
        raise UsageError(message)
    store = store or LocalStore()
    store.check_root()
    if not store.layout.root.exists():
        return Collected(blobs=(), leftovers=(), folders=(), kept=0, kept_size=0)
    with store.writing():
        return _Collection(store, older_than, dry_run=dry_run).run()


class _Collection:
    def __init__(self, store: LocalStore, older_than: float, *, dry_run: bool) -> None:
        self._store = store
        self._layout = store.layout
        self._older_than = older_than
        self._is_dry = dry_run
        self._marks = _Marks(store)
        self._kept: list[int] = []

    def run(self) -> Collected:
        self._marks.update()
        blobs = list(self._sweep(self._unreached()))
        with self._alone():
            leftovers = [*self._leftovers()]
            folders = [*self._empty_folders()]
        return Collected(
            blobs=tuple(blobs),
            leftovers=tuple(leftovers),
            folders=tuple(folders),
            kept=len(self._kept),
            kept_size=sum(self._kept),
        )

    def _unreached(self) -> list[Digest]:
        reached = self._marks.reached()
        found = []
        for name in _names(self._layout.blobs):
            if name.removeprefix(_PREFIX) not in reached:
                with contextlib.suppress(InvalidDigest):  # a foreign file is not ours to remove
                    found.append(Digest.parse(name.replace("-", ":", 1)))
        return sorted(found)

    def _sweep(self, candidates: Iterable[Digest]) -> Iterator[Removed]:
        rest = iter(candidates)
        while batch := list(islice(rest, _BATCH)):
            with self._alone():
                leased = read_leases(self._layout).digests
                self._marks.update()
                reached = self._marks.reached()
                lost = self._marks.lost()
                for digest in batch:
                    is_needed = digest in leased or digest.hex in reached
                    path = Path(self._layout.blob(digest))
                    is_needed = is_needed or bool(lost and _promise_of(path) in lost)
                    yield from self._remove_blob(path, is_needed=is_needed)
                if not self._is_dry:
                    sync_folder(self._layout.blobs)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        locks = self._store.locks
        return locks.reading() if self._is_dry else locks.alone()

    def _remove_blob(self, path: Path, *, is_needed: bool) -> Iterator[Removed]:
        try:
            status = path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode):
            return
        if is_needed or _age(status) < self._older_than:
            self._kept.append(status.st_size)
        else:
            yield self._remove(path, status.st_size)

    def _leftovers(self) -> Iterator[Removed]:
        """Remove what only living processes need. No name is being published meanwhile."""
        leased = read_leases(self._layout)
        self._marks.update()
        temporary = [
            entry
            for entry in _scan(self._layout.temporary)
            if entry.name.rpartition("-")[0] not in leased.names
        ]
        known = {digest.hex for digest in self._marks.manifests()}
        caches = [entry for entry in _scan(self._layout.headers) if entry.name not in known]
        caches += [entry for entry in _scan(self._layout.headers.parent) if entry.name[0] == "."]
        caches = [entry for entry in caches if self._is_old(entry)]
        for path in (*leased.dead, *(Path(entry.path) for entry in (*temporary, *caches))):
            with contextlib.suppress(FileNotFoundError):  # who writes a cache holds no lock
                yield self._remove(path, path.lstat().st_size)

    def _is_old(self, entry: os.DirEntry[str]) -> bool:
        try:
            return _age(entry.stat(follow_symlinks=False)) >= self._older_than
        except FileNotFoundError:
            return False

    def _empty_folders(self) -> Iterator[Path]:
        empty: set[str] = set()
        for folder, inner, files in os.walk(self._layout.manifests, topdown=False):
            full = [name for name in inner if str(Path(folder, name)) not in empty]
            if full or files or folder == str(self._layout.manifests):
                continue
            empty.add(folder)
            with contextlib.suppress(OSError):  # Ollama has just put something there
                if not self._is_dry:
                    Path(folder).rmdir()
                yield Path(folder).relative_to(self._layout.root)

    def _remove(self, path: Path, size: int) -> Removed:
        if not self._is_dry:
            path.unlink(missing_ok=True)
        return Removed(path.relative_to(self._layout.root), size)


class _Marked(NamedTuple):
    state: tuple[int, ...]
    manifest: Digest
    blobs: tuple[str, ...]
    """Their digests, without what is the same in all: there may be hundreds of thousands."""
    lost: str | None
    """What the config would hold of the layers, if it cannot be read."""


class _Marks:
    """What every manifest of a store reaches, each read again only when it has changed."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._layout = store.layout
        self._marked: dict[str, _Marked] = {}
        self._reached: set[str] = set()

    def update(self) -> None:
        """Read what has come or changed.

        Raises:
            InvalidManifest: a file is no manifest, or not the one that was written.
            StoreError: one cannot be read, or a folder of them.
        """
        found = {}
        for path in _files(self._layout.manifests):
            try:
                status = os.stat(path)  # noqa: PTH116 - a text, of which there are thousands
                state = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                known = self._marked.get(path)
                found[path] = known if known and known.state == state else self._read(path, state)
            except FileNotFoundError:  # removed since it was listed
                if os.path.islink(path):  # noqa: PTH114 - or to a disk that is not mounted
                    raise InvalidManifest(self._unknown(path, "it is a link to nothing")) from None
            except OSError as error:
                raise StoreError(self._unknown(path, error.strerror)) from error
        if found != self._marked or not found:
            self._reached = set(chain.from_iterable(item.blobs for item in found.values()))
        self._marked = found

    def reached(self) -> set[str]:
        """Return the blobs that the manifests reach, by the digits of their digests."""
        return self._reached

    def lost(self) -> set[str]:
        """Return what the configs hold that cannot be read: a changed bit may name another blob."""
        return {item.lost for item in self._marked.values() if item.lost is not None}

    def manifests(self) -> set[Digest]:
        """Return the digests of the manifests themselves."""
        return {item.manifest for item in self._marked.values()}

    def _read(self, path: str, state: tuple[int, ...]) -> _Marked:
        try:
            data = read_regular(path, MAX_MANIFEST_SIZE)
            manifest = Manifest.from_bytes(data)
            is_proven = self._store.check_manifest(data, manifest)
        except BlobstoreError as error:
            message = self._unknown(path, str(error).removesuffix(ADVICE))
            raise InvalidManifest(message) from None
        blobs = tuple([blob.digest.hex for blob in manifest.blobs])
        lost = None if is_proven else str(layers_digest(manifest.layers))
        return _Marked(state, Digest.of(data), blobs, lost)

    def _unknown(self, path: str, why: str | None) -> str:
        name = self._layout.reference(Path(path))
        advice = (
            "repair or remove that file first"
            if name is None
            else f"create the model again, or run 'blobstore repair {name} --from STORE' or "
            f"'blobstore rm {name}' first"
        )
        return (
            f"cannot tell which blobs {quoted(path)} needs, so no more are removed: {why}; {advice}"
        )


def _promise_of(path: Path) -> str | None:
    """Return what a blob says of a model's layers, if it is a config that does."""
    try:
        return promise(read_regular(path, MAX_CONFIG_SIZE))
    except (BlobstoreError, OSError):
        return None


def _age(status: os.stat_result) -> float:
    # A clock that was set back makes files of the future: they are as young as can be.
    return max(0.0, time.time() - status.st_mtime)


def _files(folder: Path) -> Iterator[str]:
    """Yield all that is below a folder and no folder.

    Raises:
        StoreError: a folder cannot be listed.
    """
    try:
        entries = _scan(folder)
    except OSError as error:
        message = f"cannot list {quoted(folder)}: {error.strerror}"
        raise StoreError(message) from error
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        else:
            yield entry.path


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is wanted
    except FileNotFoundError:
        return []


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        if folder.is_symlink():  # to a disk that is not mounted, perhaps
            raise
        return []

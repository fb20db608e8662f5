"""A cache of blobs that were hashed and found intact, so that they need not be hashed again.

An entry holds the state of a blob's file just before its bytes were hashed: device, inode, size and the
times of its last changes. While the file still has that state, nobody has written to it. Four traps:

- A file that changes twice within one tick of the clock, before and after it is hashed, looks the same (git
  calls this racily clean). So a file that changed in the last seconds before it was hashed gets no entry;
  the clock is the one that stamps the store's own files.
- The modification time can be set back, the time of the last inode change cannot: both count.
- A cold blob that is a delta comes from the files of its base, too: its entry has the states of all of them.
- Bit rot changes no time, nor does a write through a shared mapping that was already dirty. No cache can
  detect that; callers that must know hash again.

A cache that others could have written is ignored: each user has their own, writable by nobody else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
import time
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.files import FileVersion, open_regular, read_exactly, write_file
from blobstore.errors import BlobstoreError, Damaged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from blobstore.store.blobs import BlobReader
    from blobstore.store.cold import ColdBlob

_HEADER = b"verified blobs 1\n"
_MAX_ENTRIES = 1 << 16
_MAX_BYTES = 16 << 20
_MARGIN_NS = 3 * 10**9
"""More than the coarsest clock of any file system, two seconds on FAT."""
_OTHERS_CAN_WRITE = stat.S_IWGRP | stat.S_IWOTH


class BlobState(NamedTuple):
    """The files that the bytes of a blob come from, as they are now."""

    key: str
    """The key of an entry: the hex digest of a hot blob, and other digits for a cold one."""
    versions: tuple[FileVersion | None, ...]
    """Of the blob's own file, and of those that its base may have."""


class VerifiedBlobs:
    """The cache of one store and user. Call :meth:`save` to keep new entries."""

    def __init__(self, store: BlobReader) -> None:
        self._store = store
        self._path = store._layout.verified(os.geteuid())
        self._new: dict[str, FileVersion | None] = {}
        self._entries: dict[str, FileVersion] = {}
        self._read_at: FileVersion | None = None
        """The version of the cache's file that has these entries."""

    def has(self, digest: Digest, size: int) -> bool:
        """Return whether the blob's file has ``size`` bytes and is unchanged since it was found intact."""
        known = self._known.get(digest.hex)
        if known is None:
            return False
        return known == _version(self._store.blob_path(digest)) and known.size == size

    def has_cold(self, digest: Digest, size: int) -> bool:
        """Return whether the blob is cold alone, and its files are unchanged since it was found intact."""
        if self._store.has_hot(digest) or not self._store.has_cold(digest):
            return False
        try:
            _, state = self._open_cold(digest, size)
        except BlobstoreError:
            return False
        known = self._known.get(state.key)
        return known is not None and known == state.versions[0]

    @property
    def saved_at(self) -> float:
        """When blobs were last found intact, in seconds since the epoch; 0 if they never were."""
        try:
            return self._path.stat().st_mtime if self._known else 0.0
        except OSError:
            return 0.0

    @contextlib.contextmanager
    def noting(self, digest: Digest) -> Iterator[None]:
        """Record whether the blob is intact: whether the block, which reads it, raises Damaged."""
        before = self.look(digest)
        try:
            yield
        except Damaged:
            self.forget(before)
            raise
        self.note(before)

    def look(self, digest: Digest) -> BlobState:
        """Return the state of a hot blob before it is opened."""
        _ = self._latest  # of before it is read
        return BlobState(digest.hex, (_version(self._store.blob_path(digest)),))

    def open_cold(self, digest: Digest, size: int) -> tuple[ColdBlob, BlobState]:
        """Open a cold blob, and return its state, too.

        Raises:
            BlobMissing, BlobDamaged, StoreError: it cannot be opened.
        """
        _ = self._latest  # of before it is read
        return self._open_cold(digest, size)

    def _open_cold(self, digest: Digest, size: int) -> tuple[ColdBlob, BlobState]:
        begin = _version(self._store.cold_path(digest))
        blob = self._store.open_cold(digest, size)
        versions = cold_state(self._store, digest, blob.base)
        if versions[0] != begin:  # it may have been replaced after it was opened
            versions = (None, *versions[1:])
        # With other files of its base, it is another entry.
        bases = [version and tuple(version) for version in versions[1:]]
        return blob, BlobState(Digest.of(f"cold {digest} {bases}".encode()).hex, versions)

    def note(self, before: BlobState) -> None:
        """Record that a blob is intact, whose bytes were read after it had this state."""
        # If a file changes from then on, its state before will never match again.
        changes = [max(one.modified, one.changed) for one in before.versions if one is not None]
        if before.versions[0] is not None and max(changes) <= self._latest:
            self._new[before.key] = before.versions[0]

    def forget(self, before: BlobState) -> None:
        """Record that a blob is damaged."""
        self._new[before.key] = None

    def save(self) -> None:
        """Write the new entries, or do nothing if the store cannot be written."""
        if not self._new:
            return
        old = _read(self._path)  # read again: other processes write to it too
        known = {spelled: version for spelled, version in old.items() if spelled not in self._new}
        known |= {spelled: version for spelled, version in self._new.items() if version is not None}
        if known != old:
            latest = list(known.items())[-_MAX_ENTRIES:]
            lines = (f"{spelled} {' '.join(map(str, version))}\n" for spelled, version in latest)
            text = "".join(lines).encode()
            data = [_HEADER, f"{Digest.of(text)}\n".encode(), text]
            # Not synced: a torn file does not have the digest in its second line, and counts as
            # empty.
            with contextlib.suppress(OSError):
                write_file(self._path, data, mode=0o600, durable=False)

    @property
    def _known(self) -> dict[str, FileVersion]:
        version = _version(self._path)
        if (
            version != self._read_at
        ):  # another process, or another thread with an instance of its own, has saved
            self._entries, self._read_at = _read(self._path), version
        return self._entries

    @functools.cached_property
    def _latest(self) -> int:
        """Files that changed after this time get no entry; 0 if the cache cannot be written."""
        folder = self._path.parent
        path = folder / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # On a network, the time of a new file is that of the server's clock.
                return min(os.fstat(descriptor).st_mtime_ns, time.time_ns()) - _MARGIN_NS
            finally:
                os.close(descriptor)
                path.unlink(missing_ok=True)
        except OSError:
            return 0


def cold_state(
    store: BlobReader, digest: Digest, base: Digest | None
) -> tuple[FileVersion | None, ...]:
    """Return the versions of the files that a cold blob is decoded from; None for those that are not there."""
    paths = [store.cold_path(digest)]
    if base is not None:
        paths += [store.blob_path(base), store.base_path(base), store.cold_path(base)]
    return tuple(map(_version, paths))


def _version(path: str | Path) -> FileVersion | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return FileVersion.of_status(found) if stat.S_ISREG(found.st_mode) else None


def _read(path: Path) -> dict[str, FileVersion]:
    """Return the entries of a cache file, none if this user did not write it."""
    try:
        descriptor, size = open_regular(path, follow=False)
    except (OSError, BlobstoreError):
        return {}
    try:
        found = os.fstat(descriptor)
        if size > _MAX_BYTES or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_CAN_WRITE:
            return {}
        data = read_exactly(descriptor, size, 0)
    except OSError:
        return {}
    finally:
        os.close(descriptor)
    digest, _, text = data.removeprefix(_HEADER).partition(b"\n")
    if not data.startswith(_HEADER) or digest != str(Digest.of(text)).encode():
        return {}
    known: dict[str, FileVersion] = {}
    try:
        for line in text.decode("ascii").splitlines():
            spelled, *numbers = line.split(" ")
            known[spelled] = FileVersion(*map(int, numbers))
    except (TypeError, ValueError):
        return {}
    return known

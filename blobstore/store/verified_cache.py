"""Blobs that were hashed and found whole, so that they need not be hashed again: a cache.

An entry tells what a blob's file was just before its bytes were hashed: device, inode, size and the
times of its last changes. While the file is still that, nobody has written to it. Three traps:

- A file that changes twice within a tick of the clock, once before it is hashed and once after, looks
  the same (git calls that racily clean). So nothing is noted of a file that had changed in the last
  seconds before it was hashed, by the clock that stamps the store's own files.
- The time of modification can be set back, that of the last change of the inode cannot: both count.
- What rots on the disk changes no time, nor does a write through a shared map that was dirty before.
  No cache can tell; who must know hashes again.

A cache that others could have written is not read: each user has their own, writable by no one else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
import time
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.core.files import open_regular, read_exactly, write_file
from blobstore.errors import BlobstoreError, Damaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from blobstore.store.blobs import BlobReader

_FORM = b"verified blobs 1\n"
_MAX_ENTRIES = 1 << 16
_MAX_BYTES = 16 << 20
_MARGIN_NS = 3 * 10**9
"""More than the coarsest clock of a file system, FAT's of two seconds."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_Stamp = tuple[int, ...]
"""Device, inode, size, and the times of the last modification and of the last change."""
_STAMP_SIZE = 5


class VerifiedBlobs:
    """What is noted about the blobs of a store. Use :meth:`save` to keep it."""

    def __init__(self, store: BlobReader) -> None:
        self._layout = store._layout
        self._path = self._layout.verified(os.geteuid())
        self._known = _read(self._path)
        self._news: dict[str, _Stamp | None] = {}

    def has(self, digest: Digest, size: int) -> bool:
        """Tell whether the blob's file, of ``size`` bytes, is as it was when it was found whole."""
        known = self._known.get(digest.hex)
        if known is None:
            return False
        return known == _stamp(self._layout.blob(digest)) and known[2] == size

    @contextlib.contextmanager
    def noting(self, digest: Digest) -> Iterator[None]:
        """Note whether the blob is whole, which the block finds out by raising nothing or Damaged."""
        # If it changes from now on, the note of what it was before will never fit again.
        quiet, before = self._quiet, _stamp(self._layout.blob(digest))
        try:
            yield
        except Damaged:
            self._news[digest.hex] = None
            raise
        if before is not None and max(before[3:]) <= quiet:
            self._news[digest.hex] = before

    def save(self) -> None:
        """Keep what was noted if the store can be written; otherwise do nothing."""
        if not self._news:
            return
        old = _read(self._path)  # as it is now: other processes write to it too
        known = {spelled: stamp for spelled, stamp in old.items() if spelled not in self._news}
        known |= {spelled: stamp for spelled, stamp in self._news.items() if stamp is not None}
        if known != old:
            with contextlib.suppress(OSError):
                write_file(self._path, [_encode(known)], mode=0o600, durable=False)

    @functools.cached_property
    def _quiet(self) -> int:
        """The time after which no file that is noted may have changed; 0 if nothing can be kept."""
        folder = self._path.parent
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()  # but never the store itself: it may be gone
            return min(_file_time(folder), time.time_ns()) - _MARGIN_NS
        except OSError:
            return 0


def _file_time(folder: Path) -> int:
    """Return the time that a new file in ``folder`` gets, which on a network is the server's."""
    path = folder / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def _stamp(path: str) -> _Stamp | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _encode(known: Mapping[str, _Stamp]) -> bytes:
    latest = list(known.items())[-_MAX_ENTRIES:]
    lines = (f"{spelled} {' '.join(map(str, stamp))}\n" for spelled, stamp in latest)
    text = "".join(lines).encode()
    return _FORM + f"{Digest.of(text)}\n".encode() + text


def _read(path: Path) -> dict[str, _Stamp]:
    """Return what is noted in a file, nothing if it is not what this user wrote."""
    try:
        descriptor, size = open_regular(path, follow=False)
    except (OSError, BlobstoreError):
        return {}
    try:
        found = os.fstat(descriptor)
        if size > _MAX_BYTES or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
            return {}
        data = read_exactly(descriptor, size, 0)
    except OSError:
        return {}
    finally:
        os.close(descriptor)
    return _decode(data)


def _decode(data: bytes) -> dict[str, _Stamp]:
    digest, _, text = data.removeprefix(_FORM).partition(b"\n")
    if not data.startswith(_FORM) or digest != str(Digest.of(text)).encode():
        return {}
    known: dict[str, _Stamp] = {}
    try:
        for line in text.decode("ascii").splitlines():
            spelled, *numbers = line.split(" ")
            known[spelled] = tuple(map(int, numbers))
    except ValueError:
        return {}
    return known if all(len(stamp) == _STAMP_SIZE for stamp in known.values()) else {}

"""Partial files: blobs that are being downloaded, and can be continued at any byte.

A partial file holds the bytes of the blob at their offsets. At the offset that is the size of the blob
follows one little-endian counter of 8 bytes per part of 64 MiB: how many bytes of the part are there. The
bytes are written before their counter, so a killed process leaves counters that are true. After a power cut
they may not be, and another program can write anything, so only the digest proves that a file is complete.
A complete file has no counters.

One process at a time fills a file: the one that has locked it (``flock``). A file is never written to after
it is complete, and is removed or renamed only by a process that has locked it, or by ``gc``, which leaves
blobs alone that a lease holds. The file names end with the number of the user: another user could still
write to a file of theirs after its bytes were verified.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import threading
from typing import TYPE_CHECKING, Final

from blobstore.core import interrupts
from blobstore.core.digest import Digester
from blobstore.core.files import FileState, give_to_owner, make_folders, read_exactly
from blobstore.store.locks import NOT_INHERITED, try_lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

    from typing_extensions import Buffer

    from blobstore.core.digest import BlobId

PART: Final = 64 * 2**20
"""Bytes of a part, which one stream fills; the last part of a blob may be smaller."""
_COUNTER = struct.Struct("<Q")
_READ = 2**20
_LOCK_PAUSE = 0.01
"""Seconds between two attempts to lock a complete file, which others lock to copy it to its name."""
_NOT_OURS = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO}
"""Errors of opening a link, a pipe, or a file of another user."""
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class PartialBlob:
    """A locked partial file. Any number of threads fill it, each a part of its own."""

    def __init__(self, path: Path, descriptor: int, blob: BlobId) -> None:
        self.path = path
        self.blob = blob
        self._descriptor = descriptor
        self._process = os.getpid()
        NOT_INHERITED.add(self)
        self._digester = Digester()
        self._digester_lock = threading.Lock()
        self._done = self._read_counters()

    @classmethod
    def open(cls, folder: Path, blob: BlobId) -> Self | None:
        """Lock the partial file of a blob, and create it if it is missing; None if it is locked.

        A file that cannot be a partial file of this blob and user is replaced.

        Raises:
            OSError: it cannot be created.
            StoreError: the file system has no locks.
        """
        path = _path(folder, blob)
        root = folder.parent.parent
        if not folder.is_dir():
            make_folders(folder, root)
        while True:
            try:
                descriptor = _open_or_create(path)
            except OSError as error:
                if error.errno not in _NOT_OURS:
                    raise
                path.unlink()
                continue
            is_ours = False
            try:
                if not try_lock(descriptor, fcntl.LOCK_EX, root):
                    return None
                if not _is_at(path, descriptor):
                    continue  # another process has renamed or removed it
                give_to_owner(path)
                # Only this user or the store's owner may be able to write to it, under this name.
                status, owners = os.fstat(descriptor), (os.geteuid(), folder.stat().st_uid)
                is_regular = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                if not is_regular or status.st_uid not in owners:
                    path.unlink()
                    continue
                is_ours = True
                return cls(path, descriptor, blob)
            finally:
                if not is_ours:
                    os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def done(self) -> int:
        """Bytes that are there."""
        return sum(self._done)

    @property
    def missing(self) -> list[int]:
        """The parts that are incomplete, by number."""
        return [part for part in range(len(self._done)) if self.missing_bytes(part)]

    def missing_bytes(self, part: int) -> range:
        """Return the offsets of the bytes that a part lacks."""
        begin = part * PART
        return range(begin + self._done[part], min(begin + PART, self.blob.size))

    def write(self, part: int, data: Buffer) -> None:
        """Append bytes to what is there of a part.

        Raises:
            ValueError: the part is too short for them.
            OSError: they cannot be written; what could be written is counted.
        """
        left = self.missing_bytes(part)
        view = memoryview(data).cast("B")
        if len(view) > len(left):
            raise ValueError(f"{len(view)} bytes for a part that lacks {len(left)}")
        offset = left.start
        while offset - left.start < len(view):
            count = os.pwrite(self._descriptor, view[offset - left.start :], offset)
            offset += count
            self._done[part] += count
            self._write_counter(part)
        self._hash_next(view, left.start)

    def has_right_digest(self) -> bool:
        """Return whether the bytes of the filled file have the digest of the blob; read what is not yet hashed."""
        with self._digester_lock:
            self._catch_up()
        return self._digester.digest() == self.blob.digest

    def complete(self) -> FileState:
        """Remove the counters after the digest was found right; return the state of the file."""
        if os.fstat(self._descriptor).st_size != self.blob.size:
            os.ftruncate(self._descriptor, self.blob.size)
        return FileState.of_status(os.fstat(self._descriptor))

    def duplicate(self) -> int:
        """Return a second descriptor of the file, which the caller closes."""
        return os.dup(self._descriptor)

    def catch_up(self) -> None:
        """Hash the bytes that follow what has been hashed, unless another thread is doing so."""
        if self._digester_lock.acquire(blocking=False):
            try:
                self._catch_up()
            finally:
                self._digester_lock.release()

    def discard(self) -> None:
        """Remove the file, which is wrong."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the file; what is there stays."""
        NOT_INHERITED.discard(self)
        # As with the store's lock: a forked process may have a copy of the descriptor.
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    def _read_counters(self) -> list[int]:
        """Return the bytes that are there of each part; start again with a file that makes no sense."""
        counters = _counters(self._descriptor, self.blob.size)
        if counters is not None:
            return counters
        self._done = [0] * len(_lengths(self.blob.size))
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, self.blob.size)
        for part in range(len(self._done)):  # their disk space must not be missing later
            self._write_counter(part)
        return self._done

    def _write_counter(self, part: int) -> None:
        place = self.blob.size + _COUNTER.size * part
        os.pwrite(self._descriptor, _COUNTER.pack(self._done[part]), place)

    def _hash_next(self, data: memoryview, offset: int) -> None:
        """Hash bytes if they follow what has been hashed; otherwise they are read later."""
        if self._digester_lock.acquire(blocking=False):
            try:
                if self._digester.size == offset:
                    self._digester.update(data)
            finally:
                self._digester_lock.release()

    def _catch_up(self) -> None:
        """Hash what is there without a gap; the caller holds the lock."""
        while self._digester.size < self.blob.size:
            begin = self._digester.size
            end = self.missing_bytes(begin // PART).start
            data = (
                os.pread(self._descriptor, min(_READ, end - begin), begin) if end > begin else b""
            )
            if not data:
                return
            self._digester.update(data)


def _open_or_create(path: Path) -> int:
    while True:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR | _FLAGS)
        with contextlib.suppress(FileExistsError):  # another process has just created it
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)


def bytes_done(folder: Path, blob: BlobId) -> int:
    """Return how many bytes of a blob its partial file has, or 0, without locking it."""
    try:
        descriptor = os.open(_path(folder, blob), os.O_RDONLY | _FLAGS)
    except OSError:
        return 0
    try:
        return sum(_counters(descriptor, blob.size) or ())
    finally:
        os.close(descriptor)


def _path(folder: Path, blob: BlobId) -> Path:
    return folder / f"{blob.digest.hex}-{os.geteuid()}"


def _lengths(size: int) -> list[int]:
    """Return the bytes of each part of a blob."""
    return [min(PART, size - begin) for begin in range(0, size, PART)]


def _counters(descriptor: int, size: int) -> list[int] | None:
    """Return how many bytes of each part a partial file has; None if it makes no sense."""
    lengths = _lengths(size)
    if os.fstat(descriptor).st_size == size:
        return lengths
    data = read_exactly(descriptor, _COUNTER.size * len(lengths) + 1, size)
    if len(data) != _COUNTER.size * len(lengths):
        return None
    counters = [count for (count,) in _COUNTER.iter_unpack(data)]
    return counters if all(map(int.__le__, counters, lengths)) else None


@contextlib.contextmanager
def locked_file(path: Path, state: FileState) -> Iterator[bool]:
    """Lock a complete file while the block runs and make it read-only; yield False if it is another one now."""
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError:
        yield False
        return
    try:
        while not try_lock(descriptor, fcntl.LOCK_EX, path.parent):
            interrupts.sleep(_LOCK_PAUSE)
        status = os.fstat(descriptor)
        is_same = _is_at(path, descriptor) and FileState.of_status(status) == state
        if is_same:
            os.fchmod(descriptor, status.st_mode & 0o444)
        yield is_same
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the open file is the one that has the name."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False

"""Partial files: blobs that are being downloaded, and can be continued at any byte.

A partial file holds the bytes of the blob at their offsets. At the offset that is the size of the blob
follows one little-endian counter of 8 bytes per part of 64 MiB: how many bytes of the part are there. The
bytes are written before their counter, so a killed process leaves counters that are true. After a power cut
they may not be, and another program can write anything, so only the digest proves that a file is complete.

**A process writes only to files that it has created, and a file that can get the name of a blob has no
writer.** So no published blob is ever written to, even where locks do nothing:

- The name of a file ends with a random token, and it is created with ``O_EXCL``.
- When a file is filled, the counters are cut off, the only descriptor that can write is closed, and then the
  file is made read-only. So a read-only file is complete, and any process may read and publish it.
- Another file is continued by a copy of the bytes that are there. Some file systems share the blocks.

A file whose process has died is removed after it was copied. Where locks do nothing, its process may be alive;
so it is removed only if nothing was written to it for a minute. If a process loses its file all the same, it
finds the blob, or fails. The names also have the number of the user: another user could still write to a file
of theirs after its bytes were verified.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import threading
from typing import TYPE_CHECKING, Final

from blobstore.core.digest import Digester
from blobstore.core.escape import quote
from blobstore.core.files import FileState, copy_bytes, give_to_owner, read_exactly
from blobstore.core.fork import NOT_INHERITED
from blobstore.errors import StoreError
from blobstore.store.partial_lock import (
    NOT_OURS,
    OPEN_FLAGS,
    PartialLock,
    belongs_to_us,
    listed_files,
    lock_path,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from typing import Self

    from typing_extensions import Buffer

    from blobstore.core.digest import BlobId, Digest

PART: Final = 64 * 2**20
"""Bytes of a part, which one stream fills; the last part of a blob may be smaller."""
RUN_AGAIN: Final = "run the same command again"
_COUNTER = struct.Struct("<Q")
_READ = 2**20
_ABANDONED = 60.0
"""Seconds without a write after which no process is thought to fill a file."""
FULL = {errno.ENOSPC, errno.EDQUOT}
"""Errors of a disk without space for the user."""
_ATTEMPTS = 3
"""How often a file is created that another process removes at once."""


class PartialBlob:
    """A partial file that this process has created, or a complete one. Threads fill it, each a part of its own."""

    def __init__(
        self, lock: PartialLock, path: Path, blob: BlobId, reader: int, writer: int | None
    ) -> None:
        self.path = path
        self.blob = blob
        self._lock = lock
        self._reader = reader
        self._descriptor = -1 if writer is None else writer
        if writer is not None:
            NOT_INHERITED.add(self._descriptor)
        self._digester = Digester()
        self._digester_lock = threading.Lock()
        lengths = _lengths(blob.size)
        self._done = lengths if writer is None else [0] * len(lengths)

    @classmethod
    def open(
        cls, folder: Path, blob: BlobId, check: Callable[[], object] = lambda: None
    ) -> Self | None:
        """Return a file with the fetched bytes of a blob; None if another process is fetching it.

        Args:
            folder: of the partial files.
            blob: what is fetched.
            check: called now and then while bytes are copied; what it raises ends that.

        Raises:
            OSError: it cannot be created.
            StoreError: the file system has no locks.
        """
        for _ in range(_ATTEMPTS - 1):
            # A process that has published the blob removes all files that are listed, and the lock:
            # perhaps one that this process has created, and not opened for reading yet.
            with contextlib.suppress(FileNotFoundError):
                return cls._open(folder, blob, check)
        return cls._open(folder, blob, check)

    @classmethod
    def _open(cls, folder: Path, blob: BlobId, check: Callable[[], object]) -> Self | None:
        lock = PartialLock.take(folder, blob.digest)
        if lock is None:
            return None
        with contextlib.ExitStack() as reading, contextlib.ExitStack() as failing:
            failing.callback(lock.close)
            earlier = []
            for path in lock.files():
                descriptor = _opened(path)
                if descriptor is None:
                    continue
                if _is_complete(os.fstat(descriptor), blob):
                    # The new object closes the lock and the descriptor from now on.
                    failing.pop_all()
                    return cls(lock, path, blob, descriptor, None)
                reading.callback(os.close, descriptor)
                earlier.append(descriptor)
            new = cls._created(lock, blob)
            # From here on `new.close` releases the lock too.
            failing.pop_all()
            failing.callback(new.close)
            new._begin()
            new._copy_most(earlier, check)
            # Only after the copy, because its bytes are in the earlier files.
            new._remove_earlier()
            failing.pop_all()
            return new

    @classmethod
    def _created(cls, lock: PartialLock, blob: BlobId) -> Self:
        path = lock.add_file()
        with contextlib.ExitStack() as failing:
            # Not writable for the group, whatever the umask: it has no other user as a writer.
            writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o644)
            failing.callback(os.close, writer)
            give_to_owner(path)
            status = os.fstat(writer)
            if not status.st_mode & stat.S_IWUSR:  # an odd umask; it would seem to be complete
                os.fchmod(writer, status.st_mode & 0o777 | stat.S_IWUSR)
            # A second descriptor: the one that can write is closed before the file may be
            # published, and this one stays.
            reader = os.open(path, os.O_RDONLY | OPEN_FLAGS)
            failing.callback(os.close, reader)
            if not os.path.samestat(os.fstat(reader), status):
                raise StoreError(f"another program has replaced {quote(path)}", advice=RUN_AGAIN)
            failing.pop_all()
        return cls(lock, path, blob, reader, writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def done(self) -> int:
        """Bytes that the file has."""
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
        """Append bytes to a part.

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
            try:
                count = os.pwrite(self._descriptor, view[offset - left.start :], offset)
            except OSError as error:
                # The disk is full. Earlier files hold nothing that cannot be fetched again, so they
                # go even if they are young.
                if error.errno not in FULL or not self._remove_earlier(age=0):
                    raise
                continue
            offset += count
            self._count(
                part, count
            )  # after the bytes, so that a killed process leaves a true count
        self._hash_next(view, left.start)

    def has_right_digest(self) -> bool:
        """Return whether the bytes of the filled file have the digest of the blob; read what is not yet hashed."""
        with self._digester_lock:
            self._catch_up()
        return self._digester.digest() == self.blob.digest

    def complete(self) -> FileState:
        """Make the filled file read-only after the digest was found right, for this process too; return its state."""
        if self._descriptor >= 0:
            # In this order: a process that sees the file read-only may publish it at once.
            os.ftruncate(self._descriptor, self.blob.size)
            self._close_writer()
            os.fchmod(self._reader, os.fstat(self._reader).st_mode & 0o444)
            self._remove_earlier()
        return FileState.of_status(os.fstat(self._reader))

    def duplicate(self) -> int:
        """Return a second descriptor of the file, for reading and syncing, which the caller closes."""
        return os.dup(self._reader)

    def catch_up(self) -> None:
        """Hash the bytes that follow what has been hashed, unless another thread is doing so."""
        if self._digester_lock.acquire(blocking=False):
            try:
                self._catch_up()
            finally:
                self._digester_lock.release()

    def discard(self) -> None:
        """Remove the file, which is wrong or not needed."""
        self.path.unlink(missing_ok=True)
        self._remove_earlier(age=0)
        # Last, because it lists the files: a file that is not listed is found only by gc.
        self._lock.remove()

    def close(self) -> None:
        """Unlock the blob; what is there of it stays."""
        self._close_writer()
        os.close(self._reader)
        self._lock.close()

    def _close_writer(self) -> None:
        if self._descriptor >= 0:
            NOT_INHERITED.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin(self) -> None:
        """Give a new file its size and counters: their disk space must not be missing later."""
        # With the counters at once: a file that has the size of the blob would seem to have all of its bytes.
        os.ftruncate(self._descriptor, self.blob.size + _COUNTER.size * len(self._done))
        for part in range(len(self._done)):
            self._count(part, 0)

    def _copy_most(self, descriptors: Iterable[int], check: Callable[[], object]) -> None:
        """Copy what is there of the file that has most, as far as there is space."""
        found = [
            (counters, one) for one in descriptors if (counters := _counters(one, self.blob.size))
        ]
        if not found:
            return
        counters, source = max(found, key=lambda one: sum(one[0]))
        with contextlib.suppress(OSError):  # the bytes can be fetched again
            for part, count in enumerate(counters):
                while self._done[part] < count:
                    check()
                    at = self.missing_bytes(part).start
                    size = min(count - self._done[part], PART)
                    copied = copy_bytes(source, at, size, self._descriptor, at)
                    if not copied:
                        return
                    self._count(part, copied)

    def _remove_earlier(self, age: float = _ABANDONED) -> bool:
        """Remove the other files of the blob to which nothing was written for ``age`` seconds; return whether any."""
        is_any = False
        now = os.fstat(self._reader).st_mtime  # of the same clock
        for path in self._lock.files():
            if path == self.path:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                # A complete file stays: its process may be about to publish it.
                if not age or (
                    now - status.st_mtime >= age and not _is_complete(status, self.blob)
                ):
                    path.unlink()
                    is_any = True
        return is_any

    def _count(self, part: int, new: int) -> None:
        self._done[part] += new
        place = self.blob.size + _COUNTER.size * part
        os.pwrite(self._descriptor, _COUNTER.pack(self._done[part]), place)

    def _hash_next(self, data: memoryview, offset: int) -> None:
        """Hash bytes if they follow what has been hashed; otherwise they are read later."""
        # A stream does not wait while another one hashes; its bytes are read back later.
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
            data = os.pread(self._reader, min(_READ, end - begin), begin) if end > begin else b""
            if not data:
                return
            self._digester.update(data)


def bytes_done(folder: Path, blob: BlobId) -> int:
    """Return how many bytes of a blob its partial files have, or 0, without locking it."""
    most = 0
    for path in listed_files(folder, blob.digest):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | OPEN_FLAGS)
            try:
                most = max(most, sum(_counters(descriptor, blob.size) or ()))
            finally:
                os.close(descriptor)
    return most


def remove_partial(folder: Path, digest: Digest) -> None:
    """Remove the partial files of a blob that is not needed any more, and its lock."""
    for path in listed_files(folder, digest):
        path.unlink(missing_ok=True)
    # Last, because it lists the files.
    lock_path(folder, digest).unlink(missing_ok=True)


def _opened(path: Path) -> int | None:
    """Return a descriptor of an earlier file for reading; remove one that may be another user's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in NOT_OURS:
            raise
    else:
        if belongs_to_us(descriptor, path.parent):
            return descriptor
        os.close(descriptor)
    path.unlink(missing_ok=True)
    return None


def _is_complete(status: os.stat_result, blob: BlobId) -> bool:
    """Return whether a file is filled and has no writer."""
    return status.st_size == blob.size and not status.st_mode & 0o222


def _lengths(size: int) -> list[int]:
    """Return the bytes of each part of a blob."""
    return [min(PART, size - begin) for begin in range(0, size, PART)]


def _counters(descriptor: int, size: int) -> list[int] | None:
    """Return how many bytes of each part a partial file has; None if its counters are invalid."""
    lengths = _lengths(size)
    # The counters were cut off, so it was filled, even if its process died before it made it
    # read-only.
    if os.fstat(descriptor).st_size == size:
        return lengths
    # One byte more, which shows that a file is too long.
    data = read_exactly(descriptor, _COUNTER.size * len(lengths) + 1, size)
    if len(data) != _COUNTER.size * len(lengths):
        return None
    counters = [count for (count,) in _COUNTER.iter_unpack(data)]
    # Counters are bytes from a file, which may be anything. A larger one would count bytes of the
    # next part.
    return counters if all(map(int.__le__, counters, lengths)) else None

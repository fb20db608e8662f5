"""Blobs coming into a store: written under temporary names, synced together, then named.

The order is what makes a crash harmless: every blob's bytes are durable before it gets its name, and
``Ingest.publish`` makes the names durable before it returns, so that a manifest written afterwards
names only what is there. Syncing overlaps with the hashing and writing of later blobs, because an
fsync a blob in line nearly doubles the time of an import.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest, Digester
from blobstore.core.files import sync_folder, write_all
from blobstore.errors import BlobstoreError, DamagedSource

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path
    from typing import Self

    from typing_extensions import Buffer

    from blobstore.store.layout import Layout
    from blobstore.store.locks import Lease

_SYNC_THREADS = 4
_MAX_UNSYNCED = 64
"""Files written but not yet synced; each holds a descriptor."""

Buffers = Callable[[], Iterable["Buffer"]]
"""Gives the bytes of a blob from the start, each time it is called."""
Exists = Callable[[Digest, int], bool]
"""Tells whether a store has a blob of a size, or raises that what it has is damaged."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """A blob that the store has, and whether this ingest wrote it."""

    digest: Digest
    size: int
    written: bool


class Ingest:
    """One import into a store. Any number of threads may add blobs; one of them publishes.

    Leaving the ``with`` block without :meth:`publish` removes what was written. Until then, no blob
    that was added is removed by others, be it new or not; afterwards a manifest must reach it.
    """

    def __init__(
        self,
        layout: Layout,
        lease: Lease,
        sizes: Collection[int],
        exists: Exists,
    ) -> None:
        self._layout = layout
        self._lease = lease
        self._sizes = sizes
        """Sizes of the blobs that the store had; a blob of another size is new."""
        self._exists = exists
        self._syncing: list[Future[None]] = []
        self._unnamed: dict[Path, Digest] = {}
        self._prefix = f"{lease.name}-"
        self._numbers = itertools.count()
        self._active = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._room = threading.BoundedSemaphore(_MAX_UNSYNCED)
        self._pool = ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="blobstore-sync")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # An interrupt can strike anywhere, also between the start of a thread and its entry in
        # the list of its pool. So nothing is left to what callers joined or noted.
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._active)
        self._pool.shutdown()
        for path in self._layout.temporary.glob(f"{self._prefix}*"):
            path.unlink(missing_ok=True)

    def add(self, size: int, buffers: Buffers, *, once: bool = False) -> Ingested:
        """Take in a blob of ``size`` bytes; it gets its name when :meth:`publish` is called.

        A blob that is present already is not written again. Where the store has a blob of the same
        size, ``buffers`` is hashed first and read a second time if the blob is new; otherwise
        hashing and writing go over the bytes once. With ``once`` they always do, for bytes that
        take longer to make than to write; those of a blob that is present are thrown away.

        Raises:
            BlobDamaged: the store has that blob, and it is not whole.
            DamagedSource: the buffers are not ``size`` bytes.
            OSError: writing failed.
            BlobstoreError: the ingest has ended.
        """
        with self._working():
            if size in self._sizes and not once:
                digester = Digester()
                for buffer in buffers():
                    self._check_open()
                    digester.update(buffer)
                present = self.find(digester.digest(), size)
                if present is not None:
                    return present
            return self._write(size, buffers())

    def publish(self) -> None:
        """Give every added blob its name, durably.

        Raises:
            OSError: a blob could not be synced or renamed; none that was not synced has a name.
        """
        for synced in self._syncing:
            synced.result()
        for path, digest in self._unnamed.items():
            path.replace(self._layout.blob(digest))
        self._unnamed.clear()
        sync_folder(self._layout.blobs)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        with self._changed:
            self._check_open()
            self._active += 1
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise BlobstoreError("the import was stopped")

    def find(self, digest: Digest, size: int) -> Ingested | None:
        """Return a blob that the store has already, which stays until the ingest ends.

        Raises:
            BlobDamaged: it is not whole.
            OSError: it cannot be held.
        """
        self._lease.hold([digest])  # before it is looked for
        if not self._exists(digest, size):
            return None
        # Whoever wrote it may not have synced it; for a file that is on disk this costs nothing.
        # A blob that is cold only was synced before it got its name.
        with contextlib.suppress(FileNotFoundError):
            self._sync_later(os.open(self._layout.blob(digest), os.O_RDONLY | os.O_CLOEXEC))
        return Ingested(digest, size, written=False)

    def _write(self, size: int, buffers: Iterable[Buffer]) -> Ingested:
        path = self._layout.temporary / f"{self._prefix}{next(self._numbers)}"
        # Read-only from the start: a descriptor opened for writing stays usable.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        digester = Digester()
        try:
            for buffer in buffers:
                self._check_open()
                digester.update(buffer)
                write_all(descriptor, buffer)
            digest = self._checked(digester, size)
            present = self.find(digest, size)  # written by another process in the meantime
        except BaseException:
            os.close(descriptor)
            path.unlink()
            raise
        if present is not None:
            os.close(descriptor)
            path.unlink()
            return present
        with self._changed:
            self._unnamed[path] = digest
        self._sync_later(descriptor)
        return Ingested(digest, size, written=True)

    @staticmethod
    def _checked(digester: Digester, size: int) -> Digest:
        if digester.size != size:
            raise DamagedSource(f"a blob announced with {size} bytes has {digester.size}")
        return digester.digest()

    def _sync_later(self, descriptor: int) -> None:
        """Sync and close a file on another thread."""
        self._room.acquire()
        synced = self._pool.submit(self._sync, descriptor)
        with self._changed:
            self._syncing.append(synced)

    def _sync(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            self._room.release()

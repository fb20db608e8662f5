"""Blobs coming into a store: written under temporary names, synced together, then named.

The order is what makes a crash harmless: every blob's bytes are durable before it gets its name, and
``Ingest.publish`` makes the names durable before it returns, so that a manifest written afterwards
names only what is there. Syncing overlaps with the hashing and writing of later blobs, because an
fsync a blob in line nearly doubles the time of an import.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.digest import Digest, Digester
from blobstore.errors import DamagedSource
from blobstore.files import sync_folder, write_all

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from typing_extensions import Buffer

    from blobstore.store.local import LocalStore

_SYNC_THREADS = 4
_MAX_UNSYNCED = 64
"""Files written but not yet synced; each holds a descriptor."""

Buffers = Callable[[], Iterable["Buffer"]]
"""Gives the bytes of a blob from the start, each time it is called."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """A blob that the store has, and whether this ingest wrote it."""

    digest: Digest
    size: int
    written: bool


class Ingest:
    """One import into a store. Any number of threads may add blobs; one of them publishes.

    Leaving the ``with`` block without :meth:`publish` removes what was written.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._folder = store.layout.temporary
        self._sizes = store.blob_sizes()
        self._syncing: list[tuple[Path, Digest, Future[None]]] = []
        self._temporary: set[Path] = set()
        self._lock = threading.Lock()
        self._room = threading.BoundedSemaphore(_MAX_UNSYNCED)
        self._pool = ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="blobstore-sync")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=False)
        for path in self._temporary:
            path.unlink(missing_ok=True)

    def add(self, size: int, buffers: Buffers) -> Ingested:
        """Take in a blob of ``size`` bytes; it gets its name when :meth:`publish` is called.

        A blob that is present already is not written again. Where the store has a blob of the same
        size, ``buffers`` is hashed first and read a second time if the blob is new; otherwise
        hashing and writing go over the bytes once.

        Raises:
            BlobDamaged: the store has a blob of that digest with another size.
            OSError: writing failed.
        """
        if size in self._sizes:
            digester = Digester()
            for buffer in buffers():
                digester.update(buffer)
            digest = digester.digest()
            if self._store.exists(digest, size):
                return Ingested(digest, size, written=False)
        return self._write(size, buffers())

    def publish(self) -> None:
        """Give every added blob its name, durably.

        Raises:
            OSError: a blob could not be synced or renamed; none that was not synced has a name.
        """
        for _, _, synced in self._syncing:
            synced.result()
        for path, digest, _ in self._syncing:
            path.replace(self._store.layout.blob(digest))
            self._temporary.discard(path)
        if self._syncing:
            sync_folder(self._store.layout.blobs)
        self._syncing.clear()

    def _write(self, size: int, buffers: Iterable[Buffer]) -> Ingested:
        path = self._folder / f"{os.getpid()}-{secrets.token_hex(8)}"
        with self._lock:
            self._temporary.add(path)
        # Read-only from the start: a descriptor opened for writing stays usable.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        digester = Digester()
        try:
            for buffer in buffers:
                digester.update(buffer)
                write_all(descriptor, buffer)
        except BaseException:
            os.close(descriptor)
            raise
        if digester.size != size:
            os.close(descriptor)
            message = f"a blob announced with {size} bytes has {digester.size}"
            raise DamagedSource(message)
        digest = digester.digest()
        self._sync_later(path, digest, descriptor)
        return Ingested(digest, size, written=True)

    def _sync_later(self, path: Path, digest: Digest, descriptor: int) -> None:
        self._room.acquire()
        synced = self._pool.submit(self._sync, descriptor)
        with self._lock:
            self._syncing.append((path, digest, synced))

    def _sync(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            self._room.release()

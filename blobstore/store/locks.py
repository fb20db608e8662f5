"""The lock of a store, by which processes share it.

It is held only for moments: shared while a lease is written (:mod:`blobstore.store.leases`), exclusive while names
change or unreferenced blobs are removed. Readers do not take it: a reader that misses a blob reads the manifest
again. The system releases a lock when a process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import time
from typing import TYPE_CHECKING, Protocol

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import give_to_owner, make_folders, open_shared
from blobstore.core.workers import Cancelled
from blobstore.errors import StoreBusy, StoreError
from blobstore.store.scan import is_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from blobstore.store.layout import Layout

LOCK_TIMEOUT = 60.0
"""Seconds to wait for a lock by default."""
_IMPORT_TIMEOUT = 3600.0
"""Seconds that a running import waits at least: it may lose the work of hours."""
FIRST_PAUSE, _LAST_PAUSE = 0.0005, 0.01
# What flock fails with on file systems that cannot lock.
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_NUMBERS = itertools.count()
"""The last parts of the names of temporary files."""
_LINE = len(Digest("0" * 64).hex) + 1


class Import(Protocol):
    """What waits for a lock as long as it runs."""

    @property
    def has_ended(self) -> bool:
        """Whether it was stopped."""


class Locks:
    """The locks of a store. Waiting for one times out after ``timeout`` seconds."""

    def __init__(self, layout: Layout, timeout: float = LOCK_TIMEOUT) -> None:
        self._layout = layout
        self.timeout = timeout

    def shared(
        self, importer: Import | None = None, *, is_created: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Keep blobs and names from being removed.

        If ``importer`` is a running import, wait longer, but only until that ends.

        Raises:
            StoreBusy: another process held the exclusive lock all the time.
            StoreError: the file system has no locks.
            Cancelled: the import has ended.
            OSError: unless ``is_created``, there is no file to lock.
        """
        return self._held(fcntl.LOCK_SH, importer, is_created=is_created)

    def exclusive(self, importer: Import | None = None) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from writing and from leasing blobs. Raises as :meth:`shared`."""
        return self._held(fcntl.LOCK_EX, importer)

    @contextlib.contextmanager
    def _held(
        self, kind: int, importer: Import | None = None, *, is_created: bool = True
    ) -> Iterator[None]:
        # NFS requires a file to be open for writing for an exclusive lock.
        flags = os.O_RDWR if kind == fcntl.LOCK_EX else os.O_RDONLY
        if is_created:
            self._make(self._layout.lock.parent)
            flags |= os.O_CREAT
        # Each user of the store must be able to lock the file, as far as the umask allows.
        descriptor = open_shared(self._layout.lock, flags)
        if is_created:
            give_to_owner(self._layout.lock)
        process = os.getpid()
        try:
            self._wait(descriptor, kind, importer)
            yield
        finally:
            # Closing is not enough: a process that another thread has forked has a copy of the
            # descriptor. That process must not unlock it, either.
            if os.getpid() == process:
                with contextlib.suppress(OSError):  # there may be no locks
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _make(self, folder: Path) -> None:
        if not is_folder(folder):
            make_folders(folder, self._layout.root)

    def _wait(self, descriptor: int, kind: int, importer: Import | None) -> None:
        """Lock the file of an open descriptor, as soon as other processes let go of it."""
        timeout = self.timeout if importer is None else max(self.timeout, _IMPORT_TIMEOUT)
        deadline = time.monotonic() + timeout
        pause = FIRST_PAUSE
        while not try_lock(descriptor, kind, self._layout.root):
            if importer is not None and importer.has_ended:
                raise Cancelled("the import was stopped")
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreBusy(
                    f"timed out after {timeout:g} s waiting for the lock of the store "
                    f"{quote(self._layout.root)}, which another process holds; try again, or "
                    "wait longer"
                )
            interrupts.sleep(min(pause, left))
            pause = min(2 * pause, _LAST_PAUSE)


def try_lock(descriptor: int, kind: int, root: Path) -> bool:
    """Take a lock of a file in the store ``root`` if it is free; return whether it was.

    Raises:
        StoreError: the file system has no locks.
    """
    try:
        # Never wait inside the system call: callers look for a request to stop, and for the end of
        # their time, between two tries.
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise StoreError(
            f"the file system of the store {quote(root)} has no locks (flock): {error.strerror}; "
            "keep the store on one that has locks, because without them processes could delete each "
            "other's data"
        ) from error
    return True

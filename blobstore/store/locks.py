"""Locks and leases: how processes share a store.

A blob is garbage if no manifest references it. Blobs that an import has written or found, but that no
manifest references yet, are held by its lease: a file that lists digests and stays locked while its process
lives. The system releases a lock when a process ends, however it ends, so an unlocked lease belongs to a
dead process.

The store's lock is held only for moments: shared while a lease is written, exclusive while names change or
unreferenced blobs are removed. Readers do not take it: a reader that misses a blob reads the manifest again. The
holder of the exclusive lock reads all leases after taking it. The owner of a lease adds a digest before it looks
for the blob, so it sees whether the blob was removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import give_to_owner, make_folders, read_exactly
from blobstore.core.workers import Cancelled
from blobstore.errors import StoreBusy, StoreError
from blobstore.store.scan import is_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import Self

    from blobstore.store.layout import Layout

LOCK_TIMEOUT = 60.0
"""Seconds to wait for a lock by default."""
_IMPORT_TIMEOUT = 3600.0
"""Seconds that a running import waits at least: it may lose the work of hours."""
_FIRST_PAUSE, _LAST_PAUSE = 0.0005, 0.01
# What flock fails with on file systems that cannot lock.
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_NUMBERS = itertools.count()
"""The last parts of the names of temporary files."""
_LINE = len(Digest("0" * 64).hex) + 1


class Locks:
    """The locks of a store. Waiting for one times out after ``timeout`` seconds."""

    def __init__(self, layout: Layout, timeout: float = LOCK_TIMEOUT) -> None:
        self._layout = layout
        self.timeout = timeout

    def shared(self, importer: Lease | None = None) -> contextlib.AbstractContextManager[None]:
        """Keep blobs and names from being removed.

        If ``importer`` is the lease of a running import, wait longer, but only until that ends.

        Raises:
            StoreBusy: another process held the exclusive lock all the time.
            StoreError: the file system has no locks.
            Cancelled: the import has ended.
        """
        return self._held(fcntl.LOCK_SH, importer)

    def exclusive(self, importer: Lease | None = None) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from writing and from leasing blobs. Raises as :meth:`shared`."""
        return self._held(fcntl.LOCK_EX, importer)

    def lease(self, *, is_import: bool = False) -> Lease:
        """Return a new lease, which the caller closes. Raises as :meth:`shared`.

        A forked process keeps the lease alive too, unless it is that of an import.
        """
        self._make(self._layout.leases)
        with self.shared():  # a holder of the exclusive lock would think an unlocked lease dead
            return Lease(self._layout, self, is_import=is_import)

    def reading_lease(self) -> Lease:
        """Return a new lease as :meth:`lease` does, but create no folder and no lock file.

        Raises:
            OSError: they do not exist, or this process may not write to the store.
        """
        with self._held(fcntl.LOCK_SH, is_created=False):
            return Lease(self._layout, self)

    def join_lease(self, name: str) -> JoinedLease:
        """Return another process's lease, to add digests to it.

        Raises:
            Cancelled: the lease has ended.
        """
        return JoinedLease(self._layout, self, name)

    @contextlib.contextmanager
    def _held(
        self, kind: int, importer: Lease | None = None, *, is_created: bool = True
    ) -> Iterator[None]:
        # NFS requires a file to be open for writing for an exclusive lock.
        flags = os.O_CLOEXEC | (os.O_RDWR if kind == fcntl.LOCK_EX else os.O_RDONLY)
        if is_created:
            self._make(self._layout.lock.parent)
            flags |= os.O_CREAT
        # Each user of the store must be able to lock the file, as far as the umask allows.
        descriptor = os.open(self._layout.lock, flags, 0o666)
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

    def _wait(self, descriptor: int, kind: int, importer: Lease | None) -> None:
        """Lock the file of an open descriptor, as soon as other processes let go of it."""
        timeout = self.timeout if importer is None else max(self.timeout, _IMPORT_TIMEOUT)
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
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


class Lease:
    """The blobs that a process needs and no manifest references yet. Threads may share a lease."""

    def __init__(self, layout: Layout, locks: Locks, *, is_import: bool = False) -> None:
        self._process = os.getpid()
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
        """Unique; temporary files whose names begin with it belong to this lease."""
        self._files = layout.temporary, f"{self.name}-"
        self._locks = locks
        self._importer = self if is_import else None
        self._held: set[Digest] = set()
        self._path = layout.leases / self.name
        # Appending, because worker processes add digests to the same file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        # Readable for others, because their gc must read it too.
        self._descriptor = os.open(self._path, flags, 0o644)
        # A forked process may go on reading a model, but it never goes on with an import.
        if is_import:
            NOT_INHERITED.add(self)
        try:
            while not try_lock(self._descriptor, fcntl.LOCK_EX, layout.root):
                interrupts.sleep(_FIRST_PAUSE)  # a dry run of gc is looking whether it is locked
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, digests: Iterable[Digest]) -> None:
        """Keep blobs from being removed, those that exist now and those that are added later.

        Raises:
            StoreBusy: waiting for the store's lock timed out.
            OSError: the lease could not be written.
        """
        fresh = set(digests) - self._held
        if fresh:
            # gc decides under the exclusive lock. So it reads this line, or it is done before the
            # caller looks for the blob.
            with self._locks.shared(self._importer):
                # On a full disk, this process or another one may have left a torn line, which must not
                # become the start of this one.
                text = "".join(f"\n{digest.hex}" for digest in fresh) + "\n"
                while os.write(self._descriptor, text.encode()) < len(text):
                    pass  # all lines once more: between two writes, another process may add its own
            # Only now: if the write failed, the next call must write them again.
            self._held |= fresh

    def exclusive_lock(self) -> contextlib.AbstractContextManager[None]:
        """Take the store's exclusive lock; see :meth:`Locks.exclusive`."""
        return self._locks.exclusive(self._importer)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended the lease, or died and its lease was collected."""
        # gc removes the file of a lease if its process seems dead. The open descriptor shows that.
        return os.fstat(self._descriptor).st_nlink == 0

    def create_file(self, shared: str = "") -> tuple[Path, int]:
        """Return the path and the descriptor of a new temporary file, which belongs to this lease.

        The caller closes it with :meth:`close_file`. Forked processes cannot write to it. With the name ``shared``,
        other processes that have joined the lease open the same file.
        """
        folder, prefix = self._files
        # Read-only from the start: a descriptor that is open for writing stays usable.
        path, access, mode = folder / f"{prefix}{next(_NUMBERS)}", os.O_WRONLY | os.O_EXCL, 0o444
        if shared:
            path, access, mode = folder / f"{self.name}-{shared}", os.O_RDWR | os.O_NOFOLLOW, 0o600
        descriptor = os.open(path, access | os.O_CREAT | os.O_CLOEXEC, mode)
        _WRITTEN.add(descriptor)
        give_to_owner(path)
        return path, descriptor

    @staticmethod
    def close_file(descriptor: int) -> None:
        """Close a descriptor, which may be one of :meth:`create_file`."""
        _WRITTEN.discard(descriptor)
        os.close(descriptor)

    def remove_files(self) -> None:
        """Remove the files of :meth:`create_file` that have not been renamed."""
        folder, prefix = self._files
        # Files of worker processes too: their names begin with the same prefix.
        for path in folder.glob(f"{prefix}*"):
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """End the lease: its blobs are garbage now, or referenced by a manifest.

        In a forked process, do nothing: the lease belongs to the process that created it.
        """
        if os.getpid() == self._process:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """End the lease and close its file."""
        # If the store cannot be written any more: without its lock, the file is that of a dead lease.
        with contextlib.suppress(OSError):
            self.end()
        NOT_INHERITED.discard(self)
        os.close(self._descriptor)


class _LocksFile(Protocol):
    _descriptor: int


NOT_INHERITED: weakref.WeakSet[_LocksFile] = weakref.WeakSet()
"""Owners of locked files whose locks forked processes do not keep."""
_WRITTEN: set[int] = set()
"""Descriptors of temporary files, which may become blobs."""


def _drop_in_child() -> None:
    descriptors = _WRITTEN.union(owner._descriptor for owner in NOT_INHERITED)
    if descriptors:
        # The descriptors are redirected and not closed: their owners still know the numbers and
        # close them later, when these could belong to other files.
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for descriptor in descriptors:
            os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)
    NOT_INHERITED.clear()
    _WRITTEN.clear()


# A worker of an import that outlives it would keep its lease locked.
os.register_at_fork(after_in_child=_drop_in_child)


class JoinedLease(Lease):
    """A lease of another process, which keeps it alive; this one adds digests to it."""

    def __init__(self, layout: Layout, locks: Locks, name: str) -> None:
        self.name = name
        # The name of the lease is all up to the last dash: so gc finds it.
        self._files = layout.temporary, f"{name}-{secrets.token_hex(8)}."
        self._locks = locks
        # A worker waits for the lock as long as the import does, and stops with it.
        self._importer = self
        self._held = set()
        try:
            path = layout.leases / name
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Cancelled("the import was stopped") from None

    def end(self) -> None:
        """Do nothing: the lease belongs to the other process."""


class Leases(NamedTuple):
    """The leases of a store."""

    held: dict[str, set[Digest]]
    """The blobs that living processes hold, by the names of their leases, which begin with their IDs."""
    dead: dict[Path, set[Digest]]
    """The leases whose processes have died, and the blobs that they held."""

    @property
    def digests(self) -> set[Digest]:
        """All blobs that living processes hold."""
        return set().union(*self.held.values())


def read_leases(layout: Layout, without: str = "") -> Leases:
    """Return the leases of a store; see :meth:`LocalStore.read_leases`."""
    leases = Leases({}, {})
    paths: list[Path] = []
    with contextlib.suppress(FileNotFoundError):
        paths.extend(sorted(layout.leases.iterdir()))
    for path in paths:
        if path.name == without:
            continue
        with contextlib.suppress(FileNotFoundError):  # a lease can end at any time
            # A link or a pipe with the name of a lease must not make gc read elsewhere, or wait.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                # A living process keeps its lease locked, so a lock that is free belongs to a dead
                # one.
                is_dead = try_lock(descriptor, fcntl.LOCK_SH, layout.root)
                data = read_exactly(descriptor, os.fstat(descriptor).st_size, 0)
            finally:
                os.close(descriptor)
            lines = data.splitlines(keepends=True)
            # A line of another length is torn: the disk was full, or it is being written while a
            # dry run reads without the lock.
            whole = (line[:-1] for line in lines if len(line) == _LINE)
            digests = {Digest(line.decode("ascii", "replace")) for line in whole}
            if is_dead:
                leases.dead[path] = digests
            else:
                leases.held[path.name] = digests
    return leases


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

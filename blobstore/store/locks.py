"""Locks and leases: how processes share a store.

A blob is garbage if no manifest references it. Blobs that an import has written or found, but that no
manifest references yet, are held by its lease: a file that lists digests and stays locked while its process
lives. The system releases a lock when a process ends, however it ends, so an unlocked lease belongs to a
dead process.

The store's lock is held only for moments: shared while a lease is written or a manifest is published,
exclusive while unreferenced blobs or names are removed. The holder of the exclusive lock has read all
leases since taking it. A digest that is added to a lease later is looked for later, so its owner sees
whether the blob was removed.
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
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import read_exactly, write_all
from blobstore.core.workers import Cancelled
from blobstore.errors import StoreBusy, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import Self

    from blobstore.store.layout import Layout

LOCK_TIMEOUT = 60.0
"""Seconds to wait for a lock by default."""
_FIRST_PAUSE, _LAST_PAUSE = 0.0005, 0.01
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR}
_NUMBERS = itertools.count()
"""The last parts of the names of temporary files."""
_LINE = len(Digest("0" * 64).hex) + 1


class Locks:
    """The locks of a store. Waiting for one times out after ``timeout`` seconds."""

    def __init__(self, layout: Layout, timeout: float = LOCK_TIMEOUT) -> None:
        self._layout = layout
        self.timeout = timeout

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Keep blobs and names from being removed.

        Raises:
            StoreBusy: another process held the exclusive lock all the time.
            StoreError: the file system has no locks.
        """
        self._layout.lock.parent.mkdir(parents=True, exist_ok=True)
        with self._held(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other processes from writing and from looking for blobs. Raises as :meth:`shared`."""
        self._layout.lock.parent.mkdir(parents=True, exist_ok=True)
        with self._held(fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Take the shared lock, or none if this process may not: a store can be read-only."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._held(fcntl.LOCK_SH))
            except OSError as error:
                if error.errno not in _READ_ONLY:
                    raise
            yield

    def lease(self, *, is_inherited: bool = True) -> Lease:
        """Return a new lease, which the caller closes. Raises as :meth:`shared`.

        A forked process keeps the lease alive too, unless ``is_inherited`` is false.
        """
        self._layout.leases.mkdir(parents=True, exist_ok=True)
        with self.shared():  # a holder of the exclusive lock would think an unlocked lease dead
            return Lease(self._layout, self, is_inherited=is_inherited)

    def join_lease(self, name: str) -> JoinedLease:
        """Return another process's lease, to add digests to it.

        Raises:
            Cancelled: the lease has ended.
        """
        return JoinedLease(self._layout, self, name)

    @contextlib.contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        # NFS requires a file to be open for writing for an exclusive lock.
        mode = os.O_RDWR if kind == fcntl.LOCK_EX else os.O_RDONLY
        descriptor = os.open(self._layout.lock, mode | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + self.timeout
            pause = _FIRST_PAUSE
            while not _try_lock(descriptor, kind, self._layout.root):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StoreBusy(
                        f"timed out after {self.timeout:g} s waiting for the lock of the store "
                        f"{quote(self._layout.root)}, which another process holds; try again, or "
                        "wait longer"
                    )
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LAST_PAUSE)
            yield
        finally:
            os.close(descriptor)


class Lease:
    """The blobs that a process needs and no manifest references yet. Threads may share a lease."""

    def __init__(self, layout: Layout, locks: Locks, *, is_inherited: bool = True) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
        """Unique; temporary files whose names begin with it belong to this lease."""
        self._files = layout.temporary, f"{self.name}-"
        self._locks = locks
        self._held: set[Digest] = set()
        self._path = layout.leases / self.name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o644)
        if not is_inherited:
            _OWN_LEASES.add(self)
        try:
            while not _try_lock(self._descriptor, fcntl.LOCK_EX, layout.root):
                time.sleep(_FIRST_PAUSE)  # a dry run of gc is looking whether it is locked
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
            with self._locks.shared():
                write_all(self._descriptor, "".join(f"{digest.hex}\n" for digest in fresh).encode())
            self._held |= fresh

    def exclusive_lock(self) -> contextlib.AbstractContextManager[None]:
        """Take the store's exclusive lock; see :meth:`Locks.exclusive`."""
        return self._locks.exclusive()

    def create_file(self) -> tuple[Path, int]:
        """Return the path and the descriptor of a new temporary file, which belongs to this lease."""
        folder, prefix = self._files
        path = folder / f"{prefix}{next(_NUMBERS)}"
        # Read-only from the start: a descriptor that is open for writing stays usable.
        return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)

    def remove_files(self) -> None:
        """Remove the files of :meth:`create_file` that have not been renamed."""
        folder, prefix = self._files
        for path in folder.glob(f"{prefix}*"):
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """End the lease: its blobs are garbage now, or referenced by a manifest."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """End the lease and close its file."""
        self.end()
        _OWN_LEASES.discard(self)
        os.close(self._descriptor)


_OWN_LEASES: weakref.WeakSet[Lease] = weakref.WeakSet()
"""Leases that forked processes do not keep alive."""


def _drop_in_child() -> None:
    if _OWN_LEASES:
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        for lease in _OWN_LEASES:
            os.dup2(nowhere, lease._descriptor, inheritable=False)
        os.close(nowhere)
        _OWN_LEASES.clear()


# A worker of an import that outlives it would keep its lease locked.
os.register_at_fork(after_in_child=_drop_in_child)


class JoinedLease(Lease):
    """A lease of another process, which keeps it alive; this one adds digests to it."""

    def __init__(self, layout: Layout, locks: Locks, name: str) -> None:
        self.name = name
        # The name of the lease is all up to the last dash: so gc finds it.
        self._files = layout.temporary, f"{name}-{secrets.token_hex(8)}."
        self._locks = locks
        self._held = set()
        try:
            path = layout.leases / name
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Cancelled("the import was stopped") from None

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended the lease, or died and its lease was collected."""
        return os.fstat(self._descriptor).st_nlink == 0

    def end(self) -> None:
        """Do nothing: the lease belongs to the other process."""


class Leases(NamedTuple):
    """The leases of a store."""

    held: dict[str, set[Digest]]
    """The blobs that living processes hold, by the names of their leases, which begin with their IDs."""
    dead: list[Path]
    """Leases whose processes have died."""

    @property
    def digests(self) -> set[Digest]:
        """All blobs that living processes hold."""
        return set().union(*self.held.values())


def read_leases(layout: Layout, without: str = "") -> Leases:
    """Return the leases of a store; see :meth:`LocalStore.read_leases`."""
    leases = Leases({}, [])
    paths: list[Path] = []
    with contextlib.suppress(FileNotFoundError):
        paths.extend(sorted(layout.leases.iterdir()))
    for path in paths:
        if path.name == without:
            continue
        with contextlib.suppress(FileNotFoundError):  # a lease can end at any time
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _try_lock(descriptor, fcntl.LOCK_SH, layout.root):
                    leases.dead.append(path)
                    continue
                data = read_exactly(descriptor, os.fstat(descriptor).st_size, 0)
            finally:
                os.close(descriptor)
            lines = data.splitlines(keepends=True)
            whole = (line[:-1] for line in lines if len(line) == _LINE)
            leases.held[path.name] = {Digest(line.decode("ascii", "replace")) for line in whole}
    return leases


def _try_lock(descriptor: int, kind: int, root: Path) -> bool:
    """Take a lock if it is free; return whether it was."""
    try:
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

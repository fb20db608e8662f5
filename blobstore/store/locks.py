"""Who uses a store: one lock that is shared by all but collecting, and leases on blobs.

A blob is garbage when no manifest reaches it. What an import has written or found, but has no manifest
for yet, is held by its lease: a file that lists digests and stays locked for as long as its process
lives. The system lets go of a lock when a process ends, however it ends, so that a lease nobody has
locked is a dead process's.

The store's lock is held for moments: shared, while a lease is written or a manifest gets its name;
alone, while unreferenced blobs or names are removed. Whoever holds it alone has read all leases since,
and a digest that is added to a lease afterwards is looked for afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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

    from blobstore.store.blobs import BlobReader
    from blobstore.store.layout import Layout

LOCK_TIMEOUT = 60.0
"""Seconds to wait for a lock, where nothing else is said."""
_FIRST_PAUSE, _LAST_PAUSE = 0.0005, 0.01
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR}
_LINE = len(Digest("0" * 64).hex) + 1


class Locks:
    """The locks of a store. ``timeout`` is how many seconds to wait for one at most."""

    def __init__(self, layout: Layout, timeout: float = LOCK_TIMEOUT) -> None:
        self._layout = layout
        self.timeout = timeout

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Keep blobs and names from being removed.

        Raises:
            StoreBusy: another process has kept the lock for itself all the time.
            StoreError: the file system has no locks.
        """
        self._layout.lock.parent.mkdir(parents=True, exist_ok=True)
        with self._held(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep all others from writing and from finding blobs to use. Raises as :meth:`shared`."""
        self._layout.lock.parent.mkdir(parents=True, exist_ok=True)
        with self._held(fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Do as :meth:`shared` does where this process may: a store can be read-only."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._held(fcntl.LOCK_SH))
            except OSError as error:
                if error.errno not in _READ_ONLY:
                    raise
            yield

    def lease(self) -> Lease:
        """Return a new lease, which the caller closes. Raises as :meth:`shared`."""
        self._layout.leases.mkdir(parents=True, exist_ok=True)
        with self.shared():  # who is alone takes a lease that is not locked yet for a dead one's
            return Lease(self._layout, self)

    def join_lease(self, name: str) -> JoinedLease:
        """Return another process's lease, to add digests to it.

        Raises:
            Cancelled: the lease has ended.
        """
        return JoinedLease(self._layout, self, name)

    @contextlib.contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        # NFS wants a file to be open for writing by who locks it alone.
        way = os.O_RDWR if kind == fcntl.LOCK_EX else os.O_RDONLY
        descriptor = os.open(self._layout.lock, way | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._take(descriptor, kind)
            yield
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int, kind: int) -> None:
        deadline = time.monotonic() + self.timeout
        pause = _FIRST_PAUSE
        while not _is_taken(descriptor, kind, self._layout.root):
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreBusy(
                    f"the store {quote(self._layout.root)} is in use: others have held its lock "
                    f"for {self.timeout:g} s; try again, or wait longer"
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LAST_PAUSE)


class Lease:
    """The digests that a process needs and no manifest reaches yet. Threads may share it."""

    def __init__(self, layout: Layout, locks: Locks) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
        """Of no other lease; temporary files that begin with it are this lease's too."""
        self._locks = locks
        self._held: set[Digest] = set()
        self._path = layout.leases / self.name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o644)
        _OPEN_LEASES.add(self)
        try:
            while not _is_taken(self._descriptor, fcntl.LOCK_EX, layout.root):
                time.sleep(_FIRST_PAUSE)  # a dry collection looks whether it is
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, digests: Iterable[Digest]) -> None:
        """Keep blobs from being removed: those that are there now, and those that come.

        Raises:
            StoreBusy: the store's lock could not be had.
            OSError: the lease could not be written.
        """
        fresh = set(digests) - self._held
        if fresh:
            with self._locks.shared():
                write_all(self._descriptor, "".join(f"{digest.hex}\n" for digest in fresh).encode())
            self._held |= fresh

    def end(self) -> None:
        """Hold nothing any more: the blobs are garbage now, or referenced by a manifest."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """End it, and close its file."""
        self.end()
        _OPEN_LEASES.discard(self)
        os.close(self._descriptor)


_OPEN_LEASES: weakref.WeakSet[Lease] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked worker process that outlives this one would keep its leases locked.
    for lease in _OPEN_LEASES:
        os.close(lease._descriptor)
    _OPEN_LEASES.clear()


os.register_at_fork(after_in_child=_close_in_child)


class JoinedLease(Lease):
    """A lease of another process, which keeps it alive; this one adds digests to it."""

    def __init__(self, layout: Layout, locks: Locks, name: str) -> None:
        self.name = name
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


class Leased(NamedTuple):
    """What the leases of a store say."""

    digests: set[Digest]
    """Held by processes that live."""
    names: set[str]
    """The leases of these processes."""
    dead: list[Path]
    """Leases of processes that have ended without a word."""


def read_leases(store: BlobReader, without: str = "") -> Leased:
    """Return what is leased. Only who has the store's lock alone may believe it.

    A lease of the name ``without`` is passed over: that of the caller.

    Raises:
        OSError: a lease cannot be read.
    """
    layout = store._layout
    leased = Leased(set(), set(), [])
    paths: list[Path] = []
    with contextlib.suppress(FileNotFoundError):
        paths.extend(sorted(layout.leases.iterdir()))
    for path in paths:
        if path.name == without:
            continue
        with contextlib.suppress(FileNotFoundError):  # one ends at any time, but not the others
            _read_lease(path, leased, layout.root)
    return leased


def _read_lease(path: Path, leased: Leased, root: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _is_taken(descriptor, fcntl.LOCK_SH, root):
            leased.dead.append(path)
        else:
            leased.names.add(path.name)
            leased.digests.update(_digests(descriptor))
    finally:
        os.close(descriptor)


def _digests(descriptor: int) -> Iterator[Digest]:
    data = read_exactly(descriptor, os.fstat(descriptor).st_size, 0)
    for line in data.splitlines(keepends=True):
        if len(line) == _LINE:
            yield Digest(line[:-1].decode("ascii", "replace"))


def _is_taken(descriptor: int, kind: int, root: Path) -> bool:
    """Take a lock if it is free.

    Raises:
        StoreError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise StoreError(
            f"the file system of the store {quote(root)} has no locks (flock): {error.strerror}; "
            "keep the store on one that has, for without them processes could lose each other's data"
        ) from error
    return True

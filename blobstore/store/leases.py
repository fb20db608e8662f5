"""Leases: how blobs are held that no manifest references yet.

A blob is garbage if no manifest references it. Blobs that an import has written or found, but that no
manifest references yet, are held by its lease: a file that lists digests and stays locked while its process
lives. An unlocked lease belongs to a dead process, because the system releases the locks of a process that ends.

The holder of the store's exclusive lock reads all leases after taking it. The owner of a lease adds a digest before
it looks for the blob, so it sees whether the blob was removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import give_to_owner, make_folders, open_shared, read_exactly
from blobstore.core.fork import NOT_INHERITED
from blobstore.core.workers import Cancelled
from blobstore.errors import BlobstoreError, StoreError
from blobstore.store.locks import FIRST_PAUSE, try_lock
from blobstore.store.scan import is_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from typing import Self

    from blobstore.store.layout import Layout
    from blobstore.store.locks import Locks

_NUMBERS = itertools.count()
"""The last parts of the names of temporary files."""
_LINE = len(Digest("0" * 64).hex) + 1
_MAX_SIZE = 256 << 20
"""Bytes of the largest lease, which holds four million blobs."""


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
            NOT_INHERITED.add(self._descriptor)
        try:
            while not try_lock(self._descriptor, fcntl.LOCK_EX, layout.root):
                interrupts.sleep(FIRST_PAUSE)  # a dry run of gc is looking whether it is locked
        except BaseException:
            self.close()
            raise

    @classmethod
    def new(
        cls, layout: Layout, locks: Locks, *, is_import: bool = False, is_created: bool = True
    ) -> Lease:
        """Return a new lease, which the caller closes.

        A forked process keeps the lease alive too, unless it is that of an import.

        Raises:
            OSError: unless ``is_created``, there is no folder for it, or this process may not write to that.
            StoreBusy, StoreError: as :meth:`Locks.shared`.
        """
        if is_created and not is_folder(layout.leases):
            make_folders(layout.leases, layout.root)
        # A holder of the exclusive lock would think an unlocked lease dead.
        with locks.shared(is_created=is_created):
            return cls(layout, locks, is_import=is_import)

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
        NOT_INHERITED.add(descriptor)
        give_to_owner(path)
        return path, descriptor

    @staticmethod
    def close_file(descriptor: int) -> None:
        """Close a descriptor, which may be one of :meth:`create_file`."""
        NOT_INHERITED.discard(descriptor)
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
        NOT_INHERITED.discard(self._descriptor)
        os.close(self._descriptor)


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
            try:
                descriptor = open_shared(path, os.O_RDONLY)
            except BlobstoreError:  # no process writes to it
                leases.dead[path] = set()
                continue
            try:
                # A living process keeps its lease locked, so a lock that is free belongs to a dead
                # one.
                is_dead = try_lock(descriptor, fcntl.LOCK_SH, layout.root)
                size = os.fstat(descriptor).st_size
                if size > _MAX_SIZE and not is_dead:
                    raise StoreError(
                        f"the lease {quote(path)} has {size} bytes", advice="remove it"
                    )
                data = read_exactly(descriptor, size, 0) if size <= _MAX_SIZE else b""
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

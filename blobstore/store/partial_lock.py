"""The lock of a blob that is being downloaded, which also lists the partial files of the blob.

Locks save work: two processes do not fetch one blob. Bytes are right without them, because each process
writes to files that it has created alone. So locks may do nothing, as on some network file systems. The files
are listed because it would take long to look for those of each blob in a folder that many share.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from typing import TYPE_CHECKING, Final

from blobstore.core.escape import quote
from blobstore.core.files import give_to_owner, make_folders, read_exactly
from blobstore.core.fork import NOT_INHERITED
from blobstore.errors import StoreError
from blobstore.store.locks import try_lock
from blobstore.store.scan import is_folder

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from blobstore.core.digest import Digest

OPEN_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NOT_OURS: Final = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO}
"""Errors of opening a link, a pipe, or a file of another user."""
SUFFIX: Final = ".lock"
_MAX_FOREIGN: Final = 3
_TOKEN = re.compile(r"[0-9a-f]{16}")
_MAX_LIST = 1 << 16
"""Bytes of the list that are read."""


class PartialLock:
    """The lock of a blob, held by this process. It is a file that is never renamed."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._process = os.getpid()
        NOT_INHERITED.add(self._descriptor)

    @classmethod
    def take(cls, folder: Path, digest: Digest) -> Self | None:
        """Lock a blob; return None if another process has locked it.

        Raises:
            OSError: the file of the lock cannot be created.
            StoreError: the file system has no locks.
        """
        path, root = lock_path(folder, digest), folder.parent.parent
        if not is_folder(folder):
            make_folders(folder, root)
        foreign = 0
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | OPEN_FLAGS, 0o644)
            except OSError as error:
                if error.errno not in NOT_OURS:
                    raise
                # A link, a pipe or a file of another user has the name: remove it and create a
                # file.
                path.unlink(missing_ok=True)
                continue
            is_ours = False
            try:
                if not try_lock(descriptor, fcntl.LOCK_EX, root):
                    return None
                if not _is_at(path, descriptor):
                    continue  # another process has removed it
                give_to_owner(path)
                if not belongs_to_us(descriptor, folder):
                    foreign += 1
                    # Others left the first; this process created the last.
                    if foreign == _MAX_FOREIGN:
                        raise StoreError(
                            f"files that this user creates in {quote(folder)} belong to somebody else, as on "
                            "network file systems that map root to nobody",
                            advice="run the command as the owner of the store",
                        )
                    path.unlink(missing_ok=True)
                    continue
                is_ours = True
                return cls(path, descriptor)
            finally:
                if not is_ours:
                    os.close(descriptor)

    def files(self) -> list[Path]:
        """Return the paths of the blob's partial files, of which some may be gone."""
        return _listed(self._path, self._descriptor)

    def add_file(self) -> Path:
        """Return a path for one more partial file. It is listed first, so that no file is left unlisted."""
        token = secrets.token_hex(8)
        # Only the holder of the lock appends, so the end of the file does not move.
        os.pwrite(self._descriptor, f"{token}\n".encode(), os.fstat(self._descriptor).st_size)
        return _file(self._path, token)

    def remove(self) -> None:
        """Remove the lock, with the list."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the blob. ``gc`` removes the lock no sooner than the files that were written until now."""
        NOT_INHERITED.discard(self._descriptor)
        # As with the store's lock: a forked process may have a copy of the descriptor.
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def listed_files(folder: Path, digest: Digest) -> list[Path]:
    """Return what :meth:`PartialLock.files` does, without locking the blob."""
    path = lock_path(folder, digest)
    try:
        descriptor = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    except OSError:
        return []
    try:
        return _listed(path, descriptor)
    finally:
        os.close(descriptor)


def belongs_to_us(descriptor: int, folder: Path) -> bool:
    """Return whether only this user or the owner of the folder can write to a file, under one name."""
    # What root creates in another user's store belongs to that user, so both count as owners.
    status, owners = os.fstat(descriptor), (os.geteuid(), folder.stat().st_uid)
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid in owners


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the open file is the one that has the name."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def lock_path(folder: Path, digest: Digest) -> Path:
    """Return the path of a blob's lock."""
    return folder / f"{digest.hex}-{os.geteuid()}{SUFFIX}"


def _file(lock: Path, token: str) -> Path:
    return lock.with_name(f"{lock.stem}-{token}")


def _listed(lock: Path, descriptor: int) -> list[Path]:
    lines = read_exactly(descriptor, _MAX_LIST, 0).decode("ascii", "replace").split("\n")
    # The file may hold anything, and only tokens become paths.
    return [_file(lock, line) for line in lines if _TOKEN.fullmatch(line)]

"""Bases: the blobs that cold ones are deltas against, kept and judged by any of their files.

One file of a base may be intact where another is damaged.
"""

from __future__ import annotations

import errno
import os
import secrets
from stat import S_ISREG
from typing import TYPE_CHECKING

from blobstore.core.files import FileState, is_there, make_folders, status_of, sync_folder
from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.store.cold import LOOKS

if TYPE_CHECKING:
    from collections.abc import Callable

    from blobstore.core.digest import Digest
    from blobstore.store.blobs import BlobReader


# What link(2) fails with if a file system has no hard links, or no more of this file.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}


def pin(store: BlobReader, digest: Digest) -> bool:
    """Make sure that a base outlives its file in ``blobs/``. The caller holds the exclusive lock.

    Programs that know nothing of cold blobs delete blobs that no manifest references. So a base is either
    cold itself, or its file has a second hard link.

    Returns:
        Whether it is safe now: some file systems have no hard links.

    Raises:
        OSError: the system refused an operation.
    """
    return store.has_cold(digest) or link_base(store, digest)


def link_base(store: BlobReader, digest: Digest) -> bool:
    """Give a hot blob its second hard link, durably, replacing that of an older file.

    Returns and raises as :func:`pin`.
    """
    hot, second = store.blob_path(digest), store.base_path(digest)
    if not is_there(hot):
        return is_there(second)
    # After a repair the two names have different files, and the second one must follow.
    if is_there(second) and os.path.samestat(os.lstat(hot), os.lstat(second)):
        return True
    bases, temporary = store.folder("bases"), store.folder("temporary")
    make_folders(bases, store.root)
    make_folders(temporary, store.root)
    # Named like a file of a lease, so that gc removes it if this process dies before the rename.
    ready = temporary / f"{os.getpid()}-{secrets.token_hex(8)}-0"
    try:
        # link(2) does not replace a name, so the link is created under another one and renamed.
        os.link(hot, ready, follow_symlinks=False)
        ready.replace(second)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    # The link must be durable before a delta against this base gets its name.
    sync_folder(bases)
    return True


def states(store: BlobReader, digest: Digest) -> tuple[FileState | None, FileState | None]:
    """Return the states of a blob's hot and cold files; None for a file that does not exist."""
    return FileState.of(store.blob_path(digest)), FileState.of(store.cold_path(digest))


def which_are_whole(
    store: BlobReader, digest: Digest, size: int, progress: Callable[[int], None]
) -> tuple[bool, bool]:
    """Return whether a blob is readable and intact, and whether its cold file is intact or absent.

    Raises:
        StoreError: a file cannot be read.
    """

    def is_intact(check: Callable[[Digest, int, Callable[[int], None]], None]) -> bool:
        try:
            check(digest, size, progress)
        except (BlobMissing, BlobDamaged):
            return False
        return True

    has_cold = store.has_cold(digest)
    is_cold_intact = not has_cold or is_intact(store.check_cold)
    if store.has_hot(digest):
        return is_intact(store.check_digest), is_cold_intact
    return has_cold and is_cold_intact, is_cold_intact


class WholeBases:
    """Bases that were hashed.

    A delta against corrupted base bytes would decode only until the base is repaired, and then be lost.
    """

    def __init__(self, store: BlobReader) -> None:
        self._store = store
        self._whole: dict[Digest, set[tuple[str, FileState]]] = {}

    def file(self, digest: Digest) -> tuple[str, FileState] | None:
        """Return the path of the file that a base is read from, and its state; None if there is none."""
        store = self._store
        # In the order in which readers open the files of a base, so the file that is judged is the
        # one that is read.
        for path in (store.blob_path(digest), store.cold_path(digest), store.base_path(digest)):
            # One look for both: a commit may remove the file between two.
            if (status := status_of(path)) is not None:
                return (path, FileState.of_status(status)) if S_ISREG(status.st_mode) else None
        return None

    def intact_file(self, digest: Digest, size: int) -> tuple[str, FileState] | None:
        """Return the file that a base is read from if it is intact, else None; each file is hashed once.

        If the base is frozen or thawed in the meantime, its new file is hashed.

        Raises:
            StoreError: it cannot be read.
        """
        for _ in range(LOOKS):
            file = self.file(digest)
            if file is None:  # or it was just frozen or thawed, and is found by the next look
                continue
            if file in self._whole.get(digest, ()):
                return file
            is_intact = self._is_intact(digest, size, file[0])
            # If the file was replaced while it was hashed, the result is about neither file: hash
            # again.
            if self.file(digest) == file:
                if is_intact:
                    self.add(digest, file)
                return file if is_intact else None
        return None

    def _is_intact(self, digest: Digest, size: int, path: str) -> bool:
        store = self._store
        check = {
            store.cold_path(digest): store.check_cold,
            store.base_path(digest): store.check_base_link,
        }.get(path, store.check_digest)
        try:
            check(digest, size)
        except (BlobMissing, BlobDamaged):
            return False
        return True

    def add(self, digest: Digest, file: tuple[str, FileState]) -> None:
        """Record a file that the caller has hashed."""
        self._whole.setdefault(digest, set()).add(file)

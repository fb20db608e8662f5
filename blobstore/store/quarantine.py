"""Quarantine: damaged files are kept when intact ones replace them.

A damaged file is never deleted. It first gets a second name in ``.blobstore/quarantine/``, made of its
digest and the time; then a rename puts the intact file in its place. So no crash can leave neither, and a
process that has the damaged file mapped is not disturbed.
"""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.core.files import is_there, make_folders, sync_folder, write_file
from blobstore.store.bases import link_base, states, which_are_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from blobstore.core.digest import BlobId
    from blobstore.store.blobs import BlobReader


def replace_damaged(
    store: BlobReader,
    blob: BlobId,
    ready: Path,
    exclusive_lock: Callable[[], AbstractContextManager[None]],
    progress: Callable[[int], None],
) -> tuple[bool, Path | None]:
    """Make ``ready``, which is durable and checked, the file of a blob, unless the blob is intact now.

    Returns:
        Whether the file was needed, and the path of a damaged one in quarantine.

    Raises:
        StoreBusy: waiting for the exclusive lock timed out. Otherwise as :func:`put_in_place`.
    """
    digest, size = blob
    while True:
        # Hashing takes long, so it happens without the lock. The states show under the lock whether
        # the verdict still holds.
        seen = states(store, digest)
        is_intact, is_cold_intact = which_are_whole(store, digest, size, progress)
        if is_intact and is_cold_intact:
            return False, None
        with exclusive_lock():
            if states(store, digest) != seen:
                continue
            quarantined = None if is_intact else put_in_place(store, digest, ready)
            if not is_cold_intact:
                quarantined = quarantine_cold(store, digest) or quarantined
            return True, quarantined


def put_in_place(store: BlobReader, digest: Digest, ready: Path) -> Path | None:
    """Make ``ready``, which is durable and checked, the hot blob of ``digest``, durably.

    The caller holds the exclusive lock.

    Returns:
        The new path of the file that was in its place; None if there was none.

    Raises:
        OSError: the system refused an operation; the blob is either unchanged or replaced.
    """
    blob = store.blob_path(digest)
    quarantined = _quarantine(store, blob, digest) if is_there(blob) else None
    ready.replace(blob)
    sync_folder(store.folder("blobs"))
    if is_there(store.base_path(digest)):  # it still links to the damaged file
        link_base(store, digest)
    return quarantined


def quarantine_cold(store: BlobReader, digest: Digest) -> Path | None:
    """Move a damaged cold blob to quarantine, durably; the hot file must exist.

    Returns and raises as :func:`put_in_place`.
    """
    if not store.has_cold(digest):
        return None
    cold = store.cold_path(digest)
    quarantined = _quarantine(store, cold, digest)
    # Before the cold file goes: a base always needs a second file. gc removes a link that
    # is not needed.
    link_base(store, digest)
    # Without hard links, the file was moved to quarantine instead of being linked there.
    if is_there(cold):
        os.unlink(cold)  # noqa: PTH108 - a blob's path is a string
    sync_folder(store.folder("cold"))
    return quarantined


def quarantine_copy(store: BlobReader, data: bytes) -> Path:
    """Write the content of a damaged small file to quarantine, durably, and return its path.

    The file itself keeps its name until it is replaced, on any file system. Raises as
    :func:`put_in_place`.
    """
    for name in ("quarantine", "temporary"):
        make_folders(store.folder(name), store.root)
    path = _free_path(store.folder("quarantine"), Digest.of(data))
    write_file(path, [data], mode=0o444, temporary=store.folder("temporary"))
    return path


def _quarantine(store: BlobReader, damaged: str, digest: Digest) -> Path:
    """Link a file into quarantine, durably, and return the link; the caller replaces the original."""
    folder = store.folder("quarantine")
    make_folders(folder, store.root)
    found = os.lstat(damaged)
    for path in folder.glob(f"{digest.file_name}.*"):
        if os.path.samestat(path.lstat(), found):  # left by a repair that was interrupted
            return path
    path = _free_path(folder, digest)
    try:
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError
        os.link(damaged, path, follow_symlinks=False)
    except OSError:  # a folder; or a file system that has no hard links or forbids this one
        os.rename(damaged, path)  # noqa: PTH104 - a blob's path is a string
    sync_folder(folder)
    return path


def _free_path(folder: Path, digest: Digest) -> Path:
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path, number = folder / f"{digest.file_name}.{moment}", 1
    while is_there(path):
        number += 1
        path = folder / f"{digest.file_name}.{moment}-{number}"
    return path

"""A damaged blob put aside, and the right one put in its place.

What was there is never deleted: it gets a second name in ``.blobstore/quarantine/``, made of its digest
and the time, before the right file takes its place by a rename. So there is no moment at which a crash
leaves neither, and whoever has the damaged file mapped keeps it as it is.
"""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.core.files import make_folders, sync_folder, write_file
from blobstore.store.bases import link_base

if TYPE_CHECKING:
    from pathlib import Path

    from blobstore.store.blobs import BlobReader
    from blobstore.store.layout import Layout


def put_in_place(store: BlobReader, digest: Digest, ready: Path) -> Path | None:
    """Make ``ready``, which is durable and has been checked, the blob of ``digest``, durably.

    Only who has the store's lock alone may do this.

    Returns:
        Where a file that was in its place is now; None if there was none.

    Raises:
        OSError: the system refused something; the blob is what it was, or the right one.
    """
    layout = store._layout
    blob = layout.blob(digest)
    aside = put_aside(layout, blob, digest) if os.path.lexists(blob) else None
    ready.replace(blob)
    sync_folder(layout.blobs)
    if os.path.lexists(layout.base_blob(digest)):  # the second name of what is aside now
        link_base(store, digest)
    return aside


def put_cold_aside(store: BlobReader, digest: Digest) -> Path | None:
    """Put a damaged cold blob aside, durably; its hot form must be there. Raises as :func:`put_in_place`."""
    layout = store._layout
    cold = layout.cold_blob(digest)
    if not os.path.lexists(cold):
        return None
    aside = put_aside(layout, cold, digest)
    link_base(store, digest)  # others may be coded by it; a collection tells
    if os.path.lexists(cold):
        os.unlink(cold)  # noqa: PTH108 - a blob's path is a text
    sync_folder(layout.cold)
    return aside


def put_aside(layout: Layout, damaged: str, digest: Digest) -> Path:
    """Give a file a second name in quarantine, durably, and return it; who calls replaces the first.

    Where there are no hard links the file loses its first name. Raises as :func:`put_in_place`.
    """
    make_folders(layout.quarantine, layout.root)
    found = os.lstat(damaged)
    for path in layout.quarantine.glob(f"{digest.file_name}.*"):
        if os.path.samestat(path.lstat(), found):  # by a repair that did not come to its end
            return path
    aside = _free_name(layout.quarantine, digest)
    try:
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError
        os.link(damaged, aside, follow_symlinks=False)
    except OSError:  # a folder; or a file system without hard links, or one that forbids them
        os.rename(damaged, aside)  # noqa: PTH104 - a blob's path is a text
    sync_folder(layout.quarantine)
    return aside


def keep_copy(store: BlobReader, data: bytes) -> Path:
    """Write what a small file held into quarantine, durably, and return where.

    The file itself keeps its name until it is replaced, on any file system. Raises as
    :func:`put_in_place`.
    """
    layout = store._layout
    for folder in (layout.quarantine, layout.temporary):
        make_folders(folder, layout.root)
    path = _free_name(layout.quarantine, Digest.of(data))
    write_file(path, [data], mode=0o444, temporary=layout.temporary)
    return path


def _free_name(folder: Path, digest: Digest) -> Path:
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path, number = folder / f"{digest.file_name}.{moment}", 1
    while os.path.lexists(path):
        number += 1
        path = folder / f"{digest.file_name}.{moment}-{number}"
    return path

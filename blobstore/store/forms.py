"""The forms that a blob has in a store, hot and cold, and which of them are whole."""

from __future__ import annotations

import errno
import os
import secrets
from typing import TYPE_CHECKING

from blobstore.core.files import make_folders, sync_folder
from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.store.cold import file_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from blobstore.core.digest import Digest
    from blobstore.store.blobs import BlobReader
    from blobstore.store.cold import State
    from blobstore.store.layout import Layout


_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}


def pin(layout: Layout, digest: Digest) -> bool:
    """Make sure that a blob by which others are coded outlives its file among the blobs.

    Programs that know nothing of cold blobs remove what no manifest reaches. So it is cold itself, or
    its file has a second name, durably. Only who has the store's lock alone may do this.

    Returns:
        Whether that could be done: there are file systems without hard links.

    Raises:
        OSError: the system refused something.
    """
    return os.path.lexists(layout.cold_blob(digest)) or link_base(layout, digest)


def link_base(layout: Layout, digest: Digest) -> bool:
    """Give a hot blob its second name, durably; an older file loses it. As :func:`pin`."""
    hot, second = layout.blob(digest), layout.base_blob(digest)
    if not os.path.lexists(hot):
        return os.path.lexists(second)
    if os.path.lexists(second) and os.path.samestat(os.lstat(hot), os.lstat(second)):
        return True
    make_folders(layout.bases, layout.root)
    make_folders(layout.temporary, layout.root)
    ready = layout.temporary / f"{os.getpid()}-{secrets.token_hex(8)}-0"
    try:
        os.link(hot, ready, follow_symlinks=False)
        ready.replace(second)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    sync_folder(layout.bases)
    return True


def states(layout: Layout, digest: Digest) -> tuple[State | None, State | None]:
    """Return what tells the files of a blob, hot and cold, from others; None for what is no file."""
    return file_state(layout.blob(digest)), file_state(layout.cold_blob(digest))


def which_are_whole(
    store: BlobReader, digest: Digest, size: int, progress: Callable[[int], None]
) -> tuple[bool, bool]:
    """Tell whether a blob can be used, and whether its cold form is whole or not there.

    Raises:
        StoreError: a file cannot be read.
    """

    def is_whole(check: Callable[[Digest, int, Callable[[int], None]], None]) -> bool:
        try:
            check(digest, size, progress)
        except (BlobMissing, BlobDamaged):
            return False
        return True

    has_cold = store.cold.has(digest)
    is_cold_whole = not has_cold or is_whole(store.check_cold)
    if store.hot.has(digest):
        return is_whole(store.check_digest), is_cold_whole
    return has_cold and is_cold_whole, is_cold_whole

"""The forms that a blob has in a store, hot and cold, and which of them are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.store.cold import file_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from blobstore.digest import Digest
    from blobstore.store.blobs import BlobReader
    from blobstore.store.cold import State
    from blobstore.store.layout import Layout


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

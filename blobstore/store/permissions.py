"""What makes a store one that others could have tampered with: who may write to it, whose its names are."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from blobstore.core.escape import quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore

_ROOT_USER = 0


def folder_warnings(store: LocalStore) -> Iterator[str]:
    """Yield what a person should know before trusting a store."""
    for folder in (
        store._layout.root,
        store._layout.blobs,
        store._layout.manifests,
        store._layout.cold,
    ):
        status = _status(folder)
        if status is not None and status.st_mode & stat.S_IWOTH:
            yield f"every user may write to {quote(folder)}; take that away with chmod o-w"


def name_concerns(store: LocalStore, references: Iterable[Reference]) -> Iterator[str]:
    """Yield what a person should know before trusting names of a store.

    Digests tell that blobs are those of a manifest, but not whose manifest it is.
    """
    for reference in references:
        path = store._layout.manifest(reference)
        status = _status(path)
        if status is not None and status.st_uid not in (os.getuid(), _ROOT_USER):
            yield (
                f"{quote(reference)} was put into the store by another user (number "
                f"{status.st_uid}): {quote(path)}"
            )


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # whoever reads it says why
        return None

"""Warnings about stores and names that other users could have tampered with."""

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
    """Yield a warning for each folder of the store that every user may write to."""
    for folder in (
        store.root,
        store.folder("blobs"),
        store.folder("manifests"),
        store.folder("cold"),
    ):
        status = _status(folder)
        if status is None or not stat.S_ISDIR(status.st_mode):
            continue  # using the store reports what is wrong
        if status.st_mode & stat.S_IWOTH:
            yield f"every user may write to {quote(folder)}; remove that permission with chmod o-w"


def name_concerns(store: LocalStore, references: Iterable[Reference]) -> Iterator[str]:
    """Yield a warning for each name that another user has published.

    Digests prove that blobs belong to a manifest, but not who wrote the manifest.
    """
    for reference in references:
        path = store.manifest_path(reference)
        status = _status(path)
        if status is not None and status.st_uid not in (os.getuid(), _ROOT_USER):
            yield (
                f"{quote(reference)} was put into the store by another user (number "
                f"{status.st_uid}): {quote(path)}"
            )


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # reading the folder or manifest reports the error
        return None

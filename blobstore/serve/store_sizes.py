"""The sizes of a store and of its disk, which are measured on a thread: no request waits for a disk because of them."""

from __future__ import annotations

import contextlib
import shutil
import time
from typing import TYPE_CHECKING, Final

from blobstore.errors import BlobstoreError
from blobstore.serve.metrics import plain_families
from blobstore.store.scan import each_file

if TYPE_CHECKING:
    from pathlib import Path

    from blobstore.store.local import LocalStore

_STORE_SECONDS: Final = 300.0
"""Seconds after which the files of the store are counted again, which takes a second for some hundred thousand."""


class StoreSizes:
    """What was last measured."""

    def __init__(self, store: LocalStore) -> None:
        """Measure nothing yet."""
        self._store = store
        self._counted = -_STORE_SECONDS
        self._disk: tuple[tuple[str, str, int], ...] = ()
        self._files: tuple[tuple[str, str, int], ...] = ()

    def measure(self) -> None:
        """Measure the disk, and the store from time to time."""
        with contextlib.suppress(OSError):
            size, _, free = shutil.disk_usage(self._store.root)
            self._disk = (
                ("disk_size_bytes", "Size of the file system of the store.", size),
                ("disk_free_bytes", "Bytes that the server may still write there.", free),
            )
        if time.monotonic() - self._counted >= _STORE_SECONDS:
            with contextlib.suppress(BlobstoreError):
                blobs, cold = map(_sizes, (self._store.folder("blobs"), self._store.folder("cold")))
                self._files = (
                    ("store_blobs", "Blobs of the store that are not compressed.", len(blobs)),
                    ("store_cold_blobs", "Compressed blobs of the store.", len(cold)),
                    ("store_bytes", "Bytes of the files of all blobs.", sum(blobs) + sum(cold)),
                )
            self._counted = time.monotonic()

    def text(self) -> str:
        """Return the numbers in Prometheus' text format; those that were not measured are missing."""
        return plain_families(*self._disk, *self._files)


def _sizes(folder: Path) -> list[int]:
    """Return the sizes of the files in a folder. Raises BlobstoreError."""
    found = []
    for entry in each_file(folder):
        with contextlib.suppress(OSError):  # it is gone
            found.append(entry.stat(follow_symlinks=False).st_size)
    return found

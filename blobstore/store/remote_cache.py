"""The remote models whose blobs a store keeps as a cache.

Each is a file with the bytes of the manifest, named by their digest, whose time says when the model was last
used. Garbage collection keeps the blobs of these manifests. All of the files may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.files import make_folders, read_regular, write_file
from blobstore.errors import BlobstoreError
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from blobstore.store.layout import Layout


class CachedModel(NamedTuple):
    """A model whose blobs are kept."""

    path: Path
    blobs: tuple[str, ...]
    """The hex digests of its blobs."""
    used: float
    """When it was last opened, in seconds since the epoch."""


class RemoteCache:
    """The cached models of a store."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._blobs: dict[str, tuple[str, ...]] = {}
        """The blobs of the models that were read, by the digests of their manifests."""

    def keep(self, manifest: bytes) -> None:
        """Keep the blobs of a model from now on; if they are kept already, note that it is used.

        Raises:
            OSError: the store cannot be written.
        """
        path = self._layout.cache / Digest.of(manifest).hex
        try:
            os.utime(path)
        except FileNotFoundError:
            for missing in (self._layout.cache, self._layout.temporary):
                make_folders(missing, self._layout.root)
            write_file(path, [manifest], mode=0o644, temporary=self._layout.temporary)

    def all(self, used_within: float | None = None) -> Iterator[CachedModel]:
        """Yield the models; files that are something else are skipped.

        With ``used_within``, only those that were used within so many seconds.

        Raises:
            OSError: the folder cannot be listed.
        """
        try:
            with os.scandir(self._layout.cache) as found:
                entries = list(found)
        except FileNotFoundError:
            return
        for entry in entries:
            path = self._layout.cache / entry.name
            # Removed since, damaged, or not a file of ours.
            with contextlib.suppress(OSError, BlobstoreError):
                used = entry.stat(follow_symlinks=False).st_mtime
                if used_within is not None and time.time() - used > used_within:
                    continue
                # The name is the digest of the content, so a file that was read once is never read
                # again.
                if entry.name not in self._blobs:
                    data = read_regular(path, MAX_MANIFEST_SIZE)
                    if Digest.of(data).hex != entry.name:
                        continue
                    blobs = Manifest.from_bytes(data).blobs
                    self._blobs[entry.name] = tuple(blob.digest.hex for blob in blobs)
                yield CachedModel(path, self._blobs[entry.name], used)

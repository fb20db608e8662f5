"""What the manifests of a store reach, each read again only when it has changed.

Who removes something looks here with the store's lock alone, when nobody can give a manifest its name.
"""

from __future__ import annotations

import contextlib
import os
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from blobstore.digest import Digest
from blobstore.errors import BlobstoreError, InvalidManifest
from blobstore.files import read_regular
from blobstore.manifests import media_types
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from blobstore.store.local import LocalStore


class Marked(NamedTuple):
    """A manifest, and what it reaches."""

    state: tuple[int, ...]
    manifest: Digest
    blobs: tuple[str, ...]
    """Their digests, without what is the same in all: there may be hundreds of thousands."""
    others: frozenset[str]
    """Those of them that are no tensors, or not only."""


class Marks:
    """What every manifest of a store reaches."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._layout = store.layout
        self._marked: dict[str, Marked] = {}
        self._reached: set[str] = set()

    def update(self) -> None:
        """Read what has come or changed.

        Raises:
            InvalidManifest: a file is no manifest, or not the one that was written.
            OSError: one cannot be read.
        """
        found = {}
        for path in _files(self._layout.manifests):
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                status = os.stat(path)  # noqa: PTH116 - a text, of which there are thousands
                state = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                known = self._marked.get(path)
                found[path] = known if known and known.state == state else self._read(path, state)
        if found != self._marked or not found:
            self._reached = set(chain.from_iterable(item.blobs for item in found.values()))
        self._marked = found

    def by_path(self) -> dict[str, Marked]:
        """Return the manifests by the paths of their files."""
        return self._marked

    def reached(self) -> set[str]:
        """Return the blobs that the manifests reach, by the digits of their digests."""
        return self._reached

    def manifests(self) -> set[Digest]:
        """Return the digests of the manifests themselves."""
        return {item.manifest for item in self._marked.values()}

    def _read(self, path: str, state: tuple[int, ...]) -> Marked:
        try:
            data = read_regular(path, MAX_MANIFEST_SIZE)
            manifest = Manifest.from_bytes(data)
            self._store.check_manifest(data, manifest)
        except BlobstoreError as error:
            message = (
                f"cannot tell which blobs {quoted(path)} needs, so no more are removed: {error}; "
                "repair or remove that file first"
            )
            raise InvalidManifest(message) from None
        layers = (manifest.config, *manifest.layers)
        others = [item.digest.hex for item in layers if item.media_type != media_types.TENSOR]
        reached = tuple([blob.digest.hex for blob in manifest.blobs])
        return Marked(state, Digest.of(data), reached, frozenset(others))


def _files(folder: Path | str) -> Iterator[str]:
    """Yield all that is below a folder and no folder; errors are errors."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
        else:
            yield entry.path

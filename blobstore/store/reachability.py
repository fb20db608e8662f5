"""What the manifests of a store reach, each read again only when it has changed.

Who removes something looks here with the store's lock alone, when nobody can give a manifest its name.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import read_regular
from blobstore.errors import BlobstoreError, InvalidManifest, StoreError
from blobstore.manifests import media_types
from blobstore.manifests.check import ADVICE
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest, layers_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.store.local import LocalStore


class ManifestState(NamedTuple):
    """A manifest, and what it reaches."""

    state: tuple[int, ...]
    manifest: Digest
    blobs: tuple[str, ...]
    """Their digests, without what is the same in all: there may be hundreds of thousands."""
    others: frozenset[str]
    """Those of them that are no tensors, or not only."""
    lost: str | None
    """What the config would hold of the layers, if it cannot be read."""


class ReachableBlobs:
    """What every manifest of a store reaches, each read again only when it has changed."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._layout = store._layout
        self._marked: dict[str, ManifestState] = {}
        self._reached: set[str] = set()

    def update(self) -> None:
        """Read what has come or changed.

        Raises:
            InvalidManifest: a file is no manifest, or not the one that was written.
            StoreError: one cannot be read, or a folder of them.
        """
        found = {}
        for path in _files(str(self._layout.manifests)):
            try:
                status = os.stat(path)  # noqa: PTH116 - a text, of which there are thousands
                state = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                known = self._marked.get(path)
                found[path] = known if known and known.state == state else self._read(path, state)
            except FileNotFoundError:  # removed since it was listed
                if os.path.islink(path):  # noqa: PTH114 - or to a disk that is not mounted
                    raise InvalidManifest(self._unknown(path, "it is a link to nothing")) from None
            except OSError as error:
                raise StoreError(self._unknown(path, error.strerror)) from error
        if found != self._marked or not found:
            self._reached = set(chain.from_iterable(item.blobs for item in found.values()))
        self._marked = found

    def by_path(self) -> dict[str, ManifestState]:
        """Return the manifests by the paths of their files."""
        return self._marked

    def reached(self) -> set[str]:
        """Return the blobs that the manifests reach, by the digits of their digests."""
        return self._reached

    def lost(self) -> set[str]:
        """Return what the configs hold that cannot be read: a changed bit may name another blob."""
        return {item.lost for item in self._marked.values() if item.lost is not None}

    def manifests(self) -> set[Digest]:
        """Return the digests of the manifests themselves."""
        return {item.manifest for item in self._marked.values()}

    def _read(self, path: str, state: tuple[int, ...]) -> ManifestState:
        try:
            data = read_regular(path, MAX_MANIFEST_SIZE)
            manifest = Manifest.from_bytes(data)
            is_proven = self._store.check_manifest(data, manifest)
        except BlobstoreError as error:
            raise InvalidManifest(self._unknown(path, str(error).removesuffix(ADVICE))) from None
        blobs = tuple([blob.digest.hex for blob in manifest.blobs])
        layers = (manifest.config, *manifest.layers)
        others = [item.digest.hex for item in layers if item.media_type != media_types.TENSOR]
        lost = None if is_proven else str(layers_digest(manifest.layers))
        return ManifestState(state, Digest.of(data), blobs, frozenset(others), lost)

    def _unknown(self, path: str, why: str | None) -> str:
        name = self._layout.reference(Path(path))
        advice = (
            "repair or remove that file first"
            if name is None
            else f"create the model again, or run 'blobstore repair {name} --from STORE' or "
            f"'blobstore rm {name}' first"
        )
        return (
            f"cannot tell which blobs {quote(path)} needs, so no more are removed: {why}; {advice}"
        )


def _files(folder: str) -> Iterator[str]:
    """Yield all that is below a folder and no folder.

    Raises:
        StoreError: a folder cannot be listed.
    """
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        # A link to nothing is one to a disk that is not mounted, perhaps.
        if isinstance(error, FileNotFoundError) and not Path(folder).is_symlink():
            return
        raise StoreError(f"cannot list {quote(folder)}: {error.strerror}") from error
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
        else:
            yield entry.path

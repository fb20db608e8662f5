"""The blobs that the manifests of a store reference; a manifest is read again only when it has changed.

Those of remote models whose blobs the store keeps as a cache count as well.

Callers that delete blobs must hold the exclusive lock while they use this, so that no manifest is published at
the same time.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import cli_command, quote
from blobstore.core.files import FileVersion, read_regular
from blobstore.errors import BlobstoreError, InvalidManifest, StoreError
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import PlainDescriptors
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest, layers_digest
from blobstore.store.scan import walk_files

if TYPE_CHECKING:
    from blobstore.store.local import LocalStore


class ManifestState(NamedTuple):
    """A manifest and the blobs that it references."""

    state: FileVersion
    """The version of its file."""
    manifest: Digest
    blobs: tuple[str, ...]
    """Hex digests, because there may be hundreds of thousands."""
    others: frozenset[str]
    """Blobs that are not tensors, or not only tensors."""
    lost: str | None
    """If the config cannot be read, the digest of the layer list that it would contain."""


class ReachableBlobs:
    """The blobs that all manifests of a store reference."""

    def __init__(self, store: LocalStore, *, cached_within: float | None = None) -> None:
        """Read nothing yet. ``cached_within`` is that of :meth:`RemoteCache.all`."""
        self._store = store
        self._cached_within = cached_within
        self._cached: dict[str, tuple[str, ...]] = {}
        """The blobs of cached models by the digests of their manifests."""
        self._manifests: dict[str, ManifestState] = {}
        self._reached: set[str] = set()
        self._lost: set[str] = set()
        self._known = PlainDescriptors()
        self._folder: tuple[int, int] | None = None
        """Device and inode of the folder of manifests; None until the folder exists."""

    def update(self) -> None:
        """Read the manifests that are new or have changed.

        Raises:
            InvalidManifest: a file is not a manifest, or has changed since it was written.
            StoreError: a manifest or a folder of manifests cannot be read, or the folder of all manifests
                was replaced, for example because its disk was unmounted.
        """
        found = {}
        self._check_folder()
        for entry in walk_files(self._store.folder("manifests")):
            path = entry.path
            if entry.name.startswith("."):  # no name of a model, but .DS_Store, for example
                continue
            try:
                # Before the file is read: one that is replaced in between is read again next time.
                status = os.stat(path)  # noqa: PTH116 - there are thousands of strings
                version = FileVersion.of_status(status)
                known = self._manifests.get(path)
                found[path] = (
                    known if known and known.state == version else self._read(path, version)
                )
            except FileNotFoundError:  # removed since it was listed
                if entry.is_symlink():  # or a link to a disk that is not mounted
                    raise InvalidManifest(self._unknown(path, "it is a broken link")) from None
            except OSError as error:
                raise StoreError(self._unknown(path, error.strerror)) from error
        # Again: if the disk was unmounted during the walk, names that are only hidden would seem
        # removed.
        self._check_folder()
        cached = {
            model.path.name: model.blobs
            for model in self._store.remote_cache.all(self._cached_within)
        }
        if found != self._manifests or not found or cached.keys() != self._cached.keys():
            blobs = (item.blobs for item in found.values())
            self._reached = set(chain.from_iterable((*blobs, *cached.values())))
            self._cached = cached
            self._lost = {item.lost for item in found.values() if item.lost is not None}
        self._manifests = found

    def _check_folder(self) -> None:
        folder = self._store.folder("manifests")
        try:
            status = folder.stat()
        except FileNotFoundError:
            now = None
        else:
            now = status.st_dev, status.st_ino
        if self._folder not in {None, now}:
            raise StoreError(
                f"the folder {quote(folder)} was unmounted or replaced while its manifests were "
                "read, so no more blobs are removed",
                advice="mount it again, and repeat the command",
            )
        self._folder = now

    def by_path(self) -> dict[str, ManifestState]:
        """Return the manifests by the paths of their files."""
        return self._manifests

    def reached(self) -> set[str]:
        """Return the hex digests of all blobs that the manifests reference."""
        return self._reached

    def lost(self) -> set[str]:
        """Return the digests of layer lists whose configs cannot be read.

        A flipped bit in such a manifest may have changed the digest of its config.
        """
        return self._lost

    def manifests(self) -> set[Digest]:
        """Return the digests of the manifests themselves, those of cached models among them."""
        return {*(item.manifest for item in self._manifests.values()), *map(Digest, self._cached)}

    def _read(self, path: str, version: FileVersion) -> ManifestState:
        try:
            data = read_regular(path, MAX_MANIFEST_SIZE)
            manifest = Manifest.from_bytes(data, self._known)
            is_proven = self._store.check_manifest(data, manifest)
        except BlobstoreError as error:
            # One manifest that cannot be read is enough to stop, because any blob may be one of its
            # own.
            raise InvalidManifest(self._unknown(path, error.message)) from None
        blobs = tuple([blob.digest.hex for blob in manifest.blobs])
        layers = (manifest.config, *manifest.layers)
        others = [item.digest.hex for item in layers if item.media_type != media_types.TENSOR]
        lost = None if is_proven else str(layers_digest(manifest.layers))
        return ManifestState(version, Digest.of(data), blobs, frozenset(others), lost)

    def _unknown(self, path: str, why: str | None) -> str:
        name = self._store.reference_of(Path(path))
        advice = (
            "repair or remove that file first"
            if name is None
            else f"create the model again, or run {cli_command('repair', name, '--from', 'STORE')} or "
            f"{cli_command('rm', name)} first"
        )
        return (
            f"cannot tell which blobs {quote(path)} needs, so no more are removed: {why}; {advice}"
        )

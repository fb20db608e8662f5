"""The blobs that the manifests of a store reference; a manifest is read again only when it has changed.

Those of remote models whose blobs the store keeps as a cache count as well. The file of references says what this
user has read before, so that few manifests are read (:mod:`blobstore.store.references`). It is only believed for
blobs that stay: before a blob is deleted, :meth:`ReachableBlobs.prove` looks for its digest in all manifests.

Callers that delete blobs must hold the exclusive lock while they use this, so that no manifest is published at
the same time.
"""

from __future__ import annotations

import contextlib
import os
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.core.escape import cli_command, quote
from blobstore.core.files import FileVersion, is_there, read_regular
from blobstore.core.gc_pause import gc_paused
from blobstore.core.progress import reporting
from blobstore.errors import BlobstoreError, InvalidManifest, InvalidReference, StoreError
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.model import MAX_MANIFEST_SIZE
from blobstore.manifests.reference import Reference
from blobstore.store.scan import walk_files

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from blobstore.store.local import LocalStore
    from blobstore.store.references import KnownManifest

_FEW = 4
"""So many digests are looked for one after the other; of more, those in a manifest are looked up."""


class ManifestState(NamedTuple):
    """A manifest and the blobs that it references."""

    state: FileVersion
    """The version of its file."""
    known: KnownManifest
    """The numbers of its blobs in :attr:`ReachableBlobs.references`."""
    lost: str | None = None
    """If the config cannot be read, the digest of the layer list that it would contain."""
    is_read: bool = True
    """Whether this process has read the manifest, and not only the file of references."""


class ReachableBlobs:
    """The blobs that all manifests of a store reference."""

    def __init__(
        self, store: LocalStore, *, cached_within: float | None = None, lists_all: bool = True
    ) -> None:
        """Read no manifest yet.

        Args:
            store: the store.
            cached_within: that of :meth:`RemoteCache.all`.
            lists_all: whether to list folders that seem not to have changed, as who deletes blobs must.
        """
        self._store = store
        self._cached_within = cached_within
        self._lists_all = lists_all
        self._cached: dict[str, tuple[str, ...]] = {}
        """The blobs of cached models by the digests of their manifests."""
        self.references = store.known_references()
        self._is_believed = True
        """Whether the file of references may still say what a manifest references."""
        self._manifests: dict[str, ManifestState] = {}
        self._reached: set[str] | None = None
        self._folder: tuple[int, int] | None = None
        """Device and inode of the folder of manifests; None until the folder exists."""

    def update(self) -> None:
        """Read the manifests that are new or have changed.

        Raises:
            InvalidManifest: a file is not a manifest, or has changed since it was written.
            StoreError: a manifest or a folder of manifests cannot be read, or the folder of all manifests
                was replaced, for example because its disk was unmounted.
        """
        self._check_folder()
        known: dict[str, ManifestState | None] = {}
        unknown: dict[str, FileVersion] = {}
        for path in self._paths():
            try:
                # Before the file is read: one that is replaced in between is read again next time.
                status = os.stat(path)  # noqa: PTH116 - there are thousands of strings
            except FileNotFoundError:  # removed since it was listed
                if is_there(path):  # or a link to a disk that is not mounted
                    raise InvalidManifest(self._unknown(path, "it is a broken link")) from None
                continue
            except OSError as error:
                raise StoreError(self._unknown(path, error.strerror)) from error
            version = FileVersion.of_status(status)
            known[path] = state = self._known(path, version)
            if state is None:
                unknown[path] = version
        with gc_paused():  # it would look at what is parsed again and again
            for path in reporting("manifests read", unknown):
                with contextlib.suppress(FileNotFoundError):  # removed since
                    known[path] = self._read(path, unknown[path])
        found = {path: state for path, state in known.items() if state is not None}
        # Again: if the disk was unmounted during the walk, names that are only hidden would seem
        # removed.
        self._check_folder()
        cached = {
            model.path.name: model.blobs
            for model in self._store.remote_cache.all(self._cached_within)
        }
        if found != self._manifests or cached.keys() != self._cached.keys():
            self._reached = None
        self._manifests, self._cached = found, cached

    def _paths(self) -> Iterator[str]:
        """Yield the paths of the manifests; what begins with a dot is no name of a model, but .DS_Store, for example."""
        folder = self._store.folder("manifests")
        if self._lists_all:
            yield from (one.path for one in walk_files(folder) if not one.name.startswith("."))
            return
        for parts, tags in self._store.repositories(listings=self.references.listings):
            repository = "/".join((str(folder), *parts))
            yield from (f"{repository}/{tag}" for tag in tags if tag[0] != ".")

    def prove(self, blobs: Collection[str] | None) -> None:
        """Look for the hex digests of ``blobs`` in all manifests; read those again that have one, or all for None.

        Until then, what the file of references says of the manifests was believed. Whatever it says, those of ``blobs``
        that a manifest references are among :meth:`reached` from now on.

        Raises:
            InvalidManifest, StoreError: as :meth:`update`.
        """
        self._is_believed = False
        wanted = None if blobs is None else {digest.encode() for digest in blobs}
        for path, item in self._manifests.items():
            if not item.is_read:
                interrupts.check()
                try:
                    data = read_regular(path, MAX_MANIFEST_SIZE)
                    if Digest.of(data) != item.known.digest or _names_one(data, wanted):
                        self._manifests[path] = self._read(path, item.state)
                except FileNotFoundError:  # removed since: the next update finds that out
                    continue
                except OSError as error:
                    raise StoreError(self._unknown(path, error.strerror)) from error
                except BlobstoreError as error:
                    raise InvalidManifest(self._unknown(path, error.message)) from None
        self._reached = None

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

    def by_name(
        self, paths: Iterable[str] | None = None
    ) -> Iterator[tuple[Reference, ManifestState]]:
        """Yield the names of the store, or of some paths, with their manifests."""
        root = f"{self._store.folder('manifests')}/"
        for path in self._manifests if paths is None else paths:
            # A file of something else has another path.
            with contextlib.suppress(InvalidReference, TypeError, KeyError):
                yield Reference(*path.removeprefix(root).split("/")), self._manifests[path]

    def needing(self, blobs: Collection[Digest]) -> dict[str, ManifestState]:
        """Return the manifests that reference one of these blobs by the paths of their files."""
        wanted = set(self.references.numbers(blobs).values())
        uses = self.references.uses(item.known.row for item in self._manifests.values())
        left = sum(uses[number] for number in wanted)
        found = {}
        for path, item in self._manifests.items():
            if not left:
                break
            if uses_here := len(wanted.intersection(item.known.blobs)):
                found[path] = item
                left -= uses_here
        return found

    def reached(self) -> set[str]:
        """Return the hex digests of all blobs that the manifests reference."""
        if self._reached is None:
            is_reached = bytearray(len(self.references))
            for number in chain.from_iterable(one.known.blobs for one in self._manifests.values()):
                is_reached[number] = True
            self._reached = set(compress(self.references.hex_digests(), is_reached))
            self._reached.update(chain.from_iterable(self._cached.values()))
        return self._reached

    def lost(self) -> set[str]:
        """Return the digests of layer lists whose configs cannot be read.

        A flipped bit in such a manifest may have changed the digest of its config.
        """
        return {item.lost for item in self._manifests.values() if item.lost is not None}

    def manifests(self) -> set[Digest]:
        """Return the digests of the manifests themselves, those of cached models among them."""
        digests = (item.known.digest for item in self._manifests.values())
        return {*digests, *map(Digest, self._cached)}

    def _known(self, path: str, version: FileVersion) -> ManifestState | None:
        """Return what is known of a manifest; None if it must be read."""
        state = self._manifests.get(path)
        if state is not None and state.state == version:
            return state
        known = self.references.known(version) if self._is_believed else None
        if known is not None and known.record.is_checked:
            return ManifestState(version, known, is_read=False)
        return None

    def _read(self, path: str, version: FileVersion) -> ManifestState:
        try:
            data = read_regular(path, MAX_MANIFEST_SIZE)
            # Whatever the file of references says of its digest: what is read here counts as proved.
            known, manifest = self.references.read(
                version, data, self._store.checked_config, is_believed=False
            )
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(self._unknown(path, error.strerror)) from error
        except BlobstoreError as error:
            # One manifest that cannot be read is enough to stop, because any blob may be one of its
            # own.
            raise InvalidManifest(self._unknown(path, error.message)) from None
        lost = None
        if manifest is not None and not known.record.is_checked:
            lost = str(layers_digest(manifest.layers))
        return ManifestState(version, known, lost)

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


def _names_one(manifest: bytes, blobs: set[bytes] | None) -> bool:
    """Return whether a manifest may reference one of these blobs, or any for None.

    Strings with escapes may hide any digest.
    """
    if blobs is None or b"\\" in manifest:
        return True
    if len(blobs) <= _FEW:
        return any(blob in manifest for blob in blobs)
    return not blobs.isdisjoint(part[:64] for part in manifest.split(b"sha256:"))

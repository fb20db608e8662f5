"""Keeps what was fetched from an upstream within a limit: what was not used for the longest time goes first.

Only blobs that nothing but fetched models references count, uncompressed. Models that the store has of its own,
those that are being sent, and those with blobs that another process has leased stay. Models are removed as bytes
arrive, not for what an upstream lists: one that lists more than it sends would empty the cache.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from blobstore.core.digest import Digest
from blobstore.core.files import make_folders
from blobstore.errors import BlobstoreError
from blobstore.manifests.model import Manifest
from blobstore.operations.maintenance.gc import remove_blobs
from blobstore.serve.library import name_of, repository_of
from blobstore.serve.pulled import source_of
from blobstore.serve.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from blobstore.manifests.reference import Reference
    from blobstore.serve.library import Library
    from blobstore.serve.pulled import Origin

IDLE_SECONDS: Final = 180.0
"""How long a model stays after its last byte was sent: longer than the slowest client may take for the next ones."""
_STEP: Final = 256 << 20
"""Bytes that space is made for at least: each look reads all manifests."""


@dataclass(slots=True)
class _Fetched:
    """A version that was fetched: its manifests, with the names that have them now, and its blobs."""

    origin: Origin
    manifests: list[tuple[Reference, Digest]] = field(default_factory=list)
    blobs: dict[str, int] = field(default_factory=dict)
    """Bytes by hex digests."""


class CacheLimit:
    """The limit of a store. Threads may share it."""

    def __init__(
        self,
        library: Library,
        max_size: int | None,
        on_removed: Callable[[Origin, int], object] = lambda *_: None,
    ) -> None:
        """Remove nothing yet. ``on_removed`` is called with what was removed, and the bytes that this has freed."""
        self._library, self._store, self._pulled = library, library.store, library.pulled
        self._max_size = max_size
        self._on_removed = on_removed
        self._lock = threading.Lock()
        self._listed: dict[object, int] = {}
        """Bytes that arriving models will have."""
        self._taken: dict[object, int] = {}
        """Bytes that there is space for now."""

    def reserve(self, key: object, size: int) -> None:
        """Check that space can be made for a model that is about to be fetched. It has a claim until :meth:`release`.

        Raises:
            Refusal: there is not enough, or the models that are there are in use.
            BlobstoreError: the disk is too full, or the store is damaged.
        """
        with self._store.writing():
            make_folders(self._store.folder("temporary"), self._store.root)
        self._store.check_space(size)
        if self._max_size is None:
            return
        with self._lock:
            if size > self._max_size:
                raise Refusal(
                    HTTPStatus.INSUFFICIENT_STORAGE,
                    message=f"the model has {size} bytes, and this server keeps {self._max_size} at most",
                )
            if self._oldest(self._max_size - size - sum(self._listed.values()))[1] > 0:
                raise Refusal(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    message="there is no space for the model while those that are there are in use",
                )
            self._listed[key], self._taken[key] = size, 0

    def arrived(self, key: object, size: int) -> None:
        """Make space for the bytes that have arrived of a model, and for as many more. Raises BlobstoreError.

        If others are in use that were not, the limit is passed until the next model arrives: clients get this one.
        """
        with self._lock:
            if self._max_size is None or size <= self._taken.get(key, size):
                return
            taken = min(self._listed[key], max(2 * size, _STEP))
            others = sum(self._taken.values()) - self._taken[key]
            for version, only in self._oldest(self._max_size - taken - others)[0]:
                self._remove(version, only)
            self._taken[key] = taken

    def forget_removed(self) -> None:
        """Remove the records of models that somebody has removed, so that others may get their names.

        Raises:
            StoreError: the store cannot be written.
        """
        for origin in self._pulled.all():
            repository = repository_of(*origin.repository.split("/"))
            names = self._library.stored_tags(repository) if repository else []
            if not any(self._may_be(self._manifests(reference), origin) for reference in names):
                self._forget(origin)

    def _forget(self, origin: Origin) -> None:
        """Remove a record, unless it is all that keeps a model from those who may not read it.

        That is a copy under another name, or one whose name was removed and can be restored.
        """
        every = (self._manifests(reference) for reference in self._store.references())
        # It may have changed since the caller has read it.
        if self._pulled.is_public(origin.repository) or not any(
            self._may_be(versions, origin) for versions in (*every, self._former())
        ):
            with self._store.writing():
                self._pulled.forget(origin)

    def _may_be(self, versions: Iterable[tuple[bool, bytes]], origin: Origin) -> bool:
        """Return whether one of these is a version, or is damaged so that nobody knows."""
        commit = origin.repository, origin.commit
        try:
            return any(
                source_of(self._store, Manifest.from_bytes(data)) == commit for _, data in versions
            )
        except BlobstoreError:
            return True

    def release(self, key: object) -> None:
        """Take back what was reserved: the model is in the store, or will not be."""
        with self._lock:
            self._listed.pop(key, None)
            self._taken.pop(key, None)

    def _oldest(self, most: int) -> tuple[list[tuple[_Fetched, set[str]]], int]:
        """Return what to remove until there are ``most`` bytes, and how many are too many even then.

        With each version come the blobs that no other has. Raises BlobstoreError.
        """
        found = []
        fetched, own = self._versions()
        sizes = _all_blobs(fetched)
        total = sum(sizes[one] for one in sizes.keys() - own)
        for version in sorted(fetched, key=lambda one: self._pulled.last_use(one.origin)):
            if total <= most:
                break
            others = [one for one in fetched if one is not version]
            only = version.blobs.keys() - own - _all_blobs(others).keys()
            if not self._is_in_use(version, only):
                found.append((version, only))
                fetched = others
                total -= sum(version.blobs[one] for one in only)
        return found, max(total - most, 0)

    def _versions(self) -> tuple[list[_Fetched], set[str]]:
        """Return what was fetched, and the hex digests of the blobs of all else. Raises BlobstoreError."""
        found: dict[tuple[str, str], _Fetched] = {}
        own: set[str] = set()
        for reference in self._store.references():
            for is_current, data in self._manifests(reference):
                manifest = Manifest.from_bytes(data)
                blobs = {blob.digest.hex: blob.size for blob in manifest.blobs}
                origin = self._pulled.origin(manifest)
                if origin is None or origin.repository != name_of(reference):
                    own |= blobs.keys()
                    continue
                version = found.setdefault((origin.repository, origin.commit), _Fetched(origin))
                version.blobs |= blobs
                if is_current:
                    version.manifests.append((reference, Digest.of(data)))
        return list(found.values()), own

    def _manifests(self, reference: Reference) -> Iterator[tuple[bool, bytes]]:
        yield True, self._store.read_manifest(reference)
        yield from self._former(reference)

    def _former(self, reference: Reference | None = None) -> Iterator[tuple[bool, bytes]]:
        """Yield what can be restored of a name, or of all names."""
        for former in self._store.names.former(reference):
            with contextlib.suppress(BlobstoreError):
                if self._store.has_blobs(Manifest.from_bytes(former.data).blobs):
                    yield False, former.data

    def _is_in_use(self, version: _Fetched, only: set[str]) -> bool:
        if not all(self._library.is_idle(*one, IDLE_SECONDS) for one in version.manifests):
            return True
        leased = {digest.hex for digest in self._store.read_leases().digests}
        return not only.isdisjoint(leased)

    def _remove(self, version: _Fetched, only: set[str]) -> None:
        with self._store.writing(), self._store.exclusive_lock():
            for reference, manifest in version.manifests:
                # Somebody may have given the name to another model in the meantime.
                with contextlib.suppress(BlobstoreError):
                    if Digest.of(self._store.read_manifest(reference)) == manifest:
                        self._store.names.remove(reference)
        freed = remove_blobs(self._store, only)
        self._forget(version.origin)
        self._on_removed(version.origin, freed)


def _all_blobs(versions: list[_Fetched]) -> dict[str, int]:
    found: dict[str, int] = {}
    for version in versions:
        found |= version.blobs
    return found

"""Keeps fetched models within a limit: those that were not used for the longest time are removed first.

Bytes are written only against a :class:`Claim`, and count before they are written. Files of interrupted fetches
count as well, and so do blobs that only fetched models reference, uncompressed. The store's own models stay, and so
do models that are being sent or have blobs that another process has leased. Models are removed as bytes arrive, not
by the sizes that an upstream lists: one that lists more than it sends would empty the cache.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from blobstore.core.digest import Digest
from blobstore.core.files import make_folders
from blobstore.errors import BlobstoreError, StoreError
from blobstore.manifests.model import Manifest
from blobstore.operations.maintenance.gc import remove_blobs
from blobstore.serve.arriving_file import Claim, max_files
from blobstore.serve.refusal import Refusal
from blobstore.serve.unprepared import prepared
from blobstore.store.catalog import read_catalog
from blobstore.store.eviction import choose_evicted
from blobstore.store.fetched import fetched_from
from blobstore.store.history import read_former
from blobstore.store.scan import scan_folder, walk_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.serve.library import Library
    from blobstore.serve.pulled import Origin
    from blobstore.store.catalog import Catalog
    from blobstore.store.fetched import Commit

IDLE_SECONDS: Final = 180.0
"""Seconds that a model stays after its last byte was sent, longer than the slowest client may pause."""
_STEP: Final = 256 << 20
"""The least space that is made at once, because each look asks for the status of all manifests."""
_LOOK_SECONDS: Final = 60.0
"""Seconds until the next look while the limit is more than a step away: others may restore models."""


@dataclass(slots=True)
class _Fetched:
    """A version that was fetched: its manifests, with the names that have them now, and its blobs."""

    origin: Origin | None
    """None if its manifest is damaged, so that its blobs are unknown."""
    used: float
    manifests: list[tuple[Reference, Digest]] = field(default_factory=list)
    blobs: dict[str, int] = field(default_factory=dict)
    other_size: ClassVar = 0


@dataclass(slots=True)
class _BrokenOff:
    """The files of an interrupted fetch, which continues with them if the model is asked for again."""

    folder: Path
    used: float
    other_size: int
    blobs: ClassVar[Mapping[str, int]] = {}


class CacheLimit:
    """The limit of a store. Threads may share it."""

    def __init__(
        self,
        library: Library,
        max_size: int | None,
        note: Callable[..., object] = lambda **_: None,
    ) -> None:
        """Remove nothing yet. ``note`` is called with the fields of a line for the log."""
        self._library, self._store, self._pulled = library, library.store, library.pulled
        self._folder = self._store.folder("arrivals")
        self._max_size = max_size
        self._note = note
        self._lock = threading.Lock()
        self._claims: set[Claim] = set()
        self._left: set[str] = set()
        """Blobs of removed models that models which were arriving then had, too, or needed as bases."""
        self._bound, self._bound_until = 0, 0.0
        """The most bytes that there are if all claims are used, and until when that holds."""

    def claim(self, name: str) -> Claim:
        """Return a claim of no bytes for the version of a model that ``name`` stands for."""
        claim = Claim(self, self._folder / Digest.of(name.encode()).hex)
        with self._lock:
            self._claims.add(claim)
        return claim

    def extend(self, claim: Claim, size: int, found: int, files: int) -> None:
        """See :class:`Space`."""
        with self._store.writing():
            make_folders(self._store.folder("temporary"), self._store.root)
        with self._lock:
            most = max_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            if sum(one.files for one in self._claims) + files > most:
                raise Refusal(
                    HTTPStatus.SERVICE_UNAVAILABLE
                    if claim.files + files <= most
                    else HTTPStatus.INSUFFICIENT_STORAGE,
                    message=f"this server fetches {most} files at a time at most",
                )
            listed = sum(one.size for one in self._claims) + size
            self._store.check_space(listed - found - sum(one.spent for one in self._claims))
            if self._max_size is not None:
                if claim.size + size > self._max_size:
                    raise Refusal(
                        HTTPStatus.INSUFFICIENT_STORAGE,
                        message=f"the model has {claim.size + size} bytes or more, and this server keeps "
                        f"{self._max_size} at most",
                    )
                if self._oldest(self._max_size - listed)[1] > 0:
                    raise Refusal(
                        HTTPStatus.SERVICE_UNAVAILABLE,
                        message="there is no space for the model while those that are there are in use",
                    )
            # Only after all checks: a claim that is refused counts nothing.
            claim.size += size
            self._bound += size
            claim.spent += found
            claim.files += files

    def spend(self, claim: Claim, size: int) -> None:
        """See :class:`Space`."""
        with self._lock:
            if claim.spent + size > claim.size:
                raise StoreError("more bytes arrive of a model than there is space for")
            claim.spent += size
            if self._max_size is None or claim.spent <= claim.taken:
                return
            # Before space is made, so that the sum below includes this claim.
            claim.taken = min(claim.size, max(2 * claim.spent, _STEP))
            arriving = sum(one.taken for one in self._claims)
            self._remove(self._oldest(self._max_size - arriving)[0])

    def release(self, claim: Claim) -> None:
        """See :class:`Space`."""
        with self._lock:
            self._claims.discard(claim)
            if self._left:
                with contextlib.suppress(BlobstoreError, OSError):
                    freed = remove_blobs(self._store, self._left)
                    self._left = (self._left - freed.keys()) & self._leased()

    def forget_removed(self) -> None:
        """Remove the records of models that were removed, so that other models may get their names.

        Raises:
            StoreError: the store cannot be written.
        """
        self._forget(self._pulled.all())

    def _forget(self, origins: Iterable[Origin]) -> None:
        """Remove records, except those that say who may read a model.

        The model may be a copy under another name, or one whose name was removed or lost and can be restored.
        """
        if not (several := list(origins)):
            return
        try:
            kept = set(self._commits())
        except (BlobstoreError, OSError):  # a damaged manifest may be of any of them
            return
        with self._store.writing():
            for origin in several:
                if (origin.repository, origin.commit) not in kept:
                    self._pulled.forget(origin)

    def _commits(self) -> Iterator[Commit | None]:
        """Yield the commits of all models that the store has, or that can come back. Raises BlobstoreError or OSError."""
        names = read_catalog(self._store)
        for entry in names.unreadable():
            if entry.error is not None:
                raise entry.error
        for origin in self._origins(names).values():
            yield (origin.repository, origin.commit) if origin else None
        published = self._store.names.published
        former = (
            one.data for one in self._store.names.former(None) if self._is_restorable(one.data)
        )
        for data in (*former, *map(published.read_manifest, published.gone())):
            yield fetched_from(Manifest.from_bytes(data))

    def _origins(self, names: Catalog) -> Mapping[Reference, Origin | None]:
        """Return the commits that names were fetched from. Each manifest is parsed once for that; damaged ones are not."""
        references = [entry.reference for entry in names if entry.known]
        return prepared(lambda: self._library.origins(references))

    def _oldest(self, most: int) -> tuple[list[tuple[_Removable, set[str]]], int]:
        """Return what :func:`choose_evicted` returns. Raises BlobstoreError."""
        # A model takes a little more than its files.
        if time.monotonic() < self._bound_until and self._bound + _STEP <= most:
            return [], 0
        fetched, own = self._versions()
        models: list[_Removable] = [*fetched, *self._broken_off()]
        sizes = {blob: size for one in models for blob, size in one.blobs.items()}
        self._bound = sum(sizes.values()) + sum(one.other_size for one in models)
        self._bound += sum(claim.size for claim in self._claims)
        self._bound_until = time.monotonic() + _LOOK_SECONDS
        # A forecast: the removal looks at the leases again, under the lock.
        leased = self._leased()

        def freed(item: _Removable, only: set[str]) -> set[str] | None:
            nonlocal leased
            if not isinstance(item, _BrokenOff):
                keys = (key for _, key in item.manifests)
                if own is None or not all(self._library.is_idle(one, IDLE_SECONDS) for one in keys):
                    return None
            if not only.isdisjoint(leased):
                leased = self._leased()  # that of this process has just ended for an idle model
            # What a model that arrives has in common with it stays. If all is leased, it is in use elsewhere.
            return None if only and only <= leased else only - leased

        return choose_evicted(models, own or (), most, freed)

    def _leased(self) -> set[str]:
        return {digest.hex for digest in self._store.read_leases().digests}

    def _broken_off(self) -> Iterator[_BrokenOff]:
        """Yield the files of interrupted fetches."""
        claimed = {claim.folder for claim in self._claims}
        for entry in scan_folder(self._folder):
            folder, used = Path(entry.path), 0.0
            if folder not in claimed:
                with contextlib.suppress(OSError):
                    used = entry.stat().st_mtime
                files = [one.stat(follow_symlinks=False).st_size for one in walk_files(folder)]
                yield _BrokenOff(folder, used, sum(files))

    def _versions(self) -> tuple[list[_Fetched], set[str] | None]:
        """Return the fetched versions, and the hex digests of the blobs of other models. Raises BlobstoreError.

        They are None if a manifest of another model is damaged, which may need any blob.
        """
        found: dict[Commit, _Fetched] = {}
        own: set[str] = set()
        names = read_catalog(self._store)
        damaged = [self._damaged(entry.reference) for entry in names.unreadable()]
        origins = self._origins(names)
        given = {
            name
            for name, origin in origins.items()
            if origin and self._pulled.names.has_given(name)
        }
        hex_digests = list(names.references.hex_digests())

        def add(
            name: Reference, origin: Origin | None, blobs: Mapping[str, int]
        ) -> _Fetched | None:
            if origin is None or name not in given:
                own.update(blobs)
                return None
            key = origin.repository, origin.commit
            version = found.get(key) or _Fetched(origin, self._pulled.last_use(origin))
            found[key] = version
            version.blobs |= blobs
            return version

        for entry in names:
            name, known = entry.reference, entry.known
            if known is not None:
                blobs = dict(
                    zip(map(hex_digests.__getitem__, known.blobs), known.sizes, strict=True)
                )
                if version := add(name, origins.get(name), blobs):
                    version.manifests.append((name, known.digest))
        for name, path in self._store.names.former_files(origins):
            for former in read_former(path):
                if self._is_restorable(former.data):
                    manifest = Manifest.from_bytes(former.data)
                    blobs = {blob.digest.hex: blob.size for blob in manifest.blobs}
                    add(name, self._pulled.origin(manifest), blobs)
        fetched = [*found.values(), *(one for one in damaged if one)]
        return fetched, None if None in damaged else own

    def _damaged(self, name: Reference) -> _Fetched | None:
        """Return a fetched model of which only the name is known, and goes first; None if it may be another model."""
        with contextlib.suppress(BlobstoreError):
            if self._pulled.names.has_given(name):
                data = self._store.read_manifest(name)
                return _Fetched(None, 0.0, [(name, Digest.of(data))])
        return None

    def _is_restorable(self, former: bytes) -> bool:
        """Return whether a name can get a manifest back that it had before."""
        with contextlib.suppress(BlobstoreError):
            return self._store.has_blobs(Manifest.from_bytes(former).blobs)
        return False

    def _remove(self, chosen: Sequence[tuple[_Removable, set[str]]]) -> None:
        """Remove models, each with the blobs that go with it. All manifests are looked at once, and not for each."""
        removed: list[tuple[Origin | None, set[str]]] = []
        for version, only in chosen:
            if isinstance(version, _BrokenOff):
                shutil.rmtree(version.folder, ignore_errors=True)
                continue
            with self._store.writing(), self._store.exclusive_lock():
                for reference, manifest in version.manifests:
                    # The name may have been given to another model in the meantime, or this one by the operator.
                    with contextlib.suppress(BlobstoreError):
                        data = self._store.read_manifest(reference)
                        if Digest.of(data) == manifest and self._pulled.names.has_given(reference):
                            self._store.names.remove(reference)
            removed.append((version.origin, only))
        if not removed:
            return
        freed = remove_blobs(self._store, set().union(*(only for _, only in removed)))
        self._left = self._left.union(*(version.blobs for version, _ in chosen)) - freed.keys()
        # After the names and the blobs: without its record, a fetched model would look like one of the store's own.
        self._forget(origin for origin, _ in removed if origin)
        for origin, only in removed:
            size = sum(freed[blob] for blob in only)
            if origin:
                self._note(removed=origin.repository, commit=origin.commit, freed=size)


_Removable = _Fetched | _BrokenOff

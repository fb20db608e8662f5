"""A store in a folder of the local file system."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

from blobstore.core import pictures
from blobstore.core.arguments import local_path
from blobstore.core.escape import bytes_text, quote
from blobstore.core.files import (
    is_there,
    make_folders,
    read_regular,
    write_file,
)
from blobstore.errors import (
    BlobstoreError,
    NotFound,
    StoreError,
)
from blobstore.manifests.model import MAX_MANIFEST_SIZE
from blobstore.store.claims import BlobClaims
from blobstore.store.ingest import Ingest, WorkerIngest
from blobstore.store.layout import Layout
from blobstore.store.leases import JoinedLease, Lease, Leases, read_leases
from blobstore.store.locks import LOCK_TIMEOUT, Locks
from blobstore.store.manifests import NO_STORE, ManifestReader
from blobstore.store.names import Names
from blobstore.store.notes import pack, unpack
from blobstore.store.partial import bytes_done, remove_partial
from blobstore.store.references import References
from blobstore.store.remote_cache import RemoteCache
from blobstore.store.scan import is_folder
from blobstore.store.signatures import Signatures
from blobstore.store.verified_cache import VerifiedBlobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.reference import Reference
    from blobstore.store.notes import NoteKind
    from blobstore.store.signatures import KeptSignature


def default_root() -> Path:
    """Return ``$BLOBSTORE_HOME``, or ``~/.blobstore`` if that is not set.

    Raises:
        StoreError: this user has no home folder.
    """
    if home := os.environ.get("BLOBSTORE_HOME"):
        return Path(home)
    try:
        return Path.home() / ".blobstore"
    except RuntimeError:
        raise StoreError("there is no home folder; set BLOBSTORE_HOME or give a store") from None


def shared_root(root: Path) -> Path | None:
    """Return the store of ``$BLOBSTORE_SHARED`` if that lies below the store in ``root``: below the default store alone.

    A store that ``--store`` names, such as a backup, has all of its blobs itself.
    """
    shared = os.environ.get("BLOBSTORE_SHARED")
    if not shared or root == (path := Path(shared).absolute()):
        return None
    with contextlib.suppress(StoreError):
        return path if root == default_root().absolute() else None
    return None


_PUBLIC = frozenset(
    ("blob_path", "check_digest", "exists", "has_model", "list", "lock_timeout", "of", "open")
) | {"read_blob", "references", "resolve", "root"}
"""The names that :func:`dir` lists and docs/reference/python.md describes. Other packages use the rest."""


class LocalStore(ManifestReader):
    """A folder of blobs and manifests in Ollama's layout.

    Reading needs only read permission; the first ingest creates the folders. Any number of processes may
    use a store at once. A process waits at most ``lock_timeout`` seconds for a lock that others hold.
    Methods take references as strings too.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, *, lock_timeout: float = LOCK_TIMEOUT
    ) -> None:
        path = local_path(default_root() if root is None else root, "store")
        # Absolute, because the program may change its working directory while a model is open.
        path = path.absolute()
        below = shared_root(path)
        self.shared = None if below is None else LocalStore(below, lock_timeout=lock_timeout)
        """The store below this one, which is only read."""
        super().__init__(Layout(path), self.shared)
        self._locks = Locks(self._layout, lock_timeout)
        self._signatures = Signatures(self._layout)
        self.names = Names(self, self._locks, self._signatures)
        """The names of models, for writing."""
        self.remote_cache = RemoteCache(self._layout)
        """Remote models whose blobs are kept here as a cache."""

    @classmethod
    def of(cls, store: StoreLike) -> Self:
        """Return ``store`` itself, or the store in that folder; None means :func:`default_root`.

        Raises:
            StoreError: None is given, and this user has no home folder.
        """
        return cast("Self", store) if isinstance(store, LocalStore) else cls(store)

    @classmethod
    def to_read(cls, store: StoreLike) -> LocalStore:
        """Return ``store`` with the models of the shared store behind its own. Nothing is written by this.

        Raises as :meth:`of`.
        """
        store = cls.of(store)
        return store if store.shared is None else _WithSharedNames(store)

    def holder(self, *references: str | Reference) -> LocalStore:
        """Return the store that has the manifests of names: this one, unless the shared store alone has all of them."""
        shared = self.shared
        if shared is None or not references or any(map(self.has_model, references)):
            return self
        return shared if all(map(shared.has_model, references)) else self

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name in _PUBLIC or name.startswith("_")]

    def __repr__(self) -> str:
        return f"LocalStore({quote(self.root)})"

    def _repr_html_(self) -> str:
        """Return a picture of the store, which notebooks show."""
        return pictures.draw("store", self)

    @property
    def lock_timeout(self) -> float:
        """Seconds to wait for a lock that other processes hold."""
        return self._locks.timeout

    @lock_timeout.setter
    def lock_timeout(self, seconds: float) -> None:
        """Set how long to wait."""
        self._locks.timeout = seconds

    # Locks and leases; see blobstore.store.locks and blobstore.store.leases

    def exclusive_lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from writing and from leasing blobs while the block runs.

        Raises:
            StoreBusy: other processes held locks for ``lock_timeout`` seconds.
            StoreError: the file system has no locks.
        """
        return self._locks.exclusive()

    def lease(self) -> Lease:
        """Return a new lease, a context manager that keeps blobs from being collected.

        Raises as :meth:`exclusive_lock`.
        """
        return Lease.new(self._layout, self._locks)

    @contextlib.contextmanager
    def lease_if_writable(
        self, digests: Iterable[Digest]
    ) -> Iterator[Callable[[Iterable[Digest]], bool]]:
        """Lease blobs while the block runs, or run it without a lease if that is impossible.

        Reading must not depend on it: the store may be read-only, full, or without locks. Nothing
        else is created: a folder of root would lock the owner of the store out. The block gets a function that
        leases more blobs, and returns whether it has.
        """
        with contextlib.ExitStack() as stack:
            lease: Lease | None = None

            def hold(digests: Iterable[Digest]) -> bool:
                with contextlib.suppress(OSError, StoreError):
                    if lease is not None:
                        lease.hold(digests)
                        return True
                return False

            with contextlib.suppress(OSError, StoreError):
                lease = stack.enter_context(Lease.new(self._layout, self._locks, is_created=False))
            hold(digests)
            yield hold

    def read_leases(self, *, without: str = "") -> Leases:
        """Return the leases of all processes except the one named ``without``.

        The result stays true only while the caller holds the exclusive lock.

        Raises:
            OSError: a lease cannot be read.
        """
        return read_leases(self._layout, without)

    @contextlib.contextmanager
    def ingest(self, *, paranoid: bool = False) -> Iterator[Ingest]:
        """Begin an import of blobs; see :class:`Ingest`. Publish the manifest inside the block.

        With ``paranoid``, blobs that are already here are read, and their digests compared.

        Raises:
            StoreError: the store cannot be written: it is not a folder, read-only or full.
            StoreBusy: as :meth:`exclusive_lock`.
        """
        with self.writing():
            for name in ("blobs", "manifests", "temporary"):
                make_folders(self.folder(name), self.root)
            if not is_folder(self._layout.headers):  # readers write caches, but create no folder
                make_folders(self._layout.headers, self.root)
            with (
                Lease.new(self._layout, self._locks, is_import=True) as lease,
                Ingest(self, lease, paranoid=paranoid) as ingest,
            ):
                yield ingest

    def claims(self) -> BlobClaims:
        """Return this process's claims of blobs that are read from a remote. Raises OSError."""
        return BlobClaims.of(self._layout.claims)

    def partial_bytes(self, blob: BlobId) -> int:
        """Return how many bytes of a blob an unfinished download has."""
        return bytes_done(self._layout.partial, blob)

    def remove_partial(self, digest: Digest) -> None:
        """Remove what was downloaded of a blob that is not needed any more."""
        remove_partial(self._layout.partial, digest)

    def join_ingest(
        self, name: str, *, paranoid: bool = False, sync_later: bool = False
    ) -> WorkerIngest:
        """Join an import of another process by its :attr:`Ingest.name`, to add blobs to it.

        With ``sync_later``, they are durable only when :meth:`Ingest.sync` returns.

        Raises:
            Cancelled: the import has ended.
        """
        lease = JoinedLease(self._layout, self._locks, name)
        return WorkerIngest(self, lease, paranoid=paranoid, sync_later=sync_later)

    def check_there(self) -> None:
        """Check that the store exists. An empty folder is not a store: a disk may not be mounted there.

        Raises:
            NotFound: the store does not exist.
            StoreError: as :meth:`check_root`.
        """
        self.check_root()
        places = (self.folder("blobs"), self.folder("manifests"), self.folder("headers").parent)
        if not any(map(is_there, places)):
            raise NotFound(f"there is no store at {quote(self.root)}", advice=NO_STORE)

    def check_space(self, needed: int) -> None:
        """Check that so many bytes are free for the store.

        Raises:
            StoreError: they are not.
        """
        if needed > self.free_space():
            raise self.no_space(needed)

    def free_space(self) -> int:
        """Return the bytes that are free for the store, which need not exist yet."""
        folder = self.folder("temporary")
        return shutil.disk_usage(next(it for it in (folder, *folder.parents) if is_there(it))).free

    def no_space(self, needed: int, bound: str = "") -> StoreError:
        """Return the error for a store that has no space for so many bytes, or with ``bound`` for "up to" so many."""
        sizes = (
            f"{bound}{bytes_text(needed)} are needed, and {bytes_text(self.free_space())} are free"
        )
        return StoreError(
            f"not enough space for the store {quote(self.root)}: {sizes}",
            advice="free some, or choose another store with --store",
        )

    # Signatures and the policy; see blobstore.operations.sign

    def keep_signature(self, manifest: Digest, data: bytes, *, is_verified: bool) -> None:
        """Store a signature of the manifest with that digest durably. Its content is not checked.

        Those that no key of this user has verified are kept apart, and only some of them.

        Raises:
            StoreError: the store cannot be written.
        """
        with self.writing():
            self._signatures.keep(manifest, data, is_verified=is_verified)

    def signatures(self, manifest: Digest) -> Iterator[bytes]:
        """Yield what :meth:`keep_signature` stored for a manifest, one at a time; damaged ones are left out.

        Raises:
            StoreError: the folder cannot be listed.
        """
        return (one.data for one in self.kept_signatures(manifest) if one.data is not None)

    def kept_signatures(self, manifest: Digest) -> Iterator[KeptSignature]:
        """Yield the files of the signatures of a manifest, damaged ones too. Raises as :meth:`signatures`."""
        yield from self._signatures.of(manifest)
        if self.shared is not None:
            yield from self.shared.kept_signatures(manifest)

    def signature_folder(self, manifest: Digest) -> Path:
        """Return where the signatures of a manifest are kept."""
        return self._signatures.folder(manifest)

    def signed_manifests(self) -> Iterator[Digest]:
        """Yield the digests of the manifests that have signatures."""
        return self._signatures.manifests()

    def lost_signatures(self, manifests: set[Digest]) -> Iterator[Path]:
        """Yield the files of signatures of manifests that are not among ``manifests``."""
        return self._signatures.without(manifests)

    def prune_signatures(self) -> None:
        """Remove folders of signatures that are empty."""
        self._signatures.remove_empty_folders()

    @property
    def policy_path(self) -> Path:
        """The file that says whose signatures the models of the store need, if it exists."""
        return self._layout.policy

    # Notes and the verified blobs, caches that may vanish at any time

    def verified_blobs(self) -> VerifiedBlobs:
        """Return the cache of the blobs that this user has found intact."""
        return VerifiedBlobs(self)

    def known_references(self, remote: str = "") -> References:
        """Return what this user has read of manifests, here or at the address of a remote."""
        return References(self._layout.references(os.geteuid(), remote))

    def read_note(self, kind: NoteKind, key: Digest) -> bytes | None:
        """Return what :meth:`write_note` stored of a kind under ``key``, or None."""
        try:
            note = read_regular(self._note_path(kind, key), MAX_MANIFEST_SIZE)
        except (OSError, BlobstoreError):
            return None
        return unpack(kind, key, note)

    def write_note(self, kind: NoteKind, key: Digest, data: bytes) -> None:
        """Store a note, or do nothing if the store cannot be written; see :mod:`blobstore.store.notes`.

        Readers call this, so it creates no folder: one of root would lock the owner out.
        """
        with contextlib.suppress(OSError):
            # A torn note is ignored, so no sync is needed.
            write_file(self._note_path(kind, key), [pack(kind, key, data)], durable=False)

    def remove_note(self, kind: NoteKind, key: Digest) -> None:
        """Remove a note, if the store can be written."""
        with contextlib.suppress(OSError):
            self._note_path(kind, key).unlink(missing_ok=True)

    def _note_path(self, kind: NoteKind, key: Digest) -> Path:
        return self._layout.headers / f"{key.hex}{kind.ending}"


class _WithSharedNames(LocalStore):
    """A store and the names of the shared one. Its own names come first."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store.root, lock_timeout=store.lock_timeout)

    def manifest_path(self, reference: str | Reference) -> Path:
        """Return the path of a manifest, here or in the shared store."""
        path = super().manifest_path(reference)
        if self.shared is None or is_there(path) or not self.shared.has_model(reference):
            return path
        return self.shared.manifest_path(reference)

    def tags(self, repository: Reference) -> Iterator[Reference]:
        """Yield the names of a repository in both, sorted."""
        shared = () if self.shared is None else self.shared.tags(repository)
        own = ManifestReader.tags(LocalStore(self.root), repository)
        yield from sorted({*own, *shared})


StoreLike = LocalStore | str | os.PathLike[str] | None
"""A store, its folder, or None for that of :func:`default_root`."""

"""A store in a folder of the local file system."""

from __future__ import annotations

import contextlib
import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blobstore.core import interrupts, pictures
from blobstore.core.arguments import local_path
from blobstore.core.escape import quote
from blobstore.core.files import (
    FileVersion,
    make_folders,
    read_regular,
    sync_folder,
    write_file,
)
from blobstore.errors import (
    BlobstoreError,
    InvalidManifest,
    ModelNotFound,
    NameConflict,
    StoreError,
)
from blobstore.manifests.check import MAX_CONFIG_SIZE, check_layers
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest
from blobstore.manifests.reference import DEFAULT_HOST, DEFAULT_TAG, Reference, similar_names
from blobstore.store.blobs import BlobReader
from blobstore.store.claims import BlobClaims
from blobstore.store.history import FormerManifest, History, WholeHistory
from blobstore.store.ingest import Ingest, WorkerIngest
from blobstore.store.layout import Layout, why_refused
from blobstore.store.locks import LOCK_TIMEOUT, Lease, Leases, Locks, read_leases
from blobstore.store.partial import bytes_done, remove_partial
from blobstore.store.remote_cache import RemoteCache
from blobstore.store.scan import is_folder, list_names, scan_folder
from blobstore.store.signatures import Signatures
from blobstore.store.verified_cache import VerifiedBlobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.descriptor import Descriptor, PlainDescriptors
    from blobstore.store.signatures import KeptSignature


NO_STORE: Final = "'blobstore create' makes a store, and --store or BLOBSTORE_HOME names another"
"""What to do if there is none."""


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


_PUBLIC = frozenset(
    ("blob_path", "check_digest", "exists", "has_model", "lock_timeout", "of", "read_blob")
) | {"references", "resolve", "root"}
"""What :func:`dir` lists and docs/reference/python.md describes. Other packages use the rest."""


class LocalStore(BlobReader):
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
        super().__init__(Layout(path.absolute()))
        self._locks = Locks(self._layout, lock_timeout)
        self._history = History(self._layout)
        self._signatures = Signatures(self._layout)
        self.remote_cache = RemoteCache(self._layout)
        """Remote models whose blobs are kept here as a cache."""

    @classmethod
    def of(cls, store: StoreLike) -> LocalStore:
        """Return ``store`` itself, or the store in that folder; None means :func:`default_root`.

        Raises:
            StoreError: None is given, and this user has no home folder.
        """
        return store if isinstance(store, LocalStore) else cls(store)

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

    # Locks and leases; see blobstore.store.locks

    def shared_lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep blobs and names from being removed while the block runs.

        Raises:
            StoreBusy: another process held the exclusive lock for ``lock_timeout`` seconds.
            StoreError: the file system has no locks.
        """
        return self._locks.shared()

    def exclusive_lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from writing and from leasing blobs.

        Raises as :meth:`shared_lock`.
        """
        return self._locks.exclusive()

    def lease(self) -> Lease:
        """Return a new lease, a context manager that keeps blobs from being collected.

        Raises as :meth:`shared_lock`.
        """
        return self._locks.lease()

    @contextlib.contextmanager
    def lease_if_writable(self, digests: Iterable[Digest]) -> Iterator[None]:
        """Lease blobs while the block runs, or run it without a lease if that is impossible.

        Reading must not depend on it: the store may be read-only, full, or without locks. Nothing
        else is created: a folder of root would lock the owner of the store out.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError, StoreError):
                stack.enter_context(self._locks.reading_lease()).hold(digests)
            yield

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
            StoreBusy: as :meth:`shared_lock`.
        """
        with self.writing():
            for name in ("blobs", "manifests", "temporary"):
                make_folders(self.folder(name), self.root)
            if not self._layout.headers.is_dir():  # readers write caches, but create no folder
                make_folders(self._layout.headers, self.root)
            with (
                self._locks.lease(is_import=True) as lease,
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

    def join_ingest(self, name: str, *, paranoid: bool = False) -> WorkerIngest:
        """Join an import of another process by its :attr:`Ingest.name`, to add blobs to it.

        Raises:
            Cancelled: the import has ended.
        """
        return WorkerIngest(self, self._locks.join_lease(name), paranoid=paranoid)

    def check_space(self, needed: int) -> None:
        """Check that so many bytes are free for the store, within :meth:`ingest`.

        Raises:
            StoreError: they are not.
        """
        free = shutil.disk_usage(self.folder("temporary")).free
        if needed > free:
            sizes = f"{needed / 10**6:,.1f} MB are needed, and {free / 10**6:,.1f} MB are free"
            raise StoreError(f"not enough space for the store {quote(self.root)}: {sizes}")

    # Manifests

    def manifest_path(self, reference: str | Reference) -> Path:
        """Return the path of a manifest."""
        return self._layout.manifest(Reference.of(reference))

    def reference_of(self, path: Path) -> Reference | None:
        """Return the reference that a manifest's path spells, or None."""
        return self._layout.reference(path)

    def manifest_version(self, reference: str | Reference) -> FileVersion | None:
        """Return the version of a manifest's file; None if it is missing or cannot be read.

        A reader that misses a blob may have read a manifest that was removed or replaced in the meantime.
        """
        return FileVersion.of(self.manifest_path(reference))

    def resolve(self, reference: str | Reference) -> Manifest:
        """Return the manifest of a model, checked against its config if that can be read.

        Raises:
            InvalidReference: ``reference`` is malformed.
            ModelNotFound: the store has no such model.
            InvalidManifest: the manifest breaks the format, or has changed since it was written; the
                message begins with its path.
            StoreError: the manifest or the store cannot be read.
        """
        data, manifest = self.parse(reference)
        try:
            self.check_manifest(data, manifest)
        except InvalidManifest as error:
            raise error.at(quote(self.manifest_path(reference))) from None
        return manifest

    def parse(
        self, reference: str | Reference, known: PlainDescriptors | None = None
    ) -> tuple[bytes, Manifest]:
        """Return the bytes of a manifest and the parsed manifest, not checked against the config.

        ``known`` is as for :meth:`Manifest.from_bytes`. Raises as :meth:`resolve`.
        """
        data = self.read_manifest(reference)
        try:
            return data, Manifest.from_bytes(data, known)
        except InvalidManifest as error:
            raise error.at(quote(self.manifest_path(reference))) from None

    def check_manifest(self, data: bytes, manifest: Manifest) -> bool:
        """Check against the config that ``data``, the bytes of ``manifest``, has not changed.

        Returns:
            Whether the config could be read. If it could not, either the config is lost or its digest
            in the manifest has changed; the layers cannot be checked.

        Raises:
            InvalidManifest: it has changed.
        """
        config = manifest.config
        try:
            # With the size of the file, because the size in the manifest may be what has changed.
            size = os.lstat(self.blob_path(config.digest)).st_size
            content = self.read_blob(config.digest, size, MAX_CONFIG_SIZE)
        except (BlobstoreError, OSError):
            return False
        check_layers(data, content)
        return True

    def read_manifest(self, reference: str | Reference) -> bytes:
        """Return the bytes of a manifest, at most 64 MiB, unparsed.

        Raises:
            ModelNotFound: the store has no such model.
            InvalidManifest: the file is too large or not a regular file.
            StoreError: the manifest or the store cannot be read.
        """
        interrupts.check()
        path = self.manifest_path(reference)
        try:
            return read_regular(path, MAX_MANIFEST_SIZE)
        except (FileNotFoundError, NotADirectoryError):
            # If the store itself is unusable, that is the error, and not a missing model.
            self.check_root()
            if path.is_symlink():
                raise InvalidManifest(f"{quote(path)} is a broken symbolic link") from None
            raise self._not_found(Reference.of(reference)) from None
        except OSError as error:
            raise StoreError(f"cannot read manifest {quote(path)}: {error.strerror}") from error
        except BlobstoreError as error:
            raise InvalidManifest(str(error)) from None

    def _not_found(self, reference: Reference) -> ModelNotFound:
        return ModelNotFound(
            f"no model {quote(reference)} in the store {quote(self.root)}",
            advice=partial(self._similar_names, reference),
        )

    def _similar_names(self, reference: Reference) -> str:
        if not self.root.exists():
            return f"there is no store there; {NO_STORE}"
        try:
            similar = similar_names(reference, self.references())
        except BlobstoreError:
            similar = ""
        text = str(reference)
        for path in (text, text.removesuffix(f":{DEFAULT_TAG}")):
            if not similar and os.path.lexists(path):
                return f"'blobstore create PATH NAME' imports the path {quote(path)}"
        if similar or reference.host == DEFAULT_HOST:
            return similar
        return f"'blobstore pull {reference}' fetches it if a registry has it"

    def references(
        self, *, on_error: Callable[[StoreError], object] | None = None
    ) -> Iterator[Reference]:
        """Yield the name of every model in the store, sorted. Files with other names are skipped.

        Args:
            on_error: called with the error of each folder of manifests that cannot be read, which is
                then skipped; by default the first of these errors is raised.

        Raises:
            StoreError: the store is not a folder or cannot be read.
        """
        self.check_root()
        folders, files = [str(self._layout.manifests)], list[str]()
        for _ in range(4):  # host, namespace, model, tag
            found, folders, files = folders, [], []
            for folder in found:
                try:
                    for entry in scan_folder(folder):
                        # Pipes and broken links are files: reading such a manifest says what is wrong
                        # with it.
                        (folders if is_folder(entry.path) else files).append(entry.path)
                except StoreError as error:
                    if on_error is None:
                        raise
                    on_error(error)
        for file in sorted(map(Path, files)):
            reference = self.reference_of(file)
            if reference is not None:
                yield reference

    def check_name(self, reference: str | Reference) -> None:
        """Check that no other name in the store differs from ``reference`` only in case.

        Other tools ignore case in names, and on some file systems both would be one file.

        Raises:
            NameConflict: there is such a name.
        """
        reference = Reference.of(reference)
        folder = self._layout.manifests
        for part in reference.parts:
            with contextlib.suppress(StoreError):  # writing the manifest says what is wrong
                for found in list_names(folder):
                    if found != part and found.casefold() == part.casefold():
                        existing = (folder / found).relative_to(self._layout.manifests)
                        raise NameConflict(
                            f"{quote(reference)} differs only in case from the existing "
                            f"{quote(existing)}; use that spelling or another name"
                        )
            folder /= part

    def publish(
        self, reference: str | Reference, manifest: Manifest, ingest: Ingest | None = None
    ) -> bytes | None:
        """Make ``manifest`` the one of that name, atomically and durably; return what it replaces.

        Within :meth:`ingest`, pass the import, which waits longer for the lock.

        Raises:
            BlobMissing, BlobDamaged: a blob is missing or has another size; nothing changes.
            NameConflict: as :meth:`check_name`.
            StoreError: the store cannot be written.
        """
        lock = self.exclusive_lock if ingest is None else ingest.exclusive_lock
        # Exclusive: of two names that differ only in case, the second one must see the first.
        with self.writing(), lock():
            return self.place(reference, manifest.to_bytes(), manifest.blobs)

    def place(
        self, reference: str | Reference, data: bytes, blobs: Iterable[Descriptor]
    ) -> bytes | None:
        """Publish a manifest while the caller holds the exclusive lock; return the one it replaces.

        The replaced one is kept until gc removes its blobs. None means that the name was free, had this
        manifest already, or had one that cannot be read.

        Args:
            reference: the name.
            data: the bytes of the manifest, which are written unchanged.
            blobs: the blobs that it references.

        Raises:
            OSError: the store cannot be written. Otherwise as :meth:`publish`.
        """
        path = self.manifest_path(reference)
        # The caller's lock keeps blobs that are found here from being removed before the manifest
        # has its name.
        for blob in blobs:
            self.check_size(blob.digest, blob.size)
        self.check_name(reference)
        for folder in (path.parent, self._layout.temporary):
            make_folders(folder, self.root)
        former = None
        # An unreadable manifest cannot be kept, but it must be replaceable.
        with contextlib.suppress(ModelNotFound, InvalidManifest, StoreError):
            if (found := self.read_manifest(reference)) != data:
                Manifest.from_bytes(found)
                # Before the new one is written: a crash in between loses neither.
                self._history.keep(Reference.of(reference), found)
                former = found
        write_file(path, [data], mode=0o644, temporary=self._layout.temporary)
        return former

    def has_model(self, reference: str | Reference) -> bool:
        """Return whether the name ``reference`` exists, whether its manifest can be read or not.

        Raises:
            InvalidReference: it is malformed.
        """
        return os.path.lexists(self.manifest_path(reference))

    def is_taken(self, reference: str | Reference, data: bytes) -> bool:
        """Return whether the name exists and its manifest differs from ``data``."""
        try:
            return self.read_manifest(reference) != data
        except ModelNotFound:
            return False
        except BlobstoreError:  # an unreadable manifest is another one
            return True

    def remove(self, *references: str | Reference) -> None:
        """Remove names durably. The caller holds the exclusive lock.

        Folders that become empty are removed too; blobs are not. Manifests are not read, so damaged
        ones can be removed.

        Raises:
            ModelNotFound: the store has no such model; names before it are removed.
            OSError: the store cannot be written.
        """
        folders: dict[Path, None] = {}
        try:
            for reference in references:
                path = self.manifest_path(reference)
                try:
                    path.unlink()
                except (FileNotFoundError, NotADirectoryError):
                    raise self._not_found(Reference.of(reference)) from None
                folders[path.parent] = None
        finally:
            for folder in folders:
                # Even if a later name does not exist: those before it must be removed durably.
                sync_folder(folder)
        for folder in folders:
            with contextlib.suppress(OSError):  # the folder has other names
                for empty in (folder, *folder.parents[:2]):  # model, namespace, host
                    empty.rmdir()

    # Former manifests, which may vanish at any time

    def keep_former(self, references: Iterable[Reference]) -> None:
        """Keep the manifests of names that are about to be removed. The caller holds the exclusive lock."""
        self._history.keep_all((name, self.read_manifest(name)) for name in references)

    def former(self, reference: str | Reference | None) -> Iterator[FormerManifest]:
        """Yield manifests that a name had before, latest first, or all names; a damaged one may be among them."""
        return self._history.of(None if reference is None else Reference.of(reference))

    def whole_history(self) -> WholeHistory:
        """Return the manifests that names had before, none of them read yet."""
        return WholeHistory(self._layout)

    def has_blobs(self, blobs: Iterable[Descriptor]) -> bool:
        """Return whether the store has all of these blobs, judged by their sizes."""
        try:
            for blob in blobs:
                self.check_size(blob.digest, blob.size)
        except BlobstoreError:
            return False
        return True

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
        return (one.data for one in self._signatures.of(manifest) if one.data is not None)

    def kept_signatures(self, manifest: Digest) -> Iterator[KeptSignature]:
        """Yield the files of the signatures of a manifest, damaged ones too. Raises as :meth:`signatures`."""
        return self._signatures.of(manifest)

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

    # The header index and the verified blobs, caches that may vanish at any time

    def verified_blobs(self) -> VerifiedBlobs:
        """Return the cache of the blobs that this user has found intact."""
        return VerifiedBlobs(self)

    def read_index(self, key: Digest, ending: str = "") -> bytes | None:
        """Return the data that :meth:`write_index` stored under ``key`` and ``ending``, or None."""
        try:
            return read_regular(self._layout.headers / f"{key.hex}{ending}", MAX_MANIFEST_SIZE)
        except (OSError, BlobstoreError):
            return None

    def write_index(self, key: Digest, data: bytes, ending: str = "") -> None:
        """Store ``data`` under ``key``, or do nothing if the store cannot be written.

        If the key is the digest of a manifest, ``gc`` removes the data after the manifest. The ``ending``, such as
        ``.files``, distinguishes what is stored about one manifest.

        Readers call this, so it creates no folder: one of root would lock the owner out.
        """
        with contextlib.suppress(OSError):
            # A torn index is a cache that is wrong, which its readers expect, so no sync is needed.
            write_file(self._layout.headers / f"{key.hex}{ending}", [data], durable=False)

    def remove_index(self, key: Digest) -> None:
        """Remove what :meth:`write_index` stored under ``key``, if the store can be written."""
        with contextlib.suppress(OSError):
            (self._layout.headers / key.hex).unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self, *, is_dry: bool = False) -> Iterator[None]:
        """Convert an OSError of the block into an error that says why the store cannot be written.

        A dry run only reads, so its errors say that the store cannot be read.

        Raises:
            StoreError: the system refused an operation.
        """
        try:
            yield
        except OSError as error:
            self.check_root()
            raise StoreError(why_refused(self.root, error, is_dry=is_dry)) from error


StoreLike = LocalStore | str | os.PathLike[str] | None
"""A store, its folder, or None for that of :func:`default_root`."""

"""A store in a folder of the local file system."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import make_folders, read_regular, sync_folder, write_file
from blobstore.errors import (
    BlobstoreError,
    InvalidManifest,
    ModelNotFound,
    NameConflict,
    StoreError,
)
from blobstore.manifests.check import MAX_CONFIG_SIZE, check_layers
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest
from blobstore.store.blobs import BlobReader
from blobstore.store.ingest import Ingest, WorkerIngest
from blobstore.store.layout import Layout
from blobstore.store.locks import LOCK_TIMEOUT, Lease, Locks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blobstore.core.digest import Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Reference

_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def default_root() -> Path:
    """Return ``$BLOBSTORE_HOME``, else ``~/.blobstore``."""
    home = os.environ.get("BLOBSTORE_HOME")
    return Path(home) if home else Path.home() / ".blobstore"


class LocalStore(BlobReader):
    """Blobs and manifests below one folder, in Ollama's layout.

    Reading needs no more than read permission; the folders are made by the first ingest. Any number
    of processes may use a store at once. A process waits at most ``lock_timeout`` seconds for a lock
    that others hold.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, *, lock_timeout: float = LOCK_TIMEOUT
    ) -> None:
        # Absolute, because the program may change its working directory while a model is open.
        path = Path(os.path.expanduser(default_root() if root is None else root))  # noqa: PTH111 - leaves ~ alone where there is no home
        super().__init__(Layout(path.absolute()))
        self._locks = Locks(self._layout, lock_timeout)

    @classmethod
    def of(cls, store: LocalStore | str | os.PathLike[str] | None) -> LocalStore:
        """Return ``store`` itself, the store in that folder, or by default :func:`default_root`'s."""
        return store if isinstance(store, LocalStore) else cls(store)

    def __repr__(self) -> str:
        return f"LocalStore({quote(self._layout.root)})"

    @property
    def lock_timeout(self) -> float:
        """Seconds to wait for a lock that other processes hold."""
        return self._locks.timeout

    @lock_timeout.setter
    def lock_timeout(self, seconds: float) -> None:
        """Set how long to wait."""
        self._locks.timeout = seconds

    def manifest_path(self, reference: Reference) -> Path:
        """Return the path of a manifest."""
        return self._layout.manifest(reference)

    # Locks and leases; see blobstore.store.locks

    def shared_lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep blobs and names from being removed while the block runs.

        Raises:
            StoreBusy: another process has held the exclusive lock for ``lock_timeout`` seconds.
            StoreError: the file system has no locks.
        """
        return self._locks.shared()

    def reading_lock(self) -> contextlib.AbstractContextManager[None]:
        """Take the shared lock if this process may; without it, a read-only store is read as it is.

        Raises as :meth:`shared_lock`.
        """
        return self._locks.reading()

    def exclusive_lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from writing and from looking for blobs to use.

        Raises as :meth:`shared_lock`.
        """
        return self._locks.alone()

    def lease(self) -> Lease:
        """Return a new lease, a context manager that keeps blobs from being collected.

        Raises as :meth:`shared_lock`.
        """
        return self._locks.lease()

    @contextlib.contextmanager
    def lease_if_writable(self, digests: Iterable[Digest]) -> Iterator[None]:
        """Lease blobs while the block runs, or run it without a lease if the store is read-only.

        Raises:
            StoreBusy: as :meth:`shared_lock`.
            StoreError: the lease cannot be written for another reason.
        """
        with contextlib.ExitStack() as stack:
            with self.writing():
                try:
                    stack.enter_context(self.lease()).hold(digests)
                except OSError as error:
                    if error.errno not in _READ_ONLY:
                        raise
            yield

    @contextlib.contextmanager
    def ingest(self, *, paranoid: bool = False) -> Iterator[Ingest]:
        """Start an import of blobs; see :class:`Ingest`. Publish its manifest before it ends.

        With ``paranoid``, blobs that exist already are read, and their digests compared.

        Raises:
            StoreError: the store cannot be written: a file in its place, read-only, full.
            StoreBusy: another process has held the exclusive lock for ``lock_timeout`` seconds.
        """
        with self.writing():
            for folder in (self._layout.blobs, self._layout.manifests, self._layout.temporary):
                make_folders(folder, self._layout.root)
            with self.lease() as lease, Ingest(self, lease, paranoid=paranoid) as ingest:
                yield ingest

    def join_ingest(self, name: str, *, paranoid: bool = False) -> WorkerIngest:
        """Join an import of another process by its :attr:`Ingest.name`, to add blobs to it.

        Raises:
            Cancelled: the import has ended.
        """
        return WorkerIngest(self, self._locks.join_lease(name), paranoid=paranoid)

    # Manifests

    def resolve(self, reference: Reference) -> Manifest:
        """Return the manifest of a name, checked against its config where that can be read.

        Raises:
            ModelNotFound: the store has no such name.
            InvalidManifest: the manifest breaks the format, or is not the one that was written; the
                message begins with its path.
            StoreError: the manifest or the store cannot be read.
        """
        data, manifest = self.parse(reference)
        try:
            self.check_manifest(data, manifest)
        except InvalidManifest as error:
            raise error.at(quote(self.manifest_path(reference))) from None
        return manifest

    def parse(self, reference: Reference) -> tuple[bytes, Manifest]:
        """Return the bytes of a name's manifest and what they say, not checked against the config.

        Raises as :meth:`resolve`.
        """
        data = self.read_manifest(reference)
        try:
            return data, Manifest.from_bytes(data)
        except InvalidManifest as error:
            raise error.at(quote(self.manifest_path(reference))) from None

    def check_manifest(self, data: bytes, manifest: Manifest) -> bool:
        """Check by its config that ``data``, the file of ``manifest``, is what was written.

        Returns:
            Whether the config could be read. Without it nothing can be told; but then the config is
            what is lost, or a bit of its name, and the layers are what they were.

        Raises:
            InvalidManifest: it is not.
        """
        config = manifest.config
        try:
            # As large as it is, for the size may be what was changed in the manifest.
            size = os.lstat(self._layout.blob(config.digest)).st_size
            content = self.read_blob(config.digest, size, MAX_CONFIG_SIZE)
        except (BlobstoreError, OSError):
            return False
        check_layers(data, content)
        return True

    def read_manifest(self, reference: Reference) -> bytes:
        """Return the bytes of a name's manifest, of at most 64 MiB, unparsed.

        Raises:
            ModelNotFound: the store has no such name.
            InvalidManifest: it is too large or not a regular file.
            StoreError: the manifest or the store cannot be read.
        """
        path = self.manifest_path(reference)
        try:
            return read_regular(path, MAX_MANIFEST_SIZE)
        except (FileNotFoundError, NotADirectoryError):
            self.check_root()
            if path.is_symlink():
                raise InvalidManifest(f"{quote(path)} is a link to nothing") from None
            raise self._not_found(reference) from None
        except OSError as error:
            raise StoreError(f"cannot read manifest {quote(path)}: {error.strerror}") from error
        except BlobstoreError as error:
            raise InvalidManifest(str(error)) from None

    def _not_found(self, reference: Reference) -> ModelNotFound:
        return ModelNotFound(f"no model {quote(reference)} in the store {quote(self._layout.root)}")

    def references(self) -> Iterator[Reference]:
        """Yield every name in the store, sorted. Files that spell no name are passed over.

        Raises:
            StoreError: the store is not a folder or cannot be read.
        """
        self.check_root()
        paths = [self._layout.manifests]
        try:
            for _ in range(4):  # not by glob, which passes over folders that cannot be read
                paths = [found for path in paths if path.is_dir() for found in _entries(path)]
            # Pipes and links to nothing too: reading them says what is wrong with that name.
            files = sorted(path for path in paths if not path.is_dir())
        except OSError as error:
            raise StoreError(f"cannot list {quote(error.filename)}: {error.strerror}") from error
        for path in files:
            reference = self._layout.reference(path)
            if reference is not None:
                yield reference

    def check_name(self, reference: Reference) -> None:
        """Check that no other name of the store differs from ``reference`` in case only.

        Names compare without case elsewhere, and on some file systems they would be one file.

        Raises:
            NameConflict: there is such a name.
        """
        folder = self._layout.manifests
        for part in reference.parts:
            for found in _names(folder):
                if found != part and found.casefold() == part.casefold():
                    raise NameConflict(
                        f"{quote(reference)} differs only in case from the existing "
                        f"{quote((folder / found).relative_to(self._layout.manifests))}; "
                        "use that spelling or another name"
                    )
            folder /= part

    def publish(self, reference: Reference, manifest: Manifest) -> None:
        """Give ``manifest`` its name, in one step and durably; an old one is replaced.

        Raises:
            BlobMissing, BlobDamaged: a blob of the manifest is not whole; nothing is changed.
            NameConflict: see :meth:`check_name`.
            StoreError: the store cannot be written.
        """
        with self.writing(), self.shared_lock():
            self.place(reference, manifest.to_bytes(), manifest.blobs)

    def place(self, reference: Reference, data: bytes, blobs: Iterable[Descriptor]) -> None:
        """Do as :meth:`publish` does, for a caller who has the store's lock.

        Args:
            reference: the name.
            data: the manifest's bytes, which are kept as they are.
            blobs: what the manifest lists.

        Raises:
            OSError: the store cannot be written. Otherwise as :meth:`publish`.
        """
        path = self.manifest_path(reference)
        for blob in blobs:
            self.check_size(blob.digest, blob.size)
        self.check_name(reference)
        for folder in (path.parent, self._layout.temporary):
            make_folders(folder, self._layout.root)
        write_file(path, [data], mode=0o644, temporary=self._layout.temporary)

    def is_taken(self, reference: Reference, data: bytes) -> bool:
        """Tell whether a name is there and has another manifest than ``data``."""
        try:
            return self.read_manifest(reference) != data
        except ModelNotFound:
            return False
        except BlobstoreError:  # whatever it is
            return True

    def remove(self, reference: Reference) -> None:
        """Take a name away, durably, for a caller who has the store's lock alone.

        Folders that become empty are removed too. The blobs stay, and so does what is wrong with the
        manifest: it is not read.

        Raises:
            ModelNotFound: the store has no such name; nothing is changed.
            OSError: the store cannot be written.
        """
        path = self.manifest_path(reference)
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            raise self._not_found(reference) from None
        sync_folder(path.parent)
        with contextlib.suppress(OSError):  # there are other names
            for folder in path.parents[: len(reference.parts) - 1]:
                folder.rmdir()

    # The header index: a cache that may vanish at any time

    def read_index(self, key: Digest) -> bytes | None:
        """Return what :meth:`write_index` stored under ``key``, or None."""
        try:
            return read_regular(self._layout.headers / key.hex, MAX_MANIFEST_SIZE)
        except (OSError, BlobstoreError):
            return None

    def write_index(self, key: Digest, data: bytes) -> None:
        """Store ``data`` under ``key`` if the store can be written; otherwise do nothing."""
        folder = self._layout.headers
        with contextlib.suppress(OSError):
            for missing in (folder.parent, folder):  # but never the store itself: it may be gone
                missing.mkdir(exist_ok=True)
            write_file(folder / key.hex, [data], durable=False)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Say in errors that writing to the store has failed, and why.

        Raises:
            StoreError: the system refused something.
        """
        try:
            yield
        except OSError as error:
            self.check_root()
            root = quote(self._layout.root)
            reasons = {
                errno.EROFS: f"the store {root} is on a read-only file system",
                errno.EACCES: f"no permission to write to the store {root}",
                errno.EPERM: f"no permission to write to the store {root}",
                errno.ENOSPC: f"no space left for the store {root}; free some or use another",
                errno.EDQUOT: f"the disk quota of the store {root} is used up",
                errno.EXDEV: f"the folders of the store {root} lie on different file systems",
            }
            place = f" ({quote(error.filename)})" if error.filename else ""
            otherwise = f"writing to the store {root} failed: {error.strerror}{place}"
            raise StoreError(reasons.get(error.errno or 0, otherwise)) from error


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:  # removed since it was seen, as Ollama does with empty folders
        return []


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []

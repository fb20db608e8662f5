"""A store in a folder of the local file system."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.digest import Digest, Digester
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    InvalidHeader,
    InvalidManifest,
    ModelNotFound,
    NameConflict,
    StoreError,
)
from blobstore.files import make_folders, open_regular, read_exactly, read_regular, write_file
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest
from blobstore.safetensors.file import read_header
from blobstore.store.ingest import Ingest
from blobstore.store.layout import Layout
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.mapping import Region
    from blobstore.safetensors.header import Header

_READ_SIZE = 1 << 20
_MAX_SMALL_BLOB = 256 * 2**20


def default_root() -> Path:
    """Return ``$BLOBSTORE_HOME``, else ``~/.blobstore``."""
    home = os.environ.get("BLOBSTORE_HOME")
    return Path(home) if home else Path.home() / ".blobstore"


class LocalStore:
    """Blobs and manifests below one folder, in Ollama's layout.

    Reading needs no more than read permission; the folders are made by the first ingest.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.layout = Layout(default_root() if root is None else Path(root))

    def __repr__(self) -> str:
        return f"LocalStore({quoted(self.layout.root)})"

    # Blobs

    def exists(self, digest: Digest, size: int) -> bool:
        """Tell whether the blob is here, by its size; the digest is not computed.

        Raises:
            BlobDamaged: a file of that name has another size or is not a regular file.
        """
        try:
            self.check_size(digest, size)
        except BlobMissing:
            return False
        return True

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that the blob is here and has ``size`` bytes.

        Raises:
            BlobMissing: it is not in the store.
            BlobDamaged: it has another size.
        """
        path = self.layout.blob(digest)
        try:
            found = os.lstat(path)
        except OSError as error:
            raise self._blob_error(digest, error) from None
        if found.st_size != size or not stat.S_ISREG(found.st_mode):
            raise _wrong_size(path, size, found.st_size)

    def open_blob(self, digest: Digest, size: int) -> int:
        """Open a blob of ``size`` bytes; return its descriptor, which the caller closes.

        Raises:
            BlobMissing: it is not in the store.
            BlobDamaged: it has another size, or is a symbolic link.
        """
        path = self.layout.blob(digest)
        try:
            descriptor, found = open_regular(path, follow=False)
        except OSError as error:
            raise self._blob_error(digest, error) from None
        if found != size:
            os.close(descriptor)
            raise _wrong_size(path, size, found)
        return descriptor

    def check_sizes(self, blobs: Iterable[tuple[Digest, int]]) -> None:
        """Check many blobs as :meth:`check_size` does, and raise for the first that is not whole.

        A model has thousands of blobs, so the usual case costs one system call a blob.
        """
        with self._blob_folder() as folder:
            for digest, size in blobs:
                try:
                    found = os.stat(digest.file_name, dir_fd=folder, follow_symlinks=False)
                    is_whole = found.st_size == size and stat.S_ISREG(found.st_mode)
                except OSError:
                    is_whole = False
                if not is_whole:
                    self.check_size(digest, size)

    def map_blobs(
        self, blobs: Sequence[tuple[Digest, int]], slots: Collection[int], region: Region
    ) -> Iterator[int]:
        """Map the blobs at ``slots`` of ``blobs`` into the same slots of ``region``, yielding each.

        No descriptor stays open. Raises as :meth:`open_blob`.
        """
        if not slots:
            return
        with self._blob_folder() as folder:
            for slot in slots:
                digest, size = blobs[slot]
                try:
                    descriptor, found = open_regular(digest.file_name, follow=False, folder=folder)
                except OSError as error:
                    raise self._blob_error(digest, error) from None
                try:
                    if found != size:
                        raise _wrong_size(self.layout.blob(digest), size, found)
                    region.map(slot, descriptor, size)
                finally:
                    os.close(descriptor)
                yield slot

    def read_blob(self, digest: Digest, size: int) -> bytes:
        """Return the bytes of a small blob, such as a config, after checking its digest.

        Raises:
            BlobDamaged: also when the digest differs. Otherwise as :meth:`open_blob`.
        """
        if size > _MAX_SMALL_BLOB:
            message = f"blob {digest} of {size} bytes is too large to be read as a small file"
            raise BlobDamaged(message)
        descriptor = self.open_blob(digest, size)
        try:
            data = read_exactly(descriptor, size, 0)
        finally:
            os.close(descriptor)
        found = Digest.of(data)
        if found != digest:
            raise _wrong_digest(self.layout.blob(digest), digest, found)
        return data

    def read_blob_header(
        self, digest: Digest, size: int, *, region: Region | None = None, slot: int = 0
    ) -> Header:
        """Return the checked safetensors header of a tensor blob.

        With ``region``, the blob is mapped into its ``slot`` while it is open.

        Raises:
            BlobDamaged: the header breaks the format. Otherwise as :meth:`open_blob`.
        """
        descriptor = self.open_blob(digest, size)
        try:
            header = read_header(descriptor, size)
            if region is not None:
                region.map(slot, descriptor, size)
            return header
        except InvalidHeader as error:
            message = f"blob {quoted(self.layout.blob(digest))}: {error}"
            raise BlobDamaged(message) from None
        finally:
            os.close(descriptor)

    def check_digest(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Read the whole blob and compare its digest; ``progress`` gets the bytes of each read.

        Raises:
            BlobDamaged: the digest differs. Otherwise as :meth:`open_blob`.
        """
        digester = Digester()
        buffer = memoryview(bytearray(min(_READ_SIZE, size + 1)))
        descriptor = self.open_blob(digest, size)
        try:
            while count := os.preadv(descriptor, [buffer], digester.size):
                digester.update(buffer[:count])
                if progress is not None:
                    progress(count)
        except OSError as error:
            message = (
                f"blob {quoted(self.layout.blob(digest))} cannot be read at byte "
                f"{digester.size}: {error.strerror}"
            )
            raise BlobDamaged(message) from error
        finally:
            os.close(descriptor)
        if digester.digest() != digest:
            raise _wrong_digest(self.layout.blob(digest), digest, digester.digest())

    def blob_sizes(self) -> set[int]:
        """Return the sizes of all blobs."""
        try:
            with os.scandir(self.layout.blobs) as entries:
                return {entry.stat(follow_symlinks=False).st_size for entry in entries}
        except FileNotFoundError:
            return set()

    @contextlib.contextmanager
    def ingest(self) -> Iterator[Ingest]:
        """Begin an import of blobs; see :class:`Ingest`.

        Raises:
            StoreError: the store cannot be written: a file in its place, read-only, full.
        """
        with self._writing():
            for folder in (self.layout.blobs, self.layout.manifests, self.layout.temporary):
                make_folders(folder, self.layout.root)
            with Ingest(self.layout, self.blob_sizes(), self.exists) as ingest:
                yield ingest

    # Manifests

    def resolve(self, reference: Reference) -> Manifest:
        """Return the manifest of a name.

        Raises:
            ModelNotFound: the store has no such name.
            InvalidManifest: the manifest breaks the format; the message begins with its path.
            StoreError: the manifest or the store cannot be read.
        """
        data = self.read_manifest(reference)
        try:
            return Manifest.from_bytes(data)
        except InvalidManifest as error:
            raise error.at(quoted(self.layout.manifest(reference))) from None

    def read_manifest(self, reference: Reference) -> bytes:
        """Return the bytes of a name's manifest, of at most 64 MiB, unparsed.

        Raises:
            ModelNotFound: the store has no such name.
            InvalidManifest: it is too large or not a regular file.
            StoreError: the manifest or the store cannot be read.
        """
        path = self.layout.manifest(reference)
        try:
            return read_regular(path, MAX_MANIFEST_SIZE)
        except (FileNotFoundError, NotADirectoryError):
            self._check_root()
            message = f"no model {quoted(reference)} in the store {quoted(self.layout.root)}"
            raise ModelNotFound(message) from None
        except OSError as error:
            message = f"cannot read manifest {quoted(path)}: {error.strerror}"
            raise StoreError(message) from error
        except BlobstoreError as error:
            raise InvalidManifest(str(error)) from None

    def references(self) -> Iterator[Reference]:
        """Yield every name in the store, sorted. Files that spell no name are passed over.

        Raises:
            StoreError: the store is not a folder or cannot be read.
        """
        self._check_root()
        try:
            paths = sorted(self.layout.manifests.glob("*/*/*/*"))
        except OSError as error:
            message = f"cannot list {quoted(self.layout.manifests)}: {error.strerror}"
            raise StoreError(message) from error
        for path in paths:
            reference = self.layout.reference(path)
            if reference is not None and path.is_file():
                yield reference

    def check_name(self, reference: Reference) -> None:
        """Check that no other name of the store differs from ``reference`` in case only.

        Names compare without case elsewhere, and on some file systems they would be one file.

        Raises:
            NameConflict: there is such a name.
        """
        folder = self.layout.manifests
        for part in reference.parts:
            for found in _names(folder):
                if found != part and found.casefold() == part.casefold():
                    message = (
                        f"{quoted(reference)} differs only in case from the existing "
                        f"{quoted((folder / found).relative_to(self.layout.manifests))}; "
                        "use that spelling or another name"
                    )
                    raise NameConflict(message)
            folder /= part

    def publish(self, reference: Reference, manifest: Manifest) -> None:
        """Give ``manifest`` its name, in one step and durably; an old one is replaced.

        Raises:
            BlobMissing, BlobDamaged: a blob of the manifest is not whole; nothing is changed.
            NameConflict: see :meth:`check_name`.
            StoreError: the store cannot be written.
        """
        self.check_sizes((blob.digest, blob.size) for blob in manifest.blobs)
        self.check_name(reference)
        path = self.layout.manifest(reference)
        with self._writing():
            make_folders(path.parent, self.layout.root)
            write_file(path, [manifest.to_bytes()], mode=0o644, temporary=self.layout.temporary)

    # The header index: a cache that may vanish at any time

    def read_index(self, key: Digest) -> bytes | None:
        """Return what :meth:`write_index` stored under ``key``, or None."""
        try:
            return read_regular(self.layout.headers / key.hex, MAX_MANIFEST_SIZE)
        except (OSError, BlobstoreError):
            return None

    def write_index(self, key: Digest, data: bytes) -> None:
        """Store ``data`` under ``key`` if the store can be written; otherwise do nothing."""
        folder = self.layout.headers
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / key.hex, [data], durable=False)

    # Errors

    def _check_root(self) -> None:
        root = self.layout.root
        if root.exists() and not root.is_dir():
            message = f"the store {quoted(root)} is not a folder"
            raise StoreError(message)

    @contextlib.contextmanager
    def _blob_folder(self) -> Iterator[int]:
        try:
            folder = os.open(self.layout.blobs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._check_root()
            message = f"cannot open {quoted(self.layout.blobs)}: {error.strerror}"
            raise StoreError(message) from error
        try:
            yield folder
        finally:
            os.close(folder)

    def _blob_error(self, digest: Digest, error: OSError) -> BlobstoreError:
        path = quoted(self.layout.blob(digest))
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return BlobMissing(f"blob {path} is missing")
        if error.errno == errno.ELOOP:
            return BlobDamaged(f"blob {path} is a symbolic link, which a store must not hold")
        return StoreError(f"blob {path} cannot be opened: {error.strerror}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._check_root()
            root = quoted(self.layout.root)
            reasons = {
                errno.EROFS: f"the store {root} is on a read-only file system",
                errno.EACCES: f"no permission to write to the store {root}",
                errno.EPERM: f"no permission to write to the store {root}",
                errno.ENOSPC: f"no space left for the store {root}; free some or use another",
                errno.EDQUOT: f"the disk quota of the store {root} is used up",
                errno.EXDEV: f"the folders of the store {root} lie on different file systems",
            }
            place = f" ({quoted(error.filename)})" if error.filename else ""
            otherwise = f"writing to the store {root} failed: {error.strerror}{place}"
            raise StoreError(reasons.get(error.errno or 0, otherwise)) from error


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def _wrong_size(path: str, expected: int, found: int) -> BlobDamaged:
    return BlobDamaged(
        f"blob {quoted(path)} is damaged: it has {found} bytes, expected {expected}; "
        "remove it and create the model again"
    )


def _wrong_digest(path: str, expected: Digest, found: Digest) -> BlobDamaged:
    return BlobDamaged(
        f"blob {quoted(path)} is damaged: its bytes have digest {found}, expected {expected}; "
        "remove it and create the model again"
    )

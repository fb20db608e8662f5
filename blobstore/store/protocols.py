"""The abilities that a place for models can have, one protocol each.

Workflows ask for the abilities that they use, so that they work with a folder, an archive, a registry or
an object store alike. No signature assumes a local file. ``tests/support/store_suite.py`` tests the
promises below; every implementation runs it.

Four promises hold throughout. Digests name the decoded bytes of a blob, however they are stored. Content
that is already present is not an error. Methods may be called from several threads. Errors are those of
:mod:`blobstore.errors`; a place that cannot be reached raises :class:`~blobstore.errors.StoreError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from pathlib import Path

    from blobstore.core.digest import Digest
    from blobstore.core.mmap import MappedRegion
    from blobstore.core.progress import Progress
    from blobstore.errors import Damaged, StoreError
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.safetensors.header import Header
    from blobstore.store.blob_ranges import BlobRange, LoadedRanges
    from blobstore.store.cold import ColdBlob, Read
    from blobstore.store.notes import NoteKind
    from blobstore.store.verified_cache import VerifiedBlobs


class BlobFetcher(Protocol):
    """Reads blobs by digest and size."""

    def exists(self, digest: Digest, size: int) -> bool:
        """Return whether the blob exists, without reading its content.

        Raises:
            BlobDamaged: it has another size.
        """
        ...

    def read_pieces(self, digest: Digest, size: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob in order. A piece is valid until the next one is asked for.

        Only the size is verified: a caller that needs the digest hashes the pieces. The generator
        releases its resources when it is exhausted or closed, and each call starts from the first byte.

        Raises:
            BlobMissing: it does not exist.
            BlobDamaged: it has another size, or its end cannot be read.
        """
        ...

    def read_into(self, digest: Digest, size: int, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a blob from ``offset`` on; nothing is verified.

        Raises as :meth:`read_pieces`; BlobDamaged also if the blob ends before the buffer does.
        """
        ...


class ManifestResolver(Protocol):
    """Finds manifests by name."""

    def references(self) -> Iterable[Reference]:
        """Return the names of the models."""
        ...

    def read_manifest(self, reference: str | Reference) -> bytes:
        """Return the bytes of a manifest as they were published.

        The bytes are not parsed, and the blobs need not be here.

        Raises:
            ModelNotFound: there is no such name.
            InvalidManifest: it is too large to be a manifest.
        """
        ...


class ModelReader(BlobFetcher, ManifestResolver, Protocol):
    """A place to read models from."""


class BlobDescriber(Protocol):
    """Describes blobs by their sizes, their headers and, if they are small, their contents."""

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that the blob exists. Raises BlobMissing or BlobDamaged."""
        ...

    def read_blob(self, digest: Digest, size: int) -> bytes:
        """Return the bytes of a small blob after checking its digest. Raises BlobMissing or BlobDamaged."""
        ...

    def read_headers(
        self, blobs: Iterable[tuple[Digest, int]]
    ) -> Iterable[Header | Damaged | StoreError]:
        """Return for each tensor blob its checked header, or the error that reading it raised."""
        ...


class ModelInspector(ModelReader, BlobDescriber, Protocol):
    """A place whose models can be described: by their manifests, headers and small files."""

    def resolve(self, reference: str | Reference) -> Manifest:
        """Return the manifest of a model.

        Raises:
            ModelNotFound: there is no such model.
            InvalidManifest: the manifest breaks the format, or has changed since it was written.
        """
        ...

    def is_cold(self, digest: Digest) -> bool:
        """Return whether the blob has a cold file only."""
        ...


class BlobChecker(Protocol):
    """Compares the digests of blobs."""

    def check_digest(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Read the whole blob and compare its digest; ``progress`` receives the bytes of each read.

        Raises:
            BlobMissing, BlobDamaged: it does not exist, or has other bytes.
        """
        ...


class BlobAccess(BlobDescriber, BlobChecker, Protocol):
    """What an open model needs of a store: its blobs in memory, from files or from a remote.

    A *local* blob is read from the files of a local store: by its hot file if there is one, which can be
    mapped, or its cold file. Others come by :meth:`load` and :meth:`read_ranges`, which read local blobs
    as well, but share no memory with other processes. A blob may become local at any time.
    """

    @property
    def root(self) -> Path:
        """The folder of the local store."""
        ...

    def blob_path(self, digest: Digest) -> str:
        """Return the path that the hot file of a local blob has."""
        ...

    def readable_path(self, digest: Digest) -> str:
        """Return the path of the hot file of a local blob that is read, here or in the shared store."""
        ...

    def cold_path(self, digest: Digest) -> str:
        """Return the path that the cold file of a local blob has."""
        ...

    def is_local(self, digest: Digest) -> bool:
        """Return whether the blob is read from files, if it can be read at all."""
        ...

    def check_manifest(self, data: bytes, manifest: Manifest) -> bool:
        """Check against the config that a manifest has not changed; see :meth:`LocalStore.check_manifest`."""
        ...

    def verified_blobs(self) -> VerifiedBlobs:
        """Return the cache of the local blobs that were found intact."""
        ...

    def read_note(self, kind: NoteKind, key: Digest) -> bytes | None:
        """Return what :meth:`write_note` stored of a kind under ``key``, or None."""
        ...

    def write_note(self, kind: NoteKind, key: Digest, data: bytes) -> None:
        """Store ``data`` under ``key``, or do nothing if that is impossible or of no use."""
        ...

    def read_headers(
        self, blobs: Iterable[tuple[Digest, int]], region: MappedRegion | None = None
    ) -> Iterable[Header | Damaged | StoreError]:
        """Return headers as :class:`BlobDescriber` does; local blobs may be mapped into ``region``."""
        ...

    def open_hot(self, digest: Digest, size: int) -> int:
        """Open the hot file of a local blob. Raises BlobMissing if it does not exist."""
        ...

    def open_cold(
        self, digest: Digest, size: int | None = None, read: Read | None = None
    ) -> ColdBlob:
        """Open the cold file of a local blob. Raises BlobMissing if it does not exist."""
        ...

    def map_hot(self, digest: Digest, size: int, slot: int, region: MappedRegion) -> None:
        """Map the hot file of a local blob into a slot of ``region``. Raises as :meth:`open_hot`."""
        ...

    def is_cached(self, digest: Digest, size: int) -> bool:
        """Return whether most of the hot file is in the page cache. Raises as :meth:`open_hot`."""
        ...

    def read_into(
        self,
        digest: Digest,
        size: int,
        offset: int,
        buffer: memoryview,
        *,
        past_cache: bool = False,
    ) -> None:
        """Fill ``buffer`` with the bytes of a blob from ``offset`` on; see :meth:`LocalStore.read_into`."""
        ...

    def load(
        self, blobs: Iterable[tuple[Digest, int, memoryview]], progress: Progress | None = None
    ) -> None:
        """Fill memory with blobs, given by digest, size and memory, and check their digests.

        Raises:
            BlobMissing, BlobDamaged: a blob is missing, or has other bytes.
            RemoteError: the remote cannot be reached, refuses access or misbehaves.
        """
        ...

    def read_ranges(self, wanted: Iterable[BlobRange]) -> LoadedRanges:
        """Read parts of blobs into memory that may be read-only; nothing is verified.

        Raises as :meth:`load`.
        """
        ...

"""A local store that reads the blobs of one model from elsewhere if it lacks them.

An open model reads blobs, or ranges of them, straight into its memory. A blob that was read completely is
kept in the local store as in a cache: the second model that needs it finds it there.
"""

from __future__ import annotations

from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING

from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, BlobMissing, Damaged
from blobstore.manifests import media_types
from blobstore.operations.remote.cache import BlobCache
from blobstore.operations.remote.cold_layer import ColdLayer, parse_cold_index
from blobstore.operations.remote.loading import RemoteLoader
from blobstore.operations.remote.reader import RemoteReader
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from blobstore.core.mmap import MappedRegion
    from blobstore.errors import StoreError
    from blobstore.objects.source import ObjectSource
    from blobstore.operations.remote.reading import Cache
    from blobstore.safetensors.header import Header


class RemoteStore(LocalStore):
    """The blobs of a local store, and those that it lacks of one model elsewhere."""

    remote: RemoteLoader

    def __init__(
        self,
        local: LocalStore,
        source: ObjectSource,
        *,
        cache: Cache = "keep",
        cache_limit: int | None = None,
    ) -> None:
        """Read nothing but the list of compressed forms.

        Args:
            local: the store.
            source: the model.
            cache: whether to keep blobs that were read completely in the store.
            cache_limit: bytes of blobs to keep for models elsewhere, at most; others are removed first.

        Raises:
            RemoteError: the remote cannot be reached, or fails.
        """
        super().__init__(local.root, lock_timeout=local.lock_timeout)
        self._local = local
        self._source = source
        self.reference = source.address.reference
        """The name of the model."""
        self.manifest = source.manifest
        """Its manifest."""
        self.manifest_data = source.data
        """The bytes of that."""
        self._reader = RemoteReader({self.reference: source}, local)
        self._sizes = {blob.digest: blob.size for blob in source.blobs}
        missing = [blob for blob in source.blobs if not local.has(blob.digest)]
        needed = sum(blob.size for blob in missing)
        layers: dict[Digest, ColdLayer] = {}
        if missing and (index := source.cold_index()) is not None:
            layers = parse_cold_index(index)
        self._cache = None
        if cache == "keep":
            self._cache = BlobCache(local, source.data, needed, cache_limit)
        self.remote = RemoteLoader(source, local, layers, self._reader.starts, self._cache)
        self._small: dict[Digest, bytes] = {}

    def __reduce__(self) -> str:
        """Refuse to be sent to another process: its connections and threads stay in this one."""
        raise TypeError(
            f"{self.reference} is read from elsewhere, and cannot be copied or pickled; open it in each "
            "process, or pull it first"
        )

    def begin(self) -> None:
        """Note that the model is used, and read everything but the tensors, with concurrent requests.

        Raises:
            BlobMissing, BlobDamaged: a small file is missing or damaged.
            RemoteError: the remote cannot be reached, or fails.
        """
        if self._cache is not None:
            self._cache.begin()
        tensors = {layer.digest for layer in self._source.manifest.layers_of(media_types.TENSOR)}
        small = [
            blob.id
            for blob in self._source.blobs
            if blob.digest not in tensors
            and blob.size <= limits.SMALL_FILES.one
            and self.remote.is_elsewhere(blob.digest)
        ]
        # Those beyond the limit are read when they are asked for.
        small.sort(key=attrgetter("size"))
        sizes = accumulate(blob.size for blob in small)
        count = sum(size <= limits.SMALL_FILES.all for size in sizes)
        self._small = self.remote.load_small(small[: min(count, limits.SMALL_FILES.count)])

    def close(self) -> None:
        """Wait until the blobs that are kept are in the store."""
        if self._cache is not None:
            self._cache.close()

    # What BlobReader reads from files

    def check_size(self, digest: Digest, size: int, *, as_base: bool = False) -> None:
        """Check that the blob is here, or that the remote manifest lists it with this size."""
        try:
            super().check_size(digest, size, as_base=as_base)
        except Damaged:
            self._check_listed(digest, size)

    def check_digest(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Read the whole blob and compare its digest. Raises BlobDamaged and RemoteError."""
        try:
            super().check_digest(digest, size, progress)
        except BlobMissing:
            found = Digest.of_pieces(self._reader.read_pieces(digest, size), progress)
            if found != digest:
                raise BlobDamaged(
                    f"the remote sent bytes with digest {found} for blob {digest}"
                ) from None

    def read_into(
        self,
        digest: Digest,
        size: int,
        offset: int,
        buffer: memoryview,
        *,
        past_cache: bool = False,
    ) -> None:
        """Read bytes of a blob from ``offset`` on, from the local store or elsewhere."""
        try:
            super().read_into(digest, size, offset, buffer, past_cache=past_cache)
        except BlobMissing:
            self._check_listed(digest, size)
            self._reader.read_into(digest, size, offset, buffer[: size - offset])

    def read_blob(self, digest: Digest, size: int, limit: int = limits.SMALL_FILES.one) -> bytes:
        """Return the bytes of a small blob after checking its digest."""
        if digest in self._small:
            return self._small[digest]
        try:
            return super().read_blob(digest, size, limit)
        except BlobMissing:
            self._check_listed(digest, size)
            return self._reader.read_blob(digest, size, limit)

    def read_headers(
        self, blobs: Iterable[tuple[Digest, int]], region: MappedRegion | None = None
    ) -> Iterator[Header | Damaged | StoreError]:
        """Yield the headers of blobs, from wherever these are; nothing is mapped."""
        del region
        return self._reader.read_headers(blobs)

    def read_index(self, key: Digest) -> bytes | None:  # noqa: ARG002
        """Return None: what the local store knows of blobs that it lacks was never checked."""
        return None

    def write_index(self, key: Digest, data: bytes) -> None:
        """Do nothing: the headers of blobs that were not read completely were not checked."""

    def _check_listed(self, digest: Digest, size: int) -> None:
        listed = self._sizes.get(digest)
        if listed is None:
            raise BlobMissing(f"no model here has the blob {digest}")
        if listed != size:
            raise BlobDamaged(f"blob {digest} has {listed} bytes, expected {size}")

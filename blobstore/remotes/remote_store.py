"""The blobs of one remote model. Those that the local store has are read from it.

An open model reads blobs, or ranges of them, straight into its memory. A blob that was read completely is
kept in the local store as in a cache: the second model that needs it finds it there.
"""

from __future__ import annotations

import contextlib
import os
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from blobstore.core import limits
from blobstore.core.arguments import bytes_of
from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.manifests.layers_digest import MAX_CONFIG_SIZE, check_layers
from blobstore.models.model import Model
from blobstore.remotes.addresses import ReadPlan
from blobstore.remotes.blob_cache import BlobCache
from blobstore.remotes.model_reader import RemoteReader, check_sent
from blobstore.remotes.range_loader import RangeLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.core.mmap import MappedRegion
    from blobstore.core.progress import Progress
    from blobstore.errors import Damaged, StoreError
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.models.checks import Verify
    from blobstore.models.read_strategy import Read as HowToRead
    from blobstore.remotes.addresses import Cache
    from blobstore.remotes.cold_layers import ColdLayer
    from blobstore.remotes.model_reader import RemoteModelSource
    from blobstore.safetensors.header import Header
    from blobstore.store.blob_ranges import BlobRange, LoadedRanges
    from blobstore.store.cold import ColdBlob, Read
    from blobstore.store.local import LocalStore
    from blobstore.store.notes import NoteKind
    from blobstore.store.verified_cache import VerifiedBlobs


class RemoteStore:
    """The blobs of one remote model, for an open model: a :class:`~blobstore.store.protocols.BlobAccess`."""

    def __init__(
        self,
        local: LocalStore,
        source: RemoteModelSource,
        reference: Reference,
        *,
        cold_layers: Callable[[], Mapping[Digest, ColdLayer]] = dict,
        base_layers: Callable[[], Mapping[Digest, ColdLayer]] = dict,
        cache: Cache = "keep",
        cache_limit: float | str | None = None,
    ) -> None:
        """Read nothing but the list of compressed forms.

        Args:
            local: the store that has some of the blobs, and keeps others.
            source: the model.
            reference: its name, for messages and for callers that ask for the name of a model.
            cold_layers: returns the compressed forms that the remote has of the blobs. Called only if blobs
                are missing.
            base_layers: returns those of the bases of these. Called only if such bases are missing.
            cache: whether to keep blobs that were read completely in the store.
            cache_limit: bytes of blobs to keep for remote models, at most; others are removed first. The
                default is ``$BLOBSTORE_CACHE_LIMIT``, or no limit.

        Raises:
            RemoteError: the remote cannot be reached, or fails.
            UsageError: the environment states no valid limit.
        """
        self.local = local
        """The store that has some of the blobs."""
        self._source = source
        self.reference = reference
        """The name of the model."""
        self.manifest = source.manifest
        """Its manifest."""
        self.manifest_data = source.data
        """The bytes of that."""
        self._reader = RemoteReader({self.reference: source}, local)
        # As of now: whether a blob is local is asked again whenever it is read.
        missing = [blob for blob in source.blobs if not local.has(blob.digest)]
        layers, forms = _listed_forms(local, source, missing, cold_layers, base_layers)
        self._cache = None
        if cache == "keep":
            needed = sum(blob.size for blob in missing)
            self._cache = BlobCache(local, source.data, needed, _cache_limit(cache_limit))
        self._loader = RangeLoader(
            source,
            local,
            layers,
            forms,
            self._reader.starts,
            self._cache,
            self._reader.forget_headers,
        )
        self._small: dict[Digest, bytes] = {}

    def __reduce__(self) -> str:
        """Refuse to be sent to another process: its connections and threads stay in this one."""
        raise TypeError(
            f"{self.reference} is read from a remote, and cannot be copied or pickled; open it in each "
            "process, or pull it first"
        )

    def read_plan(self) -> ReadPlan:
        """Return the blobs and bytes that reading the model takes. Raises BlobMissing or BlobDamaged."""
        return ReadPlan.of(self, self.manifest, self._loader.stored_size)

    def open(self, verify: Verify, *, read: HowToRead, **options: Any) -> Model:
        """Open the model. Its blobs are read into memory when they are needed.

        Args:
            verify: ``digest`` and ``rehash`` read all blobs first.
            read: ``populate`` does so too; ``auto`` maps what is local.
            options: as for :class:`Model`.

        Raises:
            BlobMissing, BlobDamaged: the model is incomplete or damaged.
            RemoteError: the remote cannot be reached, or fails.
        """
        with contextlib.ExitStack() as ending:
            ending.callback(self.close)
            # Blobs of the local store must stay until they are read.
            digests = (blob.digest for blob in self.manifest.blobs)
            ending.enter_context(self.local.lease_if_writable(digests))
            self.begin()
            how = "mmap" if read == "auto" else read
            model = Model(self.reference, self.manifest_data, self, read=how, **options)
            is_hashed = verify in {"digest", "rehash"}
            for blob in self.manifest.blobs if is_hashed else ():
                # Remote blobs are hashed below, when they are read.
                if self.is_local(blob.digest):
                    self.check_digest(*blob.id)
            if is_hashed or read == "populate":
                model.check("size")  # reads what is remote, and hashes it
            # Last: until here an error ends the lease, from here on the model does.
            model.at_end(ending.pop_all().close)
            return model

    def begin(self) -> None:
        """Note that the model is used, and read everything but the tensors, with concurrent requests.

        Raises:
            BlobMissing, BlobDamaged: a small file is missing or damaged.
            RemoteError: the remote cannot be reached, or fails.
        """
        if self._cache is not None:
            self._cache.begin()
        layers = self._source.manifest.layers_of(*media_types.WEIGHTS)
        tensors = {layer.digest for layer in layers}
        small = [
            blob.id
            for blob in self._source.blobs
            if blob.digest not in tensors
            and blob.size <= limits.SMALL_FILES.one
            and not self.is_local(blob.digest)
        ]
        # Those beyond the limit are read when they are asked for.
        small.sort(key=attrgetter("size"))
        sizes = accumulate(blob.size for blob in small)
        count = sum(size <= limits.SMALL_FILES.all for size in sizes)
        self._small = self._loader.load_small(small[: min(count, limits.SMALL_FILES.count)])

    def close(self) -> None:
        """Wait until the blobs that are kept are in the store."""
        if self._cache is not None:
            self._cache.close()

    # Files are those of the local store

    @property
    def root(self) -> Path:
        """The folder of the local store."""
        return self.local.root

    def verified_blobs(self) -> VerifiedBlobs:
        """Return the cache of the local blobs that were found intact."""
        return self.local.verified_blobs()

    def blob_path(self, digest: Digest) -> str:
        """Return the path that the hot file of a local blob has."""
        return self.local.blob_path(digest)

    def readable_path(self, digest: Digest) -> str:
        """Return the path of the hot file of a local blob that is read."""
        return self.local.readable_path(digest)

    def cold_path(self, digest: Digest) -> str:
        """Return the path that the cold file of a local blob has."""
        return self.local.cold_path(digest)

    def open_hot(self, digest: Digest, size: int) -> int:
        """Open the hot file of a local blob. Raises BlobMissing if it does not exist."""
        return self.local.open_hot(digest, size)

    def open_cold(
        self, digest: Digest, size: int | None = None, read: Read | None = None
    ) -> ColdBlob:
        """Open the cold file of a local blob. Raises BlobMissing if it does not exist."""
        return self.local.open_cold(digest, size, read)

    def map_hot(self, digest: Digest, size: int, slot: int, region: MappedRegion) -> None:
        """Map the hot file of a local blob into a slot of ``region``. Raises as :meth:`open_hot`."""
        self.local.map_hot(digest, size, slot, region)

    def is_cached(self, digest: Digest, size: int) -> bool:
        """Return whether most of the hot file is in the page cache. Raises as :meth:`open_hot`."""
        return self.local.is_cached(digest, size)

    # Other blobs come from the remote

    def is_local(self, digest: Digest) -> bool:
        """Return whether the blob is read from files, if it can be read at all."""
        return self._loader.is_local(digest)

    def load(
        self, blobs: Iterable[tuple[Digest, int, memoryview]], progress: Progress | None = None
    ) -> None:
        """Fill memory with blobs, given by digest, size and memory, and check their digests."""
        self._loader.load(blobs, progress)

    def read_ranges(self, wanted: Iterable[BlobRange]) -> LoadedRanges:
        """Read parts of blobs into memory that may be read-only; nothing is verified."""
        return self._loader.read_ranges(wanted)

    def check_size(self, digest: Digest, size: int) -> None:
        """Check that a blob is here, or that the remote lists it, with this size.

        The remote is not asked: the manifest is enough to open a model, and a blob that is missing there
        fails when it is read.
        """
        self._reader.check_listed(digest, size)

    def check_digest(
        self, digest: Digest, size: int, progress: Callable[[int], None] | None = None
    ) -> None:
        """Read the whole blob and compare its digest. Raises BlobDamaged and RemoteError."""
        if self.is_local(digest):
            self.local.check_digest(digest, size, progress)
            return
        pieces = self._reader.read_pieces(digest, size)
        check_sent(digest, Digest.of_pieces(pieces, progress))

    def check_manifest(self, data: bytes, manifest: Manifest) -> bool:
        """Check against the config that the manifest has not changed; return whether it could be read."""
        try:
            config = self.read_blob(*manifest.config.id, MAX_CONFIG_SIZE)
        except BlobstoreError:
            # As in a local store: nothing can confirm the manifest then.
            return False
        check_layers(data, config)
        return True

    def read_into(
        self,
        digest: Digest,
        size: int,
        offset: int,
        buffer: memoryview,
        *,
        past_cache: bool = False,
    ) -> None:
        """Read bytes of a blob from ``offset`` on, from the local store or the remote."""
        if self.is_local(digest):
            self.local.read_into(digest, size, offset, buffer, past_cache=past_cache)
        else:
            self._reader.read_into(digest, size, offset, buffer)

    def read_blob(self, digest: Digest, size: int, limit: int = limits.SMALL_FILES.one) -> bytes:
        """Return the bytes of a small blob after checking its digest."""
        if digest in self._small:
            return self._small[digest]
        return self._reader.read_blob(digest, size, limit)

    def read_headers(
        self, blobs: Iterable[tuple[Digest, int]], region: MappedRegion | None = None
    ) -> Iterator[Header | Damaged | StoreError]:
        """Yield the headers of blobs, from the local store or the remote; nothing is mapped."""
        del region
        return self._reader.read_headers(blobs)

    def read_note(self, kind: NoteKind, key: Digest) -> None:
        """Return None: a note about blobs that the local store lacks was never checked."""

    def write_note(self, kind: NoteKind, key: Digest, data: bytes) -> None:
        """Do nothing: the headers of blobs that were not read completely were not checked."""


def _listed_forms(
    local: LocalStore,
    source: RemoteModelSource,
    missing: Sequence[Descriptor],
    cold_layers: Callable[[], Mapping[Digest, ColdLayer]],
    base_layers: Callable[[], Mapping[Digest, ColdLayer]],
) -> tuple[Mapping[Digest, ColdLayer], Mapping[Digest, ColdLayer]]:
    """Return the compressed forms of missing blobs, and those of their bases.

    Each list is a request, which is made only if the list helps.
    """
    if not missing:
        return {}, {}
    layers = cold_layers()
    listed = {blob.digest for blob in source.blobs}
    found = filter(None, (layers.get(blob.digest) for blob in missing))
    bases = {layer.base.digest for layer in found if layer.base is not None}
    lacks_base = any(not local.has(base) for base in bases - listed)
    return layers, base_layers() if lacks_base else {}


def _cache_limit(given: float | str | None) -> int | None:
    """Return the limit of an argument, or of the environment. Raises UsageError."""
    limit = os.environ.get("BLOBSTORE_CACHE_LIMIT") or None if given is None else given
    return None if limit is None else bytes_of(limit)

"""The blobs of one remote model, of which those that a local store has are read there.

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
from blobstore.core.arguments import parse_bytes
from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.manifests.check import MAX_CONFIG_SIZE, check_layers
from blobstore.models.model import Model
from blobstore.remotes.addresses import ReadPlan
from blobstore.remotes.blob_cache import BlobCache
from blobstore.remotes.model_reader import RemoteReader, check_sent
from blobstore.remotes.range_loader import RangeLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from blobstore.core.mmap import MappedRegion
    from blobstore.errors import Damaged, StoreError
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.models.checks import Verify
    from blobstore.models.memory import Prefetch
    from blobstore.remotes.addresses import Cache
    from blobstore.remotes.cold_layers import ColdLayer
    from blobstore.remotes.model_reader import RemoteModelSource
    from blobstore.safetensors.header import Header
    from blobstore.store.local import LocalStore


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
        cache_limit: int | None = None,
    ) -> None:
        """Read nothing but the list of compressed forms.

        Args:
            local: the store that has some of the blobs, and keeps others.
            source: the model.
            reference: its name, for messages and for what asks for the name of a model.
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
        # The manifest is enough to open a model: a blob that the remote lacks fails when it is
        # read.
        self.check_size = self._reader.check_listed
        missing = [blob for blob in source.blobs if not local.has(blob.digest)]
        needed = sum(blob.size for blob in missing)
        # If nothing is missing, nothing is decoded, and the request is spared.
        layers = cold_layers() if missing else {}
        listed = {blob.digest for blob in source.blobs}
        bases = (
            layer.base
            for blob in missing
            if (layer := layers.get(blob.digest)) is not None and layer.base is not None
        )
        lacks_base = any(not (base.digest in listed or local.has(base.digest)) for base in bases)
        forms = base_layers() if lacks_base else {}
        self._cache = None
        text = os.environ.get("BLOBSTORE_CACHE_LIMIT")
        if cache_limit is None and text:
            cache_limit = parse_bytes(text)
        if cache == "keep":
            self._cache = BlobCache(local, source.data, needed, cache_limit)
        loader = RangeLoader(
            source,
            local,
            layers,
            forms,
            self._reader.starts,
            self._cache,
            self._reader.forget_headers,
        )
        self.load, self.read_ranges = loader.load, loader.read_ranges
        self.is_local, self.stored_size = loader.is_local, loader.stored_size
        self._load_small = loader.load_small
        # What is a file is one of the local store.
        self.root, self.verified_blobs = local.root, local.verified_blobs
        self.blob_path, self.cold_path = local.blob_path, local.cold_path
        self.open_hot, self.open_cold = local.open_hot, local.open_cold
        self.map_hot, self.is_cached = local.map_hot, local.is_cached
        self._small: dict[Digest, bytes] = {}

    def __reduce__(self) -> str:
        """Refuse to be sent to another process: its connections and threads stay in this one."""
        raise TypeError(
            f"{self.reference} is read from a remote, and cannot be copied or pickled; open it in each "
            "process, or pull it first"
        )

    def read_plan(self) -> ReadPlan:
        """Return what reading all blobs takes. Raises BlobMissing or BlobDamaged."""
        return ReadPlan.of(self, self.manifest, self.stored_size)

    def open(self, verify: Verify, *, prefetch: Prefetch | None, **options: Any) -> Model:
        """Open the model. Its blobs are read into memory when they are needed.

        Args:
            verify: ``digest`` and ``rehash`` read all blobs first.
            prefetch: ``read`` does so too.
            options: as for :class:`Model`.

        Raises:
            BlobMissing, BlobDamaged: the model is incomplete or damaged.
            RemoteError: the remote cannot be reached, or fails.
        """
        with contextlib.ExitStack() as ending:
            ending.callback(self.close)
            # What the local store has must stay until it is read.
            digests = (blob.digest for blob in self.manifest.blobs)
            ending.enter_context(self.local.lease_if_writable(digests))
            self.begin()
            model = Model(self.reference, self.manifest_data, self, prefetch=prefetch, **options)
            is_hashed = verify in {"digest", "rehash"}
            for blob in self.manifest.blobs if is_hashed else ():
                # Remote blobs are hashed below, when they are read.
                if self.is_local(blob.digest):
                    self.check_digest(*blob.id)
            if is_hashed or prefetch == "read":
                model.check("size")  # reads what is remote, and hashes it
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
        self._small = self._load_small(small[: min(count, limits.SMALL_FILES.count)])

    def close(self) -> None:
        """Wait until the blobs that are kept are in the store."""
        if self._cache is not None:
            self._cache.close()

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
        """Yield the headers of blobs, from wherever these are; nothing is mapped."""
        del region
        return self._reader.read_headers(blobs)

    def read_index(self, key: Digest) -> None:
        """Return None: what the local store knows of blobs that it lacks was never checked."""

    def write_index(self, key: Digest, data: bytes) -> None:
        """Do nothing: the headers of blobs that were not read completely were not checked."""

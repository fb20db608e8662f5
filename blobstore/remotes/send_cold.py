"""Encodes the blobs of a model for a registry, one by one, and lists what was sent there."""

from __future__ import annotations

import contextlib
import os
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.cold_blobs.batches import TemporaryFiles
from blobstore.cold_blobs.blob_encoder import SizeEstimator
from blobstore.cold_blobs.builder import BLOCK, ColdBlobBuilder
from blobstore.cold_blobs.plan import plan_freeze
from blobstore.compression.level import check_compression_level
from blobstore.core.digest import BlobId, Digest
from blobstore.core.files import open_regular
from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.registry.layouts.attached import referrer
from blobstore.registry.layouts.oci import MAX_LAYERS
from blobstore.remotes.cold_layers import COLD, ColdLayer, base_of
from blobstore.remotes.referrers import send_referrers
from blobstore.store.cold import ColdBlob

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from blobstore.cold_blobs.batches import Report
    from blobstore.compression.level import Level
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Reference
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.manifest import RemoteManifest
    from blobstore.store.local import LocalStore

_READ: Final = 1 << 20


class ColdFile(NamedTuple):
    """A cold layer, and the open file with its bytes."""

    layer: ColdLayer
    descriptor: int

    def pieces(self) -> Generator[memoryview, None, None]:
        """Yield the bytes of the file."""
        at = 0
        while piece := os.pread(self.descriptor, _READ, at):
            yield memoryview(piece)
            at += len(piece)


class ColdBlobs:
    """The cold layers of a model's blobs; those that are not frozen are encoded one by one.

    The store is not changed: what is encoded goes to temporary files.
    """

    def __init__(
        self, store: LocalStore, reference: Reference, level: Level, base: Reference | None
    ) -> None:
        """Search for the bases of deltas, unless ``base`` is the model that has them.

        Raises:
            ModelNotFound: there is no such model.
            UsageError: there is no such level.
        """
        check_compression_level(level)
        estimator = SizeEstimator(store, level)
        plan = plan_freeze(
            store,
            [reference],
            estimator,
            older_than=None,
            base=base,
            find_base=True,
            chains=True,
        )
        self.base = plan.bases.get(reference, base)
        """The model whose blobs are the bases, if one is."""
        self._store = store
        self._builder = ColdBlobBuilder(store, estimator, plan.base_blobs, chains=True)
        self._leased = [*plan.blobs, *(blob.digest for blob in plan.base_blobs.values())]
        self._files: TemporaryFiles | None = None
        self.blobs: Sequence[Descriptor] = sorted(
            (blob for blob in plan.blobs.values() if blob.size > BLOCK),
            key=lambda blob: blob.size,
            reverse=True,
        )
        """The blobs that may take less when they are compressed, the largest first."""
        self.size = sum(blob.size for blob in self.blobs)

    @property
    def fallbacks(self) -> int:
        """The number of blobs that are compressed alone, because their delta or base is not intact."""
        return len(self._builder.fallbacks)

    @contextlib.contextmanager
    def temporary_files(self, jobs: int) -> Iterator[None]:
        """Make a place for as many encoded blobs as there are threads, and keep ``gc`` from the blobs.

        Raises:
            StoreError: the disk does not have the space, or the store cannot be written.
        """
        hot = (blob.size for blob in self.blobs if not self._store.has_cold(blob.digest))
        with self._store.writing(), TemporaryFiles(self._store) as self._files:
            # Before anything is read: the names of these blobs may be removed at any time.
            self._files.lease.hold(self._leased)
            # The largest blobs come first, and each thread encodes one at a time.
            self._store.check_space(sum(islice(hot, jobs)))
            yield

    def stored_size(self, blob: Descriptor) -> int | None:
        """Return the size of the cold layer of a frozen blob, None if it has none that can be opened."""
        with contextlib.suppress(BlobMissing, BlobDamaged):
            return self._store.open_cold(*blob.id).stored
        return None

    def estimate(self, blob: Descriptor) -> int:
        """Return about how many bytes the cold layer of a blob has.

        Raises:
            BlobMissing, BlobDamaged: the blob is not intact.
        """
        return self.stored_size(blob) or self._builder.estimate(blob)[0]

    @contextlib.contextmanager
    def encoded(self, blob: Descriptor, report: Report) -> Iterator[ColdFile | None]:
        """Yield the cold layer of a blob, or None if that is not smaller.

        Args:
            blob: the blob.
            report: called with the bytes read and decoded, twice the blob's size in total.

        Raises:
            BlobMissing, BlobDamaged: the blob is not intact.
            OSError: a temporary file cannot be written.
        """
        if self._files is None:
            raise ValueError("there are no temporary files")
        item = self._builder.build(blob, self._files, report)
        if item.fault is not None:
            raise item.fault.at(f"layer {blob.name}")
        if item.state is None:
            yield None
            return
        path = str(item.path or self._store.cold_path(blob.digest))
        # All bytes are read by one descriptor, because a thaw may remove the file of a frozen blob.
        descriptor, size = open_regular(path)
        try:
            base = base_of(ColdBlob(path, blob.digest, self._store.base_files))
            file = ColdFile(ColdLayer(blob.id, blob.id, base), descriptor)
            # The remote stores the compressed bytes under their own digest.
            stored = BlobId(Digest.of_pieces(file.pieces()), size)
            yield file._replace(layer=file.layer._replace(stored=stored))
        finally:
            os.close(descriptor)
            if item.path is not None:
                item.path.unlink(missing_ok=True)


def send_cold_manifests(
    client: RegistryClient,
    repository: str,
    root: RemoteManifest,
    layers: Iterable[ColdLayer],
    kind: str = COLD,
) -> None:
    """List cold layers, which the registry has, in manifests that refer to the model's.

    Raises:
        RemoteError: the registry cannot be reached, or refuses them.
    """
    referrers = (referrer(root, kind, part) for part in cold_lists(layers))
    send_referrers(client, repository, root, referrers)


def cold_lists(layers: Iterable[ColdLayer]) -> list[list[dict[str, Any]]]:
    """Return the entries of cold layers, in lists of which each fits into a manifest."""
    ordered = [layer.to_json() for layer in sorted(layers, key=lambda layer: layer.blob.digest.hex)]
    return [ordered[begin : begin + MAX_LAYERS] for begin in range(0, len(ordered), MAX_LAYERS)]

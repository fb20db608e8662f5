"""The frozen form of a model in a registry, next to the manifest that it belongs to.

A cold layer is the file of a cold blob, byte for byte. Manifests list such layers with the blobs that they
decode to, and name the model's manifest as their subject. Ordinary clients see only the model. Nothing of
this is trusted: what a layer decodes to counts only if it has the digest that the model's manifest lists.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core.digest import BlobId, Digest, Digester
from blobstore.core.files import open_regular
from blobstore.errors import BlobDamaged, BlobstoreError, InvalidDigest
from blobstore.operations.freeze.batches import TemporaryFiles
from blobstore.operations.freeze.blob_encoder import SizeEstimator
from blobstore.operations.freeze.compress import BLOCK, ColdBlobBuilder, EncodedBlob
from blobstore.operations.freeze.plan import plan_freeze
from blobstore.operations.transfer.signatures import send_referrers
from blobstore.registry.manifest import ImageManifest
from blobstore.store.cold import ColdBlob

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from blobstore.compression.level import Level
    from blobstore.core.workers import WorkerPool
    from blobstore.manifests.reference import Reference
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.manifest import RemoteDescriptor, RemoteManifest
    from blobstore.store.local import LocalStore

COLD: Final = "application/vnd.blobstore.cold.v1"
"""The artifact type of manifests of cold layers, and the media type of these."""
BLOB_DIGEST: Final = "blobstore.cold.digest"
BLOB_SIZE: Final = "blobstore.cold.size"
BASE_DIGEST: Final = "blobstore.cold.base.digest"
BASE_SIZE: Final = "blobstore.cold.base.size"
_MAX_LAYERS: Final = 400
"""Layers per manifest; more than some registries accept."""
_MAX_MANIFESTS: Final = 100
_MAX_SIZE_DIGITS: Final = 18
_READ: Final = 1 << 20


class ColdLayer(NamedTuple):
    """The cold form of a blob in a registry."""

    blob: BlobId
    """What it decodes to."""
    stored: BlobId
    base: BlobId | None = None

    def to_json(self) -> dict[str, Any]:
        """Return its entry in a manifest."""
        annotations = {BLOB_DIGEST: str(self.blob.digest), BLOB_SIZE: str(self.blob.size)}
        if self.base is not None:
            annotations |= {BASE_DIGEST: str(self.base.digest), BASE_SIZE: str(self.base.size)}
        return {
            "mediaType": COLD,
            "digest": str(self.stored.digest),
            "size": self.stored.size,
            "annotations": annotations,
        }

    @classmethod
    def of(cls, layer: RemoteDescriptor) -> ColdLayer | None:
        """Return the cold layer that an entry describes; None if it describes none."""
        blob = _blob_id(layer.annotations, BLOB_DIGEST, BLOB_SIZE)
        has_base = BASE_DIGEST in layer.annotations
        base = _blob_id(layer.annotations, BASE_DIGEST, BASE_SIZE)
        if layer.media_type != COLD or blob is None or (has_base and base is None):
            return None
        return cls(blob, BlobId(layer.digest, layer.size), base)

    def pieces(self, path: str, store: LocalStore) -> Generator[memoryview, None, None]:
        """Yield the bytes of the blob from the layer's file; no more than the blob has.

        Raises:
            BlobDamaged: the file is not the cold form of the blob, or decodes to other bytes.
        """
        cold = ColdBlob(path, self.blob.digest, store.base_forms)
        base = None if cold.base is None else BlobId(cold.base, cold.base_size)
        if (cold.size, base) != (self.blob.size, self.base):
            raise BlobDamaged(
                f"cold blob {self.stored.digest} has another size or base than stated"
            )
        digester = Digester()
        with contextlib.closing(cold.pieces()) as pieces:
            for piece in pieces:
                digester.update(piece)
                yield piece
        if digester.digest() != self.blob.digest:
            raise BlobDamaged(f"cold blob {self.stored.digest} decodes to {digester.digest()}")


def _blob_id(annotations: Mapping[str, str], digest: str, size: str) -> BlobId | None:
    number = annotations.get(size, "")
    if not (number.isascii() and number.isdigit() and len(number) <= _MAX_SIZE_DIGITS):
        return None
    try:
        return BlobId(Digest.parse(annotations.get(digest, "")), int(number))
    except InvalidDigest:
        return None


class ColdFile(NamedTuple):
    """A cold layer, and the open file that has its bytes."""

    layer: ColdLayer
    label: str
    descriptor: int

    def pieces(self) -> Generator[memoryview, None, None]:
        """Yield the bytes of the file."""
        at = 0
        while piece := os.pread(self.descriptor, _READ, at):
            yield memoryview(piece)
            at += len(piece)


@contextlib.contextmanager
def encoded_layers(
    store: LocalStore,
    reference: Reference,
    level: Level,
    base: Reference | None,
    workers: WorkerPool,
) -> Iterator[list[ColdFile]]:
    """Yield the cold forms of a model's blobs; those that are not frozen are encoded for this.

    The store is not changed. Blobs that take as much when they are compressed are left out.

    Raises:
        BlobMissing, BlobDamaged: a blob is not intact.
        OSError: a temporary file cannot be written.
    """
    estimator = SizeEstimator(store, level)
    plan = plan_freeze(store, [reference], estimator, older_than=None, base=base, find_base=True)
    builder = ColdBlobBuilder(store, estimator, plan.base_blobs)
    with TemporaryFiles(store) as files, contextlib.ExitStack() as opened:
        files.lease.hold(plan.blobs)
        files.lease.hold(blob.digest for blob in plan.base_blobs.values())
        build = partial(builder.build, files=files, report=workers.report)
        large = [blob for blob in plan.blobs.values() if blob.size > BLOCK]
        found = []
        for item in workers.run(large, build):
            if item.fault is not None:
                raise item.fault.at(item.blob.name)
            if item.state is not None:
                found.append(_opened(store, item, opened))
        yield found


def _opened(store: LocalStore, item: EncodedBlob, opened: contextlib.ExitStack) -> ColdFile:
    path = str(item.path or store.cold_path(item.blob.digest))
    descriptor, _ = open_regular(path)
    opened.callback(os.close, descriptor)
    cold = ColdBlob(path, item.blob.digest, store.base_forms)
    base = None if cold.base is None else BlobId(cold.base, cold.base_size)
    file = ColdFile(ColdLayer(item.blob.id, item.blob.id, base), item.blob.name, descriptor)
    stored = BlobId(Digest.of_pieces(file.pieces()), os.fstat(descriptor).st_size)
    return file._replace(layer=file.layer._replace(stored=stored))


def send_cold_manifests(
    client: RegistryClient, repository: str, root: RemoteManifest, layers: Sequence[ColdLayer]
) -> None:
    """List the cold layers, which the registry has, in manifests that refer to the model's.

    Raises:
        RemoteError: the registry cannot be reached, or refuses them.
    """
    ordered = [layer.to_json() for layer in sorted(layers, key=lambda layer: layer.blob.digest.hex)]
    parts = [
        {"artifactType": COLD, "layers": ordered[begin : begin + _MAX_LAYERS]}
        for begin in range(0, len(ordered), _MAX_LAYERS)
    ]
    send_referrers(client, repository, root, parts)


def fetch_cold_layers(
    client: RegistryClient, repository: str, root: RemoteManifest
) -> dict[Digest, ColdLayer]:
    """Return the smallest cold layer of each blob that a registry says to have; none of them is trusted."""
    found: dict[Digest, ColdLayer] = {}
    with contextlib.suppress(BlobstoreError):
        listed = [
            one for one in client.referrers(repository, root.digest) if one.artifact_type == COLD
        ]
        for item in listed[:_MAX_MANIFESTS]:
            with contextlib.suppress(BlobstoreError):
                content = client.get_manifest(repository, str(item.digest)).parse()
                for one in content.layers if isinstance(content, ImageManifest) else ():
                    layer = ColdLayer.of(one)
                    if layer is None or not 0 < layer.stored.size < layer.blob.size:
                        continue
                    known = found.setdefault(layer.blob.digest, layer)
                    if layer.stored.size < known.stored.size:
                        found[layer.blob.digest] = layer
    return found

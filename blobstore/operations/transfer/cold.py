"""The frozen form of a model in a registry, next to the manifest that it belongs to.

A cold layer is the file of a cold blob, byte for byte. Manifests list such layers with the blobs that they
decode to, and name the model's manifest as their subject. Ordinary clients see only the model. Nothing of
this is trusted: what a layer decodes to counts only if it has the digest that the model's manifest lists.
"""

from __future__ import annotations

import contextlib
import os
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.compression.level import check_compression_level
from blobstore.core.digest import BlobId, Digest, Digester
from blobstore.core.files import open_regular
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, InvalidDigest
from blobstore.operations.freeze.batches import TemporaryFiles
from blobstore.operations.freeze.blob_encoder import SizeEstimator
from blobstore.operations.freeze.compress import BLOCK, ColdBlobBuilder
from blobstore.operations.freeze.plan import plan_freeze
from blobstore.operations.transfer.referrers import send_referrers
from blobstore.registry.manifest import ImageManifest
from blobstore.store.cold import ColdBlob

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from blobstore.compression.level import Level
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Reference
    from blobstore.operations.freeze.batches import Report
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.manifest import RemoteDescriptor, RemoteManifest
    from blobstore.store.cold import BaseForms
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
        """Return the cold layer that an entry describes; None if it describes none that is of use."""
        blob = _blob_id(layer.annotations, BLOB_DIGEST, BLOB_SIZE)
        has_base = BASE_DIGEST in layer.annotations
        base = _blob_id(layer.annotations, BASE_DIGEST, BASE_SIZE)
        if layer.media_type != COLD or blob is None or (has_base and base is None):
            return None
        return cls(blob, BlobId(layer.digest, layer.size), base) if layer.size < blob.size else None

    def pieces(self, path: str, base_forms: BaseForms) -> Generator[memoryview, None, None]:
        """Yield the bytes of the blob from the layer's file; no more than the blob has.

        Raises:
            BlobDamaged: the file is not the cold form of the blob, or decodes to other bytes.
        """
        cold = ColdBlob(path, self.blob.digest, base_forms)
        if (cold.size, _base_of(cold)) != (self.blob.size, self.base):
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


def _base_of(cold: ColdBlob) -> BlobId | None:
    return None if cold.base is None else BlobId(cold.base, cold.base_size)


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
    descriptor: int

    def pieces(self) -> Generator[memoryview, None, None]:
        """Yield the bytes of the file."""
        at = 0
        while piece := os.pread(self.descriptor, _READ, at):
            yield memoryview(piece)
            at += len(piece)


class ColdForms:
    """The cold forms of a model's blobs; those that are not frozen are encoded one by one.

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
            store, [reference], estimator, older_than=None, base=base, find_base=True
        )
        self._store = store
        self._builder = ColdBlobBuilder(store, estimator, plan.base_blobs)
        self._leased = [*plan.blobs, *(blob.digest for blob in plan.base_blobs.values())]
        self._files: TemporaryFiles | None = None
        self.blobs: Sequence[Descriptor] = sorted(
            (blob for blob in plan.blobs.values() if blob.size > BLOCK),
            key=lambda blob: blob.size,
            reverse=True,
        )
        """The blobs that may take less when they are compressed, the largest first."""
        self.size = sum(blob.size for blob in self.blobs)

    @contextlib.contextmanager
    def temporary_files(self, jobs: int) -> Iterator[None]:
        """Make a place for as many encoded blobs as there are threads, and keep ``gc`` from the blobs.

        Raises:
            StoreError: the disk does not have the space, or the store cannot be written.
        """
        hot = (blob.size for blob in self.blobs if not self._store.has_cold(blob.digest))
        with self._store.writing(), TemporaryFiles(self._store) as self._files:
            self._files.lease.hold(self._leased)
            self._store.check_space(sum(islice(hot, jobs)))
            yield

    def stored_size(self, blob: Descriptor) -> int | None:
        """Return the size of the cold form of a frozen blob, None if it is not frozen.

        Raises:
            BlobDamaged: the cold form is damaged.
        """
        with contextlib.suppress(BlobMissing):
            return self._store.open_cold(*blob.id).stored
        return None

    def estimate(self, blob: Descriptor) -> int:
        """Return about how many bytes the cold form of a blob has.

        Raises:
            BlobMissing, BlobDamaged: the blob is not intact.
        """
        return self.stored_size(blob) or self._builder.estimate(blob)

    @contextlib.contextmanager
    def encoded(self, blob: Descriptor, report: Report) -> Iterator[ColdFile | None]:
        """Yield the cold form of a blob, or None if that is not smaller.

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
        descriptor, size = open_regular(path)
        try:
            base = _base_of(ColdBlob(path, blob.digest, self._store.base_forms))
            file = ColdFile(ColdLayer(blob.id, blob.id, base), descriptor)
            stored = BlobId(Digest.of_pieces(file.pieces()), size)
            yield file._replace(layer=file.layer._replace(stored=stored))
        finally:
            os.close(descriptor)
            if item.path is not None:
                item.path.unlink(missing_ok=True)


def send_cold_manifests(
    client: RegistryClient, repository: str, root: RemoteManifest, layers: Iterable[ColdLayer]
) -> None:
    """List cold layers, which the registry has, in manifests that refer to the model's.

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
    client: RegistryClient,
    repository: str,
    referrers: Iterable[RemoteDescriptor],
    blobs: Iterable[BlobId],
    on_error: Callable[[Digest, BlobstoreError], None] = lambda *_: None,
) -> dict[Digest, ColdLayer]:
    """Return the smallest cold layer of each blob that a registry lists; none of them is trusted.

    Args:
        client: the registry.
        repository: the repository of the model.
        referrers: what the registry says refers to the model's manifest.
        blobs: those of the model; layers of others are left out.
        on_error: called with the digest of a manifest that cannot be read, which is left out.
    """
    found: dict[Digest, ColdLayer] = {}
    wanted = set(blobs)
    listed = [one for one in referrers if one.artifact_type == COLD]
    for item in listed[:_MAX_MANIFESTS]:
        try:
            content = client.get_manifest(repository, str(item.digest)).parse()
        except BlobstoreError as error:
            on_error(item.digest, error)
            continue
        for one in content.layers if isinstance(content, ImageManifest) else ():
            layer = ColdLayer.of(one)
            if layer is not None and layer.blob in wanted:
                known = found.setdefault(layer.blob.digest, layer)
                if layer.stored.size < known.stored.size:
                    found[layer.blob.digest] = layer
    return found


def usable_layers(
    store: LocalStore,
    layers: Mapping[Digest, ColdLayer],
    missing: Sequence[Descriptor],
    is_intact: Callable[[BlobId], bool],
) -> tuple[dict[Digest, ColdLayer], int]:
    """Return the cold layers of missing blobs that spare bytes, and whose bases are here or are fetched too.

    The second result is the number of those whose bases are missing.

    Args:
        store: the store, which may have parts of either form.
        layers: the cold layers of the registry.
        missing: the blobs to fetch.
        is_intact: whether the store has a blob; asked once for each base.
    """

    def is_base(base: BlobId) -> bool:
        with contextlib.suppress(BlobDamaged, BlobMissing):
            # A delta cannot be a base.
            is_alone = not store.is_cold(base.digest) or store.open_cold(*base).base is None
            return is_alone and is_intact(base)
        return False

    found: dict[Digest, ColdLayer] = {}
    bases: dict[BlobId, bool] = {}
    without_base = 0
    fetched = {blob.id for blob in missing}
    for blob in missing:
        layer = layers.get(blob.digest)
        if layer is None:
            continue
        left = [item.size - store.partial_bytes(item) for item in (layer.stored, blob.id)]
        if left[0] >= left[1]:
            continue
        base = layer.base
        if base in fetched:
            # Deltas must not wait for each other.
            chosen = found.get(base.digest)
            is_usable = base != blob.id and (chosen is None or chosen.base not in fetched)
        elif base is not None:
            if base not in bases:
                bases[base] = is_base(base)
            is_usable = bases[base]
            without_base += not is_usable
        else:
            is_usable = True
        if is_usable:
            found[blob.digest] = layer
    return found, without_base

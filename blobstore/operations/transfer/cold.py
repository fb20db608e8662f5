"""The frozen form of a model in a registry, next to the manifest that it belongs to.

A cold layer is the file of a cold blob, byte for byte. Manifests list such layers with the blobs that they
decode to, and name the model's manifest as their subject. Ordinary clients see only the model. Nothing of
this is trusted: what a layer decodes to counts only if it has the digest that the model's manifest lists.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core.digest import BlobId, Digest, Digester
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, InvalidDigest
from blobstore.registry.manifest import ImageManifest
from blobstore.store.cold import ColdBlob

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.manifest import RemoteDescriptor
    from blobstore.store.cold import BaseForms
    from blobstore.store.local import LocalStore

COLD: Final = "application/vnd.blobstore.cold.v1"
"""The artifact type of manifests of cold layers, and the media type of these."""
BLOB_DIGEST: Final = "blobstore.cold.digest"
BLOB_SIZE: Final = "blobstore.cold.size"
BASE_DIGEST: Final = "blobstore.cold.base.digest"
BASE_SIZE: Final = "blobstore.cold.base.size"
_MAX_MANIFESTS: Final = 100
_MAX_SIZE_DIGITS: Final = 18


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
        if (cold.size, base_of(cold)) != (self.blob.size, self.base):
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


def base_of(cold: ColdBlob) -> BlobId | None:
    """Return the base of a delta, None for any other cold blob."""
    return None if cold.base is None else BlobId(cold.base, cold.base_size)


def _blob_id(annotations: Mapping[str, str], digest: str, size: str) -> BlobId | None:
    number = annotations.get(size, "")
    if not (number.isascii() and number.isdigit() and len(number) <= _MAX_SIZE_DIGITS):
        return None
    try:
        return BlobId(Digest.parse(annotations.get(digest, "")), int(number))
    except InvalidDigest:
        return None


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

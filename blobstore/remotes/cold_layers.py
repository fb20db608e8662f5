"""Cold layers: the compressed forms of remote blobs, which are fetched instead of the blobs.

A cold layer is the file of a cold blob, byte for byte. Nothing of it is trusted: what a layer decodes to
counts only if it has the digest that the model's manifest lists.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core import strict_json
from blobstore.core.digest import BlobId, Digest, Digester
from blobstore.errors import BlobDamaged, InvalidDigest, InvalidManifest
from blobstore.manifests.descriptor import Descriptor
from blobstore.store.cold import ColdBlob

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from blobstore.registry.manifest import RemoteDescriptor
    from blobstore.store.cold import BaseFiles

COLD: Final = "application/vnd.blobstore.cold.v1"
"""The artifact type of manifests of cold layers, and the media type of these."""
BLOB_DIGEST: Final = "blobstore.cold.digest"
BLOB_SIZE: Final = "blobstore.cold.size"
BASE_DIGEST: Final = "blobstore.cold.base.digest"
BASE_SIZE: Final = "blobstore.cold.base.size"
_MAX_SIZE_DIGITS: Final = 18


class ColdLayer(NamedTuple):
    """The compressed form of a remote blob."""

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
        is_cold = layer.media_type == COLD
        return _described(BlobId(layer.digest, layer.size), layer.annotations) if is_cold else None

    @classmethod
    def from_json(cls, value: Any) -> ColdLayer | None:
        """Return the cold layer of an entry as :meth:`to_json` makes it; None as :meth:`of`."""
        try:
            layer, annotations = Descriptor.from_json(value), value.get("annotations")
        except InvalidManifest:
            return None
        is_cold = layer.media_type == COLD and isinstance(annotations, dict)
        return _described(layer.id, annotations) if is_cold else None

    def pieces(self, path: str, base_files: BaseFiles) -> Generator[memoryview, None, None]:
        """Yield the bytes of the blob from the layer's file; no more than the blob has.

        Raises:
            BlobDamaged: the file is no cold blob of this blob, or decodes to other bytes.
        """
        cold = ColdBlob(path, self.blob.digest, base_files)
        # The file must fit what the manifest said, because space and bases were checked for that.
        if (cold.size, base_of(cold)) != (self.blob.size, self.base):
            raise BlobDamaged(
                f"cold blob {self.stored.digest} has another size or base than stated"
            )
        digester = Digester()
        with contextlib.closing(cold.pieces()) as pieces:
            for piece in pieces:
                digester.update(piece)
                yield piece
        # After the last piece: an import of these bytes fails, whatever it has written by then.
        if digester.digest() != self.blob.digest:
            raise BlobDamaged(f"cold blob {self.stored.digest} decodes to {digester.digest()}")


def base_of(cold: ColdBlob) -> BlobId | None:
    """Return the base of a delta, None for any other cold blob."""
    return None if cold.base is None else BlobId(cold.base, cold.base_size)


def format_cold_layers(layers: Iterable[ColdLayer]) -> bytes:
    """Return a list of cold layers as JSON, the same bytes for the same layers."""
    ordered = sorted(layers, key=lambda layer: layer.blob.digest.hex)
    return strict_json.dumps([layer.to_json() for layer in ordered]).encode()


def parse_cold_layers(data: bytes) -> dict[Digest, ColdLayer]:
    """Return the cold layers of a list by the blobs that they decode to; entries of no use are left out."""
    try:
        listed = strict_json.loads(data)
    except ValueError:
        return {}
    layers = map(ColdLayer.from_json, listed if isinstance(listed, list) else ())
    return {layer.blob.digest: layer for layer in layers if layer is not None}


def _described(stored: BlobId, annotations: Mapping[str, Any]) -> ColdLayer | None:
    blob = _blob_id(annotations, BLOB_DIGEST, BLOB_SIZE)
    base = _blob_id(annotations, BASE_DIGEST, BASE_SIZE)
    if (
        blob is None
        # A form that is not smaller than its blob is of no use.
        or not 0 < stored.size < blob.size
        or (base is None and BASE_DIGEST in annotations)
    ):
        return None
    return ColdLayer(blob, stored, base)


def _blob_id(annotations: Mapping[str, Any], digest: str, size: str) -> BlobId | None:
    number, text = annotations.get(size), annotations.get(digest)
    if not (isinstance(number, str) and isinstance(text, str)):
        return None
    # 18 digits always fit into 64 bits.
    if not (number.isascii() and number.isdigit() and len(number) <= _MAX_SIZE_DIGITS):
        return None
    try:
        return BlobId(Digest.parse(text), int(number))
    except InvalidDigest:
        return None

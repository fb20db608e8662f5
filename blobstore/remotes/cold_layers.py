"""Cold layers: the compressed forms of remote blobs, which are fetched instead of the blobs.

A cold layer is the file of a cold blob, byte for byte. Nothing of it is trusted: what a layer decodes to
counts only if it has the digest that the model's manifest lists.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.compression.delta import MAX_CHAIN
from blobstore.core import strict_json
from blobstore.core.digest import BlobId, Digest, Digester
from blobstore.errors import BlobDamaged, ColdDamaged, InvalidDigest, InvalidManifest
from blobstore.manifests.descriptor import Descriptor
from blobstore.store.cold import ColdBlob

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from blobstore.compression.base import BaseBlob
    from blobstore.compression.decoder import ColdBlobDecoder
    from blobstore.registry.manifest import RemoteDescriptor
    from blobstore.store.cold import BaseFiles

COLD: Final = "application/vnd.blobstore.cold.v1"
"""The artifact type of manifests of cold layers, and the media type of these."""
COLD_BASES: Final = "application/vnd.blobstore.cold.bases.v1"
"""The artifact type of manifests of the cold layers of bases, for clients that lack these."""
BLOB_DIGEST: Final = "blobstore.cold.digest"
BLOB_SIZE: Final = "blobstore.cold.size"
BASE_DIGEST: Final = "blobstore.cold.base.digest"
BASE_SIZE: Final = "blobstore.cold.base.size"
MAX_LINKS: Final = MAX_CHAIN - 1
"""Forms of bases that a form may need; with itself, they are a chain."""
_MAX_GROWTH: Final = 2
"""A base that is so many times as large as the blob is not decoded for it."""
_MAX_SIZE_DIGITS: Final = 18


class ColdLayer(NamedTuple):
    """The compressed form of a remote blob."""

    blob: BlobId
    """The blob that it decodes to."""
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


def bases_of(layer: ColdLayer, forms: Mapping[Digest, ColdLayer]) -> Iterator[ColdLayer]:
    """Yield the form of the base of a delta, that of its base, and so on, as long as all take less than the blob.

    ``forms`` is not trusted: what is yielded is short, and has no cycle.
    """
    seen = {layer.blob.digest}
    link, size = layer, layer.stored.size
    while link.base is not None and link.base.digest not in seen and len(seen) <= MAX_LINKS:
        found = forms.get(link.base.digest)
        if found is None or found.blob != link.base:
            return
        link = found
        size += link.stored.size
        if size >= layer.blob.size or link.blob.size > _MAX_GROWTH * layer.blob.size:
            return
        seen.add(link.blob.digest)
        yield link


def chain_of(
    layer: ColdLayer, forms: Mapping[Digest, ColdLayer], is_here: Callable[[BlobId], bool]
) -> list[ColdLayer] | None:
    """Return the forms from which the base of a delta can be decoded; None if they do not suffice.

    Args:
        layer: the delta. Its base is not here.
        forms: those of bases, not trusted.
        is_here: whether the store has a blob.
    """
    links = []
    for link in bases_of(layer, forms):
        links.append(link)
        if link.base is None or is_here(link.base):
            return links
    return None


def decode_base(
    links: Sequence[ColdLayer],
    read: Callable[[BlobId], Buffer],
    local_base: Callable[[BlobId], BaseBlob],
    whole: Callable[[BaseBlob], BaseBlob],
) -> BaseBlob:
    """Return the base of a delta, which is decoded from a chain of forms as it is read. Nothing is hashed.

    Args:
        links: what :func:`chain_of` returned.
        read: returns the bytes of a form.
        local_base: opens a blob of the store.
        whole: decodes a base completely; see :func:`give_base`.

    Raises:
        ColdDamaged: a form decodes to another blob than stated, or has another size or base.
        BlobDamaged, BlobMissing: what ``read`` and ``local_base`` raise.
    """
    from blobstore.compression.decoder import ColdBlobDecoder  # imports numpy

    found: BaseBlob | None = None
    for link in reversed(links):
        decoder = ColdBlobDecoder(read(link.stored))
        # Before its base is opened: sizes were judged by what the list states.
        if BlobId(decoder.table.digest, decoder.size) != link.blob:
            raise ColdDamaged(f"cold blob {link.stored.digest} is that of another blob than stated")
        if found is None and link.base is not None:
            found = local_base(link.base)
        if found is not None:
            give_base(decoder, found, whole)
        found = decoder.as_base()
    if found is None:
        raise ValueError("a chain has at least one form")
    return found


def give_base(
    decoder: ColdBlobDecoder, base: BaseBlob, whole: Callable[[BaseBlob], BaseBlob]
) -> None:
    """Give a delta its base, which may be a delta of another store whose chunks lie elsewhere.

    ``whole`` then decodes the base completely. Raises ColdDamaged if that is not the base.
    """
    try:
        decoder.give_base(base)
    except ColdDamaged:
        if base.table is None:
            raise
        decoder.give_base(whole(base))


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

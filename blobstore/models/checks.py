"""Checks a model before its tensors are used. It stops at the first fault; ``verify`` collects them all.

Each level finds everything that the level before it finds, and more: a blob that is missing or has a
wrong size; then a header that differs from the one that was stored; then any other changed bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, BlobstoreError, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.models.header_index import load_cached_index, load_index
from blobstore.models.tensors import CONSTANT_KEY, at_layer
from blobstore.store.verify_blobs import damaged_blobs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.models.header_index import TensorIndex
    from blobstore.store.protocols import BlobAccess

Verify = Literal["none", "size", "header", "digest", "rehash"]


def check_level(verify: str) -> None:
    """Check that ``verify`` is a level.

    Raises:
        UsageError: it is not.
    """
    if verify not in get_args(Verify):
        raise UsageError(
            f"verify must be none, size, header, digest or rehash, got {quote(verify)}"
        )


def reads_headers(verify: str) -> bool:
    """Return whether a level reads the headers of blobs, and not the header index alone."""
    return verify in ("header", "digest", "rehash")


def check_blobs(
    store: BlobAccess,
    manifest: bytes,
    index: TensorIndex,
    verify: str,
    progress: Progress | None = None,
    deferred: Collection[Digest] = (),
) -> int:
    """Check the blobs of a model, if the level reads headers; return how many were hashed.

    Args:
        store: the store that holds the model.
        manifest: the bytes of its manifest file.
        index: the index that the model is used with.
        verify: the level.
        progress: called with the bytes that are hashed.
        deferred: blobs that are hashed later, when they are read.

    Raises:
        BlobMissing, BlobDamaged: a blob is missing or damaged; the message names the layer. Or
            ``index`` comes from a header index that is wrong.
    """
    hashed = 0
    if not reads_headers(verify):
        return hashed
    parsed = Manifest.from_bytes(manifest)
    layers = parsed.layers_of(*media_types.WEIGHTS)
    cached = index if index.is_cached else load_cached_index(store, manifest)
    real = load_index(store, manifest, use_index=False) if index.is_cached else index
    names = real.names_in_blobs()
    for layer in layers:
        if fault := name_fault(layer, names[layer.digest, layer.size]):
            raise at_layer(BlobDamaged(fault[1]), layer)
    # If index and header disagree, the digest shows which of them is wrong.
    for slot in sorted(_differing_slots(cached, real) if cached else ()):
        try:
            store.check_digest(layers[slot].digest, layers[slot].size)
        except BlobstoreError as error:
            raise at_layer(error, layers[slot]) from None
    if verify != "header":
        blobs: Sequence[Descriptor] = [blob for blob in parsed.blobs if blob.digest not in deferred]
        verified = store.verified_blobs()
        if verify == "digest":
            unknown = verified.unknown(blob.id for blob in blobs)
            blobs = [blob for blob in blobs if blob.id in unknown]
        hashed = len(blobs)
        for blob, damage in damaged_blobs(store, blobs, progress=progress, verified=verified):
            raise damage.at(f"layer {quote(blob.name or blob.media_type)}")
    if index.is_cached and _differing_slots(index, real):
        raise BlobDamaged(
            "the header index is wrong; open the model with verify='header' to rebuild it"
        )
    return hashed


def name_fault(layer: Descriptor, names: Sequence[str]) -> tuple[str, str] | None:
    """Check that a layer's name is a tensor of its blob, or a prefix of all its tensors.

    Returns:
        None if it is, or the layer is a GGUF file. Otherwise the tensor at fault, empty if unknown, and a
        message.
    """
    if layer.media_type in media_types.GGUF:
        return None
    if not names:
        return "", f"blob {layer.digest} holds no tensor"
    if layer.name in names or list(names) == [CONSTANT_KEY]:
        return None
    foreign = [name for name in names if not name.startswith(f"{layer.name}.")]
    if not foreign:
        return None
    message = f"blob {layer.digest} holds tensor {quote(foreign[0])}, which is not of this layer"
    return foreign[0], message


def tensor_name(layer: Descriptor, names: Collection[str]) -> str:
    """Return the only tensor of a blob, given its known names; empty if it is a group."""
    if layer.name in names:
        return layer.name  # the others are its quantization parameters
    if len(names) != 1:
        return ""
    (name,) = names
    return name if name.startswith(f"{layer.name}.") else layer.name


def indexed_names(store: BlobAccess, manifest: bytes) -> Mapping[tuple[Digest, int], list[str]]:
    """Return which tensors each blob holds according to the header index.

    This names the tensors of blobs whose own headers cannot be read. ``manifest`` is the content of
    the manifest file. Returns nothing for a model without an index.
    """
    index = load_cached_index(store, manifest)
    return index.names_in_blobs() if index else {}


def _differing_slots(one: TensorIndex, other: TensorIndex) -> set[int]:
    """Return the slots of the blobs that two indexes describe differently."""
    if one.blobs != other.blobs:
        return set(range(len(other.blobs)))
    ours, theirs = (
        {
            name: (slot, (begin, dtype, *shape, *index.quantized.get(name, ())))
            for name, (dtype, shape, slot, begin) in index.entries.items()
        }
        for index in (one, other)
    )
    return {
        slot
        for name in ours.keys() | theirs.keys()
        if ours.get(name) != theirs.get(name)
        for slot in {said[0] for said in (ours.get(name), theirs.get(name)) if said}
    }

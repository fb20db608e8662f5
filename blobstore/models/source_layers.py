"""The layers about a model's source: its record, and the list of stacked tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core import strict_json
from blobstore.errors import BlobDamaged
from blobstore.manifests import media_types
from blobstore.manifests.source_record import MAX_RECORD_SIZE, SourceRecord

if TYPE_CHECKING:
    from blobstore.manifests.model import Manifest
    from blobstore.store.local import LocalStore


def read_stacks(store: LocalStore, manifest: Manifest) -> dict[str, list[str]]:
    """Return the names of the source tensors of each stacked tensor.

    Raises:
        BlobDamaged: the list is malformed.
    """
    stacks: dict[str, list[str]] = {}
    for layer in manifest.layers_of(media_types.STACKS):
        try:
            value = strict_json.loads(store.read_blob(layer.digest, layer.size))
        except ValueError as error:
            raise BlobDamaged(
                f"the list of stacked tensors, blob {layer.digest.short}, is {error}"
            ) from None
        if not isinstance(value, dict) or not all(
            isinstance(names, list) and names and all(isinstance(name, str) for name in names)
            for names in value.values()
        ):
            raise BlobDamaged(
                f"the list of stacked tensors, blob {layer.digest.short}, is not an object of "
                "lists of names"
            )
        stacks.update(value)
    return stacks


def read_source_record(store: LocalStore, manifest: Manifest) -> SourceRecord | None:
    """Return what a model was imported from; None if its manifest does not say.

    Raises:
        BlobMissing, BlobDamaged: the layer is missing, damaged or malformed.
    """
    layers = manifest.layers_of(media_types.SOURCE)
    if not layers:
        return None
    if len(layers) > 1:
        raise BlobDamaged(f"the manifest has {len(layers)} source layers, expected one")
    (layer,) = layers
    if layer.size > MAX_RECORD_SIZE:
        raise BlobDamaged(f"the source layer of {layer.size} bytes is over {MAX_RECORD_SIZE}")
    content = store.read_blob(layer.digest, layer.size)
    try:
        return SourceRecord.from_bytes(content)
    except BlobDamaged as error:
        raise BlobDamaged(f"the source layer, blob {layer.digest.short}, {error.message}") from None

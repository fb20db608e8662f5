"""The list of stacked tensors: a layer that names the source tensors of each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core import strict_json
from blobstore.errors import BlobDamaged
from blobstore.manifests import media_types

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

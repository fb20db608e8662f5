"""Which tensors of the source a stacked tensor was made of: a layer of our own beside the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.core import strict_json as strictjson
from blobstore.errors import BlobDamaged
from blobstore.manifests import media_types

if TYPE_CHECKING:
    from blobstore.manifests.model import Manifest
    from blobstore.store.local import LocalStore


def read_stacks(store: LocalStore, manifest: Manifest) -> dict[str, list[str]]:
    """Return the names of the tensors that each stacked tensor was made of.

    Raises:
        BlobDamaged: the list is not of that form.
    """
    stacks: dict[str, list[str]] = {}
    for layer in manifest.layers_of(media_types.STACKS):
        try:
            value = strictjson.loads(store.read_blob(layer.digest, layer.size))
        except ValueError as error:
            raise BlobDamaged(
                f"the list of stacked tensors, blob {layer.digest.short}, is {error}"
            ) from None
        if not isinstance(value, dict) or not all(map(_is_list_of_names, value.values())):
            raise BlobDamaged(
                f"the list of stacked tensors, blob {layer.digest.short}, is not an object of "
                "lists of names"
            )
        stacks.update(value)
    return stacks


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)

"""What an opened model has beside its tensors: its manifest, config and small files."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, Damaged, InvalidManifest, TensorNotFound
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.errors import BlobstoreError
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.local import LocalStore


class ModelFiles:
    """The model ``reference``, whose manifest has the bytes ``manifest``."""

    @classmethod
    def of(cls, reference: str | Reference, store: LocalStore) -> ModelFiles:
        """Return those of a stored model, whose tensors are not looked at.

        Raises:
            ModelNotFound: the store has no such name.
            InvalidManifest: its manifest is not whole.
        """
        if isinstance(reference, str):
            reference = Reference.parse(reference)
        data = store.read_manifest(reference)
        documents = ModelFiles(reference, data, store)
        try:
            store.check_manifest(data, documents.manifest)
        except InvalidManifest as error:
            raise error.at(str(reference)) from None
        return documents

    def __init__(self, reference: Reference, manifest: bytes, store: LocalStore) -> None:
        self.reference = reference
        self._manifest = manifest
        self._store = store

    @functools.cached_property
    def manifest(self) -> Manifest:
        """The model's manifest."""
        return Manifest.from_bytes(self._manifest)

    @property
    def config(self) -> dict[str, Any]:
        """The decoded ``config.json``, empty if the model has none.

        Raises:
            BlobMissing, BlobDamaged: it is not whole, or not a JSON object.
        """
        if "config.json" not in self.files:
            return {}
        try:
            value = json.loads(self.read_file("config.json"))
        except (ValueError, RecursionError) as error:  # it is kept as the source had it
            raise BlobDamaged(f"config.json of {self.reference} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise BlobDamaged(f"config.json of {self.reference} is not a JSON object")
        return value

    @property
    def files(self) -> Mapping[str, Descriptor]:
        """The small files of the model by name."""
        kinds = (media_types.JSON, media_types.FILE)
        return {
            layer.name: layer
            for layer in self.manifest.layers
            if layer.media_type in kinds and layer.name
        }

    def read_file(self, name: str) -> bytes:
        """Return the content of a small file, its digest checked.

        Raises:
            TensorNotFound: the model has no such file.
            BlobMissing, BlobDamaged: it is not whole.
        """
        layer = self.files.get(name)
        if layer is None:
            raise TensorNotFound(f"model {self.reference} has no file {quote(name)}")
        return self._store.read_blob(layer.digest, layer.size)

    def file_path(self, name: str) -> Path:
        """Return the blob of a small file, for whoever can only read files by their paths.

        Raises as :meth:`read_file`.
        """
        self.read_file(name)
        return Path(self._store.blob_path(self.files[name].digest))

    def _located(self, error: Damaged) -> BlobstoreError:
        """Return the error with the model and the damaged blob's layer in front of its message."""
        for layer in self.manifest.layers_of(media_types.TENSOR):
            try:
                self._store.check_size(layer.digest, layer.size)
            except Damaged as found:
                return found.at(f"{self.reference}: layer {quote(layer.name)}")
        for layer in self.manifest.layers_of(media_types.TENSOR):
            if layer.digest.hex in str(error):  # as it has the path of a cold blob
                return error.at(f"{self.reference}: layer {quote(layer.name)}")
        return error.at(str(self.reference))

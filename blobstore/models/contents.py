"""The contents of a stored model, except the bytes of its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.core import strict_json
from blobstore.core.escape import quote
from blobstore.core.fork import cached_property
from blobstore.errors import InvalidManifest
from blobstore.manifests import media_types
from blobstore.manifests.file_names import MAX_DEPTH, check_paths, is_valid_name
from blobstore.models.published import published_scheme
from blobstore.models.source_layers import read_source_record, read_stacks
from blobstore.models.tensors import read_headers, read_tensors

if TYPE_CHECKING:
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.source_record import SourceRecord
    from blobstore.models.tensors import Headers, ModelTensors
    from blobstore.store.protocols import BlobAccess


class ModelContents:
    """The headers, lists, record and small files of a model. Each is read when it is first asked for.

    Args:
        store: the store that has the model.
        manifest: its manifest.
        headers: the headers of its blobs, if they were read before.
        record: its source record, if that was read before.
    """

    def __init__(
        self,
        store: BlobAccess,
        manifest: Manifest,
        headers: Headers | None = None,
        record: SourceRecord | None = None,
    ) -> None:
        self.store = store
        self.manifest = manifest
        self._headers = headers
        self._record = record

    @cached_property
    def headers(self) -> Headers:
        """The headers of the tensor blobs."""
        if self._headers is not None:
            return self._headers
        return read_headers(self.store, self.manifest)

    @cached_property
    def tensors(self) -> ModelTensors:
        """The tensors. Raises BlobMissing and BlobDamaged."""
        return read_tensors(self.store, self.manifest, headers=self.headers)

    @cached_property
    def stacks(self) -> dict[str, list[str]]:
        """The source tensors of each stacked tensor. Raises BlobMissing and BlobDamaged."""
        return read_stacks(self.store, self.manifest)

    @cached_property
    def record(self) -> SourceRecord | None:
        """The source of the model. Raises BlobMissing and BlobDamaged."""
        return self._record or read_source_record(self.store, self.manifest)

    @cached_property
    def scheme(self) -> str:
        """The quantization of a model that is kept as published; empty for others."""
        return published_scheme(self.store, self.manifest)

    @cached_property
    def files(self) -> dict[str, Descriptor]:
        """The layers that are files, by their checked names. Raises InvalidManifest."""
        return small_files(self.manifest)

    def decoded(self, name: str) -> Any:
        """Return a decoded JSON file; None if it is missing or malformed.

        Raises:
            BlobMissing, BlobDamaged: its blob is missing or damaged.
        """
        if name not in self.files:
            return None
        layer = self.files[name]
        try:
            return strict_json.loads_any(self.store.read_blob(layer.digest, layer.size))
        except ValueError:
            return None


def small_files(manifest: Manifest) -> dict[str, Descriptor]:
    """Return the layers that are files, by their checked names.

    Raises:
        InvalidManifest: a name is not allowed, or two files clash.
    """
    layers = [
        layer
        for layer in manifest.layers
        if layer.media_type in (media_types.JSON, media_types.FILE)
    ]
    for layer in layers:
        if not is_valid_name(layer.name):
            raise InvalidManifest(
                f"layer {quote(layer.name)} is not a file name: expected at most {MAX_DEPTH} parts "
                "of letters, digits, '_', '.' and '-'"
            )
    check_paths(layer.name for layer in layers)  # the dict would lose duplicates
    return {layer.name: layer for layer in layers}

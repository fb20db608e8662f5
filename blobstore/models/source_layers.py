"""The layers about a model's source: its record, and the list of stacked tensors."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from blobstore.core import strict_json
from blobstore.core.escape import quote
from blobstore.core.tensor import DType
from blobstore.errors import BlobDamaged, InvalidHeader
from blobstore.gguf.config import config_of
from blobstore.gguf.header import InvalidGguf
from blobstore.gguf.header import parse_header as parse_gguf
from blobstore.gguf.header import read_header as read_gguf
from blobstore.gguf.roles import role_of_name
from blobstore.manifests import media_types
from blobstore.manifests.source_record import MAX_RECORD_SIZE, SourceRecord
from blobstore.quantization.formats import LEFT_OUT, PACKED_SHAPE
from blobstore.quantization.source_layout import packed_shape
from blobstore.safetensors.header import PREFIX_SIZE, parse_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blobstore.core.tensor import TensorSpec
    from blobstore.gguf.header import GgufHeader, Value
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.source_record import RecordedFile
    from blobstore.store.protocols import BlobDescriber, ModelInspector


def read_stacks(store: BlobDescriber, manifest: Manifest) -> dict[str, list[str]]:
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
                f"the list of stacked tensors, blob {layer.digest.short}: {error}"
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


def read_source_record(store: BlobDescriber, manifest: Manifest) -> SourceRecord | None:
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
        raise BlobDamaged(f"the source layer, blob {layer.digest.short}: {error.message}") from None


def is_from_gguf(record: SourceRecord | None) -> bool:
    """Return whether a model was imported from GGUF files."""
    return bool(gguf_roles(record))


def gguf_roles(record: SourceRecord | None) -> dict[str, str]:
    """Return the roles of the GGUF files that a model was imported from, by name; the model's own first."""
    files = [it for it in (record.files if record is not None else ()) if it.format == "gguf"]
    # Records of earlier versions have no roles.
    roles = {file.name: file.role or role_of_name(file.name) for file in files}
    return dict(sorted(roles.items(), key=lambda item: (item[1] != "model", item[0])))


def gguf_config(record: SourceRecord | None) -> dict[str, Any]:
    """Return the facts in the headers of a model's GGUF files, under the keys of ``config.json``.

    It is empty if the model was not imported from GGUF files, or their headers are malformed.
    """
    header = _recorded_header(record)
    return {} if header is None else config_of(header)


def gguf_metadata(store: ModelInspector, manifest: Manifest) -> Mapping[str, Value] | None:
    """Return the metadata of a model in GGUF files, imported or where they lie; None for other models.

    Raises:
        BlobMissing, BlobDamaged: as :func:`read_source_record`, or the file is missing.
    """
    for layer in manifest.layers_of(media_types.MODEL):
        with contextlib.suppress(InvalidGguf):
            return read_gguf(partial(_read, store, layer), layer.size).metadata
    header = _recorded_header(read_source_record(store, manifest))
    return None if header is None else header.metadata


def _read(store: ModelInspector, layer: Descriptor, begin: int, end: int) -> bytearray:
    buffer = bytearray(end - begin)
    store.read_into(layer.digest, layer.size, begin, memoryview(buffer))
    return buffer


def _recorded_header(record: SourceRecord | None) -> GgufHeader | None:
    """Return the header of the first GGUF file; those of companions count if there is no model."""
    files = {file.name: file for file in (record.files if record is not None else ())}
    for name in gguf_roles(record):
        with contextlib.suppress(InvalidGguf):
            return parse_gguf(files[name].start, files[name].size)
    return None


def source_specs(record: SourceRecord | None) -> dict[str, TensorSpec]:
    """Return the tensors of the source by their names in blobs; none if the record has no headers.

    Raises:
        BlobDamaged: a header in the record is malformed.
    """
    if record is None:
        return {}
    return {record.stored_names.get(spec.name, spec.name): spec for _, spec in _specs(record)}


def _specs(record: SourceRecord) -> Iterator[tuple[RecordedFile, TensorSpec]]:
    """Yield the tensors of the weight files under their full names."""
    for file in record.files:
        # Records of conversions have no headers, but what was left out has a place in one.
        if file.format != "safetensors" or not (file.start or record.left_out):
            continue
        try:
            header = parse_header(file.start[PREFIX_SIZE:], file.size)
        except InvalidHeader as error:
            raise BlobDamaged(f"the source layer: file {quote(file.name)}: {error}") from None
        folder, slash, _ = file.name.rpartition("/")
        for name, (spec, _, _) in header.tensors.items():
            yield file, spec._replace(name=folder + slash + name)


def packed_shapes(
    weights: Mapping[str, Sequence[int]], left_out: Mapping[str, tuple[TensorSpec, bytes]]
) -> dict[str, tuple[TensorSpec, bytes]]:
    """Return the tensors that a folder of compressed-tensors has with the shapes of packed weights.

    Args:
        weights: the logical shapes of weights of symmetric integers.
        left_out: the tensors of :func:`left_out_tensors`. Only element types are taken from them.
    """
    found = {}
    for name, shape in weights.items():
        published = left_out.get(name + PACKED_SHAPE)
        spec, data = packed_shape(name, shape, published[0].dtype if published else DType.I64)
        found[spec.name] = spec, data
    return found


def left_out_tensors(record: SourceRecord | None) -> dict[str, tuple[TensorSpec, bytes]]:
    """Return the tensors of the source that no blob holds unchanged.

    They are scales of activations, global scales whose reciprocals are in blobs, and shapes of packed weights.

    Raises:
        BlobDamaged: a header in the record is malformed, or the record holds other tensors.
    """
    found: dict[str, tuple[TensorSpec, bytes]] = {}
    if record is None or not record.left_out:
        return found
    for file, spec in _specs(record):
        data = record.left_out.get(spec.name, b"")
        if not data or len(data) != spec.nbytes:
            continue
        if not spec.name.endswith(LEFT_OUT):
            raise BlobDamaged(
                f"the source layer: file {quote(file.name)}: it holds tensor {quote(spec.name)}, "
                "which imports store"
            )
        found[spec.name] = spec, data
    return found

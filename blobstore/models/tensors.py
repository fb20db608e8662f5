"""The tensors of a model, as its manifest and the headers of its blobs describe them.

This is the one module that resolves groups and quantization parameters. The name of a layer is either the
name of the one tensor in its blob or the prefix of a group; only the blob's header shows which. A quantized
weight's quantization parameters (``.scale``, ``.bias``, ``.global_scale``) are the tensors of the same blob
whose name is the weight's name with such a suffix; the scales of fp8 weights keep the name that they have in
the source. Other tensors whose names end in one of these suffixes
are plain tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from blobstore.core import interrupts
from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, BlobstoreError
from blobstore.manifests import media_types
from blobstore.quantization.metadata import is_blocks, parse_quant_metadata, qparam_names
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE
from blobstore.safetensors.header import Header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.quantization.formats import QuantFormat
    from blobstore.safetensors.header import TensorEntry
    from blobstore.store.protocols import BlobDescriber

QPARAMS = {SCALE: "_scale", BIAS: "_qbias", GLOBAL_SCALE: GLOBAL_SCALE}
"""Suffixes of quantization parameters in a blob, and the suffixes of their runtime names. Scales of fp8
weights keep their names."""
CONSTANT_KEY = "data"
"""The name of the only tensor in blobs that Ollama wrote before February 2026."""

_NO_QPARAMS: Mapping[str, TensorEntry] = {}


Headers: TypeAlias = "Mapping[BlobId, Header | BlobstoreError]"
"""The headers of a model's tensor blobs, or the errors that reading them raised."""


class StoredTensor(NamedTuple):
    """A tensor of a model, and its blob. ``entry`` describes it as stored: packed, if quantized."""

    name: str
    layer: Descriptor
    header: Header
    entry: TensorEntry
    qparams: Mapping[str, TensorEntry] = _NO_QPARAMS
    """Entries by their suffix in the blob. A tensor with quantization parameters is quantized; so are blocks
    of GGUF, which have none."""
    item: QuantFormat | None = None
    """The quantization type; None for a plain tensor, or if the blob does not say."""
    group_size: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is quantized, also in a way that the blob does not tell."""
        return self.item is not None or bool(self.qparams)

    @property
    def type_name(self) -> str:
        """The quantization type, ``unknown`` if the blob does not say, or the element type."""
        if self.item is not None:
            return self.item.name
        return "unknown" if self.qparams else self.entry.spec.dtype.value

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape; the stored shape if the quantization type is unknown."""
        shape = self.entry.spec.shape
        return (*shape[:-1], self.item.columns(shape[-1])) if self.item else shape

    @property
    def nbytes(self) -> int:
        """The bytes in the blob, quantization parameters included."""
        entries = (self.entry, *self.qparams.values())
        return sum(entry.end - entry.begin for entry in entries)


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors of a model by name, in the manifest's order."""

    tensors: Mapping[str, StoredTensor]
    faults: Mapping[tuple[Digest, int], BlobstoreError]
    """Errors of tensor layers, by digest and size. The tensors of these layers are not listed."""


def read_headers(store: BlobDescriber, manifest: Manifest) -> Headers:
    """Read the headers of a model's tensor blobs, each once."""
    blobs = list(dict.fromkeys(layer.id for layer in manifest.layers_of(*media_types.WEIGHTS)))
    return dict(zip(blobs, store.read_headers(blobs), strict=True))


def read_tensors(
    store: BlobDescriber,
    manifest: Manifest,
    *,
    headers: Headers | None = None,
    collect_faults: bool = False,
) -> ModelTensors:
    """Return the tensors of a model, as the headers of its blobs describe them.

    Args:
        store: the store that holds the model.
        manifest: the model.
        headers: the headers, if they were read before.
        collect_faults: continue after a missing or damaged blob, and list it in ``faults``.

    Raises:
        BlobMissing, BlobDamaged: a blob is missing, has a wrong size or a broken header, or two
            blobs contain a tensor of the same name.
    """
    headers = read_headers(store, manifest) if headers is None else headers
    faults: dict[tuple[Digest, int], BlobstoreError] = {}
    tensors: dict[str, StoredTensor] = {}
    for layer in manifest.layers_of(*media_types.WEIGHTS):
        interrupts.check()
        try:
            found = tensors_of(layer, headers[layer.id])
        except BlobstoreError as error:
            if not collect_faults:
                raise at_layer(error, layer) from None
            faults[layer.digest, layer.size] = error
            continue
        for tensor in found:
            earlier = tensors.setdefault(tensor.name, tensor)
            if earlier is not tensor:
                raise BlobDamaged(
                    f"tensor {quote(tensor.name)} is in two layers, {quote(label(earlier.layer))} "
                    f"and {quote(label(layer))}"
                )
    return ModelTensors(tensors, faults)


def tensors_of(layer: Descriptor, header: Header | BlobstoreError) -> Sequence[StoredTensor]:
    """Return the tensors of a blob, in the order of its data.

    Raises:
        BlobstoreError: the error that was found in place of the header.
        BlobDamaged: the blob's metadata contradicts its tensors.
    """
    if not isinstance(header, Header):
        raise header
    entries, metadata = header.tensors, header.metadata
    if len(entries) == 1:
        name, entry = only_tensor(layer, header)
        known = (
            parse_quant_metadata(entry.spec, {}, metadata)
            if is_blocks(entry.spec, metadata)
            else None
        )
        return (StoredTensor(name, layer, header, entry, _NO_QPARAMS, *known or (None, 0)),)
    qparams: dict[str, dict[str, TensorEntry]] = {}
    hidden: set[str] = set()
    for name, entry in entries.items():
        own: dict[str, TensorEntry] = {}
        for suffix, other in qparam_names(entry.spec, metadata):
            if other in entries and own.setdefault(suffix, entries[other]).spec.name != other:
                raise BlobDamaged(f"tensor {quote(name)} has two tensors of scales")
        if SCALE in own:
            qparams[name] = own
            hidden.update(qparam.spec.name for qparam in own.values())
    found = []
    for name, entry in entries.items():
        if name in hidden:
            continue
        known, own = None, qparams.get(name, {})
        if own or is_blocks(entry.spec, metadata):
            specs = {suffix: qparam.spec for suffix, qparam in own.items()}
            known = parse_quant_metadata(entry.spec, specs, metadata)
        item, group_size = known or (None, 0)
        found.append(StoredTensor(name, layer, header, entry, own, item, group_size))
    return found


def only_tensor(layer: Descriptor, header: Header) -> tuple[str, TensorEntry]:
    """Return the name and the entry of the tensor of a blob that contains only one."""
    ((name, entry),) = header.tensors.items()
    return (layer.name if name == CONSTANT_KEY and layer.name else name), entry


def at_layer(error: BlobstoreError, layer: Descriptor) -> BlobstoreError:
    """Return the error with the layer in front of its message."""
    return error.at(f"layer {quote(label(layer))}")


def label(layer: Descriptor) -> str:
    """Return the name of a layer, or its media type: layers of GGUF files have no name."""
    return layer.name or layer.media_type

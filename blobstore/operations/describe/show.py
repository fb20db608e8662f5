"""The operation ``show``: the architecture, tensors and blobs of a model, and blobs that cannot be read.

Only headers and small JSON files are read. ``verify`` is the operation that hashes the data.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import BlobMissing, BlobstoreError, Damaged
from blobstore.manifests import media_types
from blobstore.models.metrics import read_metrics
from blobstore.models.model_card import config_of_source
from blobstore.models.published import published_scheme
from blobstore.models.read_strategy import ReadChooser
from blobstore.models.small_files import ARCHITECTURE_KEYS, CONFIG_FILES, first_text
from blobstore.models.tensors import read_tensors
from blobstore.operations.sign.report import signatures_of
from blobstore.remotes.addresses import is_address, reading_models
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.manifests.source_record import SourceRecord
    from blobstore.models.read_strategy import ReadStrategy
    from blobstore.operations.sign.report import CheckedSignature
    from blobstore.store.protocols import ModelInspector

CONFIG_NAME = "(config)"
"""The name under which the config blob is listed; it has none of its own."""


class TensorDescription(NamedTuple):
    """A tensor of a model. A named tuple, because a model may have many thousands."""

    name: str
    type: str
    """The quantization type (``unknown`` if the blob does not say), or else the element type."""
    dtype: str
    """The element type as stored; of packed words, if the tensor is quantized."""
    shape: tuple[int, ...]
    """The logical shape; the stored shape if the quantization type is unknown."""
    size: int
    """Bytes in the blob, including scales and biases."""
    layer: str
    digest: Digest
    """The digest of the blob that holds the tensor."""
    is_quantized: bool
    quant_type: str | None
    """The quantization type; None if the tensor is not quantized or the blob does not say."""
    group_size: int
    """Weights per group; 0 if there are no groups."""

    @property
    def parameters(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bits_per_weight(self) -> float | None:
        """Bits in the blob per element; None if there are no elements."""
        return self.size * 8 / self.parameters if self.parameters else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobDescription:
    """A blob of a model: the config or a layer."""

    name: str
    media_type: str
    size: int
    digest: Digest
    is_frozen: bool
    """Whether the blob is stored only as a cold file."""
    fault: BlobstoreError | None = None

    @property
    def state(self) -> Literal["ok", "missing", "damaged", "unreadable"]:
        """One word for the blob's condition."""
        if self.fault is None:
            return "ok"
        if isinstance(self.fault, BlobMissing):
            return "missing"
        return "damaged" if isinstance(self.fault, Damaged) else "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model, as far as it can be read."""

    reference: Reference | str
    """A text if it is an address in a registry."""
    format: Literal["tensors", "gguf"]
    """``gguf`` for a model of Ollama whose weights are in one GGUF file."""
    architecture: str
    """Empty if unknown, like ``model_type``."""
    model_type: str
    size: int
    """Bytes of all blobs. A blob that several layers share counts once."""
    frozen_size: int
    """Bytes of the frozen blobs among them, before compression."""
    blobs: tuple[BlobDescription, ...] = field(repr=False)
    """The config, then the layers in the manifest's order."""
    tensors: tuple[TensorDescription, ...] = field(repr=False)
    """The tensors of all readable blobs, in the manifest's order."""
    published_scheme: str | None = None
    """The name of the quantization if the model is kept as published."""
    notices: tuple[str, ...] = ()
    """What a user should know about how the model is served."""
    signatures: tuple[CheckedSignature, ...] | None = None
    """The signatures of the model, checked with the keys of the policy; None for a remote model."""
    reading: ReadStrategy | None = None
    """How ``open`` reads all blobs as things are now, and why; None for a remote model."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The numbers of its ``metrics.json``, such as the loss of a training step."""

    @property
    def parameters(self) -> int:
        """The number of elements of all tensors."""
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def files(self) -> tuple[BlobDescription, ...]:
        """The blobs of small files: JSON, tokenizers and the like."""
        files = (media_types.JSON, media_types.FILE)
        return tuple(blob for blob in self.blobs if blob.media_type in files)

    @property
    def faults(self) -> tuple[BlobDescription, ...]:
        """The blobs that are missing, damaged or unreadable."""
        return tuple(blob for blob in self.blobs if blob.fault is not None)


def describe_model(
    reference: str | Reference,
    *,
    store: StoreLike = None,
    plain_http: bool | None = None,
) -> ModelDescription:
    """Describe a model. Missing and damaged blobs are part of the description, not errors.

    Args:
        reference: the model's name; ``oci://`` begins an address in a registry.
        store: the store or its path; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        plain_http: whether to use HTTP without TLS for registries; by default only for this machine.

    Returns:
        the tensors and layers, with types, shapes and sizes in bytes.

    Raises:
        ModelNotFound: the store has no such model.
        InvalidManifest: the manifest is damaged.
        BlobDamaged: two blobs of the model contain a tensor of the same name.
        RemoteError: the registry cannot be reached, refuses access or misbehaves.
        StoreError: the store cannot be read.
    """
    local = LocalStore.to_read(store)
    with reading_models(local, reference, plain_http=plain_http) as (reader, (name,)):
        found = _describe(reader, name)
    if not is_address(reference):
        digest = Digest.of(local.read_manifest(reference))
        weights = [blob for blob in found.blobs if blob.media_type in media_types.WEIGHTS]
        reading = ReadChooser(local).for_all([(blob.digest, blob.size) for blob in weights])
        return replace(found, signatures=signatures_of(local, digest), reading=reading)
    from blobstore.remotes.model_reader import RemoteReader

    notices = reader.notices if isinstance(reader, RemoteReader) else ()
    return replace(found, reference=str(reference), notices=notices)


def _describe(store: ModelInspector, reference: Reference) -> ModelDescription:
    manifest = store.resolve(reference)
    contents = read_tensors(store, manifest, collect_faults=True)
    faults = dict(contents.faults)
    for blob in (manifest.config, *manifest.layers):
        if blob.media_type not in media_types.WEIGHTS:
            try:
                store.check_size(blob.digest, blob.size)
            except BlobstoreError as error:
                faults[blob.id] = error
    is_gguf = not manifest.layers_of(media_types.TENSOR) and bool(
        manifest.layers_of(media_types.MODEL)
    )
    keys = ("model_family",) if is_gguf else ARCHITECTURE_KEYS
    config = _read_config(store, manifest, faults, is_gguf=is_gguf)
    frozen = {blob.digest for blob in manifest.blobs if store.is_cold(blob.digest)}
    return ModelDescription(
        reference=reference,
        format="gguf" if is_gguf else "tensors",
        architecture=next(filter(None, (first_text(config, key) for key in keys)), ""),
        model_type=first_text(config, "model_type"),
        published_scheme=published_scheme(store, manifest) or None,
        metrics=read_metrics(store, manifest),
        size=sum(blob.size for blob in manifest.blobs),
        frozen_size=sum(blob.size for blob in manifest.blobs if blob.digest in frozen),
        blobs=tuple(
            BlobDescription(
                name=name,
                media_type=blob.media_type,
                size=blob.size,
                digest=blob.digest,
                is_frozen=blob.digest in frozen,
                fault=fault and fault.at(f"layer {quote(name or blob.media_type)}"),
            )
            for blob in (manifest.config, *manifest.layers)
            for name in [blob.name or (CONFIG_NAME if blob is manifest.config else "")]
            for fault in [faults.get(blob.id)]
        ),
        tensors=tuple(
            TensorDescription(
                name=tensor.name,
                type=tensor.type_name,
                dtype=tensor.entry.spec.dtype.value,
                shape=tensor.shape,
                size=tensor.nbytes,
                layer=tensor.layer.name,
                digest=tensor.layer.digest,
                is_quantized=tensor.is_quantized,
                quant_type=tensor.item.name if tensor.item else None,
                group_size=tensor.group_size,
            )
            for tensor in contents.tensors.values()
        ),
    )


def _read_config(
    store: ModelInspector,
    manifest: Manifest,
    faults: dict[tuple[Digest, int], BlobstoreError],
    *,
    is_gguf: bool,
) -> Mapping[str, Any]:
    """Return the config or header that states a model's architecture; note in ``faults`` if it is damaged."""
    files = {layer.name: layer for layer in manifest.layers_of(media_types.JSON)}
    blob: Descriptor | None = manifest.config
    if not is_gguf:
        blob = next((files[name] for name in CONFIG_FILES if name in files), None)
    config: Mapping[str, Any] = {} if is_gguf else config_of_source(store, manifest)
    if blob is not None:
        # Files are stored as the source has them, valid JSON or not.
        with contextlib.suppress(ValueError):
            try:
                value = strict_json.loads_any(store.read_blob(blob.digest, blob.size))
                config = value if isinstance(value, dict) else {}
            except BlobstoreError as error:
                faults.setdefault(blob.id, error)
    return config


def model_source(
    reference: str | Reference,
    *,
    store: StoreLike = None,
    plain_http: bool | None = None,
) -> SourceRecord | None:
    """Return what a model was imported from; None if an earlier version imported it.

    Args:
        reference: the model, or its address.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        plain_http: whether to use HTTP without TLS for a registry; by default only for this machine.

    Raises:
        ModelNotFound: the store has no such model.
        BlobMissing, BlobDamaged, InvalidManifest: the manifest or its source layer is damaged.
        StoreError: the store cannot be read.
    """
    from blobstore.models.source_layers import read_source_record

    with reading_models(LocalStore.to_read(store), reference, plain_http=plain_http) as (
        reader,
        (name,),
    ):
        record = read_source_record(reader, reader.resolve(name))
    if record is not None:
        check_options(record)
    return record


def check_options(record: SourceRecord) -> None:
    """Check that the recorded options are options of ``create``. Raises BlobDamaged if not."""
    if record.options:  # most models have none, and this imports what plans an import
        from blobstore.planning.import_options import ImportOptions

        ImportOptions.from_json(record.options)

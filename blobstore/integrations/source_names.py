"""The names that the tensors of a model had in its source, which libraries expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, UsageError
from blobstore.models.source_layers import left_out_tensors, read_stacks
from blobstore.models.tensors import read_tensors
from blobstore.quantization import gpt_oss
from blobstore.quantization.formats import FLOAT8_TYPE, FORMATS
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from blobstore.core.tensor import TensorSpec
    from blobstore.operations.open import Model


def stacked_names(model: Model) -> dict[str, list[str]]:
    """Return the source names of the tensors that each stacked tensor of a model was made from.

    Raises:
        BlobDamaged: the model's list of stacked tensors names a tensor that does not exist or has
            another number of parts, or gives two tensors the same name.
    """
    stacks = read_stacks(model.store, model.manifest)
    specs = model.specs if stacks else {}
    used = set(specs) - set(stacks)
    for name, sources in stacks.items():
        shape = specs[name].shape if name in specs else ()
        if shape[:1] != (len(sources),):
            raise BlobDamaged(
                f"{model.reference}: tensor {quote(name)} is listed as a stack of {len(sources)} "
                f"tensors, but {f'has shape {list(shape)}' if shape else 'does not exist'}"
            )
        for source in sources:
            if source in used:
                raise BlobDamaged(
                    f"{model.reference}: two tensors were both called {quote(source)}"
                )
            used.add(source)
    return stacks


DECODED_TYPES = frozenset({*FORMATS, ""}) - {FLOAT8_TYPE}
"""The types that servers are never given as stored; the empty one stands for unknown types."""


def why_decoded(model: Model, config: Mapping[str, Any]) -> str:
    """Return why a server cannot use its own kernels for the weights of a model; empty if it can."""
    quant_config = SourceQuantConfig(config)
    if {kind for kind, _ in model.quantized.values()} != {FLOAT8_TYPE}:
        return "not all of its quantized weights are fp8"
    if quant_config.is_mlx or not quant_config.method:
        return "its config does not say how they are quantized"
    if quant_config.has_static_activations and not activation_scales(model, config):
        return "the store does not have the scales of its activations"
    return ""


def activation_scales(
    model: Model, config: Mapping[str, Any]
) -> dict[str, tuple[TensorSpec, bytes]]:
    """Return the scales of activations by source name, if a server that takes FP8 weights needs them.

    Raises:
        BlobMissing, BlobDamaged: the record of the source is missing or damaged.
    """
    if not SourceQuantConfig(config).has_static_activations:
        return {}
    return left_out_tensors(model.store, model.manifest)


def is_dequantized(
    model: Model, config: Mapping[str, Any], wanted: bool | None, *, default: bool
) -> bool:
    """Return whether a server is given plain values of all weights, and a config without quantization.

    Args:
        model: the model.
        config: its config.
        wanted: what the user wants, None for ``default`` if that is possible.
        default: whether plain values are preferred.

    Raises:
        UsageError: the user wants weights as stored, but :func:`why_decoded`.
    """
    reason = why_decoded(model, config)
    if wanted is False and reason:
        raise UsageError(f"{model.reference} must be dequantized: {reason}")
    return (default or bool(reason)) if wanted is None else wanted


def component_prefixes(model: Model) -> tuple[str, ...]:
    """Return the prefixes of tensors that belong to other components of a pipeline."""
    folders = {file.rpartition("/")[0] for file in model.files if "/" in file}
    return tuple(f"{folder}/" for folder in sorted(folders))


def gpt_oss_experts(model: Model, config: Mapping[str, Any]) -> Collection[str]:
    """Return the quantized weights of a model that has the layout of gpt-oss, otherwise none.

    Raises:
        BlobMissing, BlobDamaged: a blob is missing or damaged.
    """
    if SourceQuantConfig(config).method != gpt_oss.METHOD:
        return ()  # without reading the headers of all blobs
    tensors = read_tensors(model.store, model.manifest).tensors.values()
    packed = [(item.name, item.shape, item.item) for item in tensors if item.companions]
    return [name for name, *_ in packed] if gpt_oss.is_gpt_oss(config, packed) else ()

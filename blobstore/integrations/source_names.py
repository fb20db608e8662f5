"""The names that the tensors of a model had in its source, which libraries expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.escape import escape, quote
from blobstore.errors import BlobDamaged, UsageError
from blobstore.models.published import published_scheme
from blobstore.models.source_layers import (
    left_out_tensors,
    packed_shapes,
    read_source_record,
    read_stacks,
    source_specs,
)
from blobstore.models.tensors import QPARAMS, read_tensors
from blobstore.quantization import gpt_oss
from blobstore.quantization.formats import (
    FLOAT8_TYPE,
    FORMATS,
    INPUT_SCALES,
    SCALE_SUFFIXES,
    SYMMETRIC_TYPES,
)
from blobstore.quantization.recipes import GLOBAL_SCALE
from blobstore.quantization.source_config import (
    MODELOPT_FILE,
    SourceQuantConfig,
    modelopt_section,
)
from blobstore.quantization.source_layout import SourceNaming, is_renamed_to

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from blobstore.core.tensor import TensorSpec
    from blobstore.models.small_files import ModelFiles
    from blobstore.operations.open import Model


_PUBLISHED_TYPES = (FLOAT8_TYPE, *SYMMETRIC_TYPES)
"""The types whose weights blobs hold as they were published."""


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
                f"{model.reference}: tensor {quote(name)} is listed as a stack of length "
                f"{len(sources)}, but {f'has shape {list(shape)}' if shape else 'does not exist'}"
            )
        for source in sources:
            if source in used:
                raise BlobDamaged(
                    f"{model.reference}: two tensors were both called {quote(source)}"
                )
            used.add(source)
    return stacks


class PublishedTensors(NamedTuple):
    """The form in a source of tensors that blobs hold under other names or types, or not at all."""

    specs: Mapping[str, TensorSpec]
    """Their specs in the source, by runtime name. FP8 weights are not listed, and of their scales only
    those that are renamed."""
    left_out: Mapping[str, tuple[TensorSpec, bytes]]
    """The tensors that no blob holds unchanged, by source name: scales of activations, and global scales
    whose reciprocals are in ``specs``."""

    @classmethod
    def of(cls, model: Model, config: Mapping[str, Any]) -> PublishedTensors:
        """Return the tensors of a model that was opened without ``dequantize``.

        Args:
            model: the model.
            config: its config, as by :func:`quant_settings`.

        Raises:
            BlobMissing, BlobDamaged: the record of the source is missing or damaged.
        """
        naming, specs = SourceNaming(config), model.specs
        record = read_source_record(model.store, model.manifest)
        published = source_specs(record)
        named = {
            name + end: naming.spec(name, suffix, specs[name + end], FORMATS[kind])
            for name, (kind, _) in model.quantized.items()
            if kind in SYMMETRIC_TYPES or _has_global_scale(model, name, kind)
            for suffix, end in {"": "", **QPARAMS}.items()
            if name + end in specs
        }
        for name, (kind, *_) in model.quantized.items():
            for end in SCALE_SUFFIXES if kind == FLOAT8_TYPE else ():
                spec = published.get(name + end)
                if spec is not None and is_renamed_to(spec, specs[name + end], specs):
                    named[name + end] = spec
        shapes = {
            name: FORMATS[kind].logical_shape(specs[name].shape)
            for name, (kind, _) in model.quantized.items()
            if kind in SYMMETRIC_TYPES
        }
        has_reciprocals = bool(named) and naming.is_reciprocal(GLOBAL_SCALE)
        is_complete = not (has_reciprocals or shapes)
        if is_complete and not SourceQuantConfig(config).has_static_activations:
            return cls(named, {})
        left_out = left_out_tensors(record)
        return cls(named, left_out | packed_shapes(shapes, left_out))


def _has_global_scale(model: Model, name: str, kind: str) -> bool:
    return kind == "nvfp4" and f"{name}{GLOBAL_SCALE}" in model


def modelopt_settings(model: ModelFiles) -> dict[str, Any]:
    """Return the quantization of the weights by ModelOpt's own file; empty if it does not state it.

    Raises:
        BlobMissing, BlobDamaged: the file is missing or damaged.
    """
    if MODELOPT_FILE not in model.files:
        return {}
    return modelopt_section(model.read_json(MODELOPT_FILE))


def quant_settings(model: ModelFiles, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model's config with its quantization, which may be in a file of its own.

    Raises:
        BlobMissing, BlobDamaged: the file is missing or damaged.
    """
    if SourceQuantConfig(config).is_quantized or not (section := modelopt_settings(model)):
        return config
    return {**config, "quantization_config": section}


def why_decoded(model: Model, config: Mapping[str, Any]) -> str:
    """Return why a server cannot use its own kernels for the weights of a model; empty if it can.

    Args:
        model: the model, opened without ``dequantize``.
        config: its config, as by :func:`quant_settings`.

    Raises:
        BlobMissing, BlobDamaged: the record of the source is missing or damaged.
    """
    if published_scheme(model.store, model.manifest):
        return ""
    quant_config, weights = SourceQuantConfig(config), model.quantized.items()
    if not weights or not all(
        kind in _PUBLISHED_TYPES or _has_global_scale(model, name, kind)
        for name, (kind, _) in weights
    ):
        return "not all of its quantized weights are fp8, int4-sym, int8-sym, or nvfp4 with global scales"
    if quant_config.is_mlx or not quant_config.method:
        return "its config does not say how they are quantized"
    specs, left_out = PublishedTensors.of(model, config)
    if quant_config.has_static_activations and not any(
        name.endswith(INPUT_SCALES) for name in left_out
    ):
        return "the store does not have the scales of its activations"
    is_reciprocal = SourceNaming(config).is_reciprocal(GLOBAL_SCALE)
    if is_reciprocal and any(
        name.endswith(GLOBAL_SCALE) and spec.name not in left_out for name, spec in specs.items()
    ):
        return "the store has its global scales as reciprocals only"
    return ""


def is_published(model: Model, dequantize: bool | None) -> bool:
    """Return whether a model is kept as published, so that a server gets its tensors and config unchanged.

    Args:
        model: the model.
        dequantize: whether the user wants plain values of quantized weights.

    Raises:
        UsageError: the user wants plain values, which such a model does not have.
    """
    scheme = published_scheme(model.store, model.manifest)
    if scheme and dequantize:
        raise UsageError(
            f"{model.reference} cannot be dequantized: its weights ({escape(scheme)}) are kept as published"
        )
    return bool(scheme)


def is_dequantized(
    model: Model,
    config: Mapping[str, Any],
    wanted: bool | None,
    *,
    default: bool,
    unsupported: str = "",
) -> bool:
    """Return whether a server is given plain values of all weights, and a config without quantization.

    Args:
        model: the model, opened without ``dequantize``.
        config: its config, as by :func:`quant_settings`.
        wanted: what the user wants, None for ``default`` if that is possible.
        default: whether plain values are preferred.
        unsupported: why the server does not support the quantization that the config describes.

    Raises:
        UsageError: the user wants weights as published, but :func:`why_decoded`; or plain values of a
            model that is kept as published.
        BlobMissing, BlobDamaged: as :func:`why_decoded`.
    """
    if is_published(model, wanted):
        return False
    reason = why_decoded(model, config) or unsupported
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
    packed = [(item.name, item.shape, item.item) for item in tensors if item.qparams]
    return [name for name, *_ in packed] if gpt_oss.is_gpt_oss(config, packed) else ()

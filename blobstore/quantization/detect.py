"""Detects how the weights of a source are quantized, from tensor specs and the config alone.

The name and element type of a weight say which scheme it may belong to:

======================  =============================================  ====================
weight                  quantization parameters                        becomes
======================  =============================================  ====================
``X.weight`` U32        ``X.scales``, ``X.biases``                     as packed by MLX
``X.weight_packed`` U8  ``X.weight_scale``, ``X.weight_global_scale``  nvfp4, or mxfp4
``X.weight_packed`` I32 ``X.weight_scale``, ``X.weight_shape``         int4-sym, or int8-sym
``X.weight`` U8         ``X.weight_scale``, ``X.weight_scale_2``       nvfp4, or mxfp4
the same, or 8-bit      the same, and a marker of ComfyUI              nvfp4-tiled, or mxfp8-tiled
``X_blocks`` U8         ``X_scales`` U8                                mxfp4
8-bit float ``W``       ``W_scale``, one exponent per 32 columns       mxfp8
8-bit float ``W``       ``W_scale`` or ``W_scale_inv``                 fp8, or BF16
8-bit ``X.weight``      ``X.scale_weight``, or ``X.scale`` of E8M0     fp8, or BF16
``X.weight`` I8         ``X.scale`` of E8M0, by the config             mxfp4
======================  =============================================  ====================

8-bit floats are kept as they are, or decoded on request. Weights of other tools than MLX have the same bits
under other names and element types: packed bytes, lowest bits first, become words of four bytes, and 8-bit
scales are relabelled as U8. Shapes and config must agree, because either alone may fit several types.

A source is read completely or not at all. If a weight uses another scheme, or a tensor next to it may change what
its bytes mean, the source is kept as published: all tensors are plain, and nothing interprets them.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.tensor import BYTE_FLOATS, DType, TensorSpec
from blobstore.quantization.comfy import (
    MARKER,
    MAX_MARKER,
    are_known_layers,
    is_known_marker,
    is_stale,
    tiled_types,
)
from blobstore.quantization.formats import (
    FACTORS,
    FLOAT8,
    FORMATS,
    INPUT_SCALES,
    MAX_GROUP,
    MODULE_SCALES,
    PACKED_SHAPE,
    SCALE_SUFFIXES,
    float8_format,
)
from blobstore.quantization.neighbours import unclaimed_neighbour, without_neighbours
from blobstore.quantization.packed_recipes import (
    NotUnderstood,
    check_matrix,
    fail,
    fp4_blocks,
    fp4_weight,
    mlx_weight,
    mxfp8_weight,
    refuse,
    relabelled,
    symmetric_weight,
    tiled_weight,
)
from blobstore.quantization.published_schemes import (
    UNKNOWN,
    quantization_key,
    scheme_name,
    scheme_of_tensor,
)
from blobstore.quantization.recipes import SCALE, Copied, Decoded, Prequantized, copies
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Final

    from blobstore.quantization.formats import QuantFormat, Sharing

    Specs = Mapping[str, TensorSpec]

_METHODS: Final = ("compressed-tensors", "modelopt", "fp8", "fbgemm_fp8", "mxfp4", "mxfp8", "mlx")
"""The values of ``quant_method`` that are supported here."""
_OTHER_FLOAT8: Final = tuple(dtype for dtype in BYTE_FLOATS if dtype not in FLOAT8)
_BYTES: Final = (DType.U8, DType.I8, *FLOAT8)
_PACKED: Final = (*_BYTES, *_OTHER_FLOAT8, DType.U32)
_INTEGERS: Final = (DType.I16, DType.U16, DType.I32)
_PACKED_OR_INTEGERS: Final = frozenset((*_PACKED, *_INTEGERS))
_USUAL_SHARINGS: Final[tuple[Sharing, ...]] = ("tensor", "channel", (128, 128))
"""How 8-bit floats may share scales if the config does not say; the shapes are distinct."""


class DetectedQuantization(NamedTuple):
    """The recipes for the tensors of a source."""

    recipes: dict[str, Copied | Decoded | Prequantized]
    """By logical name. Together they use every tensor of the source except scales of activations."""
    notices: tuple[str, ...]
    """Remarks for the user, one line each."""
    quant_type: str
    """The type of most quantized weights; empty if there are none, or most are decoded."""
    scheme: str = ""
    """The name of the quantization, if the source is kept as published; otherwise empty."""
    reason: str = ""
    """Why it is kept as published."""


def detect_quantization(
    specs: Specs,
    config: Mapping[str, Any],
    *,
    metadata: Collection[tuple[str, str]] = (),
    markers: Mapping[str, bytes] | None = None,
    decode: bool = False,
    as_is: bool = False,
) -> DetectedQuantization:
    """Return the recipes for all tensors of a source.

    Args:
        specs: the tensors by name.
        config: the decoded ``config.json``, or an empty mapping.
        metadata: keys and texts of the metadata in the headers of its files.
        markers: the contents of the tensors that :func:`is_marker` names.
        decode: decode 8-bit floats with scales to BF16.
        as_is: keep the source as published, also if it can be read.

    Raises:
        UnsupportedSource: a weight lacks a quantization parameter or contradicts the config. The message names it.
    """
    if as_is:
        return _as_published(specs, config, "")
    try:
        return _read(specs, config, metadata, markers or {}, decode=decode)
    except NotUnderstood as error:
        return _as_published(specs, config, error.message)


def is_marker(spec: TensorSpec) -> bool:
    """Return whether detection needs the content of a tensor, which is small."""
    if spec.name.endswith(f".weight{PACKED_SHAPE}"):
        return spec.dtype in (DType.I32, DType.I64) and spec.shape == (2,)
    return spec.name.endswith(MARKER) and spec.nbytes <= MAX_MARKER


def _as_published(specs: Specs, config: Mapping[str, Any], reason: str) -> DetectedQuantization:
    scheme = scheme_name(specs, config) or (UNKNOWN if reason else "")
    notices = [f"{scheme}, kept as published{f': {reason}' if reason else ''}"] if scheme else []
    return DetectedQuantization({**copies(specs)}, tuple(notices), "", scheme, reason)


def _read(
    specs: Specs,
    config: Mapping[str, Any],
    metadata: Collection[tuple[str, str]],
    markers: Mapping[str, bytes],
    *,
    decode: bool,
) -> DetectedQuantization:
    """Return the recipes of a source whose quantization is understood.

    Raises:
        NotUnderstood: it is not.
        UnsupportedSource: as :func:`detect_quantization`.
    """
    quant_config = SourceQuantConfig(config)
    if quant_config.has_transforms:
        raise NotUnderstood(
            "config.json has 'transform_config', and no type of a blob has transforms"
        )
    found: dict[str, Decoded | Prequantized] = {}
    used: set[str] = set()
    left_out: set[str] = set()
    marked = tiled_types(metadata, markers)
    tiled = {name: item for name, item in marked.items() if name in specs}
    for name, spec in specs.items():
        recipe = _tiled(spec, specs, tiled) or _quantized(
            spec, specs, quant_config, markers, decode=decode
        )
        if recipe is None:
            continue
        if found.setdefault(recipe.spec.name, recipe) is not recipe:
            fail(name, f"and another tensor are both the weight {quote(recipe.spec.name)}")
        used.update(recipe.sources, recipe.scales if isinstance(recipe, Decoded) else ())
        if spec.dtype is not DType.U32:
            left_out.update(_left_out(recipe, specs))
    known = {name for name, text in markers.items() if is_known_marker(name, text, specs, tiled)}
    is_decoded = any(isinstance(recipe, Decoded) for recipe in found.values())
    stale = set(filter(is_stale, specs)) if is_decoded else set[str]()
    claimed = used | left_out
    plain = [spec for name, spec in specs.items() if name not in claimed and name not in stale]
    weights = {name: specs[recipe.sources[0]] for name, recipe in found.items()}
    if quant_config.is_quantized:
        _check_scales(specs, plain, weights.values())
    for spec in plain:
        _check_plain(spec, specs, quant_config, found)
    weights |= {spec.name: spec for spec in plain if _may_be_packed(spec)}
    # MLX packs into words of its own, whatever a header says besides.
    has_others = any(spec.dtype is not DType.U32 for spec in weights.values())
    keys = {key for key, text in metadata if not are_known_layers(key, text, specs, tiled)}
    _check_neighbours(specs, claimed | known, weights, keys if has_others else ())
    recipes = {**found, **copies({spec.name: spec for spec in plain})}
    modules = {name.rpartition(".")[0] for name in specs} if quant_config.is_mlx else set()
    casts = sum(spec.dtype in BYTE_FLOATS and spec.name.endswith(".weight") for spec in plain)
    inputs = {name for name in left_out if name.endswith(INPUT_SCALES)}
    notices = tuple(_notices(found, inputs, casts, len(stale), quant_config.unmatched(modules)))
    return DetectedQuantization(recipes, notices, _main_type(found.values()))


def _main_type(recipes: Iterable[Decoded | Prequantized]) -> str:
    """Return the type that most elements have; empty if these are decoded, or if no weight is quantized."""
    elements: Counter[str] = Counter()
    for recipe in recipes:
        if isinstance(recipe, Prequantized):
            elements[recipe.item.name] += recipe.item.columns(recipe.spec.elements)
        else:
            elements[""] += recipe.spec.elements
    # Break ties by name, because the order of the tensors has no meaning.
    return min(elements, key=lambda kind: (-elements[kind], kind), default="")


def _left_out(recipe: Decoded | Prequantized, specs: Specs) -> Iterator[str]:
    """Yield the tensors of a quantized weight that no blob has."""
    weight = recipe.spec.name
    # Runtimes compute the scales of activations themselves.
    prefix = weight.removesuffix("weight") if weight.endswith(".weight") else f"{weight}_"
    yield from (prefix + end for end in INPUT_SCALES if prefix + end in specs)
    if isinstance(recipe, Prequantized) and recipe.item.mode == "symmetric":
        yield weight + PACKED_SHAPE


def _may_be_packed(spec: TensorSpec) -> bool:
    """Return whether a tensor that no reading uses may be a quantized weight all the same."""
    is_packed = spec.dtype in _PACKED_OR_INTEGERS
    return is_packed and spec.name.endswith(".weight") and len(spec.shape) > 1


def _check_neighbours(
    specs: Specs,
    claimed: Collection[str],
    weights: Mapping[str, TensorSpec],
    header_keys: Collection[str],
) -> None:
    """Check that nothing else says how weights are quantized.

    Raises:
        NotUnderstood: a tensor next to a weight, or a key of a header, may do so.
    """
    if not weights:
        return
    if unclaimed := unclaimed_neighbour(specs, claimed, weights):
        name, weight = unclaimed
        raise NotUnderstood(
            f"tensor {quote(name)} may change what {quote(weight)} means, and no type of a blob has "
            "such a tensor"
        )
    if key := quantization_key(header_keys):
        raise NotUnderstood(
            f"the metadata {quote(key)} in a header may change what quantized weights mean"
        )


def _quantized(
    spec: TensorSpec,
    specs: Specs,
    config: SourceQuantConfig,
    markers: Mapping[str, bytes],
    *,
    decode: bool,
) -> Decoded | Prequantized | None:
    """Return the recipe of a quantized weight, or None if the tensor is not one."""
    name, dtype, _ = spec
    if scheme := scheme_of_tensor(spec, specs):
        refuse(spec, f"is quantized {'in an unknown way' if scheme == UNKNOWN else f'by {scheme}'}")
    if name.endswith(".weight_packed"):
        return _compressed(spec, specs, config, markers)
    if dtype is DType.U32:
        return _packed_words(spec, specs, config)
    if dtype not in _BYTES:
        return None
    if dtype is DType.U8 and name.endswith("_blocks"):
        name = name.removesuffix("_blocks")
        scale = specs.get(f"{name}_scales")
        return fp4_blocks(name, spec, scale) if scale and scale.dtype is DType.U8 else None
    scales = [specs[name + end] for end in SCALE_SUFFIXES if name + end in specs]
    if dtype is DType.U8:
        is_packed = scales and name.endswith(".weight")
        return _packed_bytes(name, spec, "_scale_2", specs, config) if is_packed else None
    scales += _module_scales(name, specs)
    if not scales or not (dtype in FLOAT8 or name.endswith(".weight")):
        return None
    if len(scales) > 1:
        refuse(spec, "has two tensors of scales")
    if dtype is DType.I8:
        return _fp4_of_integers(spec, scales[0], config)
    return _float8(spec, scales[0], config.sharings(), decode=decode)


def _tiled(spec: TensorSpec, specs: Specs, types: Mapping[str, QuantFormat]) -> Prequantized | None:
    """Return the recipe of a weight to which a marker of ComfyUI gives a type with tiled scales."""
    item = types.get(spec.name)
    if item is None:
        return None
    scale, factor = (specs.get(spec.name + end) for end in ("_scale", "_scale_2"))
    return tiled_weight(spec, scale, factor, item)


def _fp4_of_integers(
    spec: TensorSpec, scale: TensorSpec, config: SourceQuantConfig
) -> Prequantized:
    """Return the recipe of 4-bit floats that a source of DeepSeek V4 has as 8-bit integers."""
    if not config.has_fp4_experts or scale.dtype is not DType.F8_E8M0:
        refuse(spec, "is of 8-bit integers with scales")
    return relabelled(spec.name, spec, scale, FORMATS["mxfp4"])


def _module_scales(name: str, specs: Specs) -> Iterator[TensorSpec]:
    """Yield the scales of a weight that are named after its module."""
    module = name.removesuffix(".weight")
    for end in MODULE_SCALES if module != name else ():
        scale = specs.get(module + end)
        # Other tensors may be called "scale" too.
        if scale is not None and (end != ".scale" or scale.dtype is DType.F8_E8M0):
            yield scale


def _packed_words(spec: TensorSpec, specs: Specs, config: SourceQuantConfig) -> Prequantized | None:
    module = spec.name.removesuffix(".weight")
    scale = specs.get(f"{module}.scales")
    if module == spec.name and f"{module}.weight" in specs:
        return None
    if scale is None:
        if f"{module}.biases" in specs:
            fail(spec.name, f"lacks its scales, {quote(f'{module}.scales')}")
        if f"{spec.name}{SCALE}" in specs:
            # A source does not have the blob's metadata, which has its type.
            fail(spec.name, "is packed as in a blob of a store; create from an export of the model")
        return None
    if f"{module}.global_scale" in specs:
        # In MLX it is not a factor of the scales but the largest magnitude that they represent.
        refuse(spec, "has a global scale in MLX's sense")
    known = config.mlx_type(spec.name, module)
    return mlx_weight(spec, scale, specs.get(f"{module}.biases"), known)


def _compressed(
    spec: TensorSpec, specs: Specs, config: SourceQuantConfig, markers: Mapping[str, bytes]
) -> Prequantized:
    """Return the recipe of a weight packed by compressed-tensors: integers in words, or floats in bytes."""
    name = spec.name.removesuffix("_packed")
    if spec.dtype is not DType.I32:
        return _packed_bytes(name, spec, "_global_scale", specs, config)
    scale, shape = specs.get(f"{name}_scale"), specs.get(name + PACKED_SHAPE)
    data = markers.get(name + PACKED_SHAPE)
    if scale is None or shape is None or data is None:
        refuse(spec, "is of packed integers without scales and shape")
    if name + "_zero_point" in specs:
        refuse(spec, "has zero points")
    size = shape.dtype.bits // 8
    lengths = [
        int.from_bytes(data[at : at + size], "little", signed=True)
        for at in range(0, len(data), size)
    ]
    return symmetric_weight(name, spec, scale, lengths, config.packed_integers())


def _packed_bytes(
    name: str, spec: TensorSpec, factor: str, specs: Specs, config: SourceQuantConfig
) -> Prequantized:
    if spec.dtype is not DType.U8:
        refuse(spec, "is of packed integers")
    scale = specs.get(f"{name}_scale")
    if scale is None:
        fail(spec.name, f"lacks its scales, {quote(f'{name}_scale')}")
    is_reciprocal = factor == "_global_scale"
    sizes, factor_spec = config.group_sizes(4), specs.get(name + factor)
    return fp4_weight(name, spec, scale, factor_spec, sizes, is_reciprocal=is_reciprocal)


def _float8(
    weight: TensorSpec, scale: TensorSpec, declared: Sequence[Sharing], *, decode: bool
) -> Decoded | Prequantized:
    check_matrix(weight)
    source = scale.name
    if not source.startswith(weight.name):
        scale = scale._replace(name=weight.name + SCALE_SUFFIXES[0])
    packed = mxfp8_weight(weight, scale, source)
    if packed is not None:
        return packed
    sharings = declared or (*_USUAL_SHARINGS, *_blocks_of_rows(weight, scale))
    item = next(filter(None, (float8_format(weight, scale, sharing) for sharing in sharings)), None)
    if item is None or item.float8 is None:
        if scale.dtype not in FACTORS:
            refuse(weight, f"has scales of type {scale.dtype.value} and shape {list(scale.shape)}")
        expected = " or ".join(
            sharing if isinstance(sharing, str) else f"block of {sharing[0]} x {sharing[1]}"
            for sharing in sharings
        )
        origin = "by config.json" if declared else "without a size that is known in config.json,"
        refuse(
            weight,
            f"of shape {list(weight.shape)} has scales of shape {list(scale.shape)}, and {origin} "
            f"it has one for each {expected}",
        )
    if decode:
        *rows, columns = weight.shape
        flat = weight._replace(shape=(math.prod(rows), columns))
        plain = weight._replace(dtype=DType.BF16)
        return Decoded(plain, (weight.name,), (source,), flat, scale, item.float8.block)
    parts = (Copied(weight, (weight.name,)), Copied(scale, (source,)))
    return Prequantized(parts, item, None)


def _blocks_of_rows(weight: TensorSpec, scale: TensorSpec) -> Iterator[Sharing]:
    """Yield the blocks of musubi-tuner, which divides rows: its scales have the shape [rows, blocks, 1]."""
    if len(weight.shape) == 2 and scale.shape[:1] == weight.shape[:1] and scale.shape[2:] == (1,):
        width, rest = divmod(weight.shape[1], max(scale.shape[1], 1))
        if not rest and 0 < width <= MAX_GROUP:
            yield 1, width


def _check_scales(
    specs: Specs, plain: Collection[TensorSpec], found: Collection[TensorSpec]
) -> None:
    """Check that weights of 8-bit floats have scales if some have. Raises UnsupportedSource."""
    if any(spec.dtype in FLOAT8 for spec in found):
        lacking = {spec.name for spec in plain if spec.dtype in FLOAT8 and _may_be_packed(spec)}
        if name := without_neighbours(specs, lacking):
            fail(name, "lacks its scales, which other weights of 8-bit floats have")


def _check_plain(
    spec: TensorSpec, specs: Specs, config: SourceQuantConfig, quantized: Collection[str]
) -> None:
    """Check that a tensor without quantization parameters is really not quantized."""
    name, dtype, shape = spec
    if name in quantized:
        fail(name, "is in the source both plain and quantized")
    if name.endswith("_zero_point") and name.removesuffix("_zero_point") in quantized:
        refuse(spec, "has zero points")
    is_scaled = any(name + end in specs for end in SCALE_SUFFIXES)
    # Diffusion models are often cast to 8-bit floats, without scales or an entry in a config.
    if dtype in BYTE_FLOATS and name.endswith(".weight") and (is_scaled or config.is_quantized):
        what = "scales that are known" if dtype in FLOAT8 else "a form that is decoded"
        refuse(spec, f"is of 8-bit floats without {what}")
    if len(shape) < 2:  # a matrix
        return
    if config.is_mlx and dtype is DType.U32:
        fail(name, "is packed by config.json, and its scales are missing")
    method = config.method
    if method and (dtype in _PACKED or (dtype in _INTEGERS and method not in _METHODS)):
        refuse(spec, f"is packed in an unknown way of {quote(method)}")


def _notices(
    found: Mapping[str, Decoded | Prequantized],
    inputs: set[str],
    casts: int,
    stale: int,
    unmatched: Sequence[str],
) -> Iterator[str]:
    if inputs:
        yield f"{_counted(len(inputs), 'input scale')} (of activations) left out"
    if stale:
        yield f"{_counted(stale, 'marker')} of 8-bit floats left out, since weights are decoded"
    decoded = sum(isinstance(recipe, Decoded) for recipe in found.values())
    if decoded:
        yield f"{_counted(decoded, 'weight')} of 8-bit floats decoded to BF16"
    if casts:
        yield f"{_counted(casts, 'weight')} of 8-bit floats without scales kept as plain tensors"
    if unmatched:
        yield (
            f"config.json gives a type to {_counted(len(unmatched), 'module')} that the source does "
            f"not have, such as {quote(unmatched[0])}"
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

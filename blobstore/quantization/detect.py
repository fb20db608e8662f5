"""Recognises what a source has quantized already. Pure: decided by specs and config alone.

Each scheme is found by its weight, whose name and element type say which one it may be:

======================  =============================================  ====================
weight                  beside it                                      becomes
======================  =============================================  ====================
``X.weight`` U32        ``X.scales``, ``X.biases``                     as MLX has packed it
``X.weight_packed`` U8  ``X.weight_scale``, ``X.weight_global_scale``  nvfp4, or mxfp4
``X.weight`` U8         ``X.weight_scale``, ``X.weight_scale_2``       nvfp4, or mxfp4
``X_blocks`` U8         ``X_scales`` U8                                mxfp4
8-bit float ``W``       ``W_scale``, an exponent for 32 of a row       mxfp8
8-bit float ``W``       ``W_scale`` or ``W_scale_inv``                 BF16, decoded
======================  =============================================  ====================

What is packed is never computed anew: a scheme whose numbers no type of ours holds exactly is
refused. Shapes and config must agree, for either alone may fit several types.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.tensor import DType, TensorSpec
from blobstore.quantization.packed_sources import (
    check_matrix,
    fail,
    fp4_blocks,
    fp4_weight,
    mlx_weight,
    mxfp8_weight,
    refuse,
)
from blobstore.quantization.recipes import SCALE, Copied, Decoded, Prequantized
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Final

    from blobstore.quantization.source_config import Block, Sharing

    Specs = Mapping[str, TensorSpec]

FLOAT8: Final = "fp8"
"""What a source of 8-bit floats is called; they are no type of ours, but decoded."""
_FOREIGN: Final = {
    ".qweight": "GPTQ, AWQ or a scheme like them",
    ".q_weight": "EXL2",
    ".trellis": "EXL3",
    ".W_q": "HQQ",
    ".SCB": "bitsandbytes",
    ".weight.absmax": "bitsandbytes",
    ".weight.quant_map": "bitsandbytes",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes",
    ".weight._data": "quanto",
    "_weight_qdata": "torchao",
}
"""Ends of names that only such a scheme has."""
_FOREIGN_ENDS: Final = tuple(_FOREIGN)
_METHODS: Final = ("compressed-tensors", "modelopt", "fp8", "fbgemm_fp8", "mxfp4", "mxfp8", "mlx")
"""What configs call the schemes that are read here."""
_INPUT_SCALES: Final = ("input_scale", "input_global_scale", "input_scale_ub", "activation_scale")
_FLOAT8: Final = (DType.F8_E4M3, DType.F8_E5M2)
_OTHER_FLOAT8: Final = (DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ, DType.F8_E8M0)
_BYTES: Final = (DType.U8, DType.I8, *_FLOAT8)
_PACKED: Final = (*_BYTES, *_OTHER_FLOAT8, DType.U32)
_INTEGERS: Final = (DType.I16, DType.U16, DType.I32)
_FACTORS: Final = (DType.F32, DType.BF16, DType.F16, DType.F8_E8M0)
_USUAL_SHARINGS: Final[tuple[Sharing, ...]] = ("tensor", "channel", (128, 128))
"""How 8-bit floats share scales where the config does not say it; the shapes tell them apart."""


class Recognised(NamedTuple):
    """What the tensors of a source are."""

    recipes: dict[str, Copied | Decoded | Prequantized]
    """By logical name; each tensor of the source is in one, but for scales of activations."""
    notices: tuple[str, ...]
    """What a person should know, one line each."""
    quant_type: str
    """What most of the quantized weights are: a type, or ``fp8``; empty if there are none."""


def detect_quantization(specs: Specs, config: Mapping[str, Any]) -> Recognised:
    """Return the recipes for all tensors of a source.

    Args:
        specs: the tensors by name.
        config: the decoded ``config.json``, empty where there is none.

    Raises:
        UnsupportedSource: a weight is of a scheme that cannot be kept exactly, lacks a part, or is
            not what the config says; the message names it.
    """
    stated = SourceQuantConfig(config)
    found: dict[str, Decoded | Prequantized] = {}
    used: set[str] = set()
    inputs: set[str] = set()
    for name, spec in specs.items():
        recipe = _quantized(spec, specs, stated)
        if recipe is None:
            continue
        if found.setdefault(recipe.spec.name, recipe) is not recipe:
            fail(name, f"and another tensor are both the weight {quote(recipe.spec.name)}")
        used.update(recipe.sources, recipe.scales if isinstance(recipe, Decoded) else ())
        if spec.dtype is not DType.U32:
            inputs.update(_input_scales(recipe.spec.name, specs))
    recipes: dict[str, Copied | Decoded | Prequantized] = {**found}
    for name, spec in specs.items():
        if name not in used and name not in inputs:
            if name in found:
                fail(name, "is in the source both plain and quantized")
            _check_plain(spec, stated)
            recipes[name] = Copied(spec, (name,))
    notices = tuple(_notices(found, inputs, _unmatched(specs, stated)))
    return Recognised(recipes, notices, _main_type(found))


def _quantized(
    spec: TensorSpec, specs: Specs, stated: SourceQuantConfig
) -> Decoded | Prequantized | None:
    """Return the recipe of a quantized weight, None if the tensor is none."""
    name, dtype, _ = spec
    if name.endswith(_FOREIGN_ENDS):
        scheme = next(scheme for end, scheme in _FOREIGN.items() if name.endswith(end))
        refuse(spec, f"belongs to a model quantized by {scheme}")
    if name.endswith(".weight_packed"):
        return _packed_bytes(name.removesuffix("_packed"), spec, "_global_scale", specs, stated)
    if dtype is DType.U32:
        return _packed_words(spec, specs, stated)
    if dtype not in _BYTES:
        return None
    if dtype is DType.U8 and name.endswith("_blocks"):
        name = name.removesuffix("_blocks")
        scale = specs.get(f"{name}_scales")
        return fp4_blocks(name, spec, scale) if scale and scale.dtype is DType.U8 else None
    scales = [specs[name + end] for end in ("_scale", "_scale_inv") if name + end in specs]
    if not scales or not (dtype in _FLOAT8 or name.endswith(".weight")):
        return None
    if dtype is DType.U8:
        return _packed_bytes(name, spec, "_scale_2", specs, stated)
    if dtype is DType.I8:
        refuse(spec, "is of 8-bit integers with scales")
    if len(scales) > 1:
        fail(name, "has two tensors of scales")
    _check_symmetric(name, specs)
    return _float8(spec, scales[0], stated.sharings())


def _packed_words(spec: TensorSpec, specs: Specs, stated: SourceQuantConfig) -> Prequantized | None:
    module = spec.name.removesuffix(".weight")
    scale = specs.get(f"{module}.scales")
    if module == spec.name and f"{module}.weight" in specs:
        return None
    if scale is None:
        if f"{module}.biases" in specs:
            fail(spec.name, f"lacks its scales, {quote(f'{module}.scales')}")
        if f"{spec.name}{SCALE}" in specs:
            # Its type is in the metadata of the blob, which is none of a source's.
            fail(spec.name, "is packed as in a blob of a store; create from an export of the model")
        return None
    if f"{module}.global_scale" in specs:
        # MLX's is no factor of the scales, but the largest magnitude that they stand for.
        refuse(spec, "has a global scale in MLX's sense")
    known = stated.mlx_type(spec.name, module)
    return mlx_weight(spec, scale, specs.get(f"{module}.biases"), known)


def _packed_bytes(
    name: str, spec: TensorSpec, factor: str, specs: Specs, stated: SourceQuantConfig
) -> Prequantized:
    if spec.dtype is not DType.U8:
        refuse(spec, "is of packed integers")
    scale = specs.get(f"{name}_scale")
    if scale is None:
        fail(spec.name, f"lacks its scales, {quote(f'{name}_scale')}")
    _check_symmetric(name, specs)
    sizes = stated.group_sizes(4)
    is_reciprocal = factor == "_global_scale"
    return fp4_weight(
        name, spec, scale, specs.get(name + factor), sizes, is_reciprocal=is_reciprocal
    )


def _float8(
    weight: TensorSpec, scale: TensorSpec, stated: Sequence[Sharing]
) -> Decoded | Prequantized:
    check_matrix(weight)
    packed = mxfp8_weight(weight, scale)
    if packed is not None:
        return packed
    *rows, columns = weight.shape
    if scale.dtype not in _FACTORS:
        refuse(weight, f"has scales of type {scale.dtype.value} and shape {list(scale.shape)}")
    block = _block(weight, scale, stated)
    flat = weight._replace(shape=(math.prod(rows), columns))
    plain = weight._replace(dtype=DType.BF16)
    return Decoded(plain, (weight.name,), (scale.name,), flat, scale, block)


def _block(weight: TensorSpec, scale: TensorSpec, stated: Sequence[Sharing]) -> Block:
    """Return the rows and columns that share a scale."""
    sharings = stated or _USUAL_SHARINGS
    blocks = (_shared(weight.shape, scale, sharing) for sharing in sharings)
    block = next(filter(None, blocks), None)
    if block is None:
        ways = " or ".join(map(_shown, sharings))
        said = "by config.json" if stated else "where config.json says nothing"
        fail(
            weight.name,
            f"of shape {list(weight.shape)} has scales of shape {list(scale.shape)}, and {said} "
            f"it has one for each {ways}",
        )
    return block


def _shared(shape: Sequence[int], scale: TensorSpec, sharing: Sharing) -> Block | None:
    """Return the rows and columns that share a scale, None if they do not share them so.

    Stacked weights are taken as one below the other, so none may end within a block.
    """
    *stack, rows, columns = shape
    if sharing == "tensor":
        if scale.elements == 1:
            return math.prod(stack) * rows, columns
        ones = ((*stack, 1, 1)[:count] for count in range(len(stack), len(shape) + 1))
        return (rows, columns) if scale.shape in ones else None
    if sharing == "channel":
        return (1, columns) if scale.shape in ((*stack, rows), (*stack, rows, 1)) else None
    height, width = (min(sharing[0], rows), sharing[1]) if stack else sharing
    fits = scale.shape == (*stack, -(-rows // height), -(-columns // width))
    return (height, width) if fits and not (stack and rows % height) else None


def _shown(sharing: Sharing) -> str:
    return sharing if isinstance(sharing, str) else f"block of {sharing[0]} x {sharing[1]}"


def _check_symmetric(name: str, specs: Specs) -> None:
    if f"{name}_zero_point" in specs:
        refuse(specs[f"{name}_zero_point"], "is of zero points beside scales")


def _check_plain(spec: TensorSpec, stated: SourceQuantConfig) -> None:
    """Check that a tensor that belongs to no quantized weight can stand alone."""
    name, dtype, shape = spec
    if dtype in (*_FLOAT8, *_OTHER_FLOAT8) and name.endswith(".weight"):
        what = "scales" if dtype in _FLOAT8 else "a form that is decoded"
        fail(name, f"({dtype.value}) is of 8-bit floats without {what}; create from BF16 weights")
    if len(shape) < 2:  # noqa: PLR2004 - a matrix
        return
    if stated.is_mlx and dtype is DType.U32:
        fail(name, "is packed by config.json, and its scales are missing")
    method = stated.method
    if method and (dtype in _PACKED or (dtype in _INTEGERS and method not in _METHODS)):
        refuse(spec, f"is packed in a way of {quote(method)} that is not known")


def _input_scales(weight: str, specs: Specs) -> Iterator[str]:
    """Yield the scales of what the weight is multiplied with; whatever runs it makes its own."""
    prefix = weight.removesuffix("weight") if weight.endswith(".weight") else f"{weight}_"
    return (prefix + end for end in _INPUT_SCALES if prefix + end in specs)


def _unmatched(specs: Specs, stated: SourceQuantConfig) -> list[str]:
    modules = {name.rpartition(".")[0] for name in specs} if stated.is_mlx else set()
    return stated.unmatched(modules)


def _notices(
    found: Mapping[str, Decoded | Prequantized], inputs: set[str], unmatched: Sequence[str]
) -> Iterator[str]:
    if inputs:
        yield f"{_counted(len(inputs), 'input scale')} (of activations) left out"
    decoded = sum(isinstance(recipe, Decoded) for recipe in found.values())
    if decoded:
        yield f"{_counted(decoded, 'weight')} of 8-bit floats decoded to BF16"
    if unmatched:
        yield (
            f"config.json gives a type to {_counted(len(unmatched), 'module')} that the source does "
            f"not have, such as {quote(unmatched[0])}"
        )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _main_type(found: Mapping[str, Decoded | Prequantized]) -> str:
    elements: Counter[str] = Counter()
    for recipe in found.values():
        if isinstance(recipe, Prequantized):
            elements[recipe.item.name] += recipe.item.columns(recipe.spec.elements)
        else:
            elements[FLOAT8] += recipe.spec.elements
    # By name where they are equally many: the order of the tensors says nothing.
    return min(elements, key=lambda kind: (-elements[kind], kind), default="")

"""Recipes of weights that a source has packed, in the forms that our types hold without a change.

MLX's own are kept. Those of other tools have the same bits under other names and element types:
packed bytes, lowest bits first, are words of four bytes, and 8-bit scales are relabelled U8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UnsupportedSource
from blobstore.quantization.formats import FORMATS, WORD_BITS
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE, Copied, Prequantized

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Final, NoReturn

    from blobstore.quantization.formats import QuantFormat

    Typed = tuple[QuantFormat, int]

EXPONENTS: Final = (DType.U8, DType.F8_E8M0)
"""Types of scales that are powers of two."""
_FLOATS: Final = (DType.BF16, DType.F16, DType.F32)
_NVFP4, _MXFP4, _MXFP8 = FORMATS["nvfp4"], FORMATS["mxfp4"], FORMATS["mxfp8"]
_WORD_BYTES: Final = WORD_BITS // 8
_BLOCK_BYTES: Final = _MXFP4.group_size * _MXFP4.bits // 8


def mlx_weight(
    weight: TensorSpec, scale: TensorSpec, bias: TensorSpec | None, stated: Typed | None
) -> Prequantized:
    """Return the recipe of a weight that MLX has packed.

    Args:
        weight: the packed words.
        scale: its scales.
        bias: its biases, which affine types have.
        stated: type and group size by the config; None leaves it to the shapes.

    Raises:
        UnsupportedSource: the tensors do not fit each other or what is stated, or fit several types.
    """
    check_matrix(weight)
    item, group_size = _fitting(weight, scale, stated, has_bias=bias is not None)
    expected = _FLOATS if item.has_bias else (DType.U8,)
    if scale.dtype not in expected:
        fail(weight.name, f"is {item.name}, whose scales cannot be {scale.dtype.value}")
    parts = [Copied(weight, (weight.name,)), _companion(weight.name, SCALE, scale)]
    if bias is not None:
        if bias[1:] != scale[1:]:
            fail(weight.name, f"has biases, {_said(bias)}, unlike its scales, {_said(scale)}")
        parts.append(_companion(weight.name, BIAS, bias))
    return Prequantized(tuple(parts), item, group_size)


def fp4_weight(
    name: str,
    weight: TensorSpec,
    scale: TensorSpec,
    factor: TensorSpec | None,
    stated: Collection[int],
    *,
    is_reciprocal: bool,
) -> Prequantized:
    """Return the recipe of 4-bit floats, two a byte: nvfp4, or mxfp4 if the scales are exponents.

    Args:
        name: of the logical tensor.
        weight: the packed bytes.
        scale: the scales of its groups.
        factor: the global scale, which nvfp4 has.
        stated: group sizes by the config, empty if it has none.
        is_reciprocal: the global scale divides, as in compressed-tensors, and does not multiply.

    Raises:
        UnsupportedSource: the tensors do not fit each other, or what is stated.
    """
    item = _MXFP4 if scale.dtype in EXPONENTS else _NVFP4
    if item is _NVFP4 and scale.dtype is not DType.F8_E4M3:
        refuse(weight, f"has packed bytes with scales of type {scale.dtype.value}")
    if stated and item.group_size not in stated:
        sizes = " or ".join(map(str, sorted(stated)))
        fail(
            weight.name,
            f"is {_type((item, item.group_size))} by its scales, {_said(scale)}, and has groups "
            f"of {sizes} by config.json",
        )
    packed = _relabelled(name, weight, scale, item)
    if item is _MXFP4:
        if factor is not None:
            fail(weight.name, f"is mxfp4 by its scales, {_said(scale)}, and has a global scale")
        return packed
    if factor is None:
        fail(weight.name, "lacks its global scale")
    if (factor.dtype, factor.elements) != (DType.F32, 1):
        fail(factor.name, f"must be one F32 number, and is {_said(factor)}")
    part = Copied(factor._replace(name=name + GLOBAL_SCALE), (factor.name,), is_reciprocal)
    # Ollama names no group size for ModelOpt's weights, and equal weights have equal digests.
    group_size = item.group_size if is_reciprocal else None
    return Prequantized((*packed.parts, part), item, group_size)


def fp4_blocks(name: str, weight: TensorSpec, scale: TensorSpec) -> Prequantized:
    """Return the recipe of mxfp4 whose groups are a dimension of their own, as in gpt-oss.

    Raises:
        UnsupportedSource: the tensors do not fit each other.
    """
    if not scale.shape or weight.shape != (*scale.shape, _BLOCK_BYTES):
        fail(
            weight.name,
            f"is {_said(weight)}, and its scales are {_said(scale)}; mxfp4 has {_BLOCK_BYTES} "
            "bytes a scale",
        )
    *rows, groups, width = weight.shape
    return _relabelled(name, weight._replace(shape=(*rows, groups * width)), scale, _MXFP4)


def mxfp8_weight(weight: TensorSpec, scale: TensorSpec) -> Prequantized | None:
    """Return the recipe of 8-bit floats with an exponent for each group, None if they are not so."""
    *rows, columns = weight.shape
    is_so = weight.dtype is DType.F8_E4M3 and scale.dtype in EXPONENTS
    if not is_so or scale.shape != (*rows, -(-columns // _MXFP8.group_size)):
        return None
    return _relabelled(weight.name, weight, scale, _MXFP8)


def check_matrix(weight: TensorSpec) -> None:
    """Check that a weight can be quantized: a matrix or a stack of some, and not empty.

    Raises:
        UnsupportedSource: it cannot.
    """
    if len(weight.shape) not in (2, 3) or not weight.elements:
        fail(
            weight.name,
            f"is quantized and of shape {list(weight.shape)}; expected 2 or 3 dimensions",
        )


def fail(name: str, what: str) -> NoReturn:
    """Raise the error that a tensor contradicts itself, its companions or the config."""
    raise UnsupportedSource(f"tensor {quote(name)} {what}")


def refuse(spec: TensorSpec, what: str) -> NoReturn:
    """Raise the error that a tensor is of a scheme that cannot be kept exactly."""
    raise UnsupportedSource(
        f"tensor {quote(spec.name)} ({spec.dtype.value}) {what}, which no type of a blob holds "
        "as it is; create from the unquantized weights"
    )


def _fitting(
    weight: TensorSpec, scale: TensorSpec, stated: Typed | None, *, has_bias: bool
) -> Typed:
    every = [(item, size) for item in FORMATS.values() for size in item.group_sizes]
    fitting = [
        (item, size)
        for item, size in ([stated] if stated else every)
        if item.has_bias == has_bias and _scale_shape(weight, item, size) == scale.shape
    ]
    if len(fitting) == 1:
        return fitting[0]
    biases = "biases" if has_bias else "no biases"
    facts = f"{_said(weight)} with scales {_said(scale)} and {biases}"
    if stated:
        fail(weight.name, f"is {_type(stated)} by config.json, and {facts} in the file")
    types = " or ".join(map(_type, fitting)) or "no type that is known"
    fail(
        weight.name,
        f"is {facts}: {types}; config.json must say bits, group_size and mode in 'quantization'",
    )


def _scale_shape(weight: TensorSpec, item: QuantFormat, group_size: int) -> tuple[Any, ...] | None:
    """Return the shape of the scales of packed words, None if they are no whole groups."""
    *rows, words = weight.shape
    groups, rest = divmod(words * WORD_BITS, item.bits * group_size)
    return None if rest else (*rows, groups)


def _relabelled(
    name: str, weight: TensorSpec, scale: TensorSpec, item: QuantFormat
) -> Prequantized:
    check_matrix(weight)
    *rows, width = weight.shape
    words, rest = divmod(width, _WORD_BYTES)
    packed = TensorSpec(name, DType.U32, (*rows, words))
    if rest or _scale_shape(packed, item, item.group_size) != scale.shape:
        typed = _type((item, item.group_size))
        fail(weight.name, f"is {_said(weight)} with scales {_said(scale)}, which is no {typed}")
    label = TensorSpec(name + SCALE, DType.U8, scale.shape)
    parts = (Copied(packed, (weight.name,)), Copied(label, (scale.name,)))
    return Prequantized(parts, item, item.group_size)


def _companion(name: str, suffix: str, spec: TensorSpec) -> Copied:
    return Copied(spec._replace(name=name + suffix), (spec.name,))


def _said(spec: TensorSpec) -> str:
    return f"{spec.dtype.value} of shape {list(spec.shape)}"


def _type(typed: Typed) -> str:
    return f"{typed[0].name} in groups of {typed[1]}"

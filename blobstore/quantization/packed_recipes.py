"""The recipes of packed weights: their tensors in a source, checked against each other and the config.

The bytes stay as they are; only names and element types change. See :mod:`blobstore.quantization.detect`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UnsupportedSource
from blobstore.quantization.formats import FORMATS, MAX_GROUP, SYMMETRIC_TYPES, WORD_BITS
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE, Copied, Prequantized

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Final, NoReturn

    from blobstore.quantization.formats import QuantFormat

    Typed = tuple[QuantFormat, int]
    """A type with its group size."""

_EXPONENT_TYPES: Final = (DType.U8, DType.F8_E8M0)
"""Element types of scales that are powers of two."""
_FLOATS: Final = (DType.BF16, DType.F16, DType.F32)
_NVFP4, _MXFP4, _MXFP8 = FORMATS["nvfp4"], FORMATS["mxfp4"], FORMATS["mxfp8"]
_SYMMETRIC: Final = tuple(FORMATS[name] for name in SYMMETRIC_TYPES)
_WORD_BYTES: Final = WORD_BITS // 8
_BLOCK_BYTES: Final = _MXFP4.group_size * _MXFP4.bits // 8


class NotUnderstood(UnsupportedSource):
    """A weight uses a scheme whose values no type holds exactly, or one that is not known for certain."""


def mlx_weight(
    weight: TensorSpec, scale: TensorSpec, bias: TensorSpec | None, declared: Typed | None
) -> Prequantized:
    """Return the recipe of a weight packed by MLX.

    Args:
        weight: the packed words.
        scale: its scales.
        bias: its biases, for affine types.
        declared: type and group size in the config; None to derive them from the shapes.

    Raises:
        UnsupportedSource: the tensors contradict each other or the config, or fit several types.
    """
    check_matrix(weight)
    every = [(item, size) for item in FORMATS.values() for size in item.group_sizes]
    fitting = [
        (item, size)
        for item, size in ([declared] if declared else every)
        if item.has_bias == (bias is not None) and _scale_shape(weight, item, size) == scale.shape
    ]
    if len(fitting) != 1:
        biases = "no biases" if bias is None else "biases"
        facts = f"{shown_spec(weight)} with scales {shown_spec(scale)} and {biases}"
        if declared:
            fail(weight.name, f"is {_type(declared)} by config.json, and {facts} in the file")
        types = " or ".join(map(_type, fitting)) or "no known type"
        fail(
            weight.name,
            f"is {facts}: {types}; config.json must say bits, group_size and mode in "
            "'quantization'",
        )
    ((item, group_size),) = fitting
    expected = _FLOATS if item.has_bias else (DType.U8,)
    if scale.dtype not in expected:
        fail(weight.name, f"is {item.name}, whose scales cannot be {scale.dtype.value}")
    renamed = scale._replace(name=weight.name + SCALE)
    parts = [Copied(weight, (weight.name,)), Copied(renamed, (scale.name,))]
    if bias is not None:
        if bias[1:] != scale[1:]:
            fail(
                weight.name,
                f"has biases, {shown_spec(bias)}, unlike its scales, {shown_spec(scale)}",
            )
        parts.append(Copied(bias._replace(name=weight.name + BIAS), (bias.name,)))
    return Prequantized(tuple(parts), item, group_size)


def fp4_weight(
    name: str,
    weight: TensorSpec,
    scale: TensorSpec,
    factor: TensorSpec | None,
    declared: Collection[int],
    *,
    is_reciprocal: bool,
) -> Prequantized:
    """Return the recipe of 4-bit floats, two per byte: nvfp4, or mxfp4 if the scales are exponents.

    Args:
        name: name of the logical tensor.
        weight: the packed bytes.
        scale: the scales of its groups.
        factor: the global scale, for nvfp4.
        declared: group sizes in the config, if any.
        is_reciprocal: whether the global scale is a divisor, as in compressed-tensors.

    Raises:
        UnsupportedSource: the tensors contradict each other or the config.
    """
    item = _MXFP4 if scale.dtype in _EXPONENT_TYPES else _NVFP4
    if item is _NVFP4 and scale.dtype is not DType.F8_E4M3:
        refuse(weight, f"has packed bytes with scales of type {scale.dtype.value}")
    if declared and item.group_size not in declared:
        sizes = " or ".join(map(str, sorted(declared)))
        fail(
            weight.name,
            f"is {_type((item, item.group_size))} by its scales, {shown_spec(scale)}, and has groups "
            f"of {sizes} by config.json",
        )
    packed = relabelled(name, weight, scale, item)
    if item is _MXFP4:
        if factor is not None:
            refuse(weight, f"is mxfp4 by its scales, {shown_spec(scale)}, and has a global scale")
        return packed
    if factor is None:
        refuse(weight, "lacks its global scale")
    if (factor.dtype, factor.elements) != (DType.F32, 1):
        refuse(factor, f"must be one F32 number, and is {shown_spec(factor)}")
    part = Copied(factor._replace(name=name + GLOBAL_SCALE), (factor.name,), is_reciprocal)
    # Ollama writes no group size for ModelOpt's weights; equal weights must have equal digests.
    group_size = item.group_size if is_reciprocal else None
    return Prequantized((*packed.parts, part), item, group_size)


def fp4_blocks(name: str, weight: TensorSpec, scale: TensorSpec) -> Prequantized:
    """Return the recipe of mxfp4 whose groups are a separate dimension, as in gpt-oss.

    Raises:
        UnsupportedSource: the shapes contradict each other.
    """
    if not scale.shape or weight.shape != (*scale.shape, _BLOCK_BYTES):
        refuse(
            weight,
            f"is {shown_spec(weight)}, and its scales are {shown_spec(scale)}; mxfp4 has {_BLOCK_BYTES} "
            "bytes per scale",
        )
    *rows, groups, width = weight.shape
    return relabelled(name, weight._replace(shape=(*rows, groups * width)), scale, _MXFP4)


def symmetric_weight(
    name: str,
    weight: TensorSpec,
    scale: TensorSpec,
    shape: Sequence[int],
    declared: Collection[tuple[int, int | None]],
) -> Prequantized:
    """Return the recipe of the format ``pack-quantized`` of compressed-tensors without zero points.

    Args:
        name: name of the logical tensor.
        weight: the packed words.
        scale: the scales of its groups, or of its rows.
        shape: the logical shape, as the source has it.
        declared: bits and group sizes in the config, None for a row.

    Raises:
        NotUnderstood: tensors and config do not say the same, or rows are padded.
    """
    if len(weight.shape) != 2 or not weight.elements:  # a matrix
        refuse(weight, f"is of shape {list(weight.shape)}, not of 2 dimensions")
    rows, words = weight.shape
    stated = f"{shown_spec(weight)} with the shape {list(shape)}"
    fitting = [item for item in _SYMMETRIC if [rows, item.columns(words)] == list(shape)]
    if not fitting:
        refuse(weight, f"is {stated}, which is neither int4 nor int8")
    (item,) = fitting
    columns = item.columns(words)
    groups = scale.shape[1] if scale.shape[:1] == (rows,) and len(scale.shape) == 2 else 0
    group_size, rest = divmod(columns, groups) if groups else (0, 1)
    if rest or not item.has_group_size(group_size) or scale.dtype not in _FLOATS:
        refuse(weight, f"is {stated}, which does not fit scales {shown_spec(scale)}")
    is_row = groups == 1 and (item.bits, None) in declared
    if group_size > MAX_GROUP or not (is_row or (item.bits, group_size) in declared):
        typed = _type((item, group_size))
        refuse(weight, f"is {typed} by its shapes, which config.json does not say")
    packed = TensorSpec(name, DType.U32, weight.shape)
    label = scale._replace(name=name + SCALE)
    parts = (Copied(packed, (weight.name,)), Copied(label, (scale.name,)))
    return Prequantized(parts, item, group_size)


def mxfp8_weight(weight: TensorSpec, scale: TensorSpec, source: str = "") -> Prequantized | None:
    """Return the recipe of 8-bit floats with one exponent per group, or None for other scales.

    ``source`` is the name of the scales in the source, if they have another one there.
    """
    *rows, columns = weight.shape
    is_mxfp8 = weight.dtype is DType.F8_E4M3 and scale.dtype in _EXPONENT_TYPES
    if not is_mxfp8 or scale.shape != (*rows, -(-columns // _MXFP8.group_size)):
        return None
    return relabelled(weight.name, weight, scale._replace(name=source or scale.name), _MXFP8)


def tiled_weight(
    weight: TensorSpec, scale: TensorSpec | None, factor: TensorSpec | None, item: QuantFormat
) -> Prequantized:
    """Return the recipe of a weight of ComfyUI whose marker names a type with tiled scales.

    Args:
        weight: packed bytes, or 8-bit floats.
        scale: the scales of its groups.
        factor: the global scale, for 4-bit floats.
        item: the type.

    Raises:
        NotUnderstood: the tensors are not of the type.
    """
    is_fp4 = item.mode == "nvfp4"
    expected = (DType.F8_E4M3,) if is_fp4 else _EXPONENT_TYPES
    if weight.dtype is not (DType.U8 if is_fp4 else DType.F8_E4M3) or len(weight.shape) != 2:
        refuse(weight, f"of shape {list(weight.shape)} is marked as {item.name}")
    if scale is None or scale.dtype not in expected:
        refuse(weight, f"is marked as {item.name} and has no scales of that type")
    packed = relabelled(weight.name, weight, scale, item)
    if is_fp4 != (factor is not None):
        refuse(
            weight, f"is marked as {item.name} and {'lacks' if is_fp4 else 'has'} a global scale"
        )
    if factor is None:
        return packed
    if (factor.dtype, factor.elements) != (DType.F32, 1):
        refuse(factor, f"must be one F32 number, and is {shown_spec(factor)}")
    part = Copied(factor._replace(name=weight.name + GLOBAL_SCALE), (factor.name,))
    return Prequantized((*packed.parts, part), item, item.group_size)


def check_matrix(weight: TensorSpec) -> None:
    """Check that a quantized weight is a matrix or a stack of matrices, and not empty."""
    if len(weight.shape) not in (2, 3) or not weight.elements:
        refuse(weight, f"is of shape {list(weight.shape)}, not of 2 or 3 dimensions")


def fail(name: str, what: str) -> NoReturn:
    """Raise an error about a tensor that contradicts its quantization parameters or the config."""
    raise UnsupportedSource(
        f"tensor {quote(name)} {what}", advice="store the tensors as they are with --as-is"
    )


def refuse(spec: TensorSpec, what: str) -> NoReturn:
    """Raise an error about a tensor whose scheme no type of a blob holds exactly."""
    raise NotUnderstood(f"tensor {quote(spec.name)} ({spec.dtype.value}) {what}")


def _scale_shape(weight: TensorSpec, item: QuantFormat, group_size: int) -> tuple[Any, ...] | None:
    """Return the shape of the scales of packed words, or None if the last group is incomplete."""
    *rows, words = weight.shape
    columns, rest = divmod(words * WORD_BITS, item.bits)
    if rest or columns % group_size:
        return None
    return item.scale_shape(rows, columns, group_size)


def relabelled(name: str, weight: TensorSpec, scale: TensorSpec, item: QuantFormat) -> Prequantized:
    """Return the recipe of a weight whose bytes and scales have other names and element types in blobs.

    Raises:
        NotUnderstood: their shapes are not those of the type.
    """
    check_matrix(weight)
    *rows, width = weight.shape
    words, rest = divmod(width, _WORD_BYTES)
    packed = TensorSpec(name, DType.U32, (*rows, words))
    if rest or _scale_shape(packed, item, item.group_size) != scale.shape:
        typed = _type((item, item.group_size))
        refuse(
            weight,
            f"is {shown_spec(weight)} with scales {shown_spec(scale)}, which is not {typed}",
        )
    label = TensorSpec(name + SCALE, DType.U8, scale.shape)
    parts = (Copied(packed, (weight.name,)), Copied(label, (scale.name,)))
    return Prequantized(parts, item, item.group_size)


def shown_spec(spec: TensorSpec) -> str:
    """Return element type and shape of a tensor as text for messages."""
    return f"{spec.dtype.value} of shape {list(spec.shape)}"


def _type(typed: Typed) -> str:
    return f"{typed[0].name} in groups of {typed[1]}"

"""Quantization in the metadata of a blob: writing and checked reading.

``quant_type`` and ``group_size`` apply to every quantized tensor of a blob without its own
``{name}.quant_type``. Readers do not trust them: type, group size and the shapes of weight and
quantization parameters must agree. ``fp8`` has no groups, but ``block_size``: which values share a scale.
Its scales keep the name that they have in the source.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.tensor import DType
from blobstore.errors import BlobDamaged
from blobstore.quantization.formats import (
    FLOAT8,
    FLOAT8_TYPE,
    FORMATS,
    GGUF_FORMATS,
    SCALE_SUFFIXES,
    WORD_BITS,
    float8_format,
)
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import NoReturn

    from blobstore.core.tensor import TensorSpec
    from blobstore.quantization.formats import QuantFormat, Sharing

    Stated = tuple[str, int | None] | tuple[str, int | None, str]
    """What metadata says of a weight: the values of :data:`KEYS`, the last for fp8 only."""

TYPE, GROUP_SIZE, BLOCK_SIZE = KEYS = ("quant_type", "group_size", "block_size")
_NUMBER = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)
_BLOCK = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", re.ASCII)
_MAX_COLUMNS = 2**48
_FLOAT_SCALES = (DType.BF16, DType.F16, DType.F32)


def stated(item: QuantFormat, group_size: int | None) -> Stated:
    """Return what metadata says of a weight of this type. A group size of None is omitted."""
    layout = item.float8
    if layout is None:
        return item.name, group_size
    sharing = layout.sharing
    block = sharing if isinstance(sharing, str) else f"{sharing[0]}x{sharing[1]}"
    return item.name, group_size, block


def quant_metadata(types: Mapping[str, Stated | None]) -> dict[str, str]:
    """Return the metadata of a blob, written once if all quantized tensors have the same type.

    Args:
        types: the type by tensor name, None for a plain tensor.
    """
    found = {name: known for name, known in types.items() if known is not None}
    # A plain tensor of bytes must not be taken for blocks of the same blob.
    has_blocks = any(known[0] in GGUF_FORMATS for known in found.values())
    is_one = len(set(found.values())) == 1 and not (has_blocks and len(found) < len(types))
    return {
        f"{'' if is_one else f'{name}.'}{key}": str(value)
        for name, known in found.items()
        for key, value in zip(KEYS, known, strict=False)
        if value is not None
    }


def qparam_names(weight: TensorSpec, metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the suffixes of the quantization parameters that a tensor of a blob may have, and their names.

    A tensor without scales among them is plain.
    """
    name, dtype, _ = weight
    if dtype is DType.U32:
        yield from ((suffix, name + suffix) for suffix in (SCALE, BIAS, GLOBAL_SCALE))
    elif dtype in FLOAT8 and _value(name, TYPE, metadata) == FLOAT8_TYPE:
        yield from ((SCALE, name + suffix) for suffix in SCALE_SUFFIXES)


def parse_quant_metadata(
    weight: TensorSpec, qparams: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> tuple[QuantFormat, int] | None:
    """Return type and group size of a quantized weight, or None if the metadata has none.

    Args:
        weight: the weight as stored.
        qparams: its quantization parameters by suffix, at least ``.scale``; none for blocks of GGUF.
        metadata: the metadata of the blob.

    Raises:
        BlobDamaged: the type is unknown, does not support the group size, or does not fit the shapes
            and element types. The message names the tensor.
    """
    name = weight.name
    quant_type = _value(name, TYPE, metadata)
    if not quant_type:
        return None
    if is_blocks(weight, metadata):
        return _parse_blocks(weight, GGUF_FORMATS[quant_type], metadata)
    item = FORMATS.get(quant_type)
    if item is None:
        _fail(name, f"{TYPE} {quote(quant_type)} is unknown; known: {', '.join(FORMATS)}")
    if quant_type == FLOAT8_TYPE:
        item = _parse_float8(weight, qparams, metadata)
        return item, item.group_size
    rows, words, bits = weight.shape[:-1], weight.shape[-1:], item.bits
    if not words or not words[0] or words[0] * WORD_BITS % bits:
        _fail(name, f"{list(weight.shape)} packed words do not make rows of {item.name}")
    columns = item.columns(words[0])
    if columns > _MAX_COLUMNS:  # only possible without rows; arithmetic in libraries would overflow
        _fail(name, f"rows of {columns} elements are too long")
    scale = qparams[SCALE]
    text = _group_size(item, weight, scale, metadata)
    if not _NUMBER.fullmatch(text) or not item.has_group_size(int(text)):
        known = item.group_sizes or filter(None, (item.group_size,))
        sizes = ", ".join(map(str, known)) or "multiples of 32 bits"
        _fail(name, f"{item.name} cannot have a {GROUP_SIZE} of {quote(text)}; possible: {sizes}")
    group_size = int(text)
    if columns % group_size or scale.shape != item.scale_shape(rows, columns, group_size):
        _fail(
            name,
            f"scales of shape {list(scale.shape)} do not fit {item.name} of shape "
            f"{[*rows, columns]} in groups of {group_size}",
        )
    _check_qparams(item, name, qparams)
    return item, group_size


def _group_size(
    item: QuantFormat, weight: TensorSpec, scale: TensorSpec, metadata: Mapping[str, str]
) -> str:
    """Return the group size that metadata state, or that the shapes tell."""
    text = metadata.get(f"{weight.name}.{GROUP_SIZE}") or metadata.get(GROUP_SIZE)
    if item.is_tiled:
        if len(weight.shape) != 2:  # a matrix
            _fail(weight.name, f"{item.name} has 2 dimensions, not {len(weight.shape)}")
        return text or str(item.group_size)
    if text is None:
        groups = scale.shape[-1] if scale.shape else 0
        text = str(item.columns(weight.shape[-1]) // groups if groups else 0)
    return text


def _value(name: str, key: str, metadata: Mapping[str, str]) -> str:
    return metadata.get(f"{name}.{key}") or metadata.get(key, "")


def is_blocks(weight: TensorSpec, metadata: Mapping[str, str]) -> bool:
    """Return whether a tensor of a blob is blocks of GGUF, which need no quantization parameters."""
    if weight.dtype is not DType.U8 or not metadata:
        return False
    return _value(weight.name, TYPE, metadata) in GGUF_FORMATS


def _parse_blocks(
    weight: TensorSpec, item: QuantFormat, metadata: Mapping[str, str]
) -> tuple[QuantFormat, int]:
    name, size = weight.name, str(item.group_size)
    text = metadata.get(f"{name}.{GROUP_SIZE}") or metadata.get(GROUP_SIZE, size)
    if text != size:
        _fail(
            name, f"{item.name} cannot have a {GROUP_SIZE} of {quote(text)}; its blocks have {size}"
        )
    if not weight.shape or weight.shape[-1] % item.block_bytes:
        _fail(
            name,
            f"rows of bytes of shape {list(weight.shape)} are no blocks of {item.name}, which have "
            f"{item.block_bytes} bytes",
        )
    return item, item.group_size


def _parse_float8(
    weight: TensorSpec, qparams: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> QuantFormat:
    name, scale = weight.name, qparams[SCALE]
    block = _value(name, BLOCK_SIZE, metadata)
    sharing: Sharing
    if block in ("tensor", "channel"):
        sharing = block  # type: ignore[assignment] # mypy does not narrow by "in"
    elif match := _BLOCK.fullmatch(block):
        sharing = int(match[1]), int(match[2])
    else:
        _fail(name, f"{BLOCK_SIZE} {quote(block)} is not tensor, channel, or rows x columns")
    if len(qparams) > 1:
        _fail(name, f"{FLOAT8_TYPE} has no quantization parameters but scales")
    item = float8_format(weight, scale, sharing)
    if item is None:
        _fail(
            name,
            f"{weight.dtype.value} of shape {list(weight.shape)} with scales {scale.dtype.value} of "
            f"shape {list(scale.shape)} and {BLOCK_SIZE} {quote(block)} is not {FLOAT8_TYPE}",
        )
    return item


def _check_qparams(item: QuantFormat, name: str, qparams: Mapping[str, TensorSpec]) -> None:
    scale, bias = qparams[SCALE], qparams.get(BIAS)
    expected = _FLOAT_SCALES if item.has_float_scales else (DType.U8,)
    if scale.dtype not in expected:
        _fail(name, f"scales of {item.name} cannot be {scale.dtype.value}")
    if item.has_bias and (bias is None or bias[1:] != scale[1:]):
        _fail(name, f"{item.name} needs biases of the type and shape of the scales")
    if bias is not None and not item.has_bias:
        _fail(name, f"{item.name} has no biases")
    scalar = qparams.get(GLOBAL_SCALE)
    if scalar is not None and item.mode == "symmetric":
        _fail(name, f"{item.name} has no global scale")
    if scalar is not None and (scalar.dtype, scalar.elements) != (DType.F32, 1):
        _fail(name, "a global scale must be one F32 number")


def _fail(name: str, what: str) -> NoReturn:
    raise BlobDamaged(f"tensor {quote(name)}: {what}")

"""Quantization in the metadata of a blob: writing and checked reading.

``quant_type`` and ``group_size`` apply to every quantized tensor of a blob without its own
``{name}.quant_type``. Readers do not trust them: type, group size and the shapes of weight and companions
must agree.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.tensor import DType
from blobstore.errors import BlobDamaged
from blobstore.quantization.formats import FORMATS, WORD_BITS
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from blobstore.core.tensor import TensorSpec
    from blobstore.quantization.formats import QuantFormat

TYPE, GROUP_SIZE = "quant_type", "group_size"
_NUMBER = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)
_MAX_COLUMNS = 2**48
_AFFINE_SCALES = (DType.BF16, DType.F16, DType.F32)


def quant_metadata(types: Mapping[str, tuple[str, int | None] | None]) -> dict[str, str]:
    """Return the metadata of a blob, written once if all quantized tensors have the same type.

    Args:
        types: type and group size by tensor name, None for a plain tensor. A group size of None is
            omitted.
    """
    found = {name: known for name, known in types.items() if known is not None}
    is_one = len(set(found.values())) == 1
    metadata: dict[str, str] = {}
    for name, (quant_type, group_size) in found.items():
        prefix = "" if is_one else f"{name}."
        metadata[prefix + TYPE] = quant_type
        if group_size is not None:
            metadata[prefix + GROUP_SIZE] = str(group_size)
    return metadata


def parse_quant_metadata(
    weight: TensorSpec, companions: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> tuple[QuantFormat, int] | None:
    """Return type and group size of a packed weight, or None if the metadata has none.

    Args:
        weight: the packed weight.
        companions: its companions by suffix, at least ``.scale``.
        metadata: the metadata of the blob.

    Raises:
        BlobDamaged: the type is unknown, does not support the group size, or does not fit the shapes
            and element types. The message names the tensor.
    """
    name = weight.name
    quant_type = metadata.get(f"{name}.{TYPE}") or metadata.get(TYPE, "")
    if not quant_type:
        return None
    item = FORMATS.get(quant_type)
    if item is None:
        _fail(name, f"{TYPE} {quote(quant_type)} is unknown; known: {', '.join(FORMATS)}")
    rows, words, bits = weight.shape[:-1], weight.shape[-1:], item.bits
    if not words or not words[0] or words[0] * WORD_BITS % bits:
        _fail(name, f"{list(weight.shape)} packed words do not make rows of {item.name}")
    columns = item.columns(words[0])
    if columns > _MAX_COLUMNS:  # only possible without rows; arithmetic in libraries would overflow
        _fail(name, f"rows of {columns} elements are too long")
    scale = companions[SCALE]
    text = metadata.get(f"{name}.{GROUP_SIZE}") or metadata.get(GROUP_SIZE)
    if text is None:  # derive it from the shapes
        groups = scale.shape[-1] if scale.shape else 0
        text = str(columns // groups if groups else 0)
    if not _NUMBER.fullmatch(text) or int(text) not in item.group_sizes:
        sizes = ", ".join(map(str, item.group_sizes))
        _fail(name, f"{item.name} cannot have a {GROUP_SIZE} of {quote(text)}; possible: {sizes}")
    group_size = int(text)
    if columns % group_size or scale.shape != (*rows, columns // group_size):
        _fail(
            name,
            f"scales of shape {list(scale.shape)} do not fit {item.name} of shape "
            f"{[*rows, columns]} in groups of {group_size}",
        )
    _check_companions(item, name, companions)
    return item, group_size


def _check_companions(item: QuantFormat, name: str, companions: Mapping[str, TensorSpec]) -> None:
    scale, bias = companions[SCALE], companions.get(BIAS)
    expected = _AFFINE_SCALES if item.has_bias else (DType.U8,)
    if scale.dtype not in expected:
        _fail(name, f"scales of {item.name} cannot be {scale.dtype.value}")
    if item.has_bias and (bias is None or bias[1:] != scale[1:]):
        _fail(name, f"{item.name} needs biases of the type and shape of the scales")
    if bias is not None and not item.has_bias:
        _fail(name, f"{item.name} has no biases")
    scalar = companions.get(GLOBAL_SCALE)
    if scalar is not None and (scalar.dtype, scalar.elements) != (DType.F32, 1):
        _fail(name, "a global scale must be one F32 number")


def _fail(name: str, what: str) -> NoReturn:
    raise BlobDamaged(f"tensor {quote(name)}: {what}")

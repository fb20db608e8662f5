"""The layout of gpt-oss folders: mxfp4 experts with groups as a dimension, or transposed plain values.

``X_blocks`` has the packed bytes ``[..., outputs, groups, 16]`` and ``X_scales`` their exponents. The
same weights as plain values are ``X`` of shape ``[..., inputs, outputs]``, because transformers multiplies
by them from the right. A blob holds ``X`` packed, as ``[..., outputs, words]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.tensor import DType, TensorSpec
from blobstore.quantization.formats import FORMATS, WORD_BITS
from blobstore.quantization.source_config import SourceQuantConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Final

METHOD: Final = "mxfp4"
"""Its ``quant_method`` in ``config.json``."""
_FORMAT: Final = FORMATS["mxfp4"]
_WORD_BYTES: Final = WORD_BITS // 8
_BLOCK_BYTES: Final = _FORMAT.group_size * _FORMAT.bits // 8


def is_gpt_oss(config: Any, weights: Sequence[tuple[str, tuple[int, ...], Any]]) -> bool:
    """Return whether a model's packed weights come from a gpt-oss source.

    Args:
        config: the decoded ``config.json``; any JSON value.
        weights: name, logical shape and quantization type of each weight.
    """
    quant_config = SourceQuantConfig(config if isinstance(config, dict) else {})
    if not weights or quant_config.is_mlx or quant_config.method != METHOD:
        return False
    return all(
        item is _FORMAT and not name.endswith(".weight") and len(shape) in (2, 3) and all(shape)
        for name, shape, item in weights
    )


def folder_spec(spec: TensorSpec) -> TensorSpec:
    """Return the spec in such a folder of packed words, their scales, or a plain weight."""
    name, dtype, (*stack, rows, columns) = spec
    if dtype is DType.U8:
        return spec._replace(name=f"{name.removesuffix('.scales')}_scales")
    if dtype is DType.U32:
        shape = (*stack, rows, columns * _WORD_BYTES // _BLOCK_BYTES, _BLOCK_BYTES)
        return TensorSpec(f"{name}_blocks", DType.U8, shape)
    return spec._replace(shape=(*stack, columns, rows))

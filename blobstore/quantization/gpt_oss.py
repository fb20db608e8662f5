"""How gpt-oss holds its experts: mxfp4, groups a dimension of their own; and plain, transposed.

``X_blocks`` has the packed bytes ``[..., outputs, groups, 16]`` and ``X_scales`` their exponents; the
same weights as plain numbers are ``X`` of shape ``[..., inputs, outputs]``, for transformers multiplies
with them from the right. A blob holds ``X`` packed as it is, ``[..., outputs, words]``.
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
"""What ``quant_method`` in ``config.json`` calls it."""
_FORMAT: Final = FORMATS["mxfp4"]
_WORD_BYTES: Final = WORD_BITS // 8
_BLOCK_BYTES: Final = _FORMAT.group_size * _FORMAT.bits // 8


def is_form_of(config: Any, weights: Sequence[tuple[str, tuple[int, ...], Any]]) -> bool:
    """Return whether a model's packed weights come from such a source.

    Args:
        config: the decoded ``config.json``, of whatever form.
        weights: name, logical shape and quantization type of each.
    """
    stated = SourceQuantConfig(config if isinstance(config, dict) else {})
    if not weights or stated.is_mlx or stated.method != METHOD:
        return False
    return all(
        item is _FORMAT and not name.endswith(".weight") and len(shape) in (2, 3) and all(shape)
        for name, shape, item in weights
    )


def folder_spec(spec: TensorSpec) -> TensorSpec:
    """Return how such a folder holds packed words, their scales, or the plain numbers of a weight."""
    name, dtype, (*stack, rows, columns) = spec
    if dtype is DType.U8:
        return spec._replace(name=f"{name.removesuffix('.scales')}_scales")
    if dtype is DType.U32:
        shape = (*stack, rows, columns * _WORD_BYTES // _BLOCK_BYTES, _BLOCK_BYTES)
        return TensorSpec(f"{name}_blocks", DType.U8, shape)
    return spec._replace(shape=(*stack, columns, rows))

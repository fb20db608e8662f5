"""Packed weights as plain MLX arrays, on any device.

MLX also quantizes, but :mod:`blobstore.quantize.reference` gives the same bytes in less time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from blobstore.quantize.formats import QuantFormat

_MLX_GLOBAL_SCALE = 448 * 6
"""MLX divides a global scale by the largest product of an E4M3 scale and an E2M1 number."""


def dequantize(
    weight: Any,
    scale: Any,
    bias: Any,
    item: QuantFormat,
    group_size: int,
    dtype: str,
    global_scale: float | None = None,
) -> Any:
    """Return packed numbers as an MLX array of ``dtype``, computed on its default device.

    Args:
        weight: ``mlx.core.array`` of uint32 words, shape ``(..., words)``.
        scale: one a group.
        bias: one a group for affine types, else None.
        item: the quantization type.
        group_size: elements that share a scale.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        global_scale: what all numbers of an nvfp4 weight are multiplied with too.
    """
    wanted = getattr(mx, dtype)
    options: dict[str, Any] = {"dtype": wanted}
    if global_scale is not None:
        # MLX then gives float32, whatever it is asked for.
        options = {"global_scale": mx.array(global_scale * _MLX_GLOBAL_SCALE, dtype=mx.float32)}
    result = mx.dequantize(
        weight, scale, bias, group_size=group_size, bits=item.bits, mode=item.mode, **options
    )
    return result if result.dtype == wanted else result.astype(wanted)

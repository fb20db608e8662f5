"""Dequantizes packed weights to MLX arrays, on any device.

MLX can quantize too, but :mod:`blobstore.quantization.numpy` produces the same bytes faster.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from blobstore.core.tensor import DType, TensorSpec
from blobstore.safetensors.numpy import as_array

if TYPE_CHECKING:
    from blobstore.quantization.formats import Float8Layout, QuantFormat

_E4M3_ONE = 0x38
_NAN_BITS = {mx.bfloat16: (mx.uint16, 0x7FC0), mx.float16: (mx.uint16, 0x7E00)}
_NAN_BITS[mx.float32] = (mx.uint32, 0x7FC00000)


def dequantize(
    weight: Any,
    scale: Any,
    bias: Any,
    item: QuantFormat,
    group_size: int,
    dtype: str,
    global_scale: float | None = None,
) -> Any:
    """Return packed values as an MLX array of ``dtype``, computed on its default device.

    Args:
        weight: ``mlx.core.array`` of uint32 words, shape ``(..., words)``, or the bits of an fp8
            weight as uint8.
        scale: one value per group.
        bias: one value per group for affine types, else None.
        item: the quantization type.
        group_size: elements that share a scale.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        global_scale: factor of the scales of an nvfp4 weight, in float32.
    """
    options: dict[str, Any] = {"group_size": group_size, "bits": item.bits, "mode": item.mode}
    wanted = getattr(mx, dtype)
    if item.float8 is not None:
        return _decode(weight, scale, item.float8, wanted)
    if not weight.size:  # MLX cannot reshape an empty array
        return mx.zeros((*weight.shape[:-1], item.columns(weight.shape[-1])), dtype=wanted)
    if weight.ndim == 1:
        row = None if bias is None else bias[None]
        return dequantize(weight[None], scale[None], row, item, group_size, dtype, global_scale)[0]
    if item.mode == "nvfp4" and scale.size % 2:  # MLX processes two groups at a time
        words, scales = (mx.concatenate([array, array], axis=-2) for array in (weight, scale))
        found = dequantize(words, scales, None, item, group_size, dtype, global_scale)
        return found[..., : weight.shape[-2], :]
    if global_scale is None:
        return mx.dequantize(weight, scale, bias, dtype=wanted, **options)
    # MLX's global scale is 2688 times as large, and dividing by that would not be exact.
    ones = mx.full(scale.shape, _E4M3_ONE, dtype=mx.uint8)
    numbers = mx.dequantize(weight, ones, dtype=mx.float32, **options)
    factors = mx.from_fp8(scale, dtype=mx.float32) * mx.array(global_scale, dtype=mx.float32)
    groups = mx.unflatten(numbers, -1, (scale.shape[-1], group_size))
    return mx.flatten(groups * factors[..., None], -2).astype(wanted)


def _decode(weight: Any, scale: Any, layout: Float8Layout, dtype: Any) -> Any:
    """Return 8-bit floats times their scales, as :func:`blobstore.quantization.fp8.decode` does."""
    if not weight.size:
        return mx.zeros(weight.shape, dtype=dtype)
    (height, width), grid = layout.blocks(weight.shape)
    factors = _values(layout.scale)[scale] if layout.scale is DType.F8_E8M0 else scale
    factors = mx.broadcast_to(
        factors.astype(mx.float32).reshape(grid if scale.size > 1 else ()), grid
    )
    values = _values(layout.weight)[weight].reshape(-1, weight.shape[-1])
    rows, columns = (mx.arange(size) for size in values.shape)
    products = values * factors[rows // height][:, columns // width]
    kind, nan = _NAN_BITS[dtype]
    bits = products.astype(dtype).view(kind)
    return mx.where(mx.isnan(products), mx.array(nan, kind), bits).view(dtype).reshape(weight.shape)


@functools.cache
def _values(dtype: DType) -> Any:
    """Return the values of the 256 codes of a type; MLX knows E4M3 only."""
    codes = memoryview(bytes(range(256)))
    return mx.array(as_array(codes, 0, TensorSpec("", dtype, (256,))).astype(np.float32))

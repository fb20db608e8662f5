"""Dequantizes packed weights to MLX arrays, on any device.

MLX can quantize too, but :mod:`blobstore.quantization.quantize_numpy` produces the same bytes faster.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from blobstore.core.tensor import DType, TensorSpec
from blobstore.quantization.fp8 import decode_stack
from blobstore.quantization.tiles import untiled
from blobstore.safetensors.mlx import copied
from blobstore.safetensors.numpy import as_array

if TYPE_CHECKING:
    from blobstore.quantization.formats import Float8Layout, QuantFormat

_E4M3_ONE = 0x38
_FLOATS = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F32}


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
    if item.float8 is not None:
        return _decode(weight, scale, item.float8, dtype)
    if item.block_bytes:
        from blobstore.gguf.dequantize import dequantize as dequantize_blocks  # few models

        blocks = as_array(memoryview(weight), 0, TensorSpec("", DType.U8, weight.shape))
        values = dequantize_blocks(item.gguf_name, blocks)
        return copied(values, TensorSpec("", DType.F32, values.shape)).astype(getattr(mx, dtype))
    wanted = getattr(mx, dtype)
    if not weight.size:  # MLX cannot reshape an empty array
        return mx.zeros((*weight.shape[:-1], item.columns(weight.shape[-1])), dtype=wanted)
    if weight.ndim == 1:
        row = None if bias is None else bias[None]
        return dequantize(weight[None], scale[None], row, item, group_size, dtype, global_scale)[0]
    if item.mode == "symmetric":
        return _symmetric(weight, scale, item, group_size).astype(wanted)
    if item.is_tiled:
        scale = untiled(scale, weight.shape[0], item.columns(weight.shape[1]) // group_size)
        if item.bits == 4:  # half a byte
            codes = weight.view(mx.uint8)
            weight = (codes >> 4 | codes << 4).view(mx.uint32)
    if item.mode == "nvfp4" and scale.size % 2:  # MLX processes two groups at a time
        words, scales = (mx.concatenate([array, array], axis=-2) for array in (weight, scale))
        found = dequantize(
            words, scales, None, replace(item, is_tiled=False), group_size, dtype, global_scale
        )
        return found[..., : weight.shape[-2], :]
    if global_scale is None:
        return mx.dequantize(weight, scale, bias, dtype=wanted, **options)
    # MLX's global scale is 2688 times as large, and dividing by that would not be exact.
    ones = mx.full(scale.shape, _E4M3_ONE, dtype=mx.uint8)
    numbers = mx.dequantize(weight, ones, dtype=mx.float32, **options)
    factors = mx.from_fp8(scale, dtype=mx.float32) * mx.array(global_scale, dtype=mx.float32)
    groups = mx.unflatten(numbers, -1, (scale.shape[-1], group_size))
    return mx.flatten(groups * factors[..., None], -2).astype(wanted)


def _symmetric(words: Any, scale: Any, item: QuantFormat, group_size: int) -> Any:
    """Return integers times their scales. MLX would round the product before it adds an offset."""
    codes = words.view(mx.uint8)
    if item.bits == 4:  # half a byte
        codes = mx.flatten(mx.stack([codes & 15, codes >> 4], axis=-1), -2)
    numbers = codes.astype(mx.float32) - item.offset
    groups = mx.unflatten(numbers, -1, (scale.shape[-1], group_size))
    return mx.flatten(groups * scale.astype(mx.float32)[..., None], -2).astype(scale.dtype)


def _decode(weight: Any, scale: Any, layout: Float8Layout, dtype: str) -> Any:
    """Return 8-bit floats times their scales. MLX knows E4M3 only, and would take longer."""
    arrays = [
        as_array(
            memoryview(mx.reshape(array, (-1,)).view(mx.uint8)),  # type: ignore[arg-type]
            0,
            TensorSpec("", kind, array.shape),
        )
        for array, kind in ((weight, layout.weight), (scale, layout.scale))
    ]
    found = decode_stack(arrays[0], arrays[1], layout, dtype)
    return copied(found, TensorSpec("", _FLOATS[dtype], found.shape))

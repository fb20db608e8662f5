"""Quantization by MLX, on the processor and from any number of threads; on its own arrays, anywhere."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from blobstore.quantize.reference import Quantized
from blobstore.safetensors.mlx import as_mlx
from blobstore.safetensors.numpy import BF16, as_bytes
from blobstore.tensor import DType, TensorSpec

if TYPE_CHECKING:
    from blobstore.quantize.formats import QuantFormat

    Array = np.ndarray[Any, Any]

_DTYPES = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16}
_MLX_GLOBAL_SCALE = 448 * 6
"""MLX divides a global scale by the largest product of an E4M3 scale and an E2M1 number."""
_threads = threading.local()


def quantize(array: Array, item: QuantFormat, group_size: int) -> Quantized:
    """Quantize finite numbers as :func:`blobstore.quantize.reference.quantize` does, bit for bit.

    The work is on the processor whatever MLX's default device is, and lets go of the interpreter's
    lock. MLX takes many times as long as numpy for nvfp4 and mxfp4.
    """
    spec = TensorSpec("", _DTYPES[array.dtype.name], array.shape)
    with mx.stream(_stream()):
        numbers = as_mlx(as_bytes(array), 0, spec)
        results = mx.quantize(numbers, group_size=group_size, bits=item.bits, mode=item.mode)
        mx.eval(*results)
    weight, scale, *bias = map(_as_numpy, results)
    return Quantized(weight, scale, bias[0] if bias else None)


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


def _stream() -> Any:
    """Return a stream of this thread: MLX runs a stream's work on the thread that made it."""
    if not hasattr(_threads, "stream"):
        _threads.stream = mx.new_stream(mx.cpu)
    return _threads.stream


def _as_numpy(array: Any) -> Array:
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16), copy=False).view(BF16)
    return np.array(array, copy=False)

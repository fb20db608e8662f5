"""Blobs of weights whose scales are tensors of their own, as MLX and libraries of 8-bit floats make them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from blobstore.compression.quant_rule import to_float32
from blobstore.core.tensor import DType
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.quantize_numpy import quantize
from tests.support.models import blob

Array = np.ndarray[Any, Any]
NUMPY: dict[DType, Any] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
}


def typed(matrix: Array, dtype: DType) -> Array:
    """Return weights, bfloat16 as uint16, as an array of a type."""
    return to_float32(matrix).astype(NUMPY[dtype])


def mlx_blob(name: str, matrix: Array, bits: int, group_size: int, scale: DType) -> bytes:
    """Return the blob of a matrix, or of a stack, that MLX has quantized after it was cast to the type of scales."""
    found = quantize(typed(matrix, scale), FORMATS[f"int{bits}"], group_size)
    assert found.bias is not None
    tensors = {"": found.weight, ".scale": found.scale, ".bias": found.bias}
    items = [
        (name + suffix, "U32" if not suffix else scale.value, item.shape, item.tobytes())
        for suffix, item in tensors.items()
    ]
    return blob(*items, quant_type=f"int{bits}", group_size=str(group_size))


def float8_codes(
    matrix: Array, scales: Array, block: tuple[int, int], quotient: DType = DType.F32
) -> Array:
    """Return the codes of a matrix, with the scales of its blocks."""
    rows, columns = matrix.shape
    factors = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[:rows, :columns]
    quotients = np.clip(to_float32(matrix) / factors, -448, 448).astype(NUMPY[quotient])
    codes: Array = quotients.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


def block_scales(matrix: Array, block: tuple[int, int]) -> Array:
    """Return the scales with which the largest weight of each block becomes 448."""
    rows, columns = (-(-size // part) for size, part in zip(matrix.shape, block, strict=True))
    padded = np.zeros((rows * block[0], columns * block[1]), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = np.abs(to_float32(matrix))
    peaks: Array = padded.reshape(rows, block[0], columns, block[1]).max((1, 3))
    return peaks / np.float32(448)


def float8_blob(
    name: str,
    matrix: Array,
    block: tuple[int, int],
    quotient: DType = DType.F32,
    scale: str = "F32",
) -> bytes:
    """Return the blob of a matrix as 8-bit floats with a scale of F32, or E8M0, for each block."""
    scales = block_scales(matrix, block)
    if scale == "F8_E8M0":
        exponents = np.ceil(np.log2(scales)).astype(np.int32)
        scales = np.ldexp(np.float32(1), exponents)
    codes = float8_codes(matrix, scales, block, quotient)
    if scale == "F8_E8M0":
        scales = (exponents + 127).astype(np.uint8)
    return blob(
        (name, "F8_E4M3", matrix.shape, codes.tobytes()),
        (f"{name}_scale_inv", scale, scales.shape, scales.tobytes()),
        quant_type="fp8",
        block_size=f"{block[0]}x{block[1]}",
    )

"""Converts bytes of tensors to MLX arrays. MLX cannot use existing memory, so each array is a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from blobstore.core.escape import quote
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UnsupportedDType
from blobstore.safetensors.numpy import as_array

if TYPE_CHECKING:
    import mmap

_AS_BYTES = frozenset(
    {DType.F8_E5M2, DType.F8_E4M3, DType.F8_E8M0, DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ}
)


def as_mlx(memory: mmap.mmap | memoryview, offset: int, spec: TensorSpec) -> Any:
    """Return the tensor ``spec`` at ``offset`` of ``memory`` as a new ``mlx.core.array``.

    8-bit floats become uint8 with the same bits, as in ``mx.load``.

    Raises:
        UnsupportedDType: MLX has no packed type of 4 or 6 bits, or cannot hold the shape.
    """
    return copied(as_array(memory, offset, spec), spec)


def copied(array: np.ndarray[Any, Any], spec: TensorSpec) -> Any:
    """Return the tensor ``spec``, given as a numpy array, as a new ``mlx.core.array``.

    Raises:
        UnsupportedDType: MLX cannot hold the shape.
    """
    try:
        if spec.dtype is DType.BF16:
            return mx.array(array.view(np.uint16)).view(mx.bfloat16)
        if spec.dtype in _AS_BYTES:
            return mx.array(array.view(np.uint8))
        if spec.dtype is DType.F64:  # mx.array() alone would round to float32
            return mx.array(array, dtype=mx.float64)
        return mx.array(array)
    except OverflowError as error:  # MLX counts a dimension in 32 bits
        raise UnsupportedDType(
            f"tensor {quote(spec.name)}: MLX cannot hold its shape: {error}"
        ) from None

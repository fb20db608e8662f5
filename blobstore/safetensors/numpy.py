"""Converts bytes of tensors to numpy arrays and back, without copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from blobstore.core.escape import quote
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UnsupportedDType

if TYPE_CHECKING:
    import mmap

BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_DTYPES: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype(code)
    for dtype, code in {
        DType.BOOL: "?",
        DType.U8: "u1",
        DType.I8: "i1",
        DType.F8_E5M2: ml_dtypes.float8_e5m2,
        DType.F8_E4M3: ml_dtypes.float8_e4m3fn,
        DType.F8_E8M0: ml_dtypes.float8_e8m0fnu,
        DType.F8_E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
        DType.F8_E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
        DType.I16: "<i2",
        DType.U16: "<u2",
        DType.F16: "<f2",
        DType.BF16: BF16,
        DType.I32: "<i4",
        DType.U32: "<u4",
        DType.F32: "<f4",
        DType.C64: "<c8",
        DType.F64: "<f8",
        DType.I64: "<i8",
        DType.U64: "<u8",
    }.items()
}


def as_array(memory: mmap.mmap | memoryview, offset: int, spec: TensorSpec) -> np.ndarray[Any, Any]:
    """Return the tensor ``spec`` at ``offset`` of ``memory`` as an array that views the memory.

    The array is writable only if the memory is. It may be unaligned, which numpy supports.

    Raises:
        UnsupportedDType: numpy has no packed type of 4 or 6 bits, or cannot hold the shape.
    """
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        raise UnsupportedDType(
            f"tensor {quote(spec.name)}: numpy has no packed {spec.dtype.value}; "
            "read its bytes with Model.view()"
        )
    elements = spec.elements
    try:
        if not elements:
            return np.empty(spec.shape, dtype)
        return np.frombuffer(memory, dtype, elements, offset).reshape(spec.shape)
    except ValueError as error:  # over 64 dimensions, or dimensions of size 0 and very large ones
        raise UnsupportedDType(
            f"tensor {quote(spec.name)}: numpy cannot hold its shape: {error}"
        ) from None


def as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array in C order, as a view if it is contiguous.

    Uses a view of bytes, because numpy exports no buffers of types from extensions, such as bfloat16.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

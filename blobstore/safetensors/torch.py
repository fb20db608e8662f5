"""Bytes of tensors as torch tensors, without a copy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from blobstore.errors import UnsupportedDType
from blobstore.tensor import DType, TensorSpec
from blobstore.text import quoted

if TYPE_CHECKING:
    import mmap

_DTYPES = {
    DType.BOOL: torch.bool,
    DType.U8: torch.uint8,
    DType.I8: torch.int8,
    DType.F8_E5M2: torch.float8_e5m2,
    DType.F8_E4M3: torch.float8_e4m3fn,
    DType.F8_E8M0: torch.float8_e8m0fnu,
    DType.F8_E4M3FNUZ: torch.float8_e4m3fnuz,
    DType.F8_E5M2FNUZ: torch.float8_e5m2fnuz,
    DType.I16: torch.int16,
    DType.U16: torch.uint16,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.I32: torch.int32,
    DType.U32: torch.uint32,
    DType.F32: torch.float32,
    DType.C64: torch.complex64,
    DType.F64: torch.float64,
    DType.I64: torch.int64,
    DType.U64: torch.uint64,
}


def as_tensor(memory: mmap.mmap | memoryview, offset: int, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor ``spec`` at ``offset`` of ``memory`` as a tensor that views the memory.

    The memory must be writable: torch has no read-only tensors. F4 becomes torch's type of pairs,
    with half the last dimension.

    Raises:
        UnsupportedDType: torch has no type of 6 bits, F4 has an odd last dimension, or torch
            cannot hold the shape.
    """
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        return _pairs(memory, offset, spec)
    elements = math.prod(spec.shape)  # not by the property: a model has thousands
    if not elements:
        try:
            return torch.empty(spec.shape, dtype=dtype)
        except (RuntimeError, TypeError):  # none of some dimensions and too many of others
            message = f"tensor {quoted(spec.name)}: torch cannot hold its shape"
            raise UnsupportedDType(message) from None
    flat = torch.frombuffer(memory, dtype=dtype, count=elements, offset=offset)
    return flat if len(spec.shape) == 1 else torch.reshape(flat, spec.shape)


def _pairs(memory: mmap.mmap | memoryview, offset: int, spec: TensorSpec) -> torch.Tensor:
    if spec.dtype is not DType.F4 or not spec.shape or spec.shape[-1] % 2:
        message = (
            f"tensor {quoted(spec.name)}: torch has no type for {spec.dtype.value} of shape "
            f"{list(spec.shape)}; read its bytes with Model.view()"
        )
        raise UnsupportedDType(message)
    shape = (*spec.shape[:-1], spec.shape[-1] // 2)
    packed = as_tensor(memory, offset, TensorSpec(spec.name, DType.U8, shape))
    return packed.view(torch.float4_e2m1fn_x2)

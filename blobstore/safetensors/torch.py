"""Converts bytes of tensors to torch tensors, without copies on the CPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from blobstore.core.escape import escape, quote
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobstoreError, UnsupportedDType, UsageError

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

    The memory must be writable, because torch has no read-only tensors. F4 becomes torch's packed
    type with two values per item, which halves the last dimension.

    Raises:
        UnsupportedDType: torch has no type of 6 bits, F4 has an odd last dimension, or torch
            cannot hold the shape.
    """
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        return as_tensor(memory, offset, _bytes_of_pairs(spec)).view(torch.float4_e2m1fn_x2)
    elements = math.prod(spec.shape)  # faster than the property; a model has thousands of tensors
    if not elements:
        return empty_tensor(spec, torch.device("cpu"))
    flat = torch.frombuffer(memory, dtype=dtype, count=elements, offset=offset)
    return flat if len(spec.shape) == 1 else torch.reshape(flat, spec.shape)


def empty_tensor(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor for ``spec`` in the memory of ``device``.

    Raises:
        UnsupportedDType: see :func:`as_tensor`.
        BlobstoreError: the device has too little memory.
    """
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        return empty_tensor(_bytes_of_pairs(spec), device).view(torch.float4_e2m1fn_x2)
    try:
        return torch.empty(spec.shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError:
        raise _out_of_memory(device, spec) from None
    except (RuntimeError, TypeError):
        if math.prod(spec.shape):
            raise
        # dimensions of size 0 and very large ones
        raise UnsupportedDType(f"tensor {quote(spec.name)}: torch cannot hold its shape") from None


def with_type(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a view of a tensor whose bytes are read as the element type of ``spec``."""
    return tensor.view(_DTYPES[spec.dtype])


def copy_to(device: str, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return ``tensor``, described by ``spec``, in the memory of ``device``.

    Raises:
        BlobstoreError: the device has too little memory.
    """
    try:
        return tensor.to(device)
    except torch.OutOfMemoryError:
        raise _out_of_memory(device, spec) from None


def check_device(device: str) -> None:
    """Check that torch can use a device.

    Raises:
        UsageError: it cannot.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = escape(str(error).partition("\n")[0])
        raise UsageError(f"torch has no device {quote(device)} here: {reason}") from None


def _bytes_of_pairs(spec: TensorSpec) -> TensorSpec:
    """Return the spec of the bytes that hold a tensor of packed 4-bit pairs."""
    if spec.dtype is not DType.F4 or not spec.shape or spec.shape[-1] % 2:
        raise UnsupportedDType(
            f"tensor {quote(spec.name)}: torch has no type for {spec.dtype.value} of shape "
            f"{list(spec.shape)}; read its bytes with Model.view()"
        )
    return TensorSpec(spec.name, DType.U8, (*spec.shape[:-1], spec.shape[-1] // 2))


def _out_of_memory(device: object, spec: TensorSpec) -> BlobstoreError:
    return BlobstoreError(
        f"{device} has no memory left for tensor {quote(spec.name)} of {spec.nbytes} bytes; "
        "use another device, or load fewer tensors at a time"
    )

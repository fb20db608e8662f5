"""Copies the elements of a strided tensor to C order. Kept apart because it imports numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.core.tensor import DType
from blobstore.safetensors.numpy import as_array, as_bytes

if TYPE_CHECKING:
    from blobstore.sources.pytorch.tensors import Storage, StridedTensor


def swapped(data: bytearray, storage: Storage) -> bytearray:
    """Swap the bytes of every element of a storage. A complex element is two numbers."""
    size = storage.itemsize // 2 if storage.kind.startswith("Complex") else storage.itemsize
    numbers = np.frombuffer(data, f"u{size}")
    numbers.byteswap(inplace=True)
    return data


def gathered(tensor: StridedTensor, data: bytearray) -> memoryview:
    """Return the bytes of a tensor in C order.

    Args:
        tensor: the tensor, whose sizes and strides the caller has checked to stay within ``data``.
        data: the bytes of its storage, from its first to its last element.
    """
    itemsize = tensor.itemsize
    elements: np.ndarray[Any, Any] = np.frombuffer(data, f"u{itemsize}")
    shape = tensor.spec.shape
    if tensor.spec.dtype is DType.F4:
        shape = (*shape[:-1], shape[-1] // 2)
    # The stride of a dimension of size 1 is never used, and can have any value.
    steps = [
        step * itemsize if size > 1 else 0 for size, step in zip(shape, tensor.stride, strict=True)
    ]
    strided = np.lib.stride_tricks.as_strided(elements, shape, steps, writeable=False)
    ordered = as_bytes(strided)
    if not tensor.is_conjugated and not tensor.is_negated:
        return ordered
    numbers = as_array(ordered, 0, tensor.spec)
    if tensor.is_conjugated:
        numbers = np.conjugate(numbers)
    return as_bytes(-numbers if tensor.is_negated else numbers)

"""Elements of a tensor put in C order. A module of its own, so that only what gathers imports numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.core.tensor import DType
from blobstore.safetensors.numpy import as_array, as_bytes

if TYPE_CHECKING:
    from blobstore.sources.pytorch.tensors import Storage, StridedTensor


def swapped(data: bytearray, storage: Storage) -> bytearray:
    """Turn round the bytes of every number in a storage; a complex one is two."""
    size = storage.itemsize // 2 if storage.kind.startswith("Complex") else storage.itemsize
    numbers = np.frombuffer(data, f"u{size}")
    numbers.byteswap(inplace=True)
    return data


def gathered(tensor: StridedTensor, data: bytearray) -> memoryview:
    """Return a tensor's bytes in C order, of those from its first to its last element.

    The caller has checked that sizes and strides stay within ``data``.
    """
    itemsize = tensor.itemsize
    elements: np.ndarray[Any, Any] = np.frombuffer(data, f"u{itemsize}")
    shape = tensor.spec.shape
    if tensor.spec.dtype is DType.F4:
        shape = (*shape[:-1], shape[-1] // 2)
    # The step of a dimension of one element is never taken, and can be of any size.
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

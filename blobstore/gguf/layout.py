"""How a GGUF file divides into a header, tensors, and the bytes between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.tensor import DTYPES, DType, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.gguf.header import GgufHeader, GgufTensor


def stored_spec(tensor: GgufTensor) -> TensorSpec:
    """Return how a blob stores a tensor: its bytes, unchanged.

    A quantized tensor is U8 ``[..., bytes per row]``, one of an unknown type U8 ``[bytes]``.
    """
    kind = tensor.type
    if kind is None:
        return TensorSpec(tensor.name, DType.U8, (tensor.size,))
    if kind.weights == 1:
        return TensorSpec(tensor.name, DTYPES[kind.name], tensor.shape)
    *rows, columns = tensor.shape
    return TensorSpec(tensor.name, DType.U8, (*rows, columns // kind.weights * kind.size))


def gaps_of(header: GgufHeader, size: int) -> Iterator[tuple[int, int]]:
    """Yield the first byte of each gap in a file of ``size`` bytes, and the byte after its last one."""
    at = header.data_start
    for tensor in header.tensors.values():
        if tensor.begin > at:
            yield at, tensor.begin
        at = tensor.begin + tensor.size
    if size > at:
        yield at, size

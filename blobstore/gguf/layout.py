"""How a GGUF file divides into a header, tensors, and the bytes between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.tensor import DTYPES, DType, FileLayout, TensorSpec

if TYPE_CHECKING:
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


def file_layout(header: GgufHeader) -> FileLayout:
    """Return where a file has its tensors, as blobs store them."""
    tensors = {
        name: (stored_spec(tensor), tensor.begin, tensor.begin + tensor.size)
        for name, tensor in header.tensors.items()
    }
    return FileLayout(tensors, header.data_start, header.alignment)

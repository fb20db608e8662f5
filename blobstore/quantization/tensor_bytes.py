"""The bytes of planned tensors: copied from the source, decoded, or quantized.

Tensors are processed in pieces of a few megabytes. Beyond these, a thread holds only the scales and
biases of the tensor that it quantizes, because they follow the packed weight in a blob.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.core.tensor import TensorSpec
from blobstore.errors import BlobstoreError, DamagedSource
from blobstore.quantization.recipes import Copied, Decoded, Prequantized
from blobstore.quantization.representable import check_finite, check_scales

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from typing_extensions import Buffer

    from blobstore.core.tensor import DType
    from blobstore.quantization.recipes import Quantized, Recipe

    Array = np.ndarray[Any, Any]
    Read = Callable[[str, memoryview], Iterator[memoryview]]

_COPY_SIZE = 1 << 20
_PIECE_SIZE = 1 << 22
"""Bytes to quantize at once: enough to outweigh the call, and few enough for the CPU cache."""


class Converter:
    """Converts source tensors to stored ones, on any number of threads.

    ``read`` yields the bytes of a source tensor in pieces, each of them in the given buffer.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._local = threading.local()

    def convert(self, recipe: Recipe) -> Iterator[Buffer]:
        """Yield the bytes of a tensor and its quantization parameters; each buffer is valid until the next one.

        Raises:
            UnreadableGroups: values of the tensor cannot be quantized.
            DamagedSource: the source cannot be read, or has values that cannot be converted.
        """
        if isinstance(recipe, Copied):
            yield from self._copy(recipe)
        elif isinstance(recipe, Prequantized):
            for part in recipe.parts:
                yield from self._copy(part)
        elif isinstance(recipe, Decoded):
            from blobstore.safetensors.numpy import as_bytes

            yield from map(as_bytes, self._decode(recipe))
        else:
            try:
                yield from self._quantize(recipe)
            except BlobstoreError as error:
                raise error.at(f"tensor {quote(recipe.spec.name)}") from None

    def _copy(self, recipe: Copied) -> Iterator[Buffer]:
        buffer = self._buffer(_COPY_SIZE)
        for source in recipe.sources:
            pieces = self._read(source, buffer)
            if not recipe.is_reciprocal:
                yield from pieces
                continue
            import numpy as np

            for piece in pieces:
                value = np.frombuffer(piece, "<f4")
                with np.errstate(all="ignore"):
                    result = np.float32(1) / value
                # The reciprocal of the smallest float32 is infinite.
                if not (np.isfinite(value) & np.isfinite(result)).all():
                    raise DamagedSource(f"a global scale of {value[0]} has no reciprocal")
                yield result.tobytes()

    def _quantize(self, recipe: Quantized) -> Iterator[Buffer]:
        from blobstore.quantization.quantize_numpy import quantize
        from blobstore.safetensors.numpy import as_bytes

        dense = recipe.dense
        if isinstance(dense, Decoded):
            arrays = self._decode(dense)
        else:
            unit = recipe.group_size * dense.spec.dtype.bits // 8
            pieces = (piece for source in dense.sources for piece in self._pieces(source, unit))
            arrays = (_as_array(piece, dense.spec.dtype) for piece in pieces)
        scales: list[Array] = []
        biases: list[Array] = []
        done = 0
        for array in arrays:
            rows = array.reshape(-1, recipe.group_size)
            check_finite(rows, recipe, done)
            done += rows.size
            weight, scale, bias = quantize(rows, recipe.item, recipe.group_size)
            check_scales(scale, recipe)
            yield as_bytes(weight)
            scales.append(scale)
            if bias is not None:
                biases.append(bias)
        for qparam in (*scales, *biases):
            yield as_bytes(qparam)

    def _decode(self, recipe: Decoded) -> Iterator[Array]:
        from blobstore.quantization import fp8

        rows, columns = recipe.weight.shape
        height, width = recipe.block
        # A piece starts with a row of blocks. If there is only one such row, it may be cut anywhere.
        unit = columns * (height if height < rows else 1)
        for source, scale in zip(recipe.sources, recipe.scales, strict=True):
            data = b"".join(map(bytes, self._read(scale, self._buffer(_COPY_SIZE))))
            scales = _as_array(memoryview(data), recipe.scale.dtype)
            scales = scales.reshape(-1, -(-columns // width))
            row = 0
            for piece in self._pieces(source, max(unit, 1)):
                weight = _as_array(piece, recipe.weight.dtype).reshape(-1, columns)
                yield fp8.decode(weight, scales[row // height :], recipe.block)
                row += len(weight)

    def _pieces(self, source: str, unit: int) -> Iterator[memoryview]:
        """Yield the bytes of a source tensor in pieces that are multiples of ``unit`` bytes."""
        buffer = self._buffer(max(_PIECE_SIZE // unit, 1) * unit)
        rest = b""
        for read in self._read(source, buffer):
            piece = memoryview(rest + read) if rest else read
            end = len(piece) - len(piece) % unit
            if end:
                yield piece[:end]
            rest = bytes(piece[end:])
        if rest:
            yield memoryview(rest)

    def _buffer(self, size: int) -> memoryview:
        found: memoryview = getattr(self._local, "buffer", memoryview(b""))
        if len(found) < size:
            found = self._local.buffer = memoryview(bytearray(size))
        return found[:size]


def _as_array(data: memoryview, dtype: DType) -> Array:
    from blobstore.safetensors.numpy import as_array

    return as_array(data, 0, TensorSpec("", dtype, (len(data) * 8 // dtype.bits,)))

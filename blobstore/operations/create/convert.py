"""The bytes of planned tensors: copied from the source, decoded, or quantized on the way.

Everything goes through in pieces of some megabytes. What a thread holds beyond them is the scales and
biases of the one tensor that it quantizes, which come after the packed weight in a blob.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.core.tensor import TensorSpec
from blobstore.errors import BlobstoreError, DamagedSource
from blobstore.quantization.recipes import Copied, Decoded, Prequantized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from typing_extensions import Buffer

    from blobstore.core.tensor import DType
    from blobstore.quantization.recipes import Quantized, Recipe

    Array = np.ndarray[Any, Any]
    Read = Callable[[str, memoryview], Iterator[memoryview]]

_COPY_SIZE = 1 << 20
_LAST_EXPONENT = 224
"""The largest E8M0 byte that cannot come from the least float32, 2^-149, over 448."""
_PIECE_SIZE = 1 << 22
"""Bytes that are quantized at once: they outweigh a call, and stay in a processor's cache."""


class Conversion:
    """Makes the bytes of recipes, on any number of threads.

    ``read`` gives the bytes of a source tensor in pieces, each in a buffer until the next one.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._local = threading.local()

    def buffers(self, recipe: Recipe) -> Iterator[Buffer]:
        """Yield the bytes of a tensor and its companions; each is good until the next one.

        Raises:
            DamagedSource: the source cannot be read, or holds numbers that cannot be converted.
        """
        if isinstance(recipe, Copied):
            yield from self._copied(recipe)
        elif isinstance(recipe, Prequantized):
            for part in recipe.parts:
                yield from self._copied(part)
        elif isinstance(recipe, Decoded):
            from blobstore.safetensors.numpy import as_bytes

            for array in self._decoded(recipe):
                yield as_bytes(array)
        else:
            try:
                yield from self._quantized(recipe)
            except BlobstoreError as error:
                where = f"tensor {quote(recipe.spec.name)}"
                raise error.at(where) from None

    def _copied(self, recipe: Copied) -> Iterator[Buffer]:
        buffer = self._buffer(_COPY_SIZE)
        for source in recipe.sources:
            pieces = self._read(source, buffer)
            yield from map(_reciprocal, pieces) if recipe.is_reciprocal else pieces

    def _quantized(self, recipe: Quantized) -> Iterator[Buffer]:
        from blobstore.quantization.numpy import quantize
        from blobstore.safetensors.numpy import as_bytes

        scales: list[Array] = []
        biases: list[Array] = []
        done = 0
        dense = recipe.dense
        unit = recipe.group_size * dense.spec.dtype.bits // 8
        arrays = self._decoded(dense) if isinstance(dense, Decoded) else self._plain(dense, unit)
        for array in arrays:
            rows = array.reshape(-1, recipe.group_size)
            _check_finite(rows, recipe, done)
            done += rows.size
            weight, scale, bias = quantize(rows, recipe.item, recipe.group_size)
            _check_exponents(scale, recipe)
            yield as_bytes(weight)
            scales.append(scale)
            if bias is not None:
                biases.append(bias)
        for companion in (*scales, *biases):
            yield as_bytes(companion)

    def _plain(self, recipe: Copied, unit: int) -> Iterator[Array]:
        for source in recipe.sources:
            for piece in self._pieces(source, unit):
                yield _numbers(piece, recipe.spec.dtype)

    def _decoded(self, recipe: Decoded) -> Iterator[Array]:
        from blobstore.quantization import fp8 as float8

        rows, columns = recipe.weight.shape
        height, width = recipe.block
        # Pieces begin where a block begins; a single block may be cut anywhere.
        unit = columns * (height if height < rows else 1)
        for source, scale in zip(recipe.sources, recipe.scales, strict=True):
            data = b"".join(map(bytes, self._read(scale, self._buffer(_COPY_SIZE))))
            scales = _numbers(memoryview(data), recipe.scale.dtype).reshape(
                -1, -(-columns // width)
            )
            row = 0
            for piece in self._pieces(source, max(unit, 1)):
                weight = _numbers(piece, recipe.weight.dtype).reshape(-1, columns)
                yield float8.decode(weight, scales[row // height :], recipe.block)
                row += len(weight)

    def _pieces(self, source: str, unit: int) -> Iterator[memoryview]:
        """Yield the bytes of a source tensor in pieces of whole units."""
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


def _check_finite(array: Array, recipe: Quantized, before: int) -> None:
    import numpy as np

    from blobstore.quantization.numpy import first_nonfinite

    index = first_nonfinite(array)
    if index is not None:
        place = [int(number) for number in np.unravel_index(before + index, recipe.spec.shape)]
        raise DamagedSource(
            f"element {place} is {array.flat[index]}, which cannot be quantized; keep the tensor "
            "with an override to none"
        )


def _check_exponents(scale: Array, recipe: Quantized) -> None:
    """Refuse exponents that may have overflowed their byte, as MLX lets them.

    Those of groups below about 1e-36 do, and so come back as 1e38; no weight is of either size.
    """
    if recipe.item.mode.startswith("mx") and int(scale.max(initial=0)) > _LAST_EXPONENT:
        raise DamagedSource(
            f"the numbers of a group are too small or too large for {recipe.item.name}; keep the "
            "tensor with an override to none"
        )


def _numbers(data: memoryview, dtype: DType) -> Array:
    from blobstore.safetensors.numpy import as_array

    return as_array(data, 0, TensorSpec("", dtype, (len(data) * 8 // dtype.bits,)))


def _reciprocal(piece: memoryview) -> memoryview:
    import numpy as np

    from blobstore.safetensors.numpy import as_bytes

    value = np.frombuffer(piece, "<f4")
    with np.errstate(all="ignore"):
        result = np.float32(1) / value
    if not (np.isfinite(value) & np.isfinite(result)).all():  # that of the smallest is infinite
        raise DamagedSource(f"a global scale of {value[0]} has no reciprocal")
    return as_bytes(result)

"""Converts bytes of tensors to MLX arrays. MLX cannot use existing memory, so each array is a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from blobstore.core.escape import MAX_SHOWN, escape, quote
from blobstore.core.gc_pause import gc_paused
from blobstore.core.tensor import BYTE_FLOATS, DType, TensorSpec
from blobstore.errors import UnsupportedDType
from blobstore.safetensors import numpy as arrays
from blobstore.safetensors.numpy import as_array

if TYPE_CHECKING:
    import mmap
    import os
    from collections.abc import Iterator, Mapping

    from typing_extensions import Buffer

    from blobstore.safetensors.reader import Reader
    from blobstore.safetensors.slices import Selection


def as_mlx(memory: mmap.mmap | memoryview, offset: int, spec: TensorSpec) -> Any:
    """Return the tensor ``spec`` at ``offset`` of ``memory`` as a new ``mlx.core.array``.

    8-bit floats become uint8 with the same bits, as in ``mx.load``.

    Raises:
        UnsupportedDType: MLX lacks the type, as it does packed ones of 4 or 6 bits, or cannot hold the shape.
    """
    return copied(as_array(memory, offset, spec, "MLX"), spec)


def copied(array: np.ndarray[Any, Any], spec: TensorSpec) -> Any:
    """Return the tensor ``spec``, given as a numpy array, as a new ``mlx.core.array``.

    Raises:
        UnsupportedDType: MLX lacks the type, or cannot hold the shape.
    """
    name = "bool_" if spec.dtype is DType.BOOL else spec.dtype.library_name
    try:
        if spec.dtype is DType.BF16:
            return mx.array(array.view(np.uint16)).view(mx.bfloat16)
        if spec.dtype in BYTE_FLOATS:
            return mx.array(array.view(np.uint8))
        if not hasattr(mx, name):
            raise arrays.no_type(spec, "MLX")
        return mx.array(
            array, dtype=getattr(mx, name)
        )  # without a type, MLX rounds to one that it has
    except OverflowError as error:  # MLX counts a dimension in 32 bits
        raise UnsupportedDType(
            f"tensor {quote(spec.name)}: MLX cannot hold its shape "
            f"{escape(str(list(spec.shape)), MAX_SHOWN)}: {error}"
        ) from None


def save(
    tensors: Mapping[str, mx.array],
    metadata: Mapping[str, str] | None = None,
    *,
    alignment: int = 8,
) -> bytes:
    """Return a file of arrays as bytes.

    ``tensors``, ``metadata`` and ``alignment`` are as for :func:`save_file`.

    Raises:
        SafetensorError: an array has the name ``__metadata__``, or ``alignment`` is not valid.
        TypeError: a name is not a text, or the metadata are not a dict of texts.
    """
    return arrays.save(_as_numpy(tensors), metadata, alignment=alignment)


def save_file(
    tensors: Mapping[str, mx.array],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    alignment: int = 8,
) -> None:
    """Write a file of arrays. It replaces an existing one when it is durable.

    Args:
        tensors: arrays by name, of any shape. They are computed, if they were not.
        filename: the file.
        metadata: texts by name.
        alignment: see :func:`blobstore.safetensors.numpy.save_file`.

    Raises:
        SafetensorError: see :func:`save`; or the file is inside a store, or cannot be written.
        TypeError: see :func:`save`.
    """
    arrays.save_file(_as_numpy(tensors), filename, metadata, alignment=alignment)


def load(data: Buffer) -> dict[str, mx.array]:
    """Return the arrays of a file in memory, in memory of MLX.

    Args:
        data: the bytes of the file.

    Returns:
        Arrays by name, with types and shapes as from :func:`load_file`.

    Raises:
        SafetensorError: the bytes break the format, or MLX cannot hold a tensor.
        TypeError: the argument is not a buffer.
    """
    from blobstore.safetensors.reader import open_memory

    return read_all(open_memory(data))


def load_file(filename: str | os.PathLike[str], *, backend: str = "mmap") -> dict[str, mx.array]:
    """Return the arrays of a file, in memory of MLX.

    Args:
        filename: the file, or what else :class:`~blobstore.safetensors.safe_open` takes.
        backend: ``mmap`` or ``pread``.

    Returns:
        Arrays by name, with the types and shapes of the file; 8-bit floats become uint8 with the same bits.

    Raises:
        SafetensorError: the file breaks the format, or MLX cannot hold a tensor.
        OSError: the file cannot be opened or read.
    """
    from blobstore.safetensors.reader import open_reader

    return read_all(open_reader(filename, backend))


@gc_paused()
def read_all(
    reader: Reader,
    device: str = "cpu",  # noqa: ARG001 - torch's
) -> dict[str, mx.array]:
    """Return all tensors of a file."""
    from blobstore.safetensors.reader import framework_errors

    with framework_errors():
        return {
            name: as_mlx(memory, begin + shift, TensorSpec(name, *kind))
            for rows, memory, shift in reader.pieces()
            for name, kind, begin in rows
        }


def read_tensor(
    reader: Reader,
    begin: int,
    spec: TensorSpec,
    device: str = "cpu",  # noqa: ARG001 - torch's
) -> Any:
    """Return the tensor that begins at byte ``begin`` of a file."""
    return as_mlx(*reader.span(begin, begin + spec.nbytes), spec)


def read_slice(
    reader: Reader,
    begin: int,
    spec: TensorSpec,
    selection: Selection,
    device: str = "cpu",  # noqa: ARG001 - torch's
) -> Any:
    """Return selected elements of the tensor that begins at byte ``begin`` of a file."""
    if spec.dtype.is_packed or not spec.dtype.library_name:
        raise arrays.no_type(spec, "MLX")
    part = arrays.read_slice(reader, begin, spec, selection)
    return copied(np.asarray(part, order="C"), spec)  # MLX has no negative strides


file_bytes = arrays.file_bytes


def named_tensors(
    tensors: Mapping[str, mx.array],
) -> Iterator[tuple[TensorSpec, np.ndarray[Any, Any]]]:
    """Return the tensors as arrays of numpy with their specs."""
    return arrays.named_tensors(_as_numpy(tensors))


def _as_numpy(tensors: Mapping[str, mx.array]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: as_numpy(tensor) for name, tensor in tensors.items()}


def as_numpy(tensor: mx.array) -> np.ndarray[Any, Any]:
    """Return an array as one of numpy, not copied; it may be strided."""
    # There is no buffer of this type.
    if isinstance(tensor, mx.array) and tensor.dtype == mx.bfloat16:
        return np.asarray(tensor.view(mx.uint16)).view(arrays.BF16)
    return np.asarray(tensor)

"""Converts bytes of tensors to numpy arrays and back, without copies, and saves and loads files of them.

Types that numpy lacks come from ``ml_dtypes``, which is imported when one is needed. So are the modules for
files, because the store needs only the conversions.
"""

from __future__ import annotations

import functools
import itertools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.core.escape import MAX_SHOWN, escape, quote
from blobstore.core.gc_pause import gc_paused
from blobstore.core.tensor import DTYPES_BY_LIBRARY_NAME, DType, TensorSpec
from blobstore.errors import UnsupportedDType

if TYPE_CHECKING:
    import mmap
    import os
    from collections.abc import Iterator, Mapping

    from typing_extensions import Buffer

    from blobstore.safetensors.reader import Reader
    from blobstore.safetensors.slices import Selection

    BF16: np.dtype[Any]

_EXTENDED = ("bfloat", "float4_", "float6_", "float8_")
"""Starts of the names of types that ``ml_dtypes`` has and numpy lacks."""
_DTYPES: dict[DType, np.dtype[Any]] = {
    # What newbyteorder() returns is equal to the native type, but its buffers have the format "<f".
    dtype: np.dtype(np.dtype(name).newbyteorder("<").str)
    for name, dtype in DTYPES_BY_LIBRARY_NAME.items()
    if not name.startswith(_EXTENDED)
}
# What scripts import from the reference library.
_TYPES = {dtype.name: array_type.type for dtype, array_type in _DTYPES.items()} | {"BOOL": bool}
_F4 = "float4_e2m1fn"
"""What ``ml_dtypes`` calls the elements of F4, which it keeps in bytes of their own."""
_BITS: dict[int, np.dtype[Any]] = {
    8: np.dtype("u1"),
    16: np.dtype("<u2"),
    32: np.dtype("<u4"),
    64: np.dtype("<u8"),
}


def as_array(
    memory: mmap.mmap | memoryview, offset: int, spec: TensorSpec, framework: str = "numpy"
) -> np.ndarray[Any, Any]:
    """Return the tensor ``spec`` at ``offset`` of ``memory`` as an array that views the memory.

    The array is writable only if the memory is. It may be unaligned, which numpy supports. Errors name
    ``framework``, that of the caller.

    Raises:
        UnsupportedDType: numpy lacks the type, as it does packed ones of 4 or 6 bits, or cannot hold the shape.
    """
    dtype = _DTYPES.get(spec.dtype) or _extension(spec, framework)
    elements = spec.elements
    try:
        if not elements:
            return np.empty(spec.shape, dtype)
        return np.frombuffer(memory, dtype, elements, offset).reshape(spec.shape)
    except ValueError as error:  # over 64 dimensions, or dimensions of size 0 and very large ones
        raise UnsupportedDType(
            f"tensor {quote(spec.name)}: {framework} cannot hold its shape "
            f"{escape(str(list(spec.shape)), MAX_SHOWN)}: {error}"
        ) from None


def as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array in C order, as a view if it is contiguous.

    Uses a view of bytes, because numpy exports no buffers of types from extensions, such as bfloat16.
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def save(
    tensor_dict: Mapping[str, np.ndarray[Any, Any]],
    metadata: Mapping[str, str] | None = None,
    *,
    alignment: int = 8,
) -> bytes:
    """Return a file of arrays as bytes.

    ``tensor_dict``, ``metadata`` and ``alignment`` are as for :func:`save_file`.

    Raises:
        SafetensorError: an array has a type that the format lacks, or the name ``__metadata__``; or
            ``alignment`` is not valid.
        TypeError: a name is not a text, or the metadata are not a dict of texts.
    """
    from blobstore.safetensors.serialization import lay_out

    header, arrays = lay_out(named_tensors(tensor_dict), metadata, alignment)
    return b"".join([header, *map(file_bytes, arrays)])


def save_file(
    tensor_dict: Mapping[str, np.ndarray[Any, Any]],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    alignment: int = 8,
) -> None:
    """Write a file of arrays. It replaces an existing one when it is durable.

    Args:
        tensor_dict: arrays by name, of any shape and strides, and of all types that the format has.
        filename: the file.
        metadata: texts by name.
        alignment: bytes, a power of two from 8 to 1 MiB. If it is over 8, the data begin at a multiple of it, and
            tensors whose bytes are a multiple of it precede the others, so that they begin at one too.

    Raises:
        SafetensorError: see :func:`save`; or the file is inside a store, or cannot be written.
        TypeError: see :func:`save`.
    """
    from blobstore.safetensors.serialization import lay_out, write_file

    header, arrays = lay_out(named_tensors(tensor_dict), metadata, alignment)
    write_file(filename, itertools.chain([header], map(file_bytes, arrays)))


def load(data: Buffer) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a file in memory, as views that are writable if the memory is.

    Args:
        data: the bytes of the file.

    Returns:
        Arrays by name, with types and shapes as from :func:`load_file`.

    Raises:
        SafetensorError: the bytes break the format, or numpy cannot hold a tensor.
        TypeError: the argument is not a buffer.
    """
    from blobstore.safetensors.reader import open_memory

    return read_all(open_memory(data))


def load_file(
    filename: str | os.PathLike[str], *, backend: str = "mmap"
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a file.

    They are views of a private map, which can be written to without changing the file. With
    ``backend="pread"``, they have memory of their own.

    Args:
        filename: the file, or what else :class:`~blobstore.safetensors.safe_open` takes.
        backend: ``mmap`` or ``pread``.

    Returns:
        Arrays by name, with the types and shapes of the file. Types that numpy lacks are those of ``ml_dtypes``.

    Raises:
        SafetensorError: the file breaks the format, or numpy cannot hold a tensor.
        OSError: the file cannot be opened or read.
    """
    from blobstore.safetensors.reader import open_reader

    return read_all(open_reader(filename, backend))


@gc_paused()
def read_all(
    reader: Reader,
    device: str = "cpu",  # noqa: ARG001 - torch's
) -> dict[str, np.ndarray[Any, Any]]:
    """Return all tensors of a file."""
    from blobstore.safetensors.reader import framework_errors

    found: dict[str, np.ndarray[Any, Any]] = {}
    with framework_errors():
        for rows, memory, shift in reader.pieces():
            for name, (dtype, shape), begin in rows:
                kind = _DTYPES.get(dtype)
                if kind is None or 0 in shape:
                    spec = TensorSpec(name, dtype, shape)
                    found[name] = _array_at(memory, begin + shift, spec)
                else:
                    found[name] = np.ndarray(shape, kind, memory, begin + shift)
    return found


def read_tensor(
    reader: Reader,
    begin: int,
    spec: TensorSpec,
    device: str = "cpu",  # noqa: ARG001 - torch's
) -> np.ndarray[Any, Any]:
    """Return the tensor that begins at byte ``begin`` of a file."""
    return _array_at(*reader.span(begin, begin + spec.nbytes), spec)


def read_slice(
    reader: Reader,
    begin: int,
    spec: TensorSpec,
    selection: Selection,
    device: str = "cpu",  # noqa: ARG001 - torch's
) -> np.ndarray[Any, Any]:
    """Return selected elements of the tensor that begins at byte ``begin`` of a file."""
    if spec.dtype is DType.F4:  # there is no address within a byte
        part: np.ndarray[Any, Any] = read_tensor(reader, begin, spec)[selection.array_index]
        return part
    dtype = _DTYPES.get(spec.dtype) or _extension(spec)
    array: np.ndarray[Any, Any] = read_bits(reader, begin, spec, selection).view(dtype)
    return array


def read_bits(
    reader: Reader, begin: int, spec: TensorSpec, selection: Selection
) -> np.ndarray[Any, Any]:
    """Return selected elements as unsigned integers of their size."""
    return reader.elements(begin, _BITS[spec.dtype.bits], spec.shape, selection)


def _array_at(memory: Any, offset: int, spec: TensorSpec) -> np.ndarray[Any, Any]:
    if spec.dtype is not DType.F4:
        return as_array(memory, offset, spec)
    pairs = np.frombuffer(memory, np.uint8, spec.nbytes, offset)
    return np.stack((pairs & 15, pairs >> 4), -1).reshape(spec.shape).view(ml_dtype(_F4))


def named_tensors(
    tensor_dict: Mapping[str, np.ndarray[Any, Any]],
) -> Iterator[tuple[TensorSpec, np.ndarray[Any, Any]]]:
    """Yield arrays with their specs.

    Raises:
        SafetensorError: the format lacks the type of an array.
    """
    from blobstore.safetensors.arguments import require

    for name, array in tensor_dict.items():
        require(name, str, "tensor_dict")
        yield spec_of(name, array), array


def spec_of(name: str, array: np.ndarray[Any, Any]) -> TensorSpec:
    """Return the spec of an array in a file. Raises SafetensorError if the format lacks its type."""
    return TensorSpec(name, _type_in_file(array.dtype), array.shape)


def file_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array as a file has them: in C order, little-endian and packed."""
    dtype = array.dtype
    if dtype.byteorder == ">" or (dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(dtype.newbyteorder("<"))
    elif _type_in_file(dtype) is DType.F4:
        values = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & 15
        array = values[::2] | values[1::2] << 4
    return as_bytes(array)


@functools.lru_cache(maxsize=64)  # numpy assembles the name of a type each time
def _type_in_file(dtype: np.dtype[Any]) -> DType:
    from blobstore.safetensors.serialization import dtype_by_name

    return DType.F4 if dtype.name == _F4 else dtype_by_name(dtype.name)


def no_type(spec: TensorSpec, framework: str) -> UnsupportedDType:
    """Return the error for a type that a framework lacks."""
    packed = "packed " if spec.dtype.is_packed else ""
    return UnsupportedDType(
        f"tensor {quote(spec.name)}: {framework} has no {packed}{spec.dtype.value}",
        advice="read its bytes with Model.view()",
    )


def _extension(spec: TensorSpec, framework: str = "numpy") -> np.dtype[Any]:
    """Return the type of a tensor that numpy itself does not have, and remember it."""
    import ml_dtypes

    name = spec.dtype.library_name
    if not name or not hasattr(ml_dtypes, name):
        raise no_type(spec, framework)
    dtype = _DTYPES[spec.dtype] = ml_dtype(name)
    return dtype


def ml_dtype(name: str) -> np.dtype[Any]:
    """Return a type of ``ml_dtypes``."""
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "BF16":
            value = globals()[name] = ml_dtype("bfloat16")
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Writes safetensors files, byte for byte as the reference library does, and takes them apart.

:func:`lay_out` decides the order of the tensors and encodes the header. Their bytes are requested while
they are written, so that a tensor that must be copied first needs memory for that tensor alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import math
import operator
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from blobstore.core.escape import escape, quote
from blobstore.core.files import replacing, without_start
from blobstore.core.gc_pause import gc_paused
from blobstore.core.targets import check_target
from blobstore.core.tensor import DTYPES, DTYPES_BY_LIBRARY_NAME, DType
from blobstore.core.tensor import TensorSpec as NamedSpec
from blobstore.errors import BlobstoreError, SafetensorError
from blobstore.safetensors.arguments import check_metadata, require
from blobstore.safetensors.header import (
    HEADER_ALIGNMENT,
    encode_file_header,
    errors_during,
    in_file_order,
)
from blobstore.safetensors.reader import open_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from typing_extensions import Buffer


T = TypeVar("T")

_MAX_ALIGNMENT = 1 << 20
_BATCH = 512
"""Buffers per system call; Linux allows 1,024."""
_BATCH_SIZE = 1 << 26
"""Bytes per system call; macOS allows 2 GiB."""


class TensorSpec:
    """A tensor to write: its type by numpy's name, its shape, and the address of its bytes.

    Nothing is kept alive: the memory must stay valid until the tensor has been written.

    Args:
        dtype: the name that numpy or torch has for the type, such as ``float32``.
        shape: the sizes of the dimensions, in elements. One element of ``float4_e2m1fn_x2`` is two values.
        data_ptr: the address of the first byte. The bytes are in C order, and little-endian.
        data_len: the number of bytes.

    Raises:
        SafetensorError: there is no such type.
        OverflowError: a number is negative, or does not fit into 64 bits.
        TypeError: a number is no integer, or ``dtype`` no text.
    """

    __slots__ = ("_data_len", "_data_ptr", "_dtype", "_shape")

    def __init__(self, *, dtype: str, shape: Iterable[int], data_ptr: int, data_len: int) -> None:
        self._dtype = dtype_by_name(dtype)
        dims = [_unsigned(dim) for dim in shape]
        if self._dtype is DType.F4 and dims:  # one element of float4_e2m1fn_x2 holds two values
            dims[-1] *= 2
        self._shape = dims
        self._data_ptr = _unsigned(data_ptr)
        self._data_len = _unsigned(data_len)

    @property
    def dtype(self) -> str:
        """The type's name in the file, such as ``F32``."""
        return str(self._dtype.value)

    @property
    def shape(self) -> list[int]:
        """The shape in the file, which counts the values of packed types."""
        return list(self._shape)

    @property
    def data_ptr(self) -> int:
        """The address of the first byte."""
        return self._data_ptr

    @property
    def data_len(self) -> int:
        """The number of bytes."""
        return self._data_len

    def __repr__(self) -> str:
        return (
            f"TensorSpec(dtype={self.dtype!r}, shape={self._shape}, "
            f"data_ptr={self._data_ptr}, data_len={self._data_len})"
        )


_LISTED = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex64"),
)
"""The types that errors of the reference library list, in their order; newer ones follow."""


def memory_at(address: int, size: int) -> Buffer:
    """Return memory of the process as a buffer, which keeps nothing alive."""
    return (ctypes.c_char * size).from_address(address) if size else b""


def dtype_by_name(name: str) -> DType:
    """Return the element type that numpy or torch calls ``name``.

    Raises:
        SafetensorError: the format has no such type.
    """
    require(name, str, "dtype")
    dtype = DTYPES_BY_LIBRARY_NAME.get(name)
    if dtype is None:
        known = ", ".join(dict.fromkeys((*_LISTED, *DTYPES_BY_LIBRARY_NAME)))
        raise SafetensorError(f'Unknown dtype "{escape(name, 200)}". Supported dtypes: {known}')
    return dtype


def serialize(
    tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return a file of the tensors as bytes.

    Args:
        tensor_dict: tensors by name.
        metadata: texts by name.

    Raises:
        SafetensorError: the number of bytes of a tensor does not follow from its type and shape, its address
            is 0, or its name is ``__metadata__``.
        TypeError: an argument has the wrong type.
    """
    header, tensors = _lay_out_specs(tensor_dict, metadata)
    return b"".join([header, *map(_bytes_of, tensors)])


def serialize_file(
    tensor_dict: Mapping[str, TensorSpec],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the tensors to a file. It replaces an existing one when it is durable.

    Args:
        tensor_dict: tensors by name.
        filename: the path of the file.
        metadata: texts by name.

    Raises:
        SafetensorError: see :func:`serialize`; or the file is inside a store, or cannot be written.
        TypeError: an argument has the wrong type.
    """
    header, tensors = _lay_out_specs(tensor_dict, metadata)
    write_file(filename, itertools.chain([header], map(_bytes_of, tensors)))


def deserialize(bytes: Buffer) -> list[tuple[str, dict[str, Any]]]:  # noqa: A002 - the public name
    """Return the tensors of a file in memory, in the order of their bytes.

    Args:
        bytes: the bytes of the file.

    Returns:
        For each tensor its name, and a dict with ``shape``, a list of sizes in elements, ``dtype``, the type's
        name in the file such as ``F32``, and ``data``, a view of its bytes.

    Raises:
        SafetensorError: the bytes break the format.
        TypeError: the argument is no buffer.
    """
    table = open_memory(bytes).table
    memory = memoryview(bytes).cast("B")
    return [
        (
            name,
            {
                "shape": list(shape),
                "dtype": dtype.value,
                "data": memory[begin : table.data_start + end],
            },
        )
        for (name, (dtype, shape), begin), end in zip(table.rows(), table.begins[1:], strict=True)
    ]


@gc_paused()
def lay_out(
    tensors: Iterable[tuple[NamedSpec, T]],
    metadata: Mapping[str, str] | None,
    alignment: int = HEADER_ALIGNMENT,
) -> tuple[bytes, list[T]]:
    """Return the header of a file, and the tensors in the order in which their bytes follow.

    The format allows no bytes between tensors. With an ``alignment`` over 8, the data begin at a multiple
    of it, and tensors whose bytes are a multiple of it precede the others.

    Raises:
        SafetensorError: a tensor or the metadata cannot be written, or ``alignment`` is no power of two from
            8 to 1 MiB.
        TypeError: a key or value of the metadata is no text.
    """
    found = list(tensors)
    check_metadata(metadata)
    if not HEADER_ALIGNMENT <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise SafetensorError(
            f"alignment {alignment} is no power of two from 8 to {_MAX_ALIGNMENT}"
        )
    sources = {spec.name: source for spec, source in found}
    ordered = in_file_order(spec for spec, _ in found)
    with errors_during("Error while serializing"):
        if alignment > HEADER_ALIGNMENT:
            ordered.sort(key=lambda spec: bool(spec.nbytes % alignment))
        header = encode_file_header(ordered, metadata, alignment)
    return header, [sources[spec.name] for spec in ordered]


def _unsigned(value: object) -> int:
    number = operator.index(value)  # type: ignore[arg-type]
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number >> 64:
        raise OverflowError("int too big to convert")
    return number


def _lay_out_specs(
    tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[TensorSpec]]:
    require(tensor_dict, dict, "tensor_dict")
    for name, tensor in tensor_dict.items():
        require(name, str, "tensor_dict")
        require(tensor, TensorSpec, "tensor_dict")
    return lay_out([(_named(name, spec), spec) for name, spec in tensor_dict.items()], metadata)


def _named(name: str, tensor: TensorSpec) -> NamedSpec:
    """Return name, type and shape, checked against the number of bytes."""
    spec = NamedSpec(name, DTYPES[tensor.dtype], tuple(tensor.shape))
    is_readable = tensor.data_ptr or not tensor.data_len
    if math.prod(spec.shape) * spec.dtype.bits != tensor.data_len * 8 or not is_readable:
        raise SafetensorError(
            "Error while serializing: invalid shape, data type, or offset for tensor: "
            f"{quote(name)} of {spec.dtype.value} {tensor.shape} is given as {tensor.data_len} "
            f"bytes at address {tensor.data_ptr}"
        )
    return spec


def _bytes_of(tensor: TensorSpec) -> Buffer:
    return memory_at(tensor.data_ptr, tensor.data_len)


def write_file(filename: str | os.PathLike[str], buffers: Iterable[Buffer]) -> None:
    """Write buffers to a file durably, and then give it the name.

    If the name is a symbolic link, the link is replaced.

    Raises:
        SafetensorError: the file is inside a store, or cannot be written; the previous one is then unchanged.
    """
    with replaced_file(filename) as descriptor:
        for batch in _batches(buffers):
            _write_batch(descriptor, batch)


@contextlib.contextmanager
def replaced_file(filename: str | os.PathLike[str]) -> Iterator[int]:
    """Yield the descriptor of a new file that gets the name, when it is durable, at the end of the block.

    Raises:
        SafetensorError: see :func:`write_file`.
    """
    try:
        name = os.fsdecode(filename)
    except TypeError as error:
        raise TypeError(f"argument 'filename': {error}") from None
    target = Path(name)
    with io_errors():
        if not name:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if "\0" in name:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        check_is_replaceable(target)
        with replacing(target) as descriptor:
            yield descriptor


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes at an offset of a file. Raises OSError."""
    while data:
        written = os.pwrite(descriptor, data[:_BATCH_SIZE], offset)
        data = data[written:]
        offset += written


def check_is_replaceable(target: Path) -> None:
    """Check that a file is there or none, and in no store: neither a device nor a blob must become a file."""
    try:
        check_target(target)
    except BlobstoreError as error:
        raise SafetensorError(error.message, advice=error.advice) from None
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise SafetensorError(
            f"Error while serializing: I/O error: {quote(target)} is not a regular file"
        )


@contextlib.contextmanager
def io_errors() -> Iterator[None]:
    """Convert errors of the system to those of the reference library."""
    try:
        yield
    except OSError as error:
        raise SafetensorError(
            f"Error while serializing: I/O error: {error.strerror or error} (os error {error.errno})"
        ) from error


def _batches(buffers: Iterable[Buffer]) -> Iterator[list[memoryview]]:
    """Return the bytes in lists that one system call takes, and that fit in memory as copies."""
    batch: list[memoryview] = []
    size = 0
    for buffer in buffers:
        view = buffer if isinstance(buffer, memoryview) else memoryview(buffer).cast("B")
        for start in range(0, len(view), _BATCH_SIZE):
            part = view[start : start + _BATCH_SIZE]
            batch.append(part)
            size += len(part)
            if size >= _BATCH_SIZE or len(batch) == _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _write_batch(descriptor: int, views: list[memoryview]) -> None:
    """Write every byte; a single write may be short."""
    while views:
        views = without_start(views, os.writev(descriptor, views))

"""Converts bytes of tensors to torch tensors, without copies on the CPU, and saves and loads files of them."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from blobstore.core.escape import MAX_SHOWN, escape, quote
from blobstore.core.gc_pause import gc_paused
from blobstore.core.tensor import DTYPES, DTYPES_BY_LIBRARY_NAME, DType, TensorSpec
from blobstore.errors import (
    BlobstoreError,
    SafetensorError,
    UnsupportedDType,
    UnsupportedSource,
    UsageError,
)
from blobstore.safetensors.handle import safe_open
from blobstore.safetensors.header import SUB_BYTE_RULE
from blobstore.safetensors.shared_tensors import end_ptr as _end_ptr
from blobstore.safetensors.shared_tensors import find_shared_tensors as _find_shared_tensors
from blobstore.safetensors.shared_tensors import is_complete as _is_complete
from blobstore.safetensors.shared_tensors import remove_duplicate_names as _remove_duplicate_names
from blobstore.safetensors.shared_tensors import storage_ptr, storage_size

if TYPE_CHECKING:
    import mmap
    import os
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np
    from typing_extensions import Buffer

    from blobstore.safetensors.reader import Reader
    from blobstore.safetensors.slices import Selection

__all__ = [
    "_SIZE",
    "_TYPES",
    "_end_ptr",
    "_find_shared_tensors",
    "_getdtype",
    "_is_complete",
    "_remove_duplicate_names",
    "_to_ndarray",
    "_tobytes",
    "_view2torch",
    "load",
    "load_file",
    "load_model",
    "safe_open",
    "save",
    "save_file",
    "save_model",
    "storage_ptr",
    "storage_size",
]

_PAIRS = torch.float4_e2m1fn_x2
"""The type that packs two values of 4 bits, which F4 becomes."""
_DTYPES: dict[DType, torch.dtype] = {
    dtype: getattr(torch, name)
    for name, dtype in DTYPES_BY_LIBRARY_NAME.items()
    if hasattr(torch, name) and dtype is not DType.F4
}
# What scripts import from the reference library.
_TYPES = {
    code: _DTYPES[DTYPES[code]] for code in DTYPES if DTYPES[code] in _DTYPES and code != "F8_E8M0"
}
_SIZE = {dtype: dtype.itemsize for dtype in _DTYPES.values()} | {_PAIRS: 1}
_NAMES = {dtype: code for code, dtype in _DTYPES.items()} | {_PAIRS: DType.F4}


def as_tensor(memory: mmap.mmap | memoryview, offset: int, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor ``spec`` at ``offset`` of ``memory`` as a tensor that views the memory.

    The memory must be writable, because torch has no read-only tensors. F4 becomes torch's packed
    type with two values per item, which halves the last dimension.

    Raises:
        UnsupportedDType: torch lacks the type, as it does those of 6 bits, F4 has an odd last
            dimension, or torch cannot hold the shape.
    """
    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        return as_tensor(memory, offset, _bytes_of_pairs(spec)).view(_PAIRS)
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
        return empty_tensor(_bytes_of_pairs(spec), device).view(_PAIRS)
    try:
        return torch.empty(spec.shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError:
        raise _out_of_memory(device, spec) from None
    except (RuntimeError, TypeError):
        if math.prod(spec.shape):
            raise
        # dimensions of size 0 and very large ones
        raise UnsupportedDType(
            f"tensor {quote(spec.name)}: torch cannot hold its shape "
            f"{escape(str(list(spec.shape)), MAX_SHOWN)}"
        ) from None


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


def save(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    tied: bool = False,
    alignment: int = 8,
) -> bytes:
    """Return a file of tensors as bytes.

    ``tensors``, ``metadata``, ``tied`` and ``alignment`` are as for :func:`save_file`.

    Raises:
        ValueError: a value is no dense and contiguous tensor.
        RuntimeError: tensors share memory.
        KeyError: the format lacks the type of a tensor.
        TypeError: a name is not a text, or the metadata are not a dict of texts.
        SafetensorError: a tensor has the name ``__metadata__``, or ``alignment`` is not valid.
    """
    from blobstore.safetensors.serialization import lay_out

    if tied:
        tensors, metadata = _tied(tensors, metadata)
    header, ordered = lay_out(named_tensors(tensors), metadata, alignment)
    return b"".join([header, *map(file_bytes, ordered)])


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    tied: bool = False,
    alignment: int = 8,
) -> None:
    """Write a file of tensors. It replaces an existing one when it is durable.

    Tensors on devices are copied to the CPU one after another.

    Args:
        tensors: dense and contiguous tensors by name, of any shape.
        filename: the file.
        metadata: texts by name.
        tied: whether tensors that share memory are written once. The metadata have, for each name
            that is omitted, the one that stands for it.
        alignment: see :func:`blobstore.safetensors.numpy.save_file`.

    Raises:
        ValueError, RuntimeError, KeyError, TypeError: see :func:`save`.
        SafetensorError: see :func:`save`; or the file is inside a store, or cannot be written.
    """
    from blobstore.safetensors.serialization import lay_out, write_file

    if tied:
        tensors, metadata = _tied(tensors, metadata)
    header, ordered = lay_out(named_tensors(tensors), metadata, alignment)
    write_file(filename, itertools.chain([header], map(file_bytes, ordered)))


def load(data: Buffer) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in memory.

    They are views if the memory can be written to. Otherwise the file is copied once, because torch
    has no read-only tensors.

    Args:
        data: the bytes of the file.

    Returns:
        Tensors on the CPU by name, with types and shapes as from :func:`load_file`.

    Raises:
        SafetensorError: the bytes break the format, or torch cannot hold a tensor.
        TypeError: the argument is not a buffer.
    """
    from blobstore.safetensors.reader import open_memory

    return read_all(open_memory(data, is_writable=True), "cpu")


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | None = "cpu",
    *,
    backend: str = "mmap",
    tied: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file.

    They are views of a private map, which can be written to without changing the file. With
    ``backend="pread"``, or on another device, they have memory of their own.

    Args:
        filename: the file, or what else :class:`~blobstore.safetensors.safe_open` takes.
        device: the device of the tensors.
        backend: ``mmap`` or ``pread``.
        tied: whether names that :func:`save_file` has omitted are returned too, with the tensors that
            stand for them.

    Returns:
        Tensors by name, with the types and shapes of the file. F4 becomes torch's type with two values per
        item, which halves the last dimension.

    Raises:
        SafetensorError: the file breaks the format, or torch cannot hold a tensor.
        OSError: the file cannot be opened or read.
    """
    from blobstore.safetensors.arguments import parse_device
    from blobstore.safetensors.reader import open_reader

    place = parse_device(device)
    reader = open_reader(filename, backend, is_writable=True)
    found = read_all(reader, place)
    for name, kept in (reader.table.metadata or {}).items() if tied else ():
        if name not in found and kept in found:
            found[name] = found[kept]
    return found


@gc_paused()
def read_all(reader: Reader, device: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a file."""
    from blobstore.safetensors.reader import framework_errors

    with framework_errors():
        return {
            name: _on_device(as_tensor(memory, begin + shift, TensorSpec(name, *kind)), device)
            for rows, memory, shift in reader.pieces()
            for name, kind, begin in rows
        }


def save_model(
    model: torch.nn.Module,
    filename: str,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Write the state dict of a model, without the names of tensors that others contain.

    The metadata has, for each name that is omitted, the one that stands for it.

    Args:
        model: the module.
        filename: the file.
        metadata: texts by name; the names that are omitted are added to this dict.
        force_contiguous: whether tensors that are not contiguous are copied; otherwise they are errors.

    Raises:
        ValueError, RuntimeError, KeyError, TypeError, SafetensorError: see :func:`save_file`.
    """
    state, found = _written_once(model.state_dict(), metadata)
    if metadata is not None and found is not None:
        metadata |= found  # the reference changes its argument too
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        save_file(state, filename, metadata=found)
    except ValueError as error:  # as the reference library
        raise ValueError(
            f"{error} Or use save_model(..., force_contiguous=True), read the docs for potential caveats."
        ) from None


def _written_once(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """Return tensors without those that others contain, and the metadata with the names of these.

    Raises:
        RuntimeError: tensors share memory, and none of them covers it.
    """
    state = dict(tensors)
    found = None if metadata is None else dict(metadata)
    for kept, names in _remove_duplicate_names(tensors).items():
        found = {} if found is None else found
        for name in names:
            found.setdefault(name, kept)
            del state[name]
    return state, found


def _tied(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> tuple[dict[str, torch.Tensor], dict[str, str] | None]:
    """Return each tensor once, as :func:`_written_once`, if those that share memory are the same.

    Raises:
        RuntimeError: one is a part of another, or the metadata have its name already.
    """
    state, found = _written_once(tensors, metadata)
    for name in tensors.keys() - state.keys():
        kept = (found or {})[name]
        one, other = tensors[name], tensors.get(kept)
        if other is None or _view(one) != _view(other):
            raise RuntimeError(
                f"tensor {quote(name)} shares memory with {quote(kept)}, and is not the same; copy it "
                "first, with .clone(), or remove that name from the metadata"
            )
    return state, found


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj()


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[set[str], list[str]]:
    """Load a file of :func:`save_model` into a model, and return missing and unexpected names.

    Args:
        model: the module, whose tensors have the shapes of the file.
        filename: the file.
        strict: whether missing and unexpected names are errors.
        device: where the tensors are loaded before they are copied into the model.
        backend: ``mmap`` or ``pread``.

    Returns:
        The names that the file lacks, and those that the model lacks.

    Raises:
        RuntimeError: shapes differ; or names do, and ``strict`` is true.
        SafetensorError, OSError: see :func:`load_file`.
    """
    state = load_file(filename, device=device, backend=backend)
    own = model.state_dict()
    duplicates = _remove_duplicate_names(own, preferred_names=state.keys())
    result = model.load_state_dict(state, strict=False)
    missing, unexpected = set(result.missing_keys), list(result.unexpected_keys)
    for names in duplicates.values():
        for name in names:
            if name in missing:
                missing.remove(name)
            else:
                unexpected.append(name)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        if missing:
            lines.append(f"    Missing key(s) in state_dict: {_quoted(sorted(missing))}")
        if unexpected:
            lines.append(f"    Unexpected key(s) in state_dict: {_quoted(sorted(unexpected))}")
        raise RuntimeError("\n".join(lines))
    return missing, unexpected


def read_tensor(reader: Reader, begin: int, spec: TensorSpec, device: str) -> torch.Tensor:
    """Return the tensor that begins at byte ``begin`` of a file."""
    memory, offset = reader.span(begin, begin + spec.nbytes)
    return _on_device(as_tensor(memory, offset, spec), device)


def read_slice(
    reader: Reader, begin: int, spec: TensorSpec, selection: Selection, device: str
) -> torch.Tensor:
    """Return selected elements of the tensor that begins at byte ``begin`` of a file."""
    from blobstore.safetensors.numpy import read_bits

    dtype = _DTYPES.get(spec.dtype)
    if dtype is None:
        dtype, spec, selection = _PAIRS, _bytes_of_pairs(spec), _selected_bytes(selection)
    bits = read_bits(reader, begin, spec, selection)
    if any(stride < 0 for stride in bits.strides):  # torch has no such strides
        bits = bits.copy()
    return _on_device(torch.from_numpy(bits).view(dtype), device)


def _selected_bytes(selection: Selection) -> Selection:
    """Return the bytes of selected pairs.

    Raises:
        SafetensorError: the selection has one element of a pair.
    """
    last = selection.ranges[-1]
    if last.step != 1 or last.start % 2 or len(last) % 2 or not selection.is_kept[-1]:
        raise SafetensorError(SUB_BYTE_RULE)
    pairs = range(last.start // 2, last.start // 2 + len(last) // 2)
    return selection._replace(ranges=(*selection.ranges[:-1], pairs))


def _bytes_of_pairs(spec: TensorSpec) -> TensorSpec:
    """Return the spec of the bytes that hold a tensor of packed 4-bit pairs."""
    if spec.dtype is not DType.F4 or not spec.shape or spec.shape[-1] % 2:
        raise UnsupportedDType(
            f"tensor {quote(spec.name)}: torch has no type for {spec.dtype.value} of shape "
            f"{list(spec.shape)}",
            advice="read its bytes with Model.view()",
        )
    return TensorSpec(spec.name, DType.U8, (*spec.shape[:-1], spec.shape[-1] // 2))


def named_tensors(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Return the tensors of a state dict with their specs.

    Raises:
        ValueError, RuntimeError, KeyError: see :func:`save`.
    """
    from blobstore.safetensors.arguments import require

    if not isinstance(tensors, dict):
        raise ValueError(  # noqa: TRY004 - as the reference library
            f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}"
        )
    _check_tensors(tensors)
    for name, tensor in tensors.items():
        require(name, str, "tensor_dict")
        yield spec_of(name, tensor), tensor


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return the spec of a tensor in a file. Raises KeyError if the format lacks its type."""
    dtype, shape = _NAMES[tensor.dtype], tuple(tensor.shape)
    if dtype is DType.F4 and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    return TensorSpec(name, dtype, shape)


def check_has_bytes(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor has bytes of its own. Raises UnsupportedSource."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedSource(
            f"tensor {quote(name)} is a {quote(type(tensor).__name__)}, which holds its values in other tensors",
            advice="gather distributed tensors with full_tensor(), and dequantize others, before",
        )
    is_empty = tensor.is_meta or torch.nn.parameter.is_lazy(tensor)
    if is_empty or tensor.is_nested or tensor.layout is not torch.strided:
        what = "has no data" if is_empty else "is sparse or nested; make it dense before"
        raise UnsupportedSource(f"tensor {quote(name)} {what}")


def wait_for_devices(tensors: Iterable[object]) -> None:
    """Wait until what was started on the streams of this thread is done: others threads may read then."""
    devices = {one.device for one in tensors if isinstance(one, torch.Tensor) and one.is_cuda}
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _check_tensors(tensors: Mapping[str, object]) -> None:
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(  # noqa: TRY004 - as the reference library
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(value)}"
            )
        found[name] = value
    sparse = [name for name, tensor in found.items() if tensor.layout is not torch.strided]
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not "
            "support. You can make it a dense tensor before saving with `.to_dense()` but be aware "
            "this might make a much larger file than needed."
        )
    shared = [names for names in _find_shared_tensors(found) if len(names) > 1]
    if shared:
        raise RuntimeError(
            f"""
            Some tensors share memory, this will lead to duplicate memory on disk and potential differences when loading them again: {shared}.
            A potential way to correctly save your model is to use `save_model`.
            More information at https://huggingface.co/docs/safetensors/torch_shared_tensors
            """
        )
    for name, tensor in found.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. "
                "It either means you are trying to save tensors which are reference of each other "
                "in which case it's recommended to save only the full tensors, and reslice at load "
                "time, or simply call `.contiguous()` on your tensor to pack it before saving."
            )


def _getdtype(dtype_str: str) -> torch.dtype:
    """Return the type that a name in files means. Raises KeyError for those that torch packs or lacks."""
    return _DTYPES[DTYPES[dtype_str]]


def _to_ndarray(tensor: torch.Tensor) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """Return the bytes of a contiguous tensor, and the tensor on the CPU that holds them."""
    held = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    # A tensor of one element counts as contiguous, whatever its strides are; view() looks at them.
    flat = held.as_strided((held.numel(),), (1,))
    return flat.view(torch.uint8).numpy(), held


def _tobytes(tensor: torch.Tensor, name: str) -> bytes:
    """Return the bytes of a tensor as a file has them, as earlier versions of the reference library.

    Raises:
        ValueError: the tensor is sparse or not contiguous.
    """
    _check_tensors({name: tensor})
    return bytes(file_bytes(tensor))


def _view2torch(views: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, torch.Tensor]:
    """Return tensors over the buffers that ``blobstore.safetensors.deserialize`` returned."""
    return {
        name: torch.frombuffer(view["data"], dtype=_getdtype(view["dtype"])).reshape(view["shape"])
        if len(view["data"])
        else torch.empty(view["shape"], dtype=_getdtype(view["dtype"]))
        for name, view in views
    }


def file_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor as a file has them."""
    return _to_ndarray(tensor)[0].data


def _quoted(names: Iterator[str] | list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _on_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if device == "cpu":
        return tensor
    return tensor.to(int(device) if device.isdigit() else device)


def _out_of_memory(device: object, spec: TensorSpec) -> BlobstoreError:
    return BlobstoreError(
        f"{device} has no memory left for tensor {quote(spec.name)} of {spec.nbytes} bytes; "
        "use another device, or load fewer tensors at a time"
    )

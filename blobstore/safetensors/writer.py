"""Writes a file tensor by tensor, for files that are larger than the memory."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from functools import partial
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import escape, quote
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.errors import SafetensorError
from blobstore.safetensors.arguments import require
from blobstore.safetensors.serialization import lay_out, replaced_file, write_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

_SHOWN = 5
"""Names that an error lists."""


class SafetensorsWriter:
    """Write a safetensors file whose tensors arrive in any order, from any thread.

    All types and shapes are declared first, because the header precedes the data. The file has the
    bytes that ``save_file`` would write. It gets its name when the writer is closed, or the ``with``
    block ends without an error. Otherwise, nothing remains.

    A file object receives the bytes from its position on, and is neither synced nor closed. If it cannot
    seek, tensors must be written in the order of :meth:`names`. What it received before an error remains.

    Args:
        file: the path of the file, or a binary file object.
        tensors: type and shape of each tensor by its name; types are those of the format, such as ``F32``.
        metadata: texts by name.
        alignment: see :func:`blobstore.safetensors.numpy.save_file`.

    Raises:
        SafetensorError: a tensor is not valid, or the file cannot be written.
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | IO[bytes],
        tensors: Mapping[str, tuple[str, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
        *,
        alignment: int = 8,
    ) -> None:
        specs = [_spec(name, *kind) for name, kind in tensors.items()]
        header, ordered = lay_out([(spec, spec) for spec in specs], metadata, alignment)
        self._places: dict[str, tuple[TensorSpec, int]] = {}
        end = len(header)
        for spec in ordered:
            self._places[spec.name] = spec, end
            end += spec.nbytes
        self._missing = set(self._places)
        self._writing: set[str] = set()
        self._lock = threading.Condition()
        self._ending = contextlib.ExitStack()
        self._write_at: Callable[[memoryview, int], object]
        if isinstance(file, str | os.PathLike):
            descriptor = self._ending.enter_context(replaced_file(file))
            self._write_at = partial(write_at, descriptor)
        else:
            self._write_at = _FileObject(file).write_at
        try:
            if isinstance(file, str | os.PathLike):
                os.ftruncate(descriptor, end)
            self._write_at(memoryview(header), 0)
        except BaseException:
            self._abandon(*sys.exc_info())
            raise
        self._is_open = True

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of their bytes."""
        return list(self._places)

    def write(self, name: str, tensor: Any) -> None:
        """Write a tensor.

        Args:
            name: a declared tensor.
            tensor: an array of numpy or MLX or a torch tensor, with the declared type and shape; or a buffer
                with the bytes, in C order and little-endian.

        Raises:
            SafetensorError: there is no such tensor, it was written before, or it has another type, shape
                or size than declared; or the file cannot be written, or is closed.
        """
        spec, offset = self._take(name)
        try:
            self._write_at(_checked_bytes(spec, tensor), offset)
        except OSError as error:
            raise SafetensorError(f"Error while serializing: I/O error: {error}") from error
        else:
            with self._lock:
                self._missing.discard(name)
        finally:
            with self._lock:
                self._writing.discard(name)
                self._lock.notify_all()

    def close(self) -> None:
        """Make the file durable, and give it its name.

        Raises:
            SafetensorError: a tensor has not been written, so nothing remains; or writing fails.
        """
        if not self._end():
            return
        if self._missing:
            names = ", ".join(quote(name) for name in sorted(self._missing)[:_SHOWN])
            error = SafetensorError(
                f"tensors not written: {len(self._missing)}, {names}; the file is discarded"
            )
            self._abandon(type(error), error, None)
            raise error
        self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif self._end():
            self._abandon(kind, error, trace)

    def _end(self) -> bool:
        """Accept no more tensors, and wait for threads that write one; return False if that was done."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
            # The number of the descriptor may soon be that of another file.
            self._lock.wait_for(lambda: not self._writing)
        return was_open

    def _take(self, name: str) -> tuple[TensorSpec, int]:
        """Reserve a tensor for this thread."""
        require(name, str, "name")
        with self._lock:
            if not self._is_open:
                raise SafetensorError("File is closed")
            if name not in self._places:
                raise SafetensorError(f"tensor {quote(name)} has not been declared")
            if name not in self._missing or name in self._writing:
                raise SafetensorError(f"tensor {quote(name)} is written twice")
            self._writing.add(name)
            return self._places[name]

    def _abandon(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(BaseException):  # which is that error
            self._ending.__exit__(kind, error, trace)


def _spec(name: str, code: str, shape: Sequence[int]) -> TensorSpec:
    require(name, str, "tensors")
    dtype = DTYPES.get(code)
    if dtype is None:
        raise SafetensorError(
            f'Unknown dtype "{escape(code, 200)}"; expected one of {list(DTYPES)}'
        )
    dims = tuple(shape)
    if not all(type(dim) is int and dim >= 0 for dim in dims):
        raise SafetensorError(f"tensor {quote(name)}: {escape(str(dims), 200)} is not a shape")
    return TensorSpec(name, dtype, dims)


def _checked_bytes(spec: TensorSpec, tensor: Any) -> memoryview:
    """Return the bytes of a tensor, if it is the declared one."""
    if _framework(tensor) is not None:
        found, read = named_bytes(spec.name, tensor)
        if found != spec:
            raise SafetensorError(
                f"tensor {quote(spec.name)} is {found.dtype.value} {list(found.shape)}, and was "
                f"declared as {spec.dtype.value} {list(spec.shape)}"
            )
        return read()
    view = memoryview(tensor)
    data = view.cast("B") if view.nbytes else memoryview(b"")
    if len(data) != spec.nbytes:
        raise SafetensorError(
            f"tensor {quote(spec.name)} has {len(data)} bytes; expected {spec.nbytes}"
        )
    return data


class NamedBytes(NamedTuple):
    """A tensor to write: its description, and a function that returns its bytes."""

    spec: TensorSpec
    read: Callable[[], memoryview]


def named_bytes(name: str, tensor: Any) -> NamedBytes:
    """Return what a tensor of any framework is in a file.

    Raises:
        SafetensorError: it is not a tensor, or the format lacks its type.
    """
    module = _framework(tensor)
    if module is None:
        raise SafetensorError(
            f"tensor {quote(name)} is of type {type(tensor).__name__}; expected an array of numpy or "
            "MLX, or a torch tensor"
        )
    ((spec, value),) = module.named_tensors({name: tensor})
    return NamedBytes(spec, lambda: module.file_bytes(value))


def _framework(tensor: object) -> Any:
    """Return the module for the framework of a tensor; None if it is of none."""
    name = type(tensor).__module__.partition(".")[0]
    if name in ("numpy", "torch", "mlx") or hasattr(tensor, "untyped_storage"):
        return import_module(
            f"blobstore.safetensors.{name if name in ('numpy', 'mlx') else 'torch'}"
        )
    return None


class _FileObject:
    """A binary file object whose present position is the start of the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._is_seekable = bool(getattr(file, "seekable", lambda: False)())
        self._start = file.tell() if self._is_seekable else 0
        self._end = 0
        self._lock = threading.Lock()

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write bytes at an offset. Raises SafetensorError if the object is elsewhere and cannot seek."""
        with self._lock:
            if self._is_seekable:
                self._file.seek(self._start + offset)
            elif offset != self._end and data:
                raise SafetensorError(
                    "the file object cannot seek: write the tensors in the order of names()"
                )
            rest = data
            while rest:
                written = self._file.write(rest)
                rest = rest[len(rest) if written is None else written :]
            self._end = offset + len(data)

"""Writes a file tensor by tensor, for files that are larger than the memory."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import escape, quote
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.errors import SafetensorError
from blobstore.safetensors.arguments import require
from blobstore.safetensors.serialization import lay_out, replaced_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

_REQUEST_SIZE = 1 << 28
"""Bytes per system call; macOS allows 2 GiB."""
_SHOWN = 5
"""Names that an error lists."""


class SafetensorsWriter:
    """Write a safetensors file whose tensors arrive in any order, from any thread.

    All types and shapes are declared first, because the header precedes the data. The file has the
    bytes that ``save_file`` would write. It gets its name when the writer is closed, or the ``with``
    block ends without an error. Otherwise, nothing remains.

    Args:
        filename: the file.
        tensors: type and shape of each tensor by its name; types are those of the format, such as ``F32``.
        metadata: texts by name.

    Raises:
        SafetensorError: a tensor is not valid, or the file cannot be written.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        tensors: Mapping[str, tuple[str, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        specs = [_spec(name, *kind) for name, kind in tensors.items()]
        header, ordered = lay_out([(spec, spec) for spec in specs], metadata)
        self._places: dict[str, tuple[TensorSpec, int]] = {}
        end = len(header)
        for spec in ordered:
            self._places[spec.name] = spec, end
            end += spec.nbytes
        self._missing = set(self._places)
        self._writing: set[str] = set()
        self._lock = threading.Condition()
        self._file = contextlib.ExitStack()
        self._descriptor = self._file.enter_context(replaced_file(filename))
        try:
            os.ftruncate(self._descriptor, end)
            _write_at(self._descriptor, memoryview(header), 0)
        except BaseException:
            self._abandon(*sys.exc_info())
            raise
        self._is_open = True

    def write(self, name: str, tensor: Any) -> None:
        """Write a tensor: an array of numpy or MLX, a torch tensor, or a buffer with its bytes.

        Raises:
            SafetensorError: there is no such tensor, it was written before, or it has another type, shape
                or size than declared.
        """
        spec, offset = self._take(name)
        try:
            data = _checked_bytes(spec, tensor)
            _write_at(self._descriptor, data, offset)
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
                f"{len(self._missing)} tensors have not been written: {names}; the file is discarded"
            )
            self._abandon(type(error), error, None)
            raise error
        self._file.close()

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
            self._file.__exit__(kind, error, trace)


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
    framework = type(tensor).__module__.partition(".")[0]
    if framework in ("numpy", "torch", "mlx"):
        module: Any = import_module(f"blobstore.safetensors.{framework}")
        ((found, value),) = module.named_tensors({spec.name: tensor})
        if found != spec:
            raise SafetensorError(
                f"tensor {quote(spec.name)} is {found.dtype.value} {list(found.shape)}, and was "
                f"declared as {spec.dtype.value} {list(spec.shape)}"
            )
        data: memoryview = module.file_bytes(value)
        return data
    view = memoryview(tensor)
    data = view.cast("B") if view.nbytes else memoryview(b"")
    if len(data) != spec.nbytes:
        raise SafetensorError(
            f"tensor {quote(spec.name)} has {len(data)} bytes; expected {spec.nbytes}"
        )
    return data


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data[:_REQUEST_SIZE], offset)
        data = data[written:]
        offset += written

"""``safe_open``: one safetensors file, whose tensors are read one by one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from blobstore.core.escape import escape
from blobstore.errors import SafetensorError
from blobstore.safetensors.arguments import FRAMEWORK_NAMES, parse_device, parse_framework, require
from blobstore.safetensors.plans import groups, part, whole
from blobstore.safetensors.prefetch_loader import IN_FLIGHT, THREADS, PrefetchLoader
from blobstore.safetensors.reader import MemoryReader, digest, framework_errors, open_reader
from blobstore.safetensors.slices import SafeSlice, select

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    from blobstore.core.tensor import TensorSpec
    from blobstore.safetensors.cuda import CallerStream
    from blobstore.safetensors.header import TensorEntry
    from blobstore.safetensors.plans import FileGroup
    from blobstore.safetensors.reader import Reader
    from blobstore.safetensors.slices import Selection

    Plan = Mapping[str, Any]

_BYTE = 8


class TensorMeta(NamedTuple):
    """What the header says about a tensor."""

    dtype: str
    """The type's name in the file, such as ``F32``."""
    shape: list[int]
    """The sizes of the dimensions, in elements."""
    data_offsets: tuple[int, int]
    """The range of its bytes, relative to the start of the data."""


class Framework(Protocol):
    """Turns bytes of files into tensors: :mod:`blobstore.safetensors.numpy`, ``torch`` and ``mlx``."""

    __name__: str

    def read_tensor(self, reader: Reader, begin: int, spec: TensorSpec, device: str) -> Any:
        """Return the tensor that begins at byte ``begin`` of the file."""

    def read_all(self, reader: Reader, device: str) -> dict[str, Any]:
        """Return all tensors of the file, in the order of their bytes."""

    def read_slice(
        self, reader: Reader, begin: int, spec: TensorSpec, selection: Selection, device: str
    ) -> Any:
        """Return selected elements of the tensor that begins at byte ``begin`` of the file."""


class _Tensors:
    """The tensors of a file for one framework. Slices hold it when the file is closed."""

    def __init__(self, reader: Reader, framework: Framework, device: str) -> None:
        self.table = reader.table
        self._reader = reader
        self._framework = framework
        self._device = device

    def entry(self, name: str) -> TensorEntry:
        require(name, str, "name")
        entry = self.table.entry(name)
        if entry is None:
            raise SafetensorError(f"File does not contain tensor {escape(name, 200)}")
        return entry

    def read(self, entry: TensorEntry, reader: Reader | None = None) -> Any:
        """Return a tensor, from another reader of its bytes if one is given."""
        begin = self.table.data_start + entry.begin
        with framework_errors():
            return self._framework.read_tensor(
                reader or self._reader, begin, entry.spec, self._device
            )

    def sha256(self, name: str) -> str:
        entry, start = self.entry(name), self.table.data_start
        return digest(self._reader, start + entry.begin, start + entry.end)

    def read_all(self) -> dict[str, Any]:
        with framework_errors():
            return self._framework.read_all(self._reader, self._device)

    def read_slice(
        self, spec: TensorSpec, selection: Selection, reader: Reader | None = None
    ) -> Any:
        """Return a part of a tensor, from another reader of its bytes if one is given."""
        begin = self.table.data_start + self.entry(spec.name).begin
        with framework_errors():
            return self._framework.read_slice(
                reader or self._reader, begin, spec, selection, self._device
            )

    def read_index(self, spec: TensorSpec, index: Any) -> Any:
        """Return the elements of a tensor that an index selects."""
        try:
            selection = select(spec.shape, index)
        except SafetensorError:
            # As in the reference library, torch judges what it can view.
            is_viewed = isinstance(self._reader, MemoryReader) and spec.dtype.bits >= _BYTE
            if not is_viewed or _module(self._framework) != "torch":
                raise
            return self.read(self.entry(spec.name))[index]
        return self.read_slice(spec, selection)

    def stream(self) -> CallerStream | None:
        """Return the current stream of a GPU; None for other devices."""
        if self._device == "cpu":
            return None
        from blobstore.safetensors.cuda import CallerStream

        return CallerStream.of(self._device)

    def groups(self, plan: Plan, device: str | int | None) -> Iterator[FileGroup]:
        """Yield the tensors of a plan that the file has, in groups that are read together."""
        tensors, start = self, self.table.data_start
        if device is not None:
            tensors = _Tensors(self._reader, self._framework, _place(self._framework, device))
        wanted = []
        for name, index in plan.items():
            if (entry := self.table.entry(name)) is None:
                continue
            if index is None:
                wanted.append(whole(entry, start, partial(tensors.read, entry)))
            else:
                wanted.append(part(entry, start, index, partial(tensors.read_slice, entry.spec)))
        return groups(self._reader, wanted, tensors.stream())


class safe_open:  # noqa: N801 - the name that users know
    """Open a safetensors file, check its header, and read tensors one by one.

    A tensor read from a map (``backend="mmap"``) is a view of private memory: it can be written to,
    and the file does not change. Tensors read with ``backend="pread"`` have memory of their own.

    Args:
        filename: the path of a file; or a buffer with its bytes, a binary file object that can seek, or an
            ``http`` or ``https`` URL of a server that supports range requests.
        framework: ``numpy`` or ``np``; ``torch``, ``pytorch`` or ``pt``; ``mlx``.
        device: the device of the tensors, for torch.
        backend: ``mmap`` or ``pread``.

    Raises:
        SafetensorError: the file breaks the format, or an argument is not valid.
        OSError: the file cannot be opened or read.
    """

    def __init__(
        self,
        filename: Any,
        framework: str,
        device: str | int | None = "cpu",
        *,
        backend: str = "mmap",
    ) -> None:
        module = parse_framework(framework)
        adapter: Any = import_module(f"blobstore.safetensors.{module}")
        place = _place(adapter, device)
        reader = open_reader(filename, backend, is_writable=module == "torch")
        self._open: _Tensors | None = _Tensors(reader, adapter, place)

    @property
    def _tensors(self) -> _Tensors:
        if self._open is None:
            raise SafetensorError("File is closed")
        return self._open

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted.

        Raises:
            SafetensorError: the file is closed.
        """
        return sorted(self._tensors.table.names)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of their bytes.

        Raises:
            SafetensorError: the file is closed.
        """
        return list(self._tensors.table.names)

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata, texts by name, or None if the file has none.

        Raises:
            SafetensorError: the file is closed.
        """
        metadata = self._tensors.table.metadata
        return None if metadata is None else dict(metadata)

    def get_tensor(self, name: str) -> Any:
        """Return a tensor, with the element type and shape that the file states.

        torch packs two F4 values per item, which halves the last dimension. MLX has 8-bit floats as uint8.

        Args:
            name: the tensor.

        Raises:
            SafetensorError: there is no such tensor, the framework cannot hold it, or the file is closed.
            OSError: the file cannot be read.
        """
        tensors = self._tensors
        return tensors.read(tensors.entry(name))

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors by name, in the order of their bytes, each as :meth:`get_tensor` does.

        Raises:
            SafetensorError: the framework cannot hold a tensor, or the file is closed.
            OSError: the file cannot be read.
        """
        return self._tensors.read_all()

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Return type, shape and place of a tensor, without reading it.

        Args:
            name: the tensor.

        Raises:
            SafetensorError: there is no such tensor, or the file is closed.
        """
        spec, begin, end = self._tensors.entry(name)
        return TensorMeta(spec.dtype.value, list(spec.shape), (begin, end))

    def sha256(self, name: str) -> str:
        """Return the sha256 of a tensor's bytes in the file, as 64 hexadecimal digits.

        Args:
            name: the tensor.

        Raises:
            SafetensorError: there is no such tensor, or the file is closed.
            OSError: the file cannot be read.
        """
        return self._tensors.sha256(name)

    def get_slice(self, name: str) -> SafeSlice:
        """Return a tensor of which slices can be read. Nothing is read yet.

        Args:
            name: the tensor.

        Raises:
            SafetensorError: there is no such tensor, or the file is closed.
        """
        tensors = self._tensors
        return SafeSlice(tensors, tensors.entry(name).spec)

    def prefetch(
        self,
        plan: Plan | None = None,
        *,
        device: str | int | None = None,
        threads: int = THREADS,
        bytes_in_flight: int = IN_FLIGHT,
    ) -> PrefetchLoader:
        """Start to load tensors in the background.

        ``plan``, ``device``, ``threads`` and ``bytes_in_flight`` are as for :func:`prefetch`.

        Returns:
            The loader, which hands the tensors out.

        Raises:
            SafetensorError, TypeError: see :func:`prefetch`; or the file is closed.
        """
        return prefetch(
            [self], plan, device=device, threads=threads, bytes_in_flight=bytes_in_flight
        )

    def close(self) -> None:
        """Close the file. Tensors and slices that were taken from it stay valid."""
        self._open = None

    def __len__(self) -> int:
        return len(self._tensors.table.names)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors.table.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __getitem__(self, name: str) -> Any:
        return self.get_tensor(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def prefetch(
    files: Iterable[safe_open],
    plan: Plan | None = None,
    *,
    device: str | int | None = None,
    threads: int = THREADS,
    bytes_in_flight: int = IN_FLIGHT,
) -> PrefetchLoader:
    """Start to load tensors of open files in the background.

    Args:
        files: the files; no two may have a tensor of one name that is loaded.
        plan: None to load all tensors. Otherwise for each name the index of a part, as for
            :meth:`safe_open.get_slice`, or None for the whole tensor.
        device: the device, if it is not that of the files.
        threads: how many threads read.
        bytes_in_flight: bytes that are loaded, or being loaded, and were not taken yet.

    Returns:
        The loader, which hands the tensors out.

    Raises:
        SafetensorError: no file has a tensor of the plan, two files have it, a file is closed, or an index or
            another argument is not valid.
        TypeError: an argument has the wrong type.
    """
    opened = [file._tensors for file in files]  # noqa: SLF001 - of this module
    if plan is None:
        plan = dict.fromkeys(name for tensors in opened for name in tensors.table.names)
    require(plan, Mapping, "plan")
    for name in plan:
        require(name, str, "plan")
        if not any(name in tensors.table.names for tensors in opened):
            raise SafetensorError(f"File does not contain tensor {escape(name, 200)}")
    found = [group for tensors in opened for group in tensors.groups(plan, device)]
    return PrefetchLoader(found, threads=threads, bytes_in_flight=bytes_in_flight)


def _place(framework: Framework, device: str | int | None) -> str:
    """Return the device for a framework. Raises SafetensorError if it has none but the processor."""
    place, module = parse_device(device), _module(framework)
    if place != "cpu" and module != "torch":
        raise SafetensorError(
            f"Device {place} is not supported for framework {FRAMEWORK_NAMES[module]}"
        )
    return place


def _module(framework: Framework) -> str:
    return framework.__name__.rpartition(".")[2]

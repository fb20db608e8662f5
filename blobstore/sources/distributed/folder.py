"""A source whose tensors are assembled from pieces in several files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import DamagedSource, UsageError
from blobstore.manifests.source_record import RecordedFile, SourceRecord
from blobstore.sources.sharded import wrapper_notices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.manifests.source_record import Format
    from blobstore.sources.base import SourceFile, SourceOptions, TensorSource
    from blobstore.sources.distributed.files import DataFile
    from blobstore.sources.distributed.pieces import Piece
    from blobstore.sources.file_tree import FileTree


class Assembled(NamedTuple):
    """A tensor and its pieces, which tile it."""

    spec: TensorSpec
    shape: Sequence[int]
    """The sizes of the dimensions, in elements of ``itemsize`` bytes."""
    pieces: Sequence[Piece]

    @property
    def itemsize(self) -> int:
        """Bytes per element; for F4, per pair."""
        return self.spec.dtype.bits // 8 or 1


def spec_of(name: str, dtype: DType, shape: tuple[int, ...]) -> TensorSpec:
    """Return the spec of a tensor by its sizes in torch, which counts pairs of F4."""
    if dtype is DType.F4 and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    return TensorSpec(name, dtype, shape)


class AssembledFolder:
    """The part of a :class:`TensorSource` that all kinds of folders with pieces share."""

    metadata: Mapping[Path, Mapping[str, str]] = {}
    block_types: Mapping[str, str] = {}
    reopen: Callable[[], TensorSource]
    _format: Format

    def __init__(self, tree: FileTree, options: SourceOptions) -> None:
        """Read nothing yet."""
        self.notices: list[str] = []
        self.config: Mapping[str, Any] = {}
        self.files: Sequence[SourceFile] = ()
        self.specs: Mapping[str, TensorSpec] = {}
        self.versions = tree.versions
        self._tree = tree
        self._options = options
        self._tensors: Mapping[str, Assembled] = {}
        self._data_files: dict[str, DataFile] = {}
        """The data files by their names relative to the folder."""

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """See :class:`TensorSource`."""
        return self.read_tensor(self._tensors[name], buffer)

    def read_tensor(self, tensor: Assembled, buffer: memoryview) -> Iterator[memoryview]:
        """Read a tensor of these files, as :meth:`read` does."""
        from blobstore.sources.distributed.assembly import read_assembled  # imports numpy

        try:
            yield from read_assembled(tensor.shape, tensor.itemsize, tensor.pieces, buffer)
        except DamagedSource as error:
            raise error.at(f"tensor {quote(tensor.spec.name)}") from None

    def check_unchanged(self) -> None:
        """See :class:`TensorSource`."""
        self.versions.check({file.path: file.version for file in self._data_files.values()})

    def record(self) -> SourceRecord:
        """See :class:`TensorSource`."""
        files = [
            RecordedFile(name, self._format, file.version.size, b"")
            for name, file in sorted(self._data_files.items())
        ]
        return SourceRecord(kind="folder", files=tuple(files), is_converted=True)

    def close(self) -> None:
        """See :class:`TensorSource`. Files are open only while they are read; the folder stays open."""
        self._tree.close()

    def _add(self, tensors: Mapping[str, Assembled]) -> None:
        """Set the tensors, without the prefix that the options name."""
        prefix = self._options.strip_prefix or ""
        if prefix and not any(name.startswith(prefix) for name in tensors):
            raise UsageError(
                f"no tensor of {self._tree.label()} has a name that begins with {quote(prefix)}"
            )
        by_name: dict[str, Assembled] = {}
        for name, tensor in sorted(tensors.items(), key=_position):
            bare = name.removeprefix(prefix)
            if not bare or bare in by_name:
                raise UsageError(
                    f"without the prefix {quote(prefix)}, tensor {quote(name)} of "
                    f"{self._tree.label()} would have no name of its own"
                )
            by_name[bare] = tensor._replace(spec=tensor.spec._replace(name=bare))
        self.notices += wrapper_notices(by_name)
        self._tensors = by_name
        self.specs = {name: tensor.spec for name, tensor in by_name.items()}


def _position(item: tuple[str, Assembled]) -> tuple[str, int, str]:
    """Return where a tensor begins: its file and offset."""
    name, tensor = item
    first = tensor.pieces[0] if tensor.pieces else None
    return ("", 0, name) if first is None else (first.file.path.name, first.begin, name)

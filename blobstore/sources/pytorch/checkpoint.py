"""PyTorch checkpoint files, read without torch, without pickle, and without running anything."""

from __future__ import annotations

import contextlib
import os
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import open_regular
from blobstore.core.gc_pause import gc_paused
from blobstore.core.mmap import MappedRegion
from blobstore.core.tensor import TensorView
from blobstore.errors import (
    BlobstoreError,
    CheckpointRefused,
    DamagedSource,
    SourceError,
    SourceNotFound,
    TensorNotFound,
)
from blobstore.sources.pytorch import state_dict as torch_tree
from blobstore.sources.pytorch.container import open_container
from blobstore.sources.pytorch.storages import StorageReader
from blobstore.sources.pytorch.tensors import TensorReader, UnreadableTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Self

    from blobstore.core.tensor import TensorSpec
    from blobstore.sources.pytorch.state_dict import Subtree
    from blobstore.sources.pytorch.tensors import StridedTensor
    from blobstore.sources.unpickler.machine import Result

_MAX_GROWTH = 16
"""How many times the file its tensors may be: views that repeat their elements take no room in it."""
_SPARE_SIZE = 64 * 2**20
_MAX_WORK = 64
"""How many times the file's bytes may have to be read: tensors can lie across all of a storage."""
_SPARE_WORK = 4 * 2**30
_SHOWN = 8


class Checkpoint:
    """The tensors of one checkpoint file, open for reading.

    The file stays open until :meth:`close`; views stay valid after that.
    """

    def __init__(self, path: Path, *, subtree: str | None = None) -> None:
        self.path = path
        self.unreadable: dict[str, str] = {}
        """Tensors that are of a kind that is not read, and why."""
        self._map: memoryview | None = None
        with _errors_of(path):
            self._descriptor, self._size = open_regular(path)
        try:
            with _errors_of(path), gc_paused():
                self._open(subtree)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors, in the order in which their bytes lie in the file."""
        return {name: tensor.spec for name, tensor in self._tensors.items()}

    @property
    def subtrees(self) -> Sequence[Subtree]:
        """The parts that ``subtree`` can choose, and how many tensors each has."""
        return torch_tree.subtrees(self._paths)

    def check_readable(self) -> None:
        """Check that every tensor can be read.

        Raises:
            CheckpointRefused: one is :attr:`unreadable`; the file is closed then.
        """
        for name, reason in self.unreadable.items():
            self.close()
            more = f" (and {len(self.unreadable) - 1} more)" if len(self.unreadable) > 1 else ""
            raise CheckpointRefused(f"{quote(self.path)}, tensor {quote(name)}{more}: {reason}")

    def view(self, name: str) -> TensorView:
        """Return a tensor's bytes: of the mapped file if they lie there in order, else gathered.

        Check sums are not looked at, for that would read the whole file; :meth:`read` does.

        Raises:
            TensorNotFound: there is no tensor of that name.
            CheckpointRefused: the file was cut short, or a compressed storage is damaged.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            reason = self.unreadable.get(name)
            message = f"no tensor {quote(name)} in {quote(self.path)}"
            raise TensorNotFound(message if reason is None else f"{message}: {reason}")
        return self._view(tensor)

    def views(self) -> dict[str, TensorView]:
        """Return :meth:`view` of every tensor."""
        memory = self._memory()
        new = tuple.__new__  # in C, as the constructors of named tuples are not
        with gc_paused():
            return {
                name: new(
                    TensorView,
                    (tensor.spec, memory[tensor.offset : tensor.offset + tensor.nbytes]),
                )
                if tensor.is_mapped
                else self._view(tensor)
                for name, tensor in self._tensors.items()
            }

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """Yield a tensor's bytes in pieces; see :meth:`TensorSource.read`."""
        return self.read_range(name, 0, self._tensors[name].nbytes, buffer)

    def read_range(
        self, name: str, begin: int, end: int, buffer: memoryview
    ) -> Iterator[memoryview]:
        """Yield bytes ``begin`` to ``end`` of a tensor in pieces, as :meth:`read` does all."""
        tensor = self._tensors[name]
        with _errors_of(self.path, name):
            if tensor.is_direct:
                first = tensor.begin
                yield from self._reader.read(tensor.place, first + begin, first + end, buffer)
            else:
                yield self._gather(tensor)[begin:end]

    def close(self) -> None:
        """Close the file; views that were handed out keep the map alive."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, subtree: str | None) -> None:
        container = open_container(self._descriptor, self._size)
        self.kind = container.kind
        """What kind of file it is, for people."""
        check_globals(container.result)
        tree = torch_tree.walk(container.result, container.pickle_size)
        choice = torch_tree.find_state_dict(tree, subtree)
        self._paths = [path for path, _ in tree.tensors]
        reader = TensorReader(
            container.result.persistents, container.locate, is_swapped=container.is_swapped
        )
        self.notices: Sequence[str] = [*choice.notices, *container.notices()]
        self._is_swapped = container.is_swapped
        self._reader = StorageReader(self._descriptor)
        found = []
        for name, value in choice.tensors.items():
            if not name.isascii():
                _check_name(name)
            try:
                found.append(reader.read(name, value))
            except UnreadableTensor as error:
                self.unreadable[name] = str(error)
        if not found and not self.unreadable:
            raise CheckpointRefused("the checkpoint holds no tensors")
        found.sort(key=attrgetter("offset"))
        self._tensors = {tensor.spec.name: tensor for tensor in found}
        self._check_growth()

    def _check_growth(self) -> None:
        limit = self._size * _MAX_GROWTH + _SPARE_SIZE
        total = sum([tensor.nbytes for tensor in self._tensors.values()])
        others = [tensor for tensor in self._tensors.values() if not tensor.is_mapped]
        # What is not compressed has its room in the file.
        unpacked = {place for tensor in others if (place := tensor.place).is_deflated}
        stored = sum(place.size for place in unpacked)
        if max(total, stored) > limit:
            raise CheckpointRefused(
                f"its tensors are {total} bytes, {stored} of compressed storages, more than "
                f"{_MAX_GROWTH} times the file's {self._size}"
            )
        work = sum(self._work(tensor) for tensor in others)
        if work > self._size * _MAX_WORK + _SPARE_WORK:
            raise CheckpointRefused(
                f"{work} bytes would have to be skipped to read its tensors, more than {_MAX_WORK} "
                f"times the file's {self._size}; load them with torch and save clones of them"
            )

    def _work(self, tensor: StridedTensor) -> int:
        """Return how many bytes of its storage are read for a tensor that is no run of the file."""
        if tensor.place.is_deflated or self._is_swapped:
            return tensor.place.size
        return tensor.extent.span * tensor.itemsize

    def _view(self, tensor: StridedTensor) -> TensorView:
        if tensor.is_mapped:
            offset = tensor.offset
            return TensorView(tensor.spec, self._memory()[offset : offset + tensor.nbytes])
        with _errors_of(self.path, tensor.spec.name):
            return TensorView(tensor.spec, self._gather(tensor))

    def _memory(self) -> memoryview:
        if self._map is None:
            region = MappedRegion([self._size])
            with _errors_of(self.path):
                region.map(0, self._descriptor, self._size)
            self._map = memoryview(region.memory)
        return self._map

    def _gather(self, tensor: StridedTensor) -> memoryview:
        from blobstore.sources.pytorch.gather import gathered, swapped

        place = tensor.place
        begin, end = tensor.begin, tensor.begin + tensor.extent.span * tensor.itemsize
        if self._is_swapped and tensor.storage.itemsize > 1:
            whole = swapped(self._reader.copy(place, 0, place.size), tensor.storage)
            return gathered(tensor, whole[begin:end])
        return gathered(tensor, self._reader.copy(place, begin, end))


def open_checkpoint(path: Path | str, *, subtree: str | None = None) -> Checkpoint:
    """Open a ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` file of PyTorch.

    ``subtree`` chooses the tensors below some keys, joined with dots; ``"."`` all of them. By
    default they are the model's, found by the names that training programs use.

    Raises:
        SourceNotFound: there is no such file.
        SourceError: it cannot be opened.
        CheckpointRefused: it is damaged, asks for code to be run, or is of a kind that is not read.
        UsageError: there is no such subtree.
    """
    return Checkpoint(Path(path), subtree=subtree)


def check_globals(result: Result) -> None:
    """Check that a pickle asks for nothing but what the closed list has.

    Raises:
        CheckpointRefused: it does; all that it asks for beyond are named.
    """
    if refused := result.refused:
        names = ", ".join(quote(item) for item in refused[:_SHOWN])
        more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        raise CheckpointRefused(
            f"pickle byte {refused[0].offset}: it asks for {names}{more}, which no checkpoint of "
            "tensors needs; nothing was run. See all of it with blobstore inspect"
        )


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointRefused(f"the name {quote(name)} of a tensor is not Unicode") from None


@contextlib.contextmanager
def _errors_of(path: Path, name: str | None = None) -> Iterator[None]:
    """Say in errors which file they are of, and which tensor."""
    where = quote(path) if name is None else f"{quote(path)}, tensor {quote(name)}"
    try:
        yield
    except CheckpointRefused as error:
        raise error.at(where) from None
    except DamagedSource as error:
        raise CheckpointRefused(f"{where}: {error}") from None
    except FileNotFoundError:
        raise SourceNotFound(f"no such file: {quote(path)}") from None
    except OSError as error:
        raise SourceError(f"cannot read {where}: {error.strerror}") from error
    except BlobstoreError as error:
        if type(error) is BlobstoreError:  # not a regular file
            raise SourceError(str(error)) from None
        raise

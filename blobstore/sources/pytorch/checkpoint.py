"""Reads PyTorch checkpoint files without torch and without executing any of their code."""

from __future__ import annotations

import contextlib
import os
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from blobstore.core.arguments import local_path
from blobstore.core.escape import join_some, quote, shell_word
from blobstore.core.files import FileVersion, open_regular
from blobstore.core.gc_pause import gc_paused
from blobstore.core.mmap import MappedRegion
from blobstore.core.tensor import TensorView
from blobstore.errors import (
    BlobstoreError,
    CheckpointDamaged,
    CheckpointRefused,
    CheckpointUnsupported,
    DamagedSource,
    SourceError,
    SourceNotFound,
    TensorNotFound,
    UnsupportedSource,
)
from blobstore.sources.pytorch.container import open_container
from blobstore.sources.pytorch.state_dict import (
    EVERYTHING,
    HasUnknownObjects,
    find_state_dict,
    find_tensors,
    known_subtrees,
    subtrees_of,
)
from blobstore.sources.pytorch.storages import StorageReader
from blobstore.sources.pytorch.tensors import TensorReader, UnreadableTensor
from blobstore.sources.pytorch.values import PlainValues, plain_values

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from blobstore.core.files import Opener
    from blobstore.core.tensor import TensorSpec
    from blobstore.sources.pytorch.state_dict import Subtree
    from blobstore.sources.pytorch.tensors import StridedTensor
    from blobstore.unpickler.machine import Result

_MAX_GROWTH = 16
"""Limit of the tensors' size, in file sizes: views that repeat elements take no space in the file."""
_SPARE_SIZE = 64 * 2**20
_MAX_WORK = 64
"""Limit of the bytes to read, in file sizes: a strided tensor can span all of its storage."""
_SPARE_WORK = 4 * 2**30
_SHOWN = 8
_INTERNAL = frozenset(("check_readable", "header", "read_range", "version"))
"""Names that other modules use and docs/reference/python.md does not describe, so :func:`dir` omits them."""


class Checkpoint:
    """The tensors of one checkpoint file, open for reading.

    The file stays open until :meth:`close`; views stay valid after that.
    """

    _may_be_empty = False

    def __init__(
        self,
        path: Path,
        *,
        subtree: str | None = None,
        skip_unreadable: bool = False,
        opener: Opener = open_regular,
    ) -> None:
        """Open the file; with ``skip_unreadable``, tensors of unknown classes are skipped and not an error."""
        self.path = path
        self._skips_unreadable = skip_unreadable
        self.notices: Sequence[str] = ()
        self.values: Any = None
        """The simple values next to the tensors, as JSON has them: a list or dict; None if there are
        none."""
        self.unreadable: dict[str, str] = {}
        """Tensors of an unsupported kind, with the reason."""
        self._map: memoryview | None = None
        self._tensors: dict[str, StridedTensor] = {}
        with errors_of(path):
            self._descriptor, self._size = opener(path)
        try:
            with errors_of(path), gc_paused():
                self._open(subtree)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name, element type and shape of each tensor by name, in the order of their bytes in the file."""
        return {name: tensor.spec for name, tensor in self._tensors.items()}

    @property
    def subtrees(self) -> Sequence[Subtree]:
        """The parts that ``subtree`` can name, with their number of tensors."""
        return subtrees_of(self._paths)

    def check_readable(self, *, skip: bool = False) -> None:
        """Check that every tensor can be read; with ``skip``, that one can, and notice the others.

        Raises:
            CheckpointUnsupported: tensors are :attr:`unreadable`. The file is then closed.
        """
        if not self.unreadable:
            return
        (name, reason), *others = self.unreadable.items()
        if not skip or not self._tensors:
            self.close()
            more = f" (and {len(others)} more)" if others else ""
            raise CheckpointUnsupported(
                f"{quote(self.path)}, tensor {quote(name)}{more}: {reason}",
                advice="leave such tensors out with --skip-unreadable" if self._tensors else "",
            )
        count = f"{len(others) + 1} tensor{'s' * bool(others)}"
        names = join_some([*map(quote, self.unreadable)], _SHOWN)
        notice = f"left out: {count} of kinds that are not read: {names}"
        self.notices = [*self.notices, notice]

    def view(self, name: str) -> TensorView:
        """Return the tensor ``name`` as its ``spec`` and its bytes, little-endian and in C order.

        The bytes are a view of the mapped file if they are contiguous there, else a copy.
        Checksums are not verified, because that would read the complete file; :meth:`read` does.

        Raises:
            TensorNotFound: there is no tensor of that name.
            CheckpointDamaged: the file was truncated, or a compressed storage is damaged.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            reason = self.unreadable.get(name)
            message = f"no tensor {quote(name)} in {quote(self.path)}"
            raise TensorNotFound(message if reason is None else f"{message}: {reason}")
        if tensor.is_mapped:
            return TensorView(
                tensor.spec, self._memory()[tensor.offset : tensor.offset + tensor.nbytes]
            )
        with errors_of(self.path, name):
            return TensorView(tensor.spec, self._gather(tensor))

    def views(self) -> dict[str, TensorView]:
        """Return :meth:`view` of every tensor by name.

        Raises:
            CheckpointDamaged: as :meth:`view`.
        """
        memory = self._memory()
        new = tuple.__new__  # in C, unlike the constructors of named tuples
        with gc_paused():
            return {
                name: new(
                    TensorView,
                    (tensor.spec, memory[tensor.offset : tensor.offset + tensor.nbytes]),
                )
                if tensor.is_mapped
                else self.view(name)
                for name, tensor in self._tensors.items()
            }

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """Yield a tensor's bytes in pieces, each valid until the next one, and verify checksums.

        Args:
            name: the tensor.
            buffer: memory that pieces may be read into, of 1 byte or more.

        Raises:
            KeyError: there is no tensor of that name.
            CheckpointDamaged: the file was truncated, or its checksum differs.
            SourceError: the file cannot be read.
        """
        return self.read_range(name, 0, self._tensors[name].nbytes, buffer)

    def read_range(
        self, name: str, begin: int, end: int, buffer: memoryview
    ) -> Iterator[memoryview]:
        """Yield bytes ``begin`` to ``end`` of a tensor in pieces; see :meth:`read`."""
        tensor = self._tensors[name]
        with errors_of(self.path, name):
            if tensor.is_direct:
                first = tensor.begin
                yield from self._reader.read(tensor.place, first + begin, first + end, buffer)
            else:
                yield self._gather(tensor)[begin:end]

    def version(self) -> FileVersion:
        """See :class:`~blobstore.sources.base.Shard`."""
        return FileVersion.of_status(os.fstat(self._descriptor))

    def close(self) -> None:
        """Close the file. Views stay valid: they keep the mapping alive."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, subtree: str | None) -> None:
        container = open_container(self._descriptor, self._size)
        self.kind = container.kind
        """Kind of the file, for messages."""
        is_part = self._skips_unreadable or subtree not in (None, EVERYTHING)
        try:
            if not is_part:
                check_globals(container.result)
            # Unknown objects in the other parts are inert records, which are not inspected.
            tree = find_tensors(container.result, container.pickle_size, is_part=is_part)
            choice = find_state_dict(tree, subtree)
        except HasUnknownObjects as error:
            parts = known_subtrees(container.result, container.pickle_size)
            if not parts:
                raise
            named = join_some([shell_word(part.path) for part in parts], _SHOWN)
            advice = f"{error.advice}, or choose a part without them: --subtree {named}"
            raise HasUnknownObjects(error.message, advice=advice, subtrees=parts) from None
        self._paths = [path for path, _ in tree.tensors]
        reader = TensorReader(
            container.result.persistents, container.locate, is_swapped=container.is_swapped
        )
        self.values, notices = self._values_of(container.result.value)
        self.notices = [*choice.notices, *notices, *container.notices()]
        self._is_swapped = container.is_swapped
        self._reader = StorageReader(self._descriptor)
        found = []
        for name, value in choice.tensors.items():
            try:
                if not name.isascii():
                    name.encode()
                found.append(reader.read(name, value))
            except UnreadableTensor as error:
                self.unreadable[name] = str(error)
            except UnicodeEncodeError:
                raise CheckpointUnsupported(
                    f"the name {quote(name)} of a tensor is not Unicode"
                ) from None
        if not found and not self.unreadable and not self._may_be_empty:
            raise CheckpointUnsupported("the checkpoint has no tensors")
        found.sort(key=attrgetter("offset"))
        self._tensors = {tensor.spec.name: tensor for tensor in found}
        self._check_growth()

    def _values_of(self, value: Any) -> PlainValues:
        """Return what is kept of the values, and notices."""
        return plain_values(value)

    def _check_growth(self) -> None:
        limit = self._size * _MAX_GROWTH + _SPARE_SIZE
        total = sum([tensor.nbytes for tensor in self._tensors.values()])
        others = [tensor for tensor in self._tensors.values() if not tensor.is_mapped]
        # Storages that are not compressed cannot be larger than the file.
        unpacked = {place for tensor in others if (place := tensor.place).is_deflated}
        stored = sum(place.size for place in unpacked)
        if max(total, stored) > limit:
            raise CheckpointUnsupported(
                f"its tensors are {total} bytes, {stored} of compressed storages, more than "
                f"{_MAX_GROWTH} times the file's {self._size}"
            )
        # A tensor that is not contiguous in the file needs a part of its storage, or all of it.
        work = sum(
            tensor.place.size
            if self._is_swapped or tensor.place.is_deflated
            else tensor.extent.span * tensor.itemsize
            for tensor in others
        )
        if work > self._size * _MAX_WORK + _SPARE_WORK:
            raise CheckpointUnsupported(
                f"{work} bytes have to be read for its tensors, more than {_MAX_WORK} times the file's "
                f"{self._size}; load them with torch and save clones of them"
            )

    def _memory(self) -> memoryview:
        if self._map is None:
            region = MappedRegion([self._size])
            with errors_of(self.path):
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

    Args:
        path: the file.
        subtree: the keys, joined by dots, of the part to read; ``"."`` is the whole checkpoint. By
            default it is the model, found by the keys that training programs use.

    Returns:
        the checkpoint; see :class:`Checkpoint`.

    Raises:
        SourceNotFound: the file does not exist.
        SourceError: it cannot be opened.
        CheckpointDamaged: it is truncated, altered, or contradicts itself.
        UnsupportedSource: it is of a format that is not read, or needs code to be executed; mostly as
            its subclass :class:`CheckpointUnsupported`.
        UsageError: there is no such subtree.
    """
    return Checkpoint(local_path(path, "source"), subtree=subtree)


def check_globals(result: Result) -> None:
    """Check that a pickle uses only globals of the list of known ones.

    Raises:
        CheckpointUnsupported: it uses others; the message names them.
    """
    if refused := result.refused:
        names = join_some([*map(quote, refused)], _SHOWN)
        raise HasUnknownObjects(
            f"pickle byte {refused[0].offset}: it uses {names}, which checkpoints of tensors do not "
            "need; no code was executed",
            advice="list them with 'blobstore inspect FILE'",
        )


@contextlib.contextmanager
def errors_of(path: Path, name: str | None = None) -> Iterator[None]:
    """Put the file, and the tensor, in front of the message of errors."""
    where = quote(path) if name is None else f"{quote(path)}, tensor {quote(name)}"
    try:
        yield
    except (CheckpointRefused, UnsupportedSource) as error:
        raise error.at(where) from None
    except DamagedSource as error:
        if str(error).startswith(quote(path)):  # it could not be opened
            raise
        raise CheckpointDamaged(f"{where}: {error}") from None
    except FileNotFoundError:
        raise SourceNotFound(f"no such file: {quote(path)}") from None
    except OSError as error:
        raise SourceError(f"cannot read {where}: {error.strerror}") from error
    except BlobstoreError as error:
        if type(error) is BlobstoreError:  # not a regular file
            raise SourceError(str(error)) from None
        raise

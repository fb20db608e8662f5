"""Changes tensors and metadata of a file. What stays is not read into memory."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.files import copy_bytes, open_regular, read_exactly
from blobstore.core.system import flush
from blobstore.core.tensor import TensorSpec
from blobstore.errors import BlobstoreError, SafetensorError
from blobstore.safetensors.arguments import check_metadata
from blobstore.safetensors.header import PREFIX_SIZE, encode_file_header, errors_during
from blobstore.safetensors.serialization import (
    check_is_replaceable,
    io_errors,
    lay_out,
    replaced_file,
    write_at,
)
from blobstore.safetensors.table import read_table
from blobstore.safetensors.writer import named_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from types import EllipsisType

    from blobstore.safetensors.table import Table
    from blobstore.safetensors.writer import NamedBytes

_PIECE = 1 << 26
"""Bytes that are copied with one request."""
_IN_MEMORY = 1 << 28
"""Bytes of new tensors that an edit in place copies into memory, and not into a file."""


def edit_file(
    filename: str | os.PathLike[str],
    tensors: Mapping[str, Any] | None = None,
    *,
    metadata: Mapping[str, str] | EllipsisType | None = ...,
    remove: Collection[str] = (),
    in_place: bool = False,
) -> bool:
    """Change a safetensors file.

    A new file is written and replaces the old one, so that an error or a killed process changes nothing. The
    system copies what stays, without a copy in memory; some file systems share the blocks.

    With ``in_place``, only the changes are written, on four conditions: nothing is removed, changed tensors
    keep type and shape, the new header is no longer than the old one with its padding, and the file can be
    written and has no other name. Symbolic and hard links are replaced. That is not atomic: if the process is
    killed or the machine fails, a changed tensor may have old and new bytes, and a file that got more tensors may be
    refused until it is cut to its former size. One process may edit a file at a time. The tensors may be views
    of the file itself: their bytes are copied before the first is written, those over 256 MiB to a temporary
    file in the same folder. Arrays that map the file show the new bytes afterwards.

    Args:
        filename: the file.
        tensors: arrays of numpy or MLX, or torch tensors, by name. They replace those of the same
            name; others are added.
        metadata: replaces the metadata; None removes it, and ``...`` keeps it.
        remove: names of tensors that are left out.
        in_place: whether to write into the file, where that is possible.

    Returns:
        Whether the file was changed in place.

    Raises:
        SafetensorError: the file breaks the format, has no tensor of a name in ``remove``, is inside a store, or
            cannot be written; or the format lacks the type of a tensor.
        OSError: the file cannot be opened or read.
    """
    path = os.fsdecode(filename)
    changes = [named_bytes(name, tensor) for name, tensor in (tensors or {}).items()]
    check_metadata(None if metadata is ... else metadata)
    try:
        descriptor, size = open_regular(path)
    except BlobstoreError as error:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV), path) from error
    try:
        edit = _Edit(descriptor, size, changes, metadata, remove)
        if in_place and edit.write_in_place(path):
            return True
        edit.write_to(path)
        return False
    finally:
        os.close(descriptor)


class _Stored(NamedTuple):
    """The bytes of a tensor in the old file."""

    begin: int
    end: int


class _Edit:
    """An open file, and its new content."""

    def __init__(
        self,
        descriptor: int,
        size: int,
        changes: Sequence[NamedBytes],
        metadata: Mapping[str, str] | EllipsisType | None,
        remove: Collection[str],
    ) -> None:
        self._descriptor = descriptor
        with errors_during("Error while deserializing header"):
            self._table: Table = read_table(
                lambda begin, end: read_exactly(descriptor, end - begin, begin), size
            )
        self._size = size
        self._changes = changes
        self._metadata = self._table.metadata if metadata is ... else metadata
        self._remove = set(remove)
        if absent := sorted(self._remove - self._table.names.keys()):
            raise SafetensorError(f"File does not contain tensor {quote(absent[0])}")
        if both := sorted(self._remove & {spec.name for spec, _ in changes}):
            raise SafetensorError(f"tensor {quote(both[0])} is to be written and removed")

    def write_in_place(self, path: str) -> bool:
        """Write what changes into the file at ``path``, if that is possible; return whether it was."""
        stored = {spec.name: (spec, place) for spec, place in self._kept(())}
        added = [(spec, data) for spec, data in self._changes if spec.name not in stored]
        changed = [(spec, data) for spec, data in self._changes if spec.name in stored]
        specs = [spec for spec, _ in stored.values()] + [spec for spec, _ in added]
        with errors_during("Error while serializing"):
            header = encode_file_header(specs, self._metadata)
        space = self._table.data_start
        if self._remove or len(header) > space:
            return False
        if any(spec != stored[spec.name][0] for spec, _ in changed):
            return False
        end = self._size
        writes = [(data, stored[spec.name][1].begin) for spec, data in changed]
        for spec, data in added:
            if end % max(1, spec.dtype.bits // 8):
                return False  # readers would have to copy it
            writes.append((data, end))
            end += spec.nbytes
        check_is_replaceable(Path(path))
        if not self._is_the_only_name(path):
            return False
        with io_errors(), _copied(writes, Path(path).parent) as copies:
            target = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if not os.path.samestat(os.fstat(target), os.fstat(self._descriptor)):
                    raise SafetensorError(f"{quote(path)} was replaced while it was edited")
                for copy, offset in copies:
                    write_at(target, copy, offset)
                flush(target)
                padded = header[PREFIX_SIZE:].ljust(space - PREFIX_SIZE)
                prefix = len(padded).to_bytes(PREFIX_SIZE, "little")
                write_at(target, memoryview(prefix + padded), 0)
                flush(target)
            finally:
                os.close(target)
        return True

    def _is_the_only_name(self, path: str) -> bool:
        """Return whether the file has no other name, and can be written.

        Another name may be that of a blob. Blobs are read-only, which does not stop root.
        """
        status = os.fstat(self._descriptor)
        is_link = stat.S_ISLNK(os.lstat(path).st_mode)
        return not is_link and status.st_nlink == 1 and bool(status.st_mode & 0o222)

    def write_to(self, path: str) -> None:
        """Write a new file, which replaces the one at ``path``."""
        replaced = {spec.name for spec, _ in self._changes}
        kept: list[tuple[TensorSpec, Any]] = list(self._kept(replaced | self._remove))
        header, sources = lay_out([*kept, *self._changes], self._metadata)
        mode = stat.S_IMODE(os.fstat(self._descriptor).st_mode)
        # A link may lead to a blob, which is read-only; the file that replaces it is not.
        if Path(path).is_symlink():
            mode |= stat.S_IWUSR
        with replaced_file(path) as target:
            os.fchmod(target, mode)
            write_at(target, memoryview(header), 0)
            end = len(header)
            for source in _joined(sources):
                if isinstance(source, _Stored):
                    _copy(self._descriptor, source, target, end)
                    end += source.end - source.begin
                else:
                    data = source()
                    write_at(target, data, end)
                    end += len(data)

    def _kept(self, without: Collection[str]) -> Iterable[tuple[TensorSpec, _Stored]]:
        """Yield the tensors of the old file, but some, in the order of their bytes."""
        ends = self._table.begins[1:]
        for (name, kind, begin), end in zip(self._table.rows(), ends, strict=True):
            if name not in without:
                yield TensorSpec(name, *kind), _Stored(begin, self._table.data_start + end)


@contextlib.contextmanager
def _copied(
    writes: Sequence[tuple[Callable[[], memoryview], int]], folder: Path
) -> Iterator[Iterator[tuple[memoryview, int]]]:
    """Copy bytes that are to be written, all of them; yield pieces of the copies with their offsets.

    They may be bytes of the very file, mapped at any address, which the first write would change.
    """
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY, dir=str(folder)) as copies:
        places: list[tuple[int, int]] = []
        for read, offset in writes:
            data = read()
            for begin in range(0, len(data), _PIECE):
                piece = data[begin : begin + _PIECE]
                copies.write(piece)
                places.append((offset + begin, len(piece)))
        copies.seek(0)
        yield ((memoryview(copies.read(size)), offset) for offset, size in places)


def _joined(sources: Iterable[Any]) -> Iterable[Any]:
    """Yield sources, with neighbours of the old file as one."""
    last: _Stored | None = None
    for source in sources:
        if last is not None and isinstance(source, _Stored) and source.begin == last.end:
            last = last._replace(end=source.end)
            continue
        if last is not None:
            yield last
        last = source if isinstance(source, _Stored) else None
        if last is None:
            yield source
    if last is not None:
        yield last


def _copy(source: int, place: _Stored, target: int, offset: int) -> None:
    """Copy bytes between files, in the kernel if that is possible."""
    begin = place.begin
    while begin < place.end:
        count = copy_bytes(source, begin, min(_PIECE, place.end - begin), target, offset)
        if not count:
            raise SafetensorError("Error while reading: the file has become shorter")
        begin += count
        offset += count

"""Reads one GGUF file as a shard: tensors of floats and integers are plain, others are blocks of bytes.

A quantized tensor of R rows is U8 of shape ``[R, bytes per row]``: the blocks as they are in the file. A tensor of
a type that is not known is U8 of one dimension. The bytes before the data are the header; those between
tensors and behind them are kept if they say more than how long they are.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import FileVersion, open_regular, read_exactly
from blobstore.errors import BlobstoreError, DamagedSource, SourceError, UnsupportedSource
from blobstore.gguf.header import InvalidGguf, read_header
from blobstore.gguf.layout import gaps_of, stored_spec
from blobstore.manifests.source_record import Gap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.core.tensor import TensorSpec
    from blobstore.gguf.header import GgufHeader

GGUF = ".gguf"
"""The ending of the files."""
_MAX_TAIL = 16 << 20
"""Bytes of a file between and behind its tensors that a source layer may hold."""


class GgufShard:
    """An open file. The descriptor stays open, so that a rename cannot change the content."""

    notices: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        """Open a file and check its header and size.

        Raises:
            DamagedSource: the file is malformed, missing, or ends too early.
            SourceError: it cannot be read.
            UnsupportedSource: more bytes follow the last tensor than can be kept.
        """
        self.path = path
        try:
            self._descriptor, self._size = open_regular(path)
        except FileNotFoundError:
            raise DamagedSource(f"weight file {quote(path)} is missing") from None
        except OSError as error:
            raise SourceError(f"cannot open {quote(path)}: {error.strerror}") from error
        except BlobstoreError as error:
            raise SourceError(str(error)) from None
        try:
            self.parsed: GgufHeader = read_header(self._read_range, self._size)
            self._gaps = self._read_gaps()
        except BaseException as error:
            self.close()
            if isinstance(error, InvalidGguf):
                raise DamagedSource(f"{quote(path)}: {error}") from None
            if isinstance(error, OSError):
                raise SourceError(f"cannot read {quote(path)}: {error.strerror}") from error
            raise

    def _read_range(self, begin: int, end: int) -> bytes:
        return read_exactly(self._descriptor, end - begin, begin)

    def _read_gaps(self) -> tuple[Gap, ...]:
        """Return the bytes between tensors that are not zeros, and all behind the last one."""
        found, kept = [], 0
        for begin, end in gaps_of(self.parsed, self._size):
            size = end - begin
            if size > _MAX_TAIL:
                raise UnsupportedSource(
                    f"{quote(self.path)}: {size} bytes follow the last tensor at byte {begin}, and "
                    f"no more than {_MAX_TAIL >> 20} MiB can be kept",
                    advice="remove them if they belong to another file",
                )
            data = self._read_range(begin, end)
            if end == self._size or any(data):
                kept += size
                found.append(Gap(begin, data))
            if kept > _MAX_TAIL:
                raise UnsupportedSource(
                    f"{quote(self.path)}: more than {_MAX_TAIL >> 20} MiB between its tensors, up to byte "
                    f"{end}, are no zeros, and cannot be kept"
                )
        return tuple(found)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The bytes that are neither in the header nor in tensors; zeros between tensors are left out."""
        return self._gaps

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See :class:`Shard`."""
        return {name: stored_spec(tensor) for name, tensor in self.parsed.tensors.items()}

    def block_types(self) -> Iterator[tuple[str, str]]:
        """Yield the names of the quantized tensors, and the names of their types in llama.cpp."""
        for name, tensor in self.parsed.tensors.items():
            if tensor.type is not None and tensor.type.weights > 1:
                yield name, tensor.type.name

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """See :class:`Shard`."""
        tensor = self.parsed.tensors[name]
        offset, left = tensor.begin, tensor.size
        while left:
            try:
                count = os.preadv(self._descriptor, [buffer[:left]], offset)
            except OSError as error:
                raise DamagedSource(
                    f"cannot read {quote(self.path)} at byte {offset}, in tensor {quote(name)}: "
                    f"{error.strerror}"
                ) from error
            if not count:
                raise DamagedSource(
                    f"{quote(self.path)} ended at byte {offset}, in tensor {quote(name)} with {left} "
                    "bytes missing: the file was truncated while it was read"
                )
            yield buffer[:count]
            offset += count
            left -= count

    def version(self) -> FileVersion:
        """See :class:`Shard`."""
        return FileVersion.of_status(os.fstat(self._descriptor))

    def header(self) -> bytes:
        """Return the bytes before the data, padding included."""
        size = self.parsed.data_start
        try:
            data = self._read_range(0, size)
        except OSError as error:
            raise DamagedSource(
                f"cannot read the header of {quote(self.path)}: {error.strerror}"
            ) from error
        if len(data) != size:
            raise DamagedSource(
                f"{quote(self.path)} ended at byte {len(data)}, in its header of {size} bytes: the file "
                "was truncated while it was read"
            )
        return data

    def close(self) -> None:
        """See :class:`Shard`."""
        os.close(self._descriptor)


def check_complete(shards: Iterable[GgufShard]) -> None:
    """Check that the parts of split files are all there.

    Raises:
        DamagedSource: one is missing, or the parts have fewer or more tensors than the first one says.
    """
    parts: dict[int, list[GgufShard]] = {}
    for shard in shards:
        count = shard.parsed.metadata.get("split.count", 1)
        if isinstance(count, int) and count > 1:
            parts.setdefault(count, []).append(shard)
    for count, found in parts.items():
        numbers = {shard.parsed.metadata.get("split.no") for shard in found}
        path = quote(found[0].path)
        if len(found) != count or len(numbers) != count:
            raise DamagedSource(
                f"{path} is one of {count} parts of a model, and {len(numbers)} are read; create from the "
                "folder that has all parts"
            )
        expected = found[0].parsed.metadata.get("split.tensors.count")
        tensors = sum(len(shard.parsed.tensors) for shard in found)
        if expected is not None and tensors != expected:
            raise DamagedSource(
                f"{path} says that its {count} parts have {expected} tensors, and they have {tensors}; "
                "download the complete model"
            )

"""Reads one GGUF file as a shard: tensors of floats and integers are plain, others are blocks of bytes.

A quantized tensor of R rows is U8 of shape ``[R, bytes per row]``: the blocks as they are in the file. A tensor of
a type that is not known is U8 of one dimension. The bytes before the data are the header; those between
tensors are kept unless they are zeros, and so are those behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.errors import DamagedSource, UnsupportedSource
from blobstore.gguf.header import MAGIC, InvalidGguf, parse_header, read_header
from blobstore.gguf.layout import file_layout
from blobstore.gguf.roles import role_of
from blobstore.manifests.source_record import Gap
from blobstore.sources.file_shard import FileShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blobstore.core.tensor import FileLayout

GGUF = ".gguf"
"""The ending of the files."""
_MAX_TAIL = 16 << 20
"""Bytes of a file between and behind its tensors that a source layer may hold."""


class GgufShard(FileShard):
    """See :class:`FileShard`."""

    ending = GGUF
    format = "gguf"
    invalid = InvalidGguf

    @staticmethod
    def begins(head: bytes) -> bool:
        """See :class:`FileShard`."""
        return bool(head) and MAGIC.startswith(head[: len(MAGIC)])

    def parse(self, size: int) -> FileLayout:
        """See :class:`FileShard`."""
        self.parsed = read_header(self.read_range, size)
        layout = file_layout(self.parsed)
        self.role = role_of(self.parsed.metadata, len(self.parsed.tensors), self.path.name)
        self.gaps = self._read_gaps(layout, size)
        return layout

    @staticmethod
    def layout_of(start: bytes, size: int) -> FileLayout:
        """See :class:`FileShard`."""
        return file_layout(parse_header(start, size))

    def _read_gaps(self, layout: FileLayout, size: int) -> tuple[Gap, ...]:
        """Return the bytes between tensors that are not zeros, and all behind the last one."""
        found, kept = [], 0
        for begin, end in layout.gaps(size):
            if end - begin > _MAX_TAIL:
                raise UnsupportedSource(
                    f"{quote(self.path)}: {end - begin} bytes follow the last tensor at byte {begin}, and "
                    f"no more than {_MAX_TAIL >> 20} MiB can be kept",
                    advice="remove them if they belong to another file",
                )
            data = self.read_range(begin, end)
            if end == size or any(data):
                kept += end - begin
                found.append(Gap(begin, data))
            if kept > _MAX_TAIL:
                raise UnsupportedSource(
                    f"{quote(self.path)}: more than {_MAX_TAIL >> 20} MiB between its tensors, up to byte "
                    f"{end}, are not zeros, and cannot be kept"
                )
        return tuple(found)

    def block_types(self) -> Iterator[tuple[str, str]]:
        """Yield the names of the quantized tensors, and the names of their types in llama.cpp."""
        for name, tensor in self.parsed.tensors.items():
            if tensor.type is not None and tensor.type.weights > 1:
                yield name, tensor.type.name


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
        absent = next((number for number in range(count) if number not in numbers), None)
        if absent is not None:
            raise DamagedSource(
                f"{path} is one of {count} parts of a model, and part {absent + 1} is not read",
                advice="create from the folder that has all parts, or download the part",
            )
        if len(found) != count:
            raise DamagedSource(
                f"{path} is one of {count} parts of a model, and {len(found)} are here"
            )
        expected = found[0].parsed.metadata.get("split.tensors.count")
        tensors = sum(len(shard.parsed.tensors) for shard in found)
        if expected is not None and tensors != expected:
            raise DamagedSource(
                f"{path} says that its {count} parts have {expected} tensors, and they have {tensors}"
            )

"""Reads one safetensors file as a shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.tensor import FileLayout
from blobstore.errors import InvalidHeader
from blobstore.safetensors.file import read_header
from blobstore.safetensors.header import MAX_HEADER_SIZE, PREFIX_SIZE, Header, parse_header
from blobstore.sources.file_shard import FileShard

if TYPE_CHECKING:
    from collections.abc import Mapping

SAFETENSORS = ".safetensors"
"""The ending of the files."""


class SafetensorsShard(FileShard):
    """See :class:`FileShard`."""

    ending = SAFETENSORS
    format = "safetensors"
    invalid = InvalidHeader

    @staticmethod
    def begins(head: bytes) -> bool:
        """See :class:`FileShard`."""
        size = int.from_bytes(head[:PREFIX_SIZE], "little")
        is_header = size <= MAX_HEADER_SIZE or head[PREFIX_SIZE:].startswith(b"{")
        return is_header and any(head)

    def parse(self, size: int) -> FileLayout:
        """See :class:`FileShard`."""
        self._header = read_header(self._descriptor, size)
        return _layout(self._header)

    @staticmethod
    def layout_of(start: bytes, size: int) -> FileLayout:
        """See :class:`FileShard`."""
        return _layout(parse_header(start[PREFIX_SIZE:], size))

    @property
    def metadata(self) -> Mapping[str, str]:
        """The ``__metadata__`` of the header."""
        return self._header.metadata


def _layout(header: Header) -> FileLayout:
    start = header.data_start
    tensors = {
        name: (spec, start + begin, start + end)
        for name, (spec, begin, end) in header.tensors.items()
    }
    return FileLayout(tensors, start)

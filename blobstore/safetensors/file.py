"""A safetensors file, mapped for reading."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import open_regular, read_exactly
from blobstore.core.mmap import MappedRegion
from blobstore.core.tensor import TensorView
from blobstore.errors import InvalidHeader, TensorNotFound
from blobstore.safetensors.header import PREFIX_SIZE, Header, header_size, parse_header, parse_start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

_FIRST_READ = 1 << 12
"""Bytes of the first read, which contain the header of nearly all blobs."""


def read_header(descriptor: int, size: int) -> Header:
    """Read and check the header of an open file of ``size`` bytes, without mapping the file.

    Raises:
        InvalidHeader: the file violates the format.
        OSError: the file cannot be read.
    """
    start = os.pread(descriptor, _FIRST_READ, 0)
    if len(start) < PREFIX_SIZE:  # a read may be short
        start += read_exactly(descriptor, PREFIX_SIZE - len(start), len(start))
    plain = parse_start(start, size)
    if plain is not None:
        return plain
    length = header_size(start, size)
    text = start[PREFIX_SIZE : PREFIX_SIZE + length]
    if len(text) < length:
        text += read_exactly(descriptor, length - len(text), len(start))
    if len(text) != length:
        raise InvalidHeader(f"header of {length} bytes ends after {len(text)}: the file has shrunk")
    return parse_header(text, size)


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A mapped file with its header; tensors are read-only views without a copy.

    Views stay valid after :meth:`close`. The memory is unmapped when the last view is deleted.
    """

    header: Header
    _memory: memoryview
    _region: MappedRegion

    @classmethod
    def open(cls, path: Path | str) -> SafetensorsFile:
        """Map a file and check its header.

        Raises:
            InvalidHeader: the file violates the format; the message begins with its path.
            OSError: the file cannot be opened or mapped.
            BlobstoreError: it is not a regular file.
        """
        descriptor, size = open_regular(path)
        try:
            header = read_header(descriptor, size)
            region = MappedRegion([size])
            region.map(0, descriptor, size)
        except InvalidHeader as error:
            raise error.at(quote(path)) from None
        finally:
            os.close(descriptor)
        return cls(header, memoryview(region.memory), region)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.header.tensors)

    def view(self, name: str) -> TensorView:
        """Return a tensor's bytes in the mapping.

        Raises:
            TensorNotFound: the file has no tensor of that name.
        """
        entry = self.header.tensors.get(name)
        if entry is None:
            raise TensorNotFound(f"no tensor {quote(name)} in this file")
        start = self.header.data_start
        return TensorView(entry.spec, self._memory[start + entry.begin : start + entry.end])

    def close(self) -> None:
        """Release the mapping; existing views keep it alive."""
        self._memory.release()
        self._region.close()

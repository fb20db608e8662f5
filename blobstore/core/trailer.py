"""A file whose table is at its end: a prefix, contents, the table, and a footer that locates the table.

The footer has the size of the table, the sha256 of the prefix and the table, and a mark. Cold blobs and
archives are such files.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import Final

    from blobstore.errors import Damaged

_FOOTER: Final = struct.Struct("<Q32s8s")
FOOTER_SIZE: Final = _FOOTER.size


class _Bytes(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, wanted: slice, /) -> memoryview: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrailerFormat:
    """A format of such files."""

    magic: bytes
    version: int
    """The byte after the magic number."""
    end: bytes
    """The 8 bytes that end a file."""
    min_table: int
    """Bytes of the smallest table."""
    what: str
    """The name of a file in messages, with its article."""
    error: type[Damaged]

    @property
    def prefix(self) -> bytes:
        """The bytes that start a file."""
        return self.magic + bytes([self.version])

    @property
    def min_size(self) -> int:
        """Bytes of the smallest file."""
        return len(self.prefix) + self.min_table + FOOTER_SIZE

    def trailer(self, table: bytes) -> bytes:
        """Return the bytes that end a file: the table and its footer."""
        return table + _FOOTER.pack(len(table), self._digest(table), self.end)

    def find_table(self, data: _Bytes) -> tuple[memoryview, int]:
        """Return the table of a file without its footer, and its offset.

        Raises:
            Damaged: as ``error``; the file is truncated or altered, or of another format or version.
        """
        prefix, what = self.prefix, self.what
        start = bytes(data[: len(prefix)])
        if start[: len(self.magic)] != self.magic[: len(start)]:
            raise self.error(f"not {what}: the prefix is different")
        if len(data) < self.min_size:
            raise self.error(
                f"{what} of {len(data)} bytes is truncated: it needs at least {self.min_size}"
            )
        if start != prefix:
            raise self.error(
                f"{what} of version {start[-1]}; this program reads version {self.version}"
            )
        size, digest, end = _FOOTER.unpack(data[-FOOTER_SIZE:])
        if end != self.end:
            raise self.error(f"{what} has no footer: it is truncated or altered")
        begin = len(data) - FOOTER_SIZE - size
        if begin < len(prefix) or size < self.min_table:
            raise self.error(f"{what} of {len(data)} bytes cannot have a table of {size} bytes")
        table = data[begin : begin + size]
        if self._digest(table) != digest:
            raise self.error(f"the table of {what} does not match its digest: it is altered")
        return table, begin

    def _digest(self, table: bytes | memoryview) -> bytes:
        digest = hashlib.sha256(self.prefix)
        digest.update(table)
        return digest.digest()

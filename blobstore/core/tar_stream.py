"""Reads the regular files of a tar from a stream, which is not trusted.

``tarfile`` reads a header of any size into memory and searches it in quadratic time, follows headers before headers
by recursion, believes negative sizes, and raises ValueError for an invalid number. Here, every byte is read once,
and nothing is kept but one header of limited size.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BLOCK: Final = 512
_PIECE: Final = 1 << 20
_MAX_HEADER: Final = 1 << 16
"""Bytes of a header that precedes an entry. It has a path, and what file systems note of a file."""
_FILES: Final = (b"0", b"\0", b"7")
_FOLDER: Final = b"5"
_PAX: Final = b"x"
_PAX_FOR_ALL: Final = b"g"
_LONG_NAME: Final = b"L"
_LONG_LINK: Final = b"K"
_OCTAL: Final = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_RECORD: Final = re.compile(rb"(\d{1,6}) ")
_SIZE: Final = re.compile(rb"\d{1,18}")


class InvalidTar(Exception):
    """A tar is malformed, or unpacks to too much."""


class TarFile(NamedTuple):
    """A file of a tar."""

    name: str
    """Bytes that are not UTF-8 are lone surrogates."""
    is_regular: bool
    """False for links and devices, whose names are all that is known."""
    pieces: Iterator[bytes]
    """The content, to be read before the next file."""


class _Entry(NamedTuple):
    name: bytes
    kind: bytes
    size: int


class TarStream:
    """A tar. Folders are left out."""

    def __init__(self, read: Callable[[int], bytes], limit: int) -> None:
        """Read nothing yet. ``read`` returns some bytes, and none at the end; at most ``limit`` are read."""
        self._read_some = read
        self._left = limit
        self._is_begun = False

    def files(self) -> Iterator[TarFile]:
        """Yield the files.

        Raises:
            InvalidTar: the tar is malformed, or ``limit`` is reached.
        """
        name: bytes | None = None
        size: int | None = None
        while (entry := self._entry()) is not None:
            if entry.kind in (_PAX, _PAX_FOR_ALL, _LONG_NAME, _LONG_LINK):
                data = self._header(entry.size)
                if entry.kind == _LONG_NAME:
                    name = data.rstrip(b"\0")
                elif entry.kind != _LONG_LINK:
                    name, size = _pax(data, name, size, is_for_all=entry.kind == _PAX_FOR_ALL)
                continue
            found = entry.name if name is None else name
            length = entry.size if size is None else size
            # Reset here, because headers concern only the entry that follows them.
            name = size = None
            is_regular = entry.kind in _FILES
            if entry.kind == _FOLDER or (is_regular and found.endswith(b"/")):
                continue  # it has no content, whatever its size
            pieces = self._pieces(length)
            yield TarFile(found.decode(errors="surrogateescape"), is_regular, pieces)
            for _ in pieces:  # what was not read
                pass

    def _entry(self) -> _Entry | None:
        """Return the next entry; None at the end."""
        block = self._read(_BLOCK)
        # Some tars end without blocks of zeros, but none is empty.
        if not block.strip(b"\0") and (block or self._is_begun):
            return None
        self._is_begun = True
        if len(block) < _BLOCK:
            raise InvalidTar("it is cut off")
        blank = block[:148] + b" " * 8 + block[156:]
        if _number(block[148:156]) != sum(blank):
            raise InvalidTar("it has an invalid header")
        name = block[:100].partition(b"\0")[0]
        if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
            name = prefix + b"/" + name
        return _Entry(name, block[156:157], _number(block[124:136]))

    def _header(self, size: int) -> bytes:
        if size > _MAX_HEADER:
            raise InvalidTar(f"it has a header of {size} bytes")
        return b"".join(self._pieces(size))

    def _pieces(self, size: int) -> Iterator[bytes]:
        """Yield the content of an entry, and read what follows it up to the next one."""
        padding = -size % _BLOCK
        while size:
            piece = self._read(min(size, _PIECE))
            if not piece:
                raise InvalidTar("it is cut off")
            size -= len(piece)
            yield piece
        self._read(padding)

    def _read(self, count: int) -> bytes:
        """Return so many bytes, or fewer at the end."""
        self._left -= count
        if self._left < 0:
            raise InvalidTar("it unpacks to too much")
        found = b""
        while len(found) < count and (piece := self._read_some(count - len(found))):
            found += piece
        return found


def _number(field: bytes) -> int:
    """Return the number in a field of a header."""
    if field[:1] == b"\x80":  # binary, as GNU writes large ones
        return int.from_bytes(field[1:], "big")
    match = _OCTAL.fullmatch(field)
    if match is None:
        raise InvalidTar("it has an invalid header")
    return int(match[1] or b"0", 8)


def _pax(
    data: bytes, name: bytes | None, size: int | None, *, is_for_all: bool
) -> tuple[bytes | None, int | None]:
    """Return the name and the size of the next entry, after a header that may have others."""
    at = 0
    while at < len(data):
        match = _RECORD.match(data, at)
        end = at + int(match[1]) if match else 0
        key, equals, value = data[match.end() if match else at : end].partition(b"=")
        if not equals or end > len(data) or value[-1:] != b"\n":
            raise InvalidTar("it has an invalid header")
        at, value = end, value[:-1]
        if key.startswith(b"GNU.sparse.") or (is_for_all and key in (b"path", b"size")):
            raise InvalidTar(f"it has headers with {key.decode('ascii', 'replace')}")
        if key == b"path":
            name = value
        elif key == b"size":
            if _SIZE.fullmatch(value) is None:
                raise InvalidTar("it has an invalid header")
            size = int(value)
    return name, size

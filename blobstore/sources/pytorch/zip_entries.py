"""Reads the entries of a zip archive, if there is only one way to read it.

Zip readers disagree about archives that contradict themselves, and attacks use that. So directory and
local headers must agree, and entries must not overlap. Otherwise, archives are accepted as PyTorch and
common archivers write them:

- PyTorch leaves CRC and sizes zero in the local headers. It pads the headers to align the data, so the
  offset of the data is computed from them.
- A CRC of 0 for non-empty content means that none was computed.

Sizes in the file are compared with its real size before memory is allocated. Files are read, never
mapped: a file that shrinks while it is read causes an error, not a signal.
"""

from __future__ import annotations

import os
import zlib
from operator import itemgetter
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from zlib_ng.zlib_ng import crc32  # at a tenth of the cost of the standard library's

from blobstore.core.escape import quote
from blobstore.errors import DamagedSource, UnsupportedSource
from blobstore.sources.pytorch.zip_directory import (
    DEFLATED,
    UNREADABLE,
    UNREADABLE_FLAGS,
    read_directory,
    read_whole,
    widen,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.sources.pytorch.zip_directory import Listed

# APPNOTE 4.3.7; x skips the version and the time.
_LOCAL = Struct("<4s2xHH4xIIIHH")
_LENGTHS = Struct("<HH").unpack_from
_LENGTHS_AT = 26
"""Offset in a local header of the lengths of the name and the extra fields."""
_LOCAL_SIGN = b"PK\3\4"
_SIZES_FOLLOW = 1 << 3

_GROUP, _NEAR = 128, 4096
"""Headers to read at once, and the largest average distance between them for that."""

_INPUT = 1 << 16
_PIECE = 1 << 20

_new = tuple.__new__  # in C, unlike the constructors of named tuples

_Local: TypeAlias = tuple[bytes, int, int, int, int, int, int, int]


class ZipEntry(NamedTuple):
    """A file in an archive."""

    name: str
    """Name in the directory. It is not checked, and must never be used as a path."""
    offset: int
    """Offset of its data in the file."""
    stored_size: int
    """Bytes of its data in the archive."""
    size: int
    """Bytes of its content."""
    crc: int
    """CRC-32 of its content; 0 for non-empty content if it was not computed."""
    is_deflated: bool


def read_entries(descriptor: int, size: int, start: int = 0) -> dict[str, ZipEntry]:
    """Return the entries of an archive by name, in the order of the directory, without folders.

    Args:
        descriptor: an open file.
        size: bytes of the archive.
        start: offset of the archive in the file. Messages have offsets from there.

    Raises:
        DamagedSource: the file is not a complete zip archive, or contradicts itself.
        UnsupportedSource: an entry is encrypted or not compressed by deflate, or the archive is
            one file of several.
        OSError: it cannot be read.
    """
    listed, end = read_directory(descriptor, size, start)
    in_file_order = sorted(listed, key=itemgetter(0))
    entries = _locate(descriptor, in_file_order, end, start)
    if in_file_order == listed:  # nearly always
        return entries
    return {entry[1]: entries[entry[1]] for entry in listed if entry[1] in entries}


def read_entry(descriptor: int, entry: ZipEntry, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the content of an entry in pieces, each in ``buffer`` and valid until the next one.

    The content is verified only when the iterator has ended.

    Raises:
        DamagedSource: it is truncated, does not decompress to its size, or has another CRC.
        OSError: it cannot be read.
    """
    crc = 0
    pieces = (
        _inflate(descriptor, entry, buffer)
        if entry.is_deflated
        else read_stored(descriptor, entry, 0, entry.size, buffer)
    )
    for piece in pieces:
        crc = crc32(piece, crc) if entry.crc else 0
        yield piece
    if crc != entry.crc:
        raise _damaged(
            entry, f"has the CRC {crc:08x}, not {entry.crc:08x}: its bytes have been changed"
        )


def read_small_entry(descriptor: int, entry: ZipEntry, limit: int) -> bytes:
    """Return the content of an entry of at most ``limit`` bytes; see :func:`read_entry`."""
    if entry.size > limit:
        raise _damaged(entry, f"has {entry.size} bytes, over the limit of {limit}")
    buffer = memoryview(bytearray(max(1, min(entry.size, _PIECE))))
    return b"".join([bytes(piece) for piece in read_entry(descriptor, entry, buffer)])


def _locate(descriptor: int, listed: list[Listed], end: int, start: int) -> dict[str, ZipEntry]:
    """Return the entries except folders. ``listed`` is sorted by offset; data must end at ``end``."""
    entries = {}
    parts_size = _LOCAL.size
    window, window_start, free = b"", 0, 0
    usual, usual_method = b"-", -1
    for index, entry in enumerate(listed):
        header, name, raw_name, method, crc, stored, size = entry
        at = header - window_start
        name_at = at + parts_size
        if name_at + len(raw_name) > len(window):
            window, window_start = _read_headers(descriptor, listed, index, start), header
            at, name_at = 0, parts_size
        if header < free or (not free and header):
            raise _misplaced(entry, free)
        if method != usual_method or not window.startswith(usual, at):
            local = _LOCAL.unpack_from(window, at)
            _check_local(descriptor, entry, local, start)
            if local[1] & _SIZES_FOLLOW and not any(local[3:6]):  # it fits all entries
                usual, usual_method = window[at : at + _LENGTHS_AT], method
        name_size, extra_size = _LENGTHS(window, at + _LENGTHS_AT)
        offset = header + parts_size + name_size + extra_size
        if name_size != len(raw_name) or not window.startswith(raw_name, name_at):
            raise DamagedSource(
                f"entry {quote(name)} at byte {header} has another name there than in the directory"
            )
        if offset + stored > end:
            raise DamagedSource(
                f"entry {quote(name)} at byte {header} has {stored} bytes from byte {offset}, "
                f"which reach into the directory at byte {end}"
            )
        free = offset + stored
        if not name.endswith("/"):
            parts = (name, start + offset, stored, size, crc, method == DEFLATED)
            entries[name] = _new(ZipEntry, parts)
        elif size:
            raise DamagedSource(
                f"entry {quote(name)} at byte {header} is a folder, but has {size} bytes"
            )
    return entries


def _read_headers(descriptor: int, listed: list[Listed], index: int, start: int) -> bytes:
    """Return the local header of entry ``index``, and the following ones if they are close."""
    first = listed[index]
    last_index = min(index + _GROUP, len(listed)) - 1
    last = listed[last_index]
    if last[0] - first[0] > _NEAR * (last_index - index):
        last = first
    end = max(entry[0] + _LOCAL.size + len(entry[2]) for entry in (first, last))
    return read_whole(descriptor, end - first[0], start + first[0])


def _check_local(descriptor: int, entry: Listed, local: _Local, start: int) -> None:
    """Check that a local header matches the directory."""
    header, name, raw_name, method, *listed = entry
    sign, flags, other_method, *numbers, _, extra_size = local
    who = f"entry {quote(name)} at byte {header}"
    if sign != _LOCAL_SIGN:
        raise DamagedSource(f"no header of entry {quote(name)} is at byte {header}")
    if flags & UNREADABLE_FLAGS:
        raise UnsupportedSource(f"{who} has flags {flags:#06x}: {UNREADABLE}")
    if other_method != method:
        raise DamagedSource(f"{who} has method {other_method}, but {method} in the directory")
    may_miss = {0} if flags & _SIZES_FOLLOW else set()
    if numbers == listed or {*numbers} <= may_miss:
        return
    extra = read_whole(descriptor, extra_size, start + header + _LOCAL.size + len(raw_name))
    numbers[2], numbers[1], *_ = widen(extra, (numbers[2], numbers[1]), 0, 0, header)
    for what, one, other in zip(("CRC", "stored size", "size"), numbers, listed, strict=True):
        if one not in {other, *may_miss}:
            raise DamagedSource(f"{who} has the {what} {one} there, but {other} in the directory")


def _misplaced(entry: Listed, free: int) -> DamagedSource:
    """Return the error for an entry that does not start at or after ``free``."""
    header, name, *_ = entry
    who = f"entry {quote(name)} at byte {header}"
    if header < free:
        return DamagedSource(f"{who} begins before byte {free}, where the one before it ends")
    return DamagedSource(f"{who} is the first, and {header} bytes lie before it")


def read_stored(
    descriptor: int, entry: ZipEntry, begin: int, end: int, buffer: memoryview
) -> Iterator[memoryview]:
    """Yield bytes ``begin`` to ``end`` of an entry that is not compressed, as :func:`read_entry` does.

    They are not verified.

    Raises:
        DamagedSource: the entry is truncated.
        OSError: it cannot be read.
    """
    offset, left = entry.offset + begin, end - begin
    while left:
        count = os.preadv(descriptor, [buffer[:left]], offset)
        if not count:
            raise _damaged(entry, f"is truncated: the file ended at byte {offset}")
        yield buffer[:count]
        offset += count
        left -= count


def _inflate(descriptor: int, entry: ZipEntry, buffer: memoryview) -> Iterator[memoryview]:
    """Decompress a deflate stream, which must end with the entry."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    offset, end = entry.offset, entry.offset + entry.stored_size
    left = entry.size
    rest = b""
    while not inflater.eof:
        if not rest and offset < end:
            rest = os.pread(descriptor, min(end - offset, _INPUT, len(buffer)), offset)
            if not rest:
                raise _damaged(entry, f"is truncated: the file ended at byte {offset}")
            offset += len(rest)
        try:  # one byte more than expected shows whether the content is too long
            content = inflater.decompress(rest, min(left + 1, len(buffer)))
        except zlib.error as error:
            raise _damaged(entry, f"does not decompress, before byte {offset}: {error}") from error
        rest = inflater.unconsumed_tail
        left -= len(content)
        if left < 0:
            raise _damaged(entry, f"decompresses to more than its {entry.size} bytes")
        if content:
            buffer[: len(content)] = content
            yield buffer[: len(content)]
        elif offset == end and not rest and not inflater.eof:
            raise _damaged(entry, f"is truncated: its compressed data does not end at byte {end}")
    offset -= len(inflater.unused_data)
    if left or offset != end:
        raise _damaged(
            entry,
            f"decompresses to {left} bytes less than its {entry.size}, at byte {offset} of {end}",
        )


def _damaged(entry: ZipEntry, what: str) -> DamagedSource:
    return DamagedSource(f"entry {quote(entry.name)} at byte {entry.offset} {what}")

"""Reads the central directory of a zip archive, if there is only one way to read it.

End records, directory and counts must agree and follow each other without a gap. PyTorch always
writes the zip64 end records, even if the plain one would do.
"""

from __future__ import annotations

from collections import Counter
from struct import Struct, iter_unpack
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from blobstore.core.escape import quote
from blobstore.core.files import read_exactly
from blobstore.errors import DamagedSource, UnsupportedSource

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ENTRIES = 1 << 22
"""Limit of the entries. Large models have some hundred thousand tensors at most."""

STORED, DEFLATED = 0, 8
UNREADABLE_FLAGS = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 13
"""Flags of encryption, patches, strong encryption and masked headers."""
UNREADABLE = "encrypted or patched entries are not read"
HEADER_SIZE = 30
"""Bytes before the name in a local header."""

# The records of APPNOTE 4.3.12 and 4.3.14 to 4.3.16; x skips versions, times and attributes.
_LISTED = Struct("<4s4xHH4xIIIHHHH6xI")
_END64 = Struct("<4sQ4xIIQQQQ")
_LOCATOR = Struct("<4sIQI")
_END = Struct("<4sHHHHIIH")
_LISTED_SIGN, _END64_SIGN = b"PK\1\2", b"PK\6\6"
_LOCATOR_SIGN, _END_SIGN = b"PK\6\7", b"PK\5\6"
_END64_LENGTH = _END64.size - 12
"""Length in the zip64 end record, without fields for encryption."""

_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
"""A field with this value has its real value in the zip64 fields."""
_FULL_END = (_FULL16, _FULL16, _FULL16, _FULL16, _FULL32, _FULL32)
_ZIP64 = 1

_MAX_TAIL = _END64.size + _LOCATOR.size + _END.size + _FULL16
_MAX_LISTED = _LISTED.size + 3 * _FULL16
_WINDOW = 1 << 20

_MAX_RATIO, _RATIO_SLACK = 1032, 64
"""The largest ratio of deflate, except for some bytes at the ends of a stream."""


Listed: TypeAlias = tuple[int, str, bytes, int, int, int, int]
"""An entry of the directory: offset of the local header, name, name in bytes, method, CRC, stored
size, size. (A plain tuple takes half as long as a named one.)"""


class _Directory(NamedTuple):
    start: int
    end: int
    entries: int


def read_directory(descriptor: int, size: int, start: int = 0) -> tuple[list[Listed], int]:
    """Return the entries of an archive's directory, and the offset of the directory.

    All local headers and their names are before that offset. No two entries have the same name.

    Args:
        descriptor: an open file.
        size: bytes of the archive.
        start: offset of the archive in the file. All other offsets are from there.

    Raises:
        DamagedSource: the file is not a complete zip archive, or the directory contradicts itself.
        UnsupportedSource: an entry is encrypted or not compressed by deflate, or the archive is
            one file of several.
        OSError: it cannot be read.
    """
    directory = _find_directory(descriptor, size, start)
    listed: list[Listed] = []
    at, taken = directory.start, 1
    while taken and at < directory.end and len(listed) <= directory.entries:
        window = read_whole(descriptor, min(_WINDOW, directory.end - at), start + at)
        taken = _parse(window, at, directory, listed)
        at += taken
    if at != directory.end or len(listed) != directory.entries:
        raise DamagedSource(
            f"the directory at byte {directory.start} does not have exactly the "
            f"{directory.entries} entries that are counted at byte {directory.end}"
        )
    names = [entry[1] for entry in listed]
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise DamagedSource(f"the archive has more than one entry {quote(twice)}")
    return listed, directory.start


def read_whole(descriptor: int, size: int, offset: int) -> bytes:
    """Return ``size`` bytes at ``offset``; raise DamagedSource if the file ends before."""
    data = read_exactly(descriptor, size, offset)
    if len(data) != size:
        raise DamagedSource(
            f"the file ended at byte {offset + len(data)}: it was truncated while it was read"
        )
    return data


def widen(
    extra: bytes, sizes: tuple[int, int], header: int, disk: int, at: int
) -> tuple[int, int, int, int]:
    """Return the fields of the entry at byte ``at``, with real values from the zip64 field."""
    narrow = (*sizes, header)
    fields = []
    begin = 0
    while begin < len(extra):
        kind, size = (int.from_bytes(extra[i : i + 2], "little") for i in (begin, begin + 2))
        end = begin + 4 + size
        if kind == _ZIP64:
            fields.append(extra[begin + 4 : end])
        begin = end
    # The field is not used if it is duplicated or truncated.
    field = fields[0] if begin == len(extra) and len(fields) == 1 else b""
    wide_size = 8 * narrow.count(_FULL32)
    disk_size = 4 if disk == _FULL16 else 0
    if len(field) < wide_size + disk_size:
        raise DamagedSource(
            f"the entry at byte {at} does not have the one zip64 field that it needs"
        )
    wide = iter_unpack("<Q", field[:wide_size])
    size, stored, header = (next(wide)[0] if one == _FULL32 else one for one in narrow)
    if disk_size:
        disk = int.from_bytes(field[wide_size : wide_size + disk_size], "little")
    return size, stored, header, disk


def _find_directory(descriptor: int, size: int, start: int) -> _Directory:
    """Return the place of the directory, by the end records."""
    tail_start = max(0, size - _MAX_TAIL)
    tail = read_whole(descriptor, size - tail_start, start + tail_start)
    at = tail.rfind(_END_SIGN, 0, max(0, len(tail) - _END.size + len(_END_SIGN)))
    if at < 0:
        raise DamagedSource("it has no end record: it is truncated, or not a zip archive")
    _, *fields, comment_size = _END.unpack_from(tail, at)
    if at + _END.size + comment_size != len(tail):
        raise DamagedSource(
            f"the end record at byte {tail_start + at} should be followed by {comment_size} bytes "
            f"of comment, and is by {len(tail) - at - _END.size}"
        )
    locator_at = at - _LOCATOR.size
    if locator_at >= 0 and tail.startswith(_LOCATOR_SIGN, locator_at):
        at = locator_at - _END64.size
        fields = _read_wide_end(tail, at, tail_start, fields)
    return _check_end(fields, tail_start + at)


def _read_wide_end(tail: bytes, at: int, tail_start: int, narrow: Sequence[int]) -> list[int]:
    """Return the fields of the zip64 end record, which must match locator and end record."""
    _, disk, claimed, disks = _LOCATOR.unpack_from(tail, at + _END64.size)
    if disk or disks > 1:
        raise UnsupportedSource(
            f"it is file {disk + 1} of {disks}; archives in several files are not supported"
        )
    if at < 0 or claimed != tail_start + at or not tail.startswith(_END64_SIGN, at):
        raise DamagedSource(
            f"there is no zip64 end record at byte {tail_start + at}, right before its locator, "
            f"which has it at byte {claimed}"
        )
    _, length, *wide = _END64.unpack_from(tail, at)
    if length != _END64_LENGTH or any(
        one not in {full, other} for one, other, full in zip(narrow, wide, _FULL_END, strict=True)
    ):
        raise DamagedSource(
            f"the zip64 end record at byte {tail_start + at}, of {length} bytes, has {wide}, and "
            f"the end record {narrow}: they contradict each other"
        )
    return wide


def _check_end(fields: Sequence[int], end: int) -> _Directory:
    """Return the directory, which must end at ``end``, the start of the end records."""
    disk, first_disk, count_here, count, size, start = fields
    if disk or first_disk:
        raise UnsupportedSource(
            f"it is file {disk + 1} of a set; archives in several files are not supported"
        )
    if start + size != end:
        raise DamagedSource(
            f"the directory, of {size} bytes from byte {start}, does not end where the end "
            f"records begin, at byte {end}"
        )
    if not count:
        raise DamagedSource("the archive is empty")
    if count_here != count or count > min(MAX_ENTRIES, size // _LISTED.size):
        raise DamagedSource(
            f"the end record at byte {end} counts {count_here} of {count} entries in {size} bytes; "
            f"at most {MAX_ENTRIES} are supported, and each takes {_LISTED.size} bytes or more"
        )
    return _Directory(start, end, count)


def _parse(window: bytes, window_start: int, directory: _Directory, listed: list[Listed]) -> int:
    """Append the entries in the window; return the bytes they claim, too many if one is cut off."""
    unpack, parts_size, full = _LISTED.unpack_from, _LISTED.size, _FULL32
    is_last = window_start + len(window) == directory.end
    stop = len(window) - (parts_size if is_last else _MAX_LISTED)
    at = 0
    while at <= stop:
        parts = unpack(window, at)
        sign, flags, method, crc, stored, size, name_size, extra_size, rest, disk, header = parts
        name_at = at + parts_size
        extra_at = name_at + name_size
        end = extra_at + extra_size
        raw_name = window[name_at:extra_at]
        if disk or full in (header, stored, size):
            wide = widen(window[extra_at:end], (size, stored), header, disk, window_start + at)
            size, stored, header, disk = wide
        try:
            name = raw_name.decode()
        except UnicodeDecodeError as error:
            raise DamagedSource(
                f"the name of an entry, at byte {window_start + name_at}, is not UTF-8"
            ) from error
        entry = (header, name, raw_name, method, crc, stored, size)
        if (
            sign != _LISTED_SIGN
            or disk
            or flags & UNREADABLE_FLAGS
            or (method != DEFLATED if method else stored != size)
            or size > _MAX_RATIO * stored + _RATIO_SLACK
            or header + HEADER_SIZE + name_size + stored > directory.start
            or "\0" in name
        ):
            raise _fault(entry, window_start + at, sign, flags, disk)
        listed.append(entry)
        at = end + rest
    return at


def _fault(
    entry: Listed, at: int, sign: bytes, flags: int, disk: int
) -> DamagedSource | UnsupportedSource:
    """Return what is wrong with the entry at byte ``at`` of the directory."""
    if sign != _LISTED_SIGN:
        return DamagedSource(f"no entry of the directory is at byte {at}, where one should be")
    header, name, _, method, _, stored, size = entry
    who = f"entry {quote(name)}, listed at byte {at},"
    if disk:
        return UnsupportedSource(f"{who} is in file {disk + 1} of a set, which is not supported")
    if flags & UNREADABLE_FLAGS:
        return UnsupportedSource(f"{who} has flags {flags:#06x}: {UNREADABLE}")
    if method not in {STORED, DEFLATED}:
        return UnsupportedSource(f"{who} is compressed by method {method}; 8 is supported")
    if "\0" in name:
        return DamagedSource(f"{who} has a NUL in its name")
    sizes = f"{who} takes {stored} bytes for a content of {size}"
    if method == STORED and stored != size:
        return DamagedSource(f"{sizes}, though it is not compressed")
    if size > _MAX_RATIO * stored + _RATIO_SLACK:
        return DamagedSource(f"{sizes}, more than deflate can compress")
    return DamagedSource(f"{sizes} from byte {header}, not all of them before the directory")

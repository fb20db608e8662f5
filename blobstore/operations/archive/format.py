"""The table of an archive: what its members are, and which models they make. Pure values and bytes.

docs/archive-format.md is the text that this follows. Members lie in the file in the order in which the
table lists them, without gaps, so the table states their sizes and no offsets: none can overlap, and
together they must fill the file. A base comes before what is coded by it: so there are no cycles.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import ArchiveDamaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Final

MAGIC: Final = b"\x8fBSARCH"
VERSION: Final = 1
PREFIX: Final = MAGIC + bytes([VERSION])
MAX_MEMBERS: Final = 1 << 20
MAX_NAMES: Final = 1 << 16
MAX_NAME: Final = 600
"""Bytes; the grammar of names allows 593."""
MAX_MANIFEST: Final = 64 << 20
_END: Final = b"BSARCHE\x8f"
_FOOTER: Final = struct.Struct("<Q32s8s")
_HEAD: Final = struct.Struct("<II")
_MEMBER: Final = struct.Struct("<B3xIQQ32s32s")
_NAME: Final = struct.Struct("<IH")
_RESERVED: Final = slice(1, 4)
LEAST_SIZE: Final = len(PREFIX) + _HEAD.size + _FOOTER.size


class Kind(IntEnum):
    """What a member is."""

    MANIFEST = 0
    RAW = 1
    """A blob as it is."""
    COLD = 2
    """A blob in its cold form, coded by itself."""
    DELTA = 3
    """A blob in its cold form, coded by another member."""


class Member(NamedTuple):
    """What the table says of a manifest or blob."""

    kind: Kind
    size: int
    digest: Digest
    """Of the manifest's or blob's bytes."""
    stored: int
    """Bytes in the archive."""
    seal: Digest
    """Of these."""
    base: int | None = None
    """The number of the member that it is coded by."""


class ArchiveTable(NamedTuple):
    """All that an archive says but its members' bytes."""

    members: Sequence[Member]
    names: Sequence[tuple[str, int]]
    """Names of models, ascending, and the numbers of their manifests."""


def encode_contents(contents: ArchiveTable) -> bytes:
    """Return the bytes that end an archive: the table, and the footer by which it is found."""
    pieces = [_HEAD.pack(len(contents.members), len(contents.names))]
    for member in contents.members:
        digests = bytes.fromhex(member.seal.hex), bytes.fromhex(member.digest.hex)
        sizes = member.stored, member.size
        pieces.append(_MEMBER.pack(member.kind, member.base or 0, *sizes, *digests))
    for name, number in contents.names:
        text = name.encode("ascii")
        pieces += (_NAME.pack(number, len(text)), text)
    table = b"".join(pieces)
    return table + _FOOTER.pack(len(table), _seal(table), _END)


def decode_contents(data: memoryview) -> ArchiveTable:
    """Return what an archive says of itself; no member is looked at.

    Raises:
        ArchiveDamaged: it is cut short, altered, or breaks the format.
    """
    table, begin = _table(data)
    count, names = _HEAD.unpack_from(table)
    if count > MAX_MEMBERS or names > MAX_NAMES:
        raise ArchiveDamaged(f"{count} members and {names} names are more than an archive can have")
    at = _HEAD.size + count * _MEMBER.size
    if at + names * _NAME.size > len(table):
        raise ArchiveDamaged(
            f"{count} members and {names} names do not fit in a table of {len(table)} bytes"
        )
    members = _decode_members(table[_HEAD.size : at])
    listed = list(_decode_names(table[at:], names, members))
    stored = sum(member.stored for member in members)
    if len(PREFIX) + stored != begin:
        raise ArchiveDamaged(
            f"members of {stored} bytes are listed, and {begin - len(PREFIX)} stored"
        )
    _check_once("manifest", (item for item in members if item.kind == Kind.MANIFEST))
    _check_once("blob", (item for item in members if item.kind != Kind.MANIFEST))
    named = {number for _, number in listed}
    for number, member in enumerate(members):
        if member.kind == Kind.MANIFEST and number not in named:
            raise ArchiveDamaged(f"member {number} is a manifest without a name")
    return ArchiveTable(members, listed)


def _table(data: memoryview) -> tuple[memoryview, int]:
    """Return the table without its footer, and where it begins."""
    start = bytes(data[: len(PREFIX)])
    if start[: len(MAGIC)] != MAGIC[: len(start)]:
        raise ArchiveDamaged("not an archive of models: it does not begin like one")
    if len(data) < LEAST_SIZE:
        raise ArchiveDamaged(f"an archive of {len(data)} bytes is cut short: none has so few")
    if start != PREFIX:
        raise ArchiveDamaged(
            f"an archive of version {start[-1]}; this program reads version {VERSION}"
        )
    size, seal, end = _FOOTER.unpack(data[-_FOOTER.size :])
    if end != _END:
        raise ArchiveDamaged("it does not end like an archive: it is cut short or altered")
    begin = len(data) - _FOOTER.size - size
    if begin < len(PREFIX) or size < _HEAD.size:
        raise ArchiveDamaged(f"an archive of {len(data)} bytes states a table of {size} bytes")
    table = data[begin : begin + size]
    if _seal(table) != seal:
        raise ArchiveDamaged("the table does not have its digest: the archive is altered")
    return table, begin


def _seal(table: bytes | memoryview) -> bytes:
    seal = hashlib.sha256(PREFIX)
    seal.update(table)
    return seal.digest()


def _decode_members(table: memoryview) -> list[Member]:
    members: list[Member] = []
    for begin in range(0, len(table), _MEMBER.size):
        entry = table[begin : begin + _MEMBER.size]
        members.append(_decode_member(entry, members))
    return members


def _decode_member(entry: memoryview, before: Sequence[Member]) -> Member:
    kind, base, stored, size, seal, digest = _MEMBER.unpack(entry)
    where = f"member {len(before)}"
    if any(entry[_RESERVED]):
        raise ArchiveDamaged(f"{where}: there is something where 0 is reserved")
    if kind not in iter(Kind):
        raise ArchiveDamaged(f"{where}: kind {kind} is unknown")
    member = Member(Kind(kind), size, Digest(digest.hex()), stored, Digest(seal.hex()))
    if member.kind in {Kind.MANIFEST, Kind.RAW} and (member[1:3] != member[3:5]):
        raise ArchiveDamaged(f"{where}: what is stored as it is has two sizes or digests")
    if member.kind == Kind.MANIFEST and size > MAX_MANIFEST:
        raise ArchiveDamaged(f"{where}: a manifest of {size} bytes is over {MAX_MANIFEST}")
    if member.kind != Kind.DELTA:
        if base:
            raise ArchiveDamaged(f"{where}: kind {kind} has no base, and {base} is stated")
        return member
    if base >= len(before) or before[base].kind not in {Kind.RAW, Kind.COLD}:
        raise ArchiveDamaged(
            f"{where}: member {base} is no base: one is an earlier blob that has none itself"
        )
    return member._replace(base=base)


def _decode_names(
    table: memoryview, count: int, members: Sequence[Member]
) -> Iterator[tuple[str, int]]:
    at, last = 0, b""
    for _ in range(count):
        if len(table) - at < _NAME.size:
            raise ArchiveDamaged("the table ends amid a name")
        number, length = _NAME.unpack_from(table, at)
        at += _NAME.size
        text = bytes(table[at : at + length])
        at += length
        if not 0 < length <= MAX_NAME or len(text) < length or not text.isascii():
            raise ArchiveDamaged(f"the name {quote(text)} is cut short, too long or not ASCII")
        if text <= last:
            raise ArchiveDamaged(f"the name {quote(text)} stands behind {quote(last)}")
        if number >= len(members) or members[number].kind != Kind.MANIFEST:
            raise ArchiveDamaged(f"the name {quote(text)} is that of member {number}, no manifest")
        yield text.decode(), number
        last = text
    if at != len(table):
        raise ArchiveDamaged(f"the table goes on for {len(table) - at} bytes after its last name")


def _check_once(what: str, members: Iterable[Member]) -> None:
    seen: set[Digest] = set()
    for member in members:
        if member.digest in seen:
            raise ArchiveDamaged(f"the {what} {member.digest} is there twice")
        seen.add(member.digest)

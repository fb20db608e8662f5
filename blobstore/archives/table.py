"""The archive file format: which members an archive has, which models they make, and who signed them.

This module turns the table of an archive into bytes and back, and does no I/O; the format is specified
in docs/reference/archive-format.md. Members lie in the file in the order of the table, without gaps. So
the table states sizes and no offsets: members cannot overlap, and together they must fill the file. A base
comes before the members that are encoded against it, so there are no cycles. A base may have a base itself.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from blobstore.compression.delta import MAX_CHAIN
from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.trailer import TrailerFormat
from blobstore.errors import ArchiveDamaged, NameConflict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Final, Self

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference

MAX_MEMBERS: Final = 1 << 20
MAX_NAMES: Final = 1 << 16
MAX_NAME: Final = 600
"""Bytes; the grammar of names allows 593."""
MAX_MANIFEST: Final = 64 << 20
_HEAD: Final = struct.Struct("<II")
_MEMBER: Final = struct.Struct("<B3xIQQ32s32s")
_NAME: Final = struct.Struct("<IH")
_RESERVED: Final = slice(1, 4)
_FORMAT: Final = TrailerFormat(
    magic=b"\x8fBSARCH",
    version=1,
    end=b"BSARCHE\x8f",
    min_table=_HEAD.size,
    what="an archive of models",
    error=ArchiveDamaged,
)
PREFIX: Final = _FORMAT.prefix


class Kind(IntEnum):
    """How a member is stored."""

    MANIFEST = 0
    RAW = 1
    """A blob, uncompressed."""
    COLD = 2
    """A cold blob without a base."""
    DELTA = 3
    """A cold blob that is delta-encoded against another member."""
    SIGNATURE = 4
    """A signature of a manifest, uncompressed."""


_BLOBS: Final = frozenset({Kind.RAW, Kind.COLD, Kind.DELTA})
_LIMITS: Final = {Kind.MANIFEST: MAX_MANIFEST, Kind.SIGNATURE: limits.SIGNATURES.one}


class Member(NamedTuple):
    """The table entry of a manifest, blob or signature."""

    kind: Kind
    size: int
    digest: Digest
    """Digest of the manifest, blob or signature."""
    stored_size: int
    """Bytes in the archive."""
    stored_digest: Digest
    """Digest of the bytes in the archive."""
    base: int | None = None
    """Number of the member that this one is delta-encoded against, or that it signs."""


class ArchiveTable(NamedTuple):
    """The members of an archive, and the names of its models."""

    members: Sequence[Member]
    names: Sequence[tuple[str, int]]
    """Full names of models, ascending, with the numbers of their manifests."""

    @classmethod
    def parse(cls, archive: memoryview) -> Self:
        """Return the table of an archive, without reading its members.

        Raises:
            ArchiveDamaged: the archive is truncated or altered, or breaks the format.
        """
        table, begin = _FORMAT.find_table(archive)
        count, name_count = _HEAD.unpack_from(table)
        if count > MAX_MEMBERS or name_count > MAX_NAMES:
            raise ArchiveDamaged(
                f"{count} members and {name_count} names are more than an archive can have"
            )
        at = _HEAD.size + count * _MEMBER.size
        if at + name_count * _NAME.size > len(table):
            raise ArchiveDamaged(
                f"{count} members and {name_count} names do not fit in a table of {len(table)} bytes"
            )
        members: list[Member] = []
        depths: list[int] = []
        for number, start in enumerate(range(_HEAD.size, at, _MEMBER.size)):
            member = _decode_member(table[start : start + _MEMBER.size], members)
            members.append(member)
            depths.append(0 if member.base is None else depths[member.base] + 1)
            if depths[-1] > MAX_CHAIN:
                raise ArchiveDamaged(f"member {number} ends a chain of {depths[-1]} deltas")
        names = list(_decode_names(table[at:], name_count, members))
        stored = sum(member.stored_size for member in members)
        if len(PREFIX) + stored != begin:
            raise ArchiveDamaged(
                f"the table lists members of {stored} bytes, but the file stores "
                f"{begin - len(PREFIX)}"
            )
        _check_unique("manifest", (item for item in members if item.kind == Kind.MANIFEST))
        _check_unique("blob", (item for item in members if item.kind in _BLOBS))
        _check_unique("signature", (item for item in members if item.kind == Kind.SIGNATURE))
        named = {number for _, number in names}
        for number, member in enumerate(members):
            if member.kind == Kind.MANIFEST and number not in named:
                raise ArchiveDamaged(f"member {number} is a manifest without a name")
        return cls(members, names)

    def to_bytes(self) -> bytes:
        """Return the end of an archive: the table, and the footer that locates it."""
        pieces = [_HEAD.pack(len(self.members), len(self.names))]
        for member in self.members:
            digests = bytes.fromhex(member.stored_digest.hex), bytes.fromhex(member.digest.hex)
            sizes = member.stored_size, member.size
            pieces.append(_MEMBER.pack(member.kind, member.base or 0, *sizes, *digests))
        for name, number in self.names:
            text = name.encode("ascii")
            pieces += (_NAME.pack(number, len(text)), text)
        return _FORMAT.trailer(b"".join(pieces))

    def offsets(self) -> list[int]:
        """Return where in the archive each member begins, and where the last one ends."""
        sizes = (member.stored_size for member in self.members)
        return list(accumulate(sizes, initial=len(PREFIX)))


class ArchivedModel(NamedTuple):
    """A model of an archive, whose manifest has been checked."""

    reference: Reference
    data: bytes
    """The bytes of the manifest."""
    manifest: Manifest

    def label(self, blob: Descriptor) -> str:
        """Return the name of a blob in messages: the model and its layer."""
        layer = f"layer {quote(blob.name)}" if blob.name else quote(blob.media_type)
        return f"{self.reference}: {layer}"


def check_case(references: Iterable[Reference]) -> None:
    """Check that one store can have all these names: no two, nor their repositories, differ in case only.

    Raises:
        NameConflict: two do.
    """
    first: dict[tuple[str, ...], Reference] = {}
    for reference in references:
        for count in (3, 4):  # a repository, and a tag of it
            parts = reference.parts[:count]
            folded = tuple(part.casefold() for part in parts)
            other = first.setdefault(folded, reference)
            if other.parts[:count] != parts:
                what = "" if count == 4 else "the repositories of "
                raise NameConflict(
                    f"{what}{quote(other)} and {quote(reference)} differ in case only: a store cannot have both"
                )


def _decode_member(entry: memoryview, before: Sequence[Member]) -> Member:
    kind, base, stored_size, size, stored_digest, digest = _MEMBER.unpack(entry)
    where = f"member {len(before)}"
    if any(entry[_RESERVED]):
        raise ArchiveDamaged(f"{where}: the reserved bytes are not 0")
    if kind not in iter(Kind):
        raise ArchiveDamaged(f"{where}: kind {kind} is unknown")
    member = Member(
        Kind(kind), size, Digest(digest.hex()), stored_size, Digest(stored_digest.hex())
    )
    is_plain = member.kind not in {Kind.COLD, Kind.DELTA}
    if is_plain and (member.size, member.digest) != (member.stored_size, member.stored_digest):
        raise ArchiveDamaged(f"{where}: an uncompressed member has two sizes or digests")
    limit = _LIMITS.get(member.kind)
    if limit is not None and size > limit:
        raise ArchiveDamaged(
            f"{where}: a {member.kind.name.lower()} of {size} bytes is over the limit of {limit}"
        )
    if member.kind not in {Kind.DELTA, Kind.SIGNATURE}:
        if base:
            raise ArchiveDamaged(f"{where}: kind {kind} has no base, but {base} is stated")
        return member
    is_delta = member.kind == Kind.DELTA
    if base >= len(before) or before[base].kind not in (_BLOBS if is_delta else {Kind.MANIFEST}):
        role = "what it signs, which must be an earlier manifest"
        if is_delta:
            role = "its base, which must be an earlier blob"
        raise ArchiveDamaged(f"{where}: member {base} cannot be {role}")
    return member._replace(base=base)


def _decode_names(
    table: memoryview, count: int, members: Sequence[Member]
) -> Iterator[tuple[str, int]]:
    at, last = 0, ""
    for _ in range(count):
        if len(table) - at < _NAME.size:
            raise ArchiveDamaged("the table ends in the middle of a name")
        number, length = _NAME.unpack_from(table, at)
        at += _NAME.size
        name = bytes(table[at : at + length]).decode("latin-1")
        at += length
        if not 0 < length <= MAX_NAME or len(name) < length or not name.isascii():
            raise ArchiveDamaged(f"the name {quote(name)} is cut short, too long or not ASCII")
        if name <= last:
            raise ArchiveDamaged(f"the name {quote(name)} is not sorted after {quote(last)}")
        if number >= len(members) or members[number].kind != Kind.MANIFEST:
            raise ArchiveDamaged(
                f"the name {quote(name)} refers to member {number}, which is not a manifest"
            )
        yield name, number
        last = name
    if at != len(table):
        raise ArchiveDamaged(f"the table has {len(table) - at} bytes after its last name")


def _check_unique(what: str, members: Iterable[Member]) -> None:
    seen: set[Digest] = set()
    for member in members:
        if member.digest in seen:
            raise ArchiveDamaged(f"the {what} {member.digest} is listed twice")
        seen.add(member.digest)

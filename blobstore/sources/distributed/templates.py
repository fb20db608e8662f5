"""Recognises items that differ from one that was parsed only in their data and checksums.

A checkpoint has thousands of pieces, but few shapes and types. torch writes the items of equal pieces with
the same bytes around the data, so one comparison replaces parsing a zip archive and a pickle.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, NamedTuple

from blobstore.sources.distributed.pieces import Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.core.tensor import DType
    from blobstore.sources.distributed.files import DataFile
    from blobstore.sources.distributed.metadata import Stored, StoredPiece, StoredTensor
    from blobstore.sources.pytorch.zip_entries import ZipEntry

    Key = tuple[int, tuple[int, ...], DType | None]

_IDENTIFIER = "/.data/serialization_id"
"""An entry of the archive that differs between items, and that is never read."""
_LOCAL, _LISTED, _LISTED_SIZE, _CRC_AT = b"PK\3\4", b"PK\1\2", 46, 16
_END, _END_SIZE = b"PK\5\6", 22
_LARGEST = 1 << 16
"""Bytes of a head or a tail; torch writes about 1 KiB."""
_MOST = 512
"""Templates. More items are parsed one by one."""


class _Template(NamedTuple):
    """The bytes of an item around its data."""

    head: bytes
    size: int
    """Bytes of the data."""
    tail: bytes
    same: Sequence[slice]
    """The parts of the tail that are equal in all items."""
    crc: slice
    """The CRC of the data, in the tail."""


class Templates:
    """Items that were parsed, one for each size, shape and type."""

    def __init__(self) -> None:
        self._known: dict[Key, _Template] = {}

    def match(
        self, descriptor: int, file: DataFile, tensor: StoredTensor, piece: StoredPiece
    ) -> Piece | None:
        """Return a piece whose item is like one that was added; None if it has to be parsed."""
        template = self._known.get(_key(tensor, piece))
        if template is None:
            return None
        head, tail = _around(descriptor, piece.stored, len(template.head), template.size)
        if head != template.head or len(tail) != len(template.tail):
            return None
        if any(tail[part] != template.tail[part] for part in template.same):
            return None
        begin = piece.stored.begin + len(head)
        crc = int.from_bytes(tail[template.crc], "little")
        return Piece(piece.box, file, begin, template.size, crc)

    def add(
        self,
        descriptor: int,
        tensor: StoredTensor,
        piece: StoredPiece,
        entries: Sequence[ZipEntry],
        data: ZipEntry,
    ) -> None:
        """Add an item that was parsed, if torch has written it as it does today.

        Args:
            descriptor: the open data file.
            tensor: the tensor of the piece.
            piece: the piece, whose elements are in C order.
            entries: the entries of its archive.
            data: the entry with its elements.
        """
        begin, after = data.offset - piece.stored.begin, data.offset + data.size
        if max(begin, piece.stored.begin + piece.stored.size - after) > _LARGEST:
            return
        identifiers = [entry for entry in entries if entry.name.endswith(_IDENTIFIER)]
        # Everything from the identifier to the directory can differ, so no other entry may be there.
        is_last = identifiers and max(entry.offset for entry in entries) == identifiers[0].offset
        if len(self._known) >= _MOST or len(identifiers) != 1 or not is_last:
            return
        head, tail = _around(descriptor, piece.stored, begin, data.size)
        if tail[-_END_SIZE:][:4] != _END:
            return
        # The end record states where the directory begins, relative to the item.
        listed = int.from_bytes(tail[-6:-2], "little") + piece.stored.begin - after
        crcs = [_crc_of(tail, entry, listed) for entry in (data, identifiers[0])]
        following = tail.find(_LOCAL)
        changing = [
            slice(0, following),  # the data descriptor, which readers of the directory do not need
            slice(identifiers[0].offset - after, listed),
            *sorted(crcs, key=lambda part: part.start),
        ]
        ends = [(part.start, part.stop) for part in changing]
        is_usual = ends == sorted(ends) and all(0 <= start <= stop for start, stop in ends)
        if not is_usual or any(a[1] > b[0] for a, b in itertools.pairwise(ends)):
            return
        bounds = [stop for _, stop in ends], [*(start for start, _ in ends[1:]), len(tail)]
        same = [slice(start, stop) for start, stop in zip(*bounds, strict=True)]
        self._known[_key(tensor, piece)] = _Template(head, data.size, tail, same, crcs[0])


def _key(tensor: StoredTensor, piece: StoredPiece) -> Key:
    return piece.stored.size, piece.box.sizes, tensor.dtype


def _around(descriptor: int, stored: Stored, begin: int, size: int) -> tuple[bytes, bytes]:
    """Return the bytes of an item before and after its data."""
    after = begin + size
    head = os.pread(descriptor, begin, stored.begin)
    return head, os.pread(descriptor, stored.size - after, stored.begin + after)


def _crc_of(tail: bytes, entry: ZipEntry, listed: int) -> slice:
    """Return where the directory, which begins at ``listed``, has the CRC of an entry."""
    at = tail.find(entry.name.encode(), max(listed, 0)) - _LISTED_SIZE
    if at < max(listed, 0) or tail[at : at + 4] != _LISTED:
        return slice(-1, -1)
    return slice(at + _CRC_AT, at + _CRC_AT + 4)

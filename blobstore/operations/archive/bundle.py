"""An archive of models in memory, usually mapped: its table, and any member by itself.

To read a member costs that member, and the base that it is coded by. What comes out is hashed, and must
have the digest of the table.
"""

from __future__ import annotations

import contextlib
import threading
from itertools import accumulate
from typing import TYPE_CHECKING

from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.core.digest import BlobId, Digest, Digester
from blobstore.errors import ArchiveDamaged, ColdDamaged
from blobstore.operations.archive.format import PREFIX, Kind, decode_contents

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final

    from typing_extensions import Buffer

_PIECE: Final = 1 << 22


class Bundle:
    """An archive; threads may share it."""

    def __init__(self, data: Buffer) -> None:
        """Read the table.

        Raises:
            ArchiveDamaged: the archive is cut short, altered, or breaks the format.
        """
        self._data = memoryview(data).cast("B").toreadonly()
        self.members, self.names = decode_contents(self._data)
        sizes = (member.stored for member in self.members)
        self._begins = list(accumulate(sizes, initial=len(PREFIX)))
        self._bases: dict[int, BaseBlob] = {}
        self._opening = threading.Lock()
        self.blobs = {
            member.digest: number
            for number, member in enumerate(self.members)
            if member.kind != Kind.MANIFEST
        }
        """The numbers of the blobs, by their digests."""

    def place(self, number: int) -> tuple[int, int]:
        """Return where in the archive the stored bytes of a member begin and end."""
        return self._begins[number], self._begins[number + 1]

    def stored(self, number: int) -> memoryview:
        """Return the stored bytes of a member, unchecked."""
        return self._data[slice(*self.place(number))]

    def check_stored(self, number: int) -> None:
        """Compare the digest of the stored bytes of a member.

        Raises:
            ArchiveDamaged: they are altered.
        """
        self.judge_stored(number, Digest.of(self.stored(number)))

    def judge_stored(self, number: int, found: Digest) -> None:
        """Do as :meth:`check_stored` does, for who has hashed them."""
        if found != self.members[number].seal:
            raise ArchiveDamaged(
                f"{self.named(number)} is altered: what is stored of it has digest {found}, expected "
                f"{self.members[number].seal}"
            )

    def pieces(self, number: int) -> Iterator[memoryview]:
        """Yield the bytes of a manifest or blob; each piece is good until the next is asked for.

        Only when the last one was asked for has the digest been checked.

        Raises:
            ArchiveDamaged: the member cannot be decoded, or not to what the table says.
        """
        member = self.members[number]
        if member.kind in {Kind.MANIFEST, Kind.RAW}:
            yield from self._raw(number)
            return
        with self._explained(number):
            yield from self._cold(number).pieces()

    def read(self, number: int) -> bytes:
        """Return the bytes of a small member. Raises as :meth:`pieces`."""
        return b"".join(map(bytes, self.pieces(number)))

    def named(self, number: int) -> str:
        """Return what messages call a member."""
        member = self.members[number]
        what = "manifest" if member.kind == Kind.MANIFEST else "blob"
        return f"{what} {member.digest} (member {number})"

    def _raw(self, number: int) -> Iterator[memoryview]:
        digester = Digester()
        stored = self.stored(number)
        for begin in range(0, len(stored), _PIECE):
            # A copy, for who uses it is to have what was hashed, whoever writes to the file.
            piece = memoryview(bytes(stored[begin : begin + _PIECE]))
            digester.update(piece)
            yield piece
        self.judge_stored(number, digester.digest())

    def _cold(self, number: int) -> ColdBlobDecoder:
        member = self.members[number]
        cold = ColdBlobDecoder(self.stored(number))
        table = cold.table
        if (table.digest, table.size) != (member.digest, member.size):
            raise ColdDamaged(f"it is that of {table.digest} of {table.size} bytes")
        if member.base is None:
            if table.base is not None:
                raise ColdDamaged(f"it is coded by {table.base.digest}, and no base is stated")
            return cold
        cold.give_base(self._base(member.base))
        return cold

    def _base(self, number: int) -> BaseBlob:
        """Return a base, opened once, for many blobs may be coded by it."""
        with self._opening:
            base = self._bases.get(number)
            if base is None:
                base = self._bases[number] = self._opened_base(number)
        return base

    def _opened_base(self, number: int) -> BaseBlob:
        member = self.members[number]
        if member.kind == Kind.RAW:  # what is decoded by it is hashed
            return BaseBlob.hot(self.stored(number), member.digest)
        with self._explained(number):
            cold = self._cold(number)
        return BaseBlob(BlobId(member.digest, member.size), cold.as_base().read_into)

    @contextlib.contextmanager
    def _explained(self, number: int) -> Iterator[None]:
        """Say in errors which member it is."""
        try:
            yield
        except ColdDamaged as error:
            raise ArchiveDamaged(f"{self.named(number)}: {error}") from None

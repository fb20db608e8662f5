"""A cold blob, opened: ranges of the blob that it stands for, decoded into memory that the caller has.

Chunks are independent: a range costs the chunks that it touches, and threads share them out. Every
chunk is checked before it counts, a whole blob against its digest too. Memory beside the result is
a few chunks a thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from concurrent.futures import wait
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from blobstore.compression.base import BaseBlob, Start
from blobstore.compression.chunks import decode_chunk
from blobstore.compression.delta.low_rank import can_predict, unpack
from blobstore.compression.scratch import scratch
from blobstore.compression.table import PREFIX, decode_table
from blobstore.compression.transforms import layout_of, predicted_type
from blobstore.core.digest import BlobId, Digester
from blobstore.errors import ColdDamaged, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor, Future
    from typing import Final

    from typing_extensions import Buffer

    from blobstore.compression.delta.low_rank import Factors
    from blobstore.compression.file_view import FileBytes
    from blobstore.compression.table import Chunk, Part
    from blobstore.compression.transforms import Transform

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_BATCH: Final = 1 << 22
"""Bytes, about, that a thread is given at a time."""
_AHEAD: Final = 16
"""Batches that are begun before the first of them is waited for."""
_PIECE: Final = 1 << 22
"""Bytes, about, of the pieces in which a whole blob is given out."""
_STARTS: Final = 2
"""Parts whose start is kept, for the next chunk of them."""


class _Piece(NamedTuple):
    """What a range takes of a chunk."""

    entry: Chunk
    layout: Transform
    stored: memoryview
    """Its planes."""
    size: int
    """Of the chunk."""
    skipped: int
    """Bytes of the chunk before those that are wanted."""
    target: Bytes
    """Where they go."""
    is_direct: bool
    """Whether the chunk can be decoded there: all of it is wanted, and its elements lie aligned."""
    start: tuple[Start, int] | None
    """What it starts from, and its offset there."""


class Cut(NamedTuple):
    """Some chunks that follow each other, and where their planes are."""

    begin: int
    """The first of their bytes in the blob."""
    end: int
    stored_begin: int
    """The first byte of their planes in the file."""
    stored_end: int


class ColdBlobDecoder:
    """A cold blob in memory, usually mapped; ``table`` is what it says of itself."""

    def __init__(self, data: Buffer, source: FileBytes | None = None) -> None:
        """Read the table, from ``source`` if that has the file's bytes too, and sooner.

        Raises:
            ColdDamaged: the file is cut short, altered, or breaks the format.
        """
        self._data = memoryview(data).cast("B").toreadonly()
        self.table = decode_table(self._data if source is None else source)
        """What the file says of itself."""
        self._base: BaseBlob | None = None
        self._starts: dict[int, Start] = {}
        parts = self.table.parts
        self._begins = list(accumulate((part.size for part in parts), initial=0))
        self._first_chunks = list(accumulate((part.chunks for part in parts), initial=0))
        self._stored_at = list(self._places())

    @property
    def data(self) -> memoryview:
        """The file's bytes."""
        return self._data

    @property
    def size(self) -> int:
        """Bytes of the blob that this stands for."""
        return self.table.size

    def give_base(self, base: BaseBlob) -> None:
        """Say where the base is that a delta was made from.

        Raises:
            ColdDamaged: this was made from another base, or from none.
        """
        if base.identity != self.table.base:
            found, wanted = (
                f"{item.digest} of {item.size} bytes" if item else "none"
                for item in (base.identity, self.table.base)
            )
            raise ColdDamaged(f"the base is {found}, and what is needed is {wanted}")
        self._base = base

    def as_base(self) -> BaseBlob:
        """Return this as the base of others, decoded where it is needed.

        Raises:
            ColdDamaged: it is a delta itself; chains are one deep.
        """
        if self.table.base is not None:
            raise ColdDamaged(f"the base {self.table.digest} is itself a delta")
        return BaseBlob(BlobId(self.table.digest, self.size), self.read_into)

    def cuts(self, limit: int, stored_limit: int) -> Iterator[Cut]:
        """Yield runs of whole chunks that make up the blob.

        None has more than ``limit`` bytes, or planes of more than ``stored_limit``, unless it has one
        chunk. Planes of chunks that a part has from another are not told of.
        """
        cut: Cut | None = None
        for begin, end, stored_begin, stored_end in self._chunk_places():
            if cut is None:
                cut = Cut(begin, end, stored_begin, stored_end)
            elif end - cut.begin > limit or stored_end - cut.stored_begin > stored_limit:
                yield cut
                cut = Cut(begin, end, stored_begin, stored_end)
            else:
                cut = cut._replace(end=end, stored_end=stored_end)
        if cut is not None:
            yield cut

    def _chunk_places(self) -> Iterator[Cut]:
        at = len(PREFIX)
        for part, begin, first in zip(
            self.table.parts, self._begins, self._first_chunks, strict=False
        ):
            for number in range(-(-part.size // part.chunk_size)):
                start = at
                if part.same_as is None:
                    start = self._stored_at[first + number]
                    at = start + sum(
                        plane.size for plane in self.table.chunks[first + number].planes
                    )
                chunk = begin + number * part.chunk_size
                yield Cut(chunk, min(chunk + part.chunk_size, begin + part.size), start, at)

    def read_into(
        self,
        out: Buffer,
        begin: int = 0,
        *,
        source: FileBytes | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Write the bytes of the blob from ``begin`` on into all of ``out``, each chunk checked.

        Planes are taken from ``source``, if that has the file's bytes too, and sooner.

        Raises:
            ColdDamaged: a chunk of them is damaged, or the base is missing.
            UsageError: the blob has no such bytes.
        """
        for _ in self._filled(_as_bytes(out), begin, executor, source):
            pass

    def decode_into(self, out: Buffer, *, executor: Executor | None = None) -> None:
        """Write the whole blob into ``out``, and check its digest too.

        Raises:
            ColdDamaged: a chunk is damaged, the base is missing, or the digest is another.
            UsageError: ``out`` does not have the blob's size.
        """
        target = _as_bytes(out)
        if len(target) != self.size:
            raise UsageError(f"a blob of {self.size} bytes does not fit in {len(target)}")
        digester = Digester()
        for done in self._filled(target, 0, executor):
            digester.update(done.data)
        self._judge(digester)

    def pieces(self, *, executor: Executor | None = None) -> Iterator[memoryview]:
        """Yield the whole blob piece by piece; each is good until the next is asked for.

        Only when the last one was asked for has the digest been checked.

        Raises:
            ColdDamaged: a chunk is damaged, the base is missing, or the digest is another.
        """
        digester = Digester()
        # While one piece is hashed and used, the next is decoded.
        memories = [np.empty(min(_PIECE, self.size), np.uint8) for _ in range(2)]
        fillings: deque[tuple[Bytes, Iterator[Bytes]]] = deque()
        for begin in range(0, self.size, _PIECE):
            memory = memories[begin // _PIECE % 2][: self.size - begin]
            fillings.append((memory, self._filled(memory, begin, executor)))
            if len(fillings) > 1:
                yield self._finished(*fillings.popleft(), digester)
        if fillings:
            yield self._finished(*fillings.popleft(), digester)
        self._judge(digester)

    def _finished(self, piece: Bytes, filling: Iterator[Bytes], digester: Digester) -> memoryview:
        for done in filling:
            digester.update(done.data)
        return piece.data.toreadonly()

    def _places(self) -> Iterator[int]:
        """Yield where in the file the planes of each chunk begin."""
        at = len(PREFIX)
        for part, first in zip(self.table.parts, self._first_chunks, strict=False):
            at += part.factors.size if part.factors is not None else 0
            for chunk in self.table.chunks[first : first + part.chunks]:
                yield at
                at += sum(plane.size for plane in chunk.planes)

    def _judge(self, digester: Digester) -> None:
        found, wanted = digester.digest(), self.table.digest
        if found != wanted:
            raise ColdDamaged(f"a cold blob decodes to {found}, and says that it is {wanted}")

    def _filled(
        self,
        out: Bytes,
        begin: int,
        executor: Executor | None,
        source: FileBytes | None = None,
    ) -> Iterator[Bytes]:
        """Begin to fill ``out``, and return an iterator of its parts as they have been written."""
        if begin < 0 or begin + len(out) > self.size:
            raise UsageError(
                f"bytes {begin} to {begin + len(out)} are wanted of a blob of {self.size}"
            )
        pieces = self._pieces(out, begin, self._data if source is None else source)
        if executor is None:
            return map(self._write, pieces)
        batches = _batches(pieces)
        running = deque(
            (executor.submit(self._write_all, batch), batch) for batch in islice(batches, _AHEAD)
        )
        return self._awaited(running, batches, executor)

    def _awaited(
        self,
        running: deque[tuple[Future[None], list[_Piece]]],
        batches: Iterator[list[_Piece]],
        executor: Executor,
    ) -> Iterator[Bytes]:
        try:
            while running:
                future, pieces = running.popleft()
                future.result()
                for batch in islice(batches, 1):
                    running.append((executor.submit(self._write_all, batch), batch))
                yield from (piece.target for piece in pieces)
        finally:
            wait([future for future, _ in running if not future.cancel()])  # they write to ``out``

    def _pieces(self, out: Bytes, begin: int, data: FileBytes) -> Iterator[_Piece]:
        """Yield what to write into ``out``."""
        number = bisect_right(self._begins, begin) - 1
        done = 0
        address = out.ctypes.data
        while done < len(out):
            part = self.table.parts[number]
            offset = begin + done - self._begins[number]
            origin = number if part.same_as is None else part.same_as
            for chunk in range(offset // part.chunk_size, -(-part.size // part.chunk_size)):
                start = chunk * part.chunk_size
                size = min(part.chunk_size, part.size - start)
                target = out[done : done + size - (offset - start)]
                if not len(target):
                    return
                is_direct = len(target) == size and (address + done) % part.width == 0
                yield self._piece(data, origin, chunk, size, offset - start, target, is_direct)
                done += len(target)
                offset += len(target)
            number += 1

    def _piece(
        self,
        data: FileBytes,
        number: int,
        chunk: int,
        size: int,
        skipped: int,
        target: Bytes,
        is_direct: bool,
    ) -> _Piece:
        part = self.table.parts[number]
        index = self._first_chunks[number] + chunk
        entry = self.table.chunks[index]
        layout = layout_of(entry.layout, part.width)
        if layout is None:  # the table was checked
            raise ColdDamaged(f"layout {entry.layout} is unknown")
        begin = self._stored_at[index]
        stored = data[begin : begin + sum(plane.size for plane in entry.planes)]
        start = None
        if layout.needs_base:
            start = self._start(number, layout), chunk * part.chunk_size
        return _Piece(entry, layout, stored, size, skipped, target, is_direct, start)

    def _start(self, number: int, layout: Transform) -> Start:
        """Return what the chunks of a part start from, made when the first asks."""
        start = self._starts.get(number)
        if start is not None:
            return start
        part = self.table.parts[number]
        if self._base is None or part.base_begin is None:
            wanted = self.table.base and self.table.base.digest
            raise ColdDamaged(f"a delta cannot be decoded without its base {wanted}")
        factors, dtype = self._factors(number, part), predicted_type(layout.number)
        if factors is not None and (dtype is None or not can_predict(dtype)):
            raise ColdDamaged(f"factors predict no elements of layout {layout.number}")
        start = Start(self._base, part.base_begin, factors, dtype)
        # Few, for a kilobyte of factors can become a quarter of a gigabyte; parts are read in order.
        kept = list(self._starts.items())[1 - _STARTS :]
        self._starts = {**dict(kept), number: start}
        return start

    def _factors(self, number: int, part: Part) -> Factors | None:
        if part.factors is None:
            return None
        end = self._stored_at[self._first_chunks[number]]
        stored = self._data[end - part.factors.size : end]
        if crc32(stored) != part.factors.check:
            raise ColdDamaged("the factors of a part are not what their check sum says")
        return unpack(stored, part.size // part.width)

    def _write_all(self, pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            self._write(piece)

    def _write(self, piece: _Piece) -> Bytes:
        # First, for a base that is cold itself is decoded in the same memory as its delta.
        base = None
        if piece.start is not None:
            start, offset = piece.start
            base = start.read(offset, piece.size)
        target = piece.target if piece.is_direct else scratch("chunk", piece.size)
        decode_chunk(piece.entry, piece.layout, piece.stored, target, base)
        if not piece.is_direct:
            np.copyto(piece.target, target[piece.skipped :][: len(piece.target)])
        return piece.target


def _as_bytes(out: Buffer) -> Bytes:
    """Return memory to write to as an array of bytes."""
    return np.frombuffer(memoryview(out).cast("B"), np.uint8)


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Yield runs of pieces that are worth a thread's while."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.size
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

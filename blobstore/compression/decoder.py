"""Decoder of the cold-blob format: decompresses ranges of a blob into the caller's memory.

Chunks are independent. A range costs only the chunks that it overlaps, and several threads may decode
different ranges of one blob. Every chunk is verified against its checksum. Apart from the result,
each thread needs memory for a few chunks.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from blobstore.compression.base import BaseBlob, Prediction
from blobstore.compression.chunks import decode_chunk
from blobstore.compression.delta.low_rank import can_predict, unpack
from blobstore.compression.file_view import FileView
from blobstore.compression.scaled_rules import AffineRule, Float8Rule
from blobstore.compression.scratch import scratch
from blobstore.compression.table import PREFIX, decode_table
from blobstore.compression.transforms import predicted_type, transform_of
from blobstore.core.digest import BlobId, Digester
from blobstore.errors import ColdDamaged, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Final

    from typing_extensions import Buffer

    from blobstore.compression.file_view import FileBytes
    from blobstore.compression.transforms import Transform

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_PIECE: Final = 1 << 22
"""Upper limit for the pieces in which a complete blob is decoded, in bytes."""
_MAX_PREDICTIONS: Final = 2
"""Parts whose prediction is kept for their next chunk."""


class ChunkRange(NamedTuple):
    """Consecutive chunks, and the place of their planes in the file."""

    begin: int
    """Offset of their first byte in the blob."""
    end: int
    stored_begin: int
    """Offset of their first plane in the file."""
    stored_end: int


class ColdBlobDecoder:
    """Decodes one cold blob from the bytes of its file, usually a memory map.

    It knows no store and opens no files; a delta gets its base from :meth:`give_base`. The store's
    ``ColdBlob`` is the counterpart that maps the file and finds the base.
    """

    def __init__(
        self,
        data: Buffer,
        source: FileBytes | None = None,
        touch: Callable[[int, int], object] | None = None,
    ) -> None:
        """Read the table.

        Args:
            data: the bytes of the file.
            source: the same bytes, if they can be read faster there.
            touch: called with each range of ``data`` before that is decoded; see :class:`FileView`.

        Raises:
            ColdDamaged: the file is truncated or altered, or violates the format.
        """
        self._data = memoryview(data).cast("B").toreadonly()
        self._bytes = FileView(self._data, touch=touch)
        self.table = decode_table(self._bytes if source is None else source)
        """The table of the file."""
        self._base: BaseBlob | None = None
        self._predictions: dict[int, Prediction] = {}
        self._scales: dict[tuple[object, ...], tuple[Bytes, Bytes]] = {}
        """Of MLX weights, which are computed with their codes."""
        parts = self.table.parts
        self._begins = list(accumulate((part.size for part in parts), initial=0))
        self._first_chunks = list(accumulate((part.chunks for part in parts), initial=0))
        self._stored_at = []
        """Offset in the file of the planes of each chunk."""
        at = len(PREFIX)
        for part, first in zip(parts, self._first_chunks, strict=False):
            at += part.factors.size if part.factors is not None else 0
            for chunk in self.table.chunks[first : first + part.chunks]:
                self._stored_at.append(at)
                at += chunk.stored_size

    @property
    def data(self) -> memoryview:
        """The bytes of the file."""
        return self._data

    @property
    def size(self) -> int:
        """Size of the decoded blob in bytes."""
        return self.table.size

    def give_base(self, base: BaseBlob) -> None:
        """Set the base that a delta is decoded against.

        Raises:
            ColdDamaged: the blob has a different base, or none; or the base is a delta, and
                :meth:`BaseBlob.check_chain` refuses the chain.
        """
        if base.identity != self.table.base:
            found, wanted = (
                f"{item.digest} of {item.size} bytes" if item else "none"
                for item in (base.identity, self.table.base)
            )
            raise ColdDamaged(f"the base is {found}, expected {wanted}")
        base.check_chain(self.table.parts)
        self._base = base

    def as_base(self) -> BaseBlob:
        """Return this blob as a base for deltas; it is decoded as needed.

        Raises:
            ColdDamaged: this is a delta that was given no base.
        """
        identity = BlobId(self.table.digest, self.size)
        if self.table.base is None:
            return BaseBlob(identity, self.read_into)
        if self._base is None:
            raise ColdDamaged(f"the base {self.table.digest} is itself a delta")
        return BaseBlob(identity, self.read_into, None, self.table, self._base.depth + 1)

    def chunk_ranges(self, limit: int, stored_limit: int) -> Iterator[ChunkRange]:
        """Yield ranges of complete chunks that together make up the blob.

        A range of more than one chunk has at most ``limit`` bytes, and planes of at most
        ``stored_limit`` bytes. Parts that repeat another part add no planes.
        """
        current: ChunkRange | None = None
        stored_end = len(PREFIX)
        for part, begin, first in zip(
            self.table.parts, self._begins, self._first_chunks, strict=False
        ):
            for number, offset in enumerate(range(0, part.size, part.chunk_size), first):
                stored_begin = stored_end
                if part.same_as is None:
                    stored_begin = self._stored_at[number]
                    stored_end = stored_begin + self.table.chunks[number].stored_size
                end = begin + min(offset + part.chunk_size, part.size)
                if (
                    current is not None
                    and end - current.begin <= limit
                    and stored_end - current.stored_begin <= stored_limit
                ):
                    current = current._replace(end=end, stored_end=stored_end)
                    continue
                if current is not None:
                    yield current
                current = ChunkRange(begin + offset, end, stored_begin, stored_end)
        if current is not None:
            yield current

    def read_into(self, out: Buffer, begin: int = 0, *, source: FileBytes | None = None) -> None:
        """Fill ``out`` with the blob's bytes from offset ``begin``. Each chunk is verified.

        Args:
            out: memory to fill completely.
            begin: offset in the blob.
            source: the bytes of the file, if they can be read faster there.

        Raises:
            ColdDamaged: one of the chunks is damaged, or the base is missing.
            UsageError: the blob does not have these bytes.
        """
        target = np.frombuffer(memoryview(out).cast("B"), np.uint8)
        if begin < 0 or begin + len(target) > self.size:
            raise UsageError(
                f"bytes {begin} to {begin + len(target)} are out of range for a blob of {self.size}"
            )
        for _ in self._decode(target, begin, self._bytes if source is None else source):
            pass

    def pieces(self) -> Iterator[memoryview]:
        """Decode the complete blob and yield it in pieces, each valid until the next one.

        The digest is verified only after the last piece, so exhaust the iterator before using them.

        Raises:
            ColdDamaged: a chunk is damaged, the base is missing, or the digest does not match.
        """
        digester = Digester()
        memory = np.empty(min(_PIECE, self.size), np.uint8)
        for begin, end, *_ in self.chunk_ranges(_PIECE, self.size):
            piece = memory[: end - begin]
            for decoded in self._decode(piece, begin, self._bytes):
                digester.update(decoded.data)  # while it is in the processor's cache
            yield piece.data.toreadonly()
        found = digester.digest()
        if found != self.table.digest:
            raise ColdDamaged(f"a cold blob decodes to {found}, expected {self.table.digest}")

    def _decode(self, out: Bytes, begin: int, data: FileBytes) -> Iterator[Bytes]:
        """Fill ``out`` chunk by chunk, and yield each slice of it once it is written."""
        number = bisect_right(self._begins, begin) - 1
        done = 0
        while done < len(out):
            part = self.table.parts[number]
            offset = begin + done - self._begins[number]
            origin = number if part.same_as is None else part.same_as
            for chunk in range(offset // part.chunk_size, -(-part.size // part.chunk_size)):
                chunk_end = min((chunk + 1) * part.chunk_size, part.size)
                target = out[done : done + chunk_end - offset]
                if not len(target):
                    return
                self._decode_chunk(origin, chunk, offset % part.chunk_size, target, data)
                yield target
                done += len(target)
                offset += len(target)
            number += 1

    def _decode_chunk(
        self, part_number: int, chunk: int, skipped: int, target: Bytes, data: FileBytes
    ) -> None:
        """Fill ``target`` with the bytes of a part's chunk that follow the first ``skipped``."""
        part = self.table.parts[part_number]
        index = self._first_chunks[part_number] + chunk
        entry = self.table.chunks[index]
        transform = transform_of(entry.transform, part.width)
        if transform is None:  # decode_table has checked this
            raise ColdDamaged(f"transform {entry.transform} is unknown")
        at = self._stored_at[index]
        stored = data[at : at + entry.stored_size]
        offset = chunk * part.chunk_size
        size = min(part.chunk_size, part.size - offset)
        base = None
        if transform.needs_base:
            # Read this first: a cold base is decoded in the same scratch memory as its delta.
            base = self._prediction(part_number, transform).read(offset, size)
        fits = len(target) == size and target.ctypes.data % part.width == 0
        decoded = target if fits else scratch("chunk", size)
        try:
            decode_chunk(entry, transform, stored, decoded, base)
        except ColdDamaged:
            self._scales.clear()  # those of a damaged base, which may be restored
            raise
        if not fits:
            np.copyto(target, decoded[skipped : skipped + len(target)])

    def _prediction(self, part_number: int, transform: Transform) -> Prediction:
        """Return the prediction for a part's chunks, created on first use."""
        known = self._predictions.get(part_number)
        if known is not None:
            return known
        part = self.table.parts[part_number]
        if self._base is None or part.base_begin is None:
            wanted = self.table.base and self.table.base.digest
            raise ColdDamaged(f"a delta cannot be decoded without its base {wanted}")
        dtype = predicted_type(transform.number)
        factors, rule = None, part.rule
        if part.factors is not None:
            end = self._stored_at[self._first_chunks[part_number]]
            stored = self._bytes[end - part.factors.size : end]
            if crc32(stored) != part.factors.checksum:
                raise ColdDamaged("the factors or scales of a part do not match their checksum")
            if isinstance(rule, Float8Rule):
                rule = rule.with_scales(stored, part.size)
            elif dtype is not None and can_predict(dtype):
                factors = unpack(stored, part.size // part.width)
            else:
                raise ColdDamaged(
                    f"factors cannot predict elements of transform {transform.number}"
                )
        if isinstance(rule, AffineRule):
            rule = replace(rule, begin=part.base_begin, known=self._scales)
        prediction = Prediction(self._base, part.base_begin, factors, dtype, rule)
        # Keep only a few, because a kilobyte of factors can expand to a quarter of a gigabyte.
        # Parts are usually read in order.
        kept = list(self._predictions.items())[1 - _MAX_PREDICTIONS :]
        self._predictions = {**dict(kept), part_number: prediction}
        return prediction

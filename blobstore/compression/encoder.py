"""Encoder of the cold-blob format: a stream of bytes becomes stored planes, followed by a table.

The table comes last because it holds the sizes of the planes. So the output can be any append-only
stream, nothing is written twice, and a truncated file has no table. The output depends only on the
bytes, the spans and the level. (The factors in the spans are found with sums that other processors may
round differently.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32

from blobstore.compression.base import Prediction
from blobstore.compression.chunks import encode_chunk
from blobstore.compression.delta.low_rank import can_predict, unpack
from blobstore.compression.quant_rule import MAX_CODED, Q8_0
from blobstore.compression.scaled_rules import Float8Rule
from blobstore.compression.scratch import scratch
from blobstore.compression.spans import Span
from blobstore.compression.table import (
    MAX_CHUNK,
    MAX_FACTORS,
    PREFIX,
    PREFIXES,
    Part,
    StoredFactors,
    Table,
    encode_table,
)
from blobstore.compression.transforms import needs_base, width_of
from blobstore.compression.tuning import choose_pipelines
from blobstore.core.digest import Digester
from blobstore.core.tensor import DType
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Final

    from typing_extensions import Buffer

    from blobstore.compression.base import BaseBlob
    from blobstore.compression.chunks import Pipeline
    from blobstore.compression.entropy import Plane
    from blobstore.compression.level import Level
    from blobstore.compression.quant_rule import Rule
    from blobstore.compression.table import Chunk
    from blobstore.core.digest import Digest

    Array = np.ndarray[Any, Any]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Write = Callable[[Buffer], object]

_CHUNK_SIZES: Final = {1: 1 << 19, 2: 1 << 20, 4: 1 << 19, 8: 1 << 20}
"""Approximate bytes per chunk, by the width of its elements.

With smaller chunks, threads wait for the GIL more than they work. With larger ones of 32-bit floats, two
distributions would share one Huffman code.
"""
_GRAIN: Final = 1 << 12
"""All chunks but the last are multiples of this many bytes."""
_CHUNKS_PER_CHOICE: Final = 32
"""Consecutive chunks that share one choice of pipelines at most."""
_MAX_DEVIATION: Final = 1 / 8
"""A chunk whose ratio differs by more from that of the chunk of the choice gets its own choice."""


class Encoded(NamedTuple):
    """A blob that was encoded."""

    table: Table
    size_alone: int
    """About the stored size of the blob without a base."""


def encode(
    pieces: Iterable[Buffer],
    spans: Sequence[Span],
    write: Write,
    *,
    level: Level = "fast",
    digest: Digest | None = None,
    base: BaseBlob | None = None,
) -> Encoded:
    """Write a blob in the cold-blob format.

    A span without any chunk that its base makes smaller is stored as one without a base.

    Args:
        pieces: the blob's bytes in order. Chunks of which each is within a piece are not copied.
        spans: the content of the blob.
        write: called with the output in order; each buffer is valid until the call returns.
        level: what to optimise for.
        digest: the digest of the blob, if known. Decoders verify against it.
        base: the blob that spans with a ``base_begin`` are encoded against.

    Raises:
        UsageError: the pieces do not have the size of the spans, or a span is impossible.
    """
    parts = parts_of(spans)
    has_base = any(part.base_begin is not None for part in parts)
    if has_base and base is None:
        raise UsageError("spans with an offset in a base need a base")
    digester = Digester()
    source = _Source(pieces, None if digest is not None else digester)
    chunks: list[Chunk] = []
    alone = 0.0
    has_blocks = any(span.blocks is not None or span.rule is not None for span in spans)
    write(PREFIXES[has_blocks])
    for number, (span, part) in enumerate(zip(spans, parts, strict=True)):
        prediction = _prediction(span, part, base)
        packed = _packed(span)
        if packed is not None and part.same_as is None:
            write(packed)
        encoder = _ChunkEncoder(span, level)
        first = len(chunks)
        for begin in range(0, part.size, part.chunk_size):
            piece = source.take(min(part.chunk_size, part.size - begin))
            if part.same_as is not None:
                continue
            chunk = _aligned(piece, part.width)
            predicted = None if prediction is None else prediction.read(begin, len(chunk))
            entry, planes = encoder.encode(chunk, predicted)
            chunks.append(entry)
            for plane in planes:
                write(plane.data)
        alone += encoder.size_alone
        if part.factors is None and all(
            not needs_base(chunk.transform) for chunk in chunks[first:]
        ):
            parts[number] = part._replace(base_begin=None, rule=None)
    source.expect_end()
    depends = any(part.base_begin is not None for part in parts)
    table = Table(
        digest or digester.digest(),
        sum(span.size for span in spans),
        base.identity if base is not None and depends else None,
        parts,
        chunks,
        has_blocks,
    )
    stored = encode_table(table)
    write(stored)
    return Encoded(table, int(alone) + len(PREFIX) + len(stored))


def parts_of(spans: Sequence[Span]) -> list[Part]:
    """Return the parts that spans are encoded as. Raises UsageError if a span is impossible."""
    parts: list[Part] = []
    for span in spans:
        part = _part(span)
        if span.same_as is not None:
            # It shares the chunks of that part, which are larger if that one has a base.
            chunk_size = parts[span.same_as].chunk_size
            part = Part(part.size, part.width, chunk_size, span.same_as)
        parts.append(part)
    return parts


def size_by_rule(data: memoryview, span: Span, base: BaseBlob, level: Level) -> float:
    """Return about the stored size of a span that a rule predicts, from the chunk in its middle."""
    (part,) = parts_of([span])
    prediction = _prediction(span, part, base)
    begin = (part.chunks - 1) // 2 * part.chunk_size
    chunk = _aligned(data[begin : begin + part.chunk_size], part.width)
    predicted = None if prediction is None else prediction.read(begin, len(chunk))
    entry, _ = _ChunkEncoder(span, level).encode(chunk, predicted)
    return entry.stored_size * span.size / len(chunk) + len(_packed(span) or b"")


class _ChunkEncoder:
    """Encodes the chunks of one part, with pipelines that follow the data as it changes."""

    def __init__(self, span: Span, level: Level) -> None:
        self._span = span
        self._level: Level = level
        self._pipelines: Sequence[Pipeline] = ()
        self._ratio = 0.0
        """The ratio of the chunk that the pipelines were chosen for."""
        self._remaining = 0
        """Chunks that may use the pipelines."""
        self._ratio_alone = 1.0
        self.size_alone = 0.0
        """About the bytes that the chunks would take without a base."""

    def encode(self, chunk: Bytes, predicted: Array | None) -> tuple[Chunk, list[Plane]]:
        """Encode the next chunk; the planes are valid until this thread encodes again."""
        if self._remaining:
            self._remaining -= 1
            entry, planes = encode_chunk(chunk, predicted, self._pipelines)
            if abs(entry.stored_size / len(chunk) - self._ratio) <= _MAX_DEVIATION:
                self.size_alone += self._ratio_alone * len(chunk)
                return entry, planes
        choice = choose_pipelines(
            chunk,
            predicted,
            self._span.dtype,
            self._level,
            self._span.blocks,
            keeps_scales=self._span.rule is not None and self._span.rule.keeps_scales,
        )
        self._pipelines, self._ratio_alone = choice.pipelines, choice.ratio_alone
        self.size_alone += self._ratio_alone * len(chunk)
        self._remaining = _CHUNKS_PER_CHOICE - 1
        entry, planes = encode_chunk(chunk, predicted, self._pipelines, choice.planes)
        self._ratio = entry.stored_size / len(chunk)
        return entry, planes


def _part(span: Span) -> Part:
    """Return a part with chunks of about equal size, so that there is no small remainder."""
    width = width_of(span.dtype)
    if not span.size or span.size % width:
        raise UsageError(f"a span of {span.size} bytes does not hold elements of {width} bytes")
    if span.rule is not None:
        return Part(
            span.size,
            width,
            _quantized_chunk(span.size, span.rule),
            None,
            span.base_begin,
            _stored_factors(span),
            span.rule,
        )
    wanted = _CHUNK_SIZES[width] if span.base_begin is None else MAX_CHUNK
    count = max((span.size + wanted // 2) // wanted, -(-span.size // MAX_CHUNK))
    grain = _GRAIN if count > 1 else width
    if span.blocks is not None:
        grain = max(grain // span.blocks.size, 1) * span.blocks.size
    chunk_size = min(-(-span.size // (count * grain)) * grain, MAX_CHUNK // grain * grain)
    return Part(span.size, width, chunk_size, None, span.base_begin, _stored_factors(span))


def _packed(span: Span) -> bytes | None:
    """Return what a part has before its planes: factors, or the scales that its rule keeps."""
    rule = span.rule
    if isinstance(rule, Float8Rule) and rule.scales is not None:
        return rule.scales.tobytes()
    return span.factors


def _stored_factors(span: Span) -> StoredFactors | None:
    packed = _packed(span)
    return StoredFactors(crc32(packed), len(packed)) if packed else None


def _quantized_chunk(size: int, rule: Rule) -> int:
    """Return a size for chunks that are quantized from whole chunks of the base, as this encoder makes them."""
    if not rule.is_possible(size):
        raise UsageError(f"a span of {size} bytes cannot be quantized by {rule}")
    blocks = Q8_0 if rule.dtype is DType.U8 else None
    source = _part(Span(rule.source_size(size), rule.dtype, blocks=blocks)).chunk_size
    step = source // rule.source_size(rule.kind.size)
    most = min(MAX_CODED // rule.kind.weights, MAX_CHUNK // rule.kind.size)
    return min(size, max(most // step, 1) * step * rule.kind.size)


def _prediction(span: Span, part: Part, base: BaseBlob | None) -> Prediction | None:
    if base is None or part.base_begin is None:
        return None
    factors = None
    if span.factors is not None:
        if span.dtype is None or not can_predict(span.dtype) or len(span.factors) >= MAX_FACTORS:
            raise UsageError("these factors cannot predict the elements of this span")
        factors = unpack(memoryview(span.factors), span.size // part.width)
    return Prediction(base, part.base_begin, factors, span.dtype, part.rule)


def _aligned(chunk: memoryview, width: int) -> Bytes:
    """Return a chunk as an array, copied if its elements are not aligned in memory."""
    array = np.frombuffer(chunk, np.uint8)
    if array.view(f"<u{width}").flags.aligned:
        return array
    copy = scratch("unaligned", len(array))
    np.copyto(copy, array)
    return copy


class _Source:
    """Regroups the pieces of a blob into buffers of any size, and hashes them if asked to."""

    def __init__(self, pieces: Iterable[Buffer], digester: Digester | None) -> None:
        self._pieces = iter(pieces)
        self._digester = digester
        self._piece = memoryview(b"")

    def take(self, size: int) -> memoryview:
        """Return the next bytes: a view, or a copy if they come from several pieces."""
        if not self._piece:
            self._piece = self._next()
        if len(self._piece) < size:
            joined = bytearray(self._piece)
            while len(joined) < size:
                view = self._next()
                taken = size - len(joined)
                joined += view[:taken]
                self._piece = view[taken:]
            return memoryview(joined)
        taken_view, self._piece = self._piece[:size], self._piece[size:]
        return taken_view

    def _next(self) -> memoryview:
        piece = next(self._pieces, None)
        if piece is None:
            raise UsageError("the pieces have fewer bytes than the spans")
        if self._digester is not None:
            self._digester.update(piece)
        return memoryview(piece).cast("B")

    def expect_end(self) -> None:
        """Raise an error unless all bytes have been taken."""
        if len(self._piece) or any(memoryview(piece).nbytes for piece in self._pieces):
            raise UsageError("the pieces have more bytes than the spans")

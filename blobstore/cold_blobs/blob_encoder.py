"""Compresses blobs, each alone or as a delta against a base, and estimates the compressed size.

:func:`write_verified` is the only way to the cold file of a blob: what was encoded is decoded before it is
used. Whether a base saves enough is known once the blob is encoded against it. :class:`SizeEstimator` is
for what must be known before.
"""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, TypeVar

from blobstore.cold_blobs.quantized import divided, find_rules
from blobstore.cold_blobs.tensor_index import MIN_PIECE, BlobIndex, slices_of, whole_of
from blobstore.errors import BlobDamaged, ColdDamaged, Damaged, InvalidHeader, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Final

    from typing_extensions import Buffer

    from blobstore.cold_blobs.tensor_index import Piece
    from blobstore.compression.base import BaseBlob
    from blobstore.compression.encoder import Encoded
    from blobstore.compression.level import Level
    from blobstore.compression.spans import Span
    from blobstore.core.digest import BlobId
    from blobstore.safetensors.header import Header
    from blobstore.store.local import LocalStore

MIN_GAIN: Final = 0.05
"""The share of the compressed size that a base must save."""
_CHUNK: Final = 16 << 20


Verified = TypeVar("Verified")


class SizeEstimator:
    """Estimates what the blobs of a store compress to, each pair once. Threads may share it."""

    def __init__(self, store: LocalStore, level: Level) -> None:
        self._store = store
        self.level: Level = level
        """The level that the estimates are for."""
        self._sizes: dict[tuple[BlobId, BlobId | None], int] = {}

    def estimate(self, blob: BlobId, base: BlobId | None = None) -> int:
        """Return about the compressed size of a hot blob, with a base if that saves enough.

        Raises:
            BlobMissing, BlobDamaged: the blob has no readable hot file.
            StoreError: the store cannot be read.
        """
        key = blob, base
        if key not in self._sizes:
            encoder = BlobEncoder(self._store, blob, self.level, base)
            size = encoder.estimate()
            # The encoder drops a base that has nothing in common with the blob.
            if encoder.has_base:
                alone = self.estimate(blob)
                size = size if size <= (1 - MIN_GAIN) * alone else alone
            self._sizes[key] = size
        return self._sizes[key]


class Output(Protocol):
    """Where a cold file is written."""

    @property
    def size(self) -> int:
        """Number of bytes written."""

    def write(self, data: Buffer) -> None:
        """Append bytes."""

    def clear(self) -> None:
        """Discard what was written."""


def write_verified(
    encoder: BlobEncoder,
    output: Output,
    *,
    is_gain: Callable[[], bool],
    verify: Callable[[], Verified | None],
    report: Callable[[int], None],
    on_fallback: Callable[[], object],
) -> Verified | None:
    """Compress a blob and verify what was written.

    If the base does not save ``MIN_GAIN``, or the delta is not verified, the blob is compressed alone.

    Args:
        encoder: compresses the blob.
        output: receives the cold file. It is left empty if there is none.
        is_gain: says whether the output is small enough to be kept.
        verify: decodes the output and compares digests; returns None if the base cannot be used.
        report: gets the number of bytes of each chunk read.
        on_fallback: called if the delta is not verified.

    Returns:
        What ``verify`` returned, or None if compressing saves nothing.

    Raises:
        BlobDamaged, ColdDamaged: the output does not decode to the blob, even without a base.
    """
    if encoder.has_base:
        encoded = encoder.write(output.write, report)
        is_delta = encoded.table.base is not None
        if not is_delta or output.size <= (1 - MIN_GAIN) * encoded.size_alone:
            if not is_gain():
                output.clear()
                return None
            with contextlib.suppress(BlobDamaged, ColdDamaged):  # perhaps the base is damaged
                verified = verify()
                if verified is not None:
                    return verified
            on_fallback()
        output.clear()
    encoder.without_base().write(output.write, report)
    verified = verify() if is_gain() else None
    if verified is None:
        output.clear()
    return verified


class BlobEncoder:
    """Compresses a blob, against ``base`` if that is given and has similar tensors.

    The bytes are those of the hot file, unless ``data`` is given. If ``chains`` are made, the chunks of
    sparse and dense deltas lie at the same places. Only with ``in_chain``, the base may be a delta, or
    become one: then no factors improve the prediction, and no rules quantize the base.

    Raises:
        BlobMissing, BlobDamaged: the blob has no readable hot file.
        StoreError: the store cannot be read.
    """

    def __init__(
        self,
        store: LocalStore,
        blob: BlobId,
        level: Level,
        base: BlobId | None = None,
        data: memoryview | None = None,
        *,
        chains: bool = False,
        in_chain: bool = False,
    ) -> None:
        from blobstore.compression.spans import header_of, spans_in  # imports numpy

        self._blob = blob
        self._level: Level = level
        self._chains = chains
        self._in_chain = in_chain
        self._data = store.mmap_hot(*blob) if data is None else data
        header = header_of(self._data, blob.size)
        self._spans = spans_in(header, blob.size)
        self._aligned: Sequence[Span] = self._spans
        """The spans, with their offsets in the base."""
        self._base: BaseBlob | None = None
        if base is None or header is None:
            return
        try:
            base_blob = store.base(*base, in_chain=in_chain)
            if _has_header_of(base_blob, self._data, header):
                base_header = header  # as the steps of a run have
            else:
                base_header = store.read_blob_header(*base)
            aligner = _BaseAligner(
                self._data, header, base_blob, base_header, has_rules=not in_chain
            )
            aligned = aligner.align(self._spans)
        except (InvalidHeader, Damaged, StoreError):
            return  # the base has no tensors, or cannot be read
        if any(span.base_begin is not None for span in aligned):
            self._aligned, self._base = aligned, base_blob

    @property
    def has_base(self) -> bool:
        """Whether the blob is compressed against a base."""
        return self._base is not None

    def without_base(self) -> BlobEncoder:
        """Return the encoder of the same blob without a base."""
        alone = copy.copy(self)
        alone._aligned, alone._base = self._spans, None  # noqa: SLF001 - a copy of this one
        return alone

    def estimate(self) -> int:
        """Return about how many bytes :meth:`write` writes, from samples of each tensor."""
        from blobstore.compression.estimate import estimate_size

        return estimate_size(self._data, self._aligned, self._base, self._level)

    def write(self, write: Callable[..., object], report: Callable[[int], None]) -> Encoded:
        """Compress the blob into ``write``; ``report`` gets the number of bytes of each chunk read."""
        from blobstore.compression.encoder import encode
        from blobstore.compression.estimate import fit_low_rank
        from blobstore.compression.spans import mark_duplicates

        spans: Sequence[Span] = self._aligned
        if self._base is not None and not self._in_chain:
            look = partial(report, 0)  # which raises if the jobs must end
            spans = list(fit_low_rank(self._data, spans, self._base, self._level, look))
        # A span that equals an earlier one refers to it, so a base would save nothing more.
        spans = [
            span
            if span.same_as is None
            else span._replace(base_begin=None, factors=None, rule=None)
            for span in mark_duplicates(spans, self._data)
        ]
        spans, digest = self._merged(spans), self._blob.digest
        pieces = self._pieces(spans, report)
        return encode(pieces, spans, write, level=self._level, digest=digest, base=self._base)

    def _pieces(self, spans: Sequence[Span], report: Callable[[int], None]) -> Iterator[memoryview]:
        """Yield the chunks of the blob, which are therefore not copied, and report the size of each."""
        from blobstore.compression.encoder import parts_of

        begin = 0
        for part in parts_of(spans):
            end = begin + part.size
            for at in range(begin, end, part.chunk_size):
                piece = self._data[at : min(at + part.chunk_size, end)]
                yield piece
                report(len(piece))
            begin = end

    def _merged(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Return the spans with small and sparse ones merged, with chunks where those of the base lie."""
        from blobstore.compression.spans import merge_small

        if not self._chains:
            return merge_small(spans)
        table = None if self._base is None else self._base.table
        if table is None:
            return merge_small([span._replace(is_sparse=False) for span in spans])
        begins = list(accumulate((part.size for part in table.parts), initial=0))
        return [
            span if self._suits_base(span) else span._replace(base_begin=None)
            for span in merge_small(spans, begins)
        ]

    def _suits_base(self, span: Span) -> bool:
        """Return whether the chunks of a span lie where those of the base lie, which is a delta."""
        from blobstore.compression.encoder import parts_of

        if self._base is None or span.base_begin is None:
            return True
        try:
            self._base.check_chain(parts_of([span]))
        except ColdDamaged:
            return False
        return True


def chunks_of(data: memoryview, report: Callable[[int], None]) -> Iterator[memoryview]:
    """Yield bytes chunk by chunk, and report the size of each once it is used."""
    for begin in range(0, len(data), _CHUNK):
        chunk = data[begin : begin + _CHUNK]
        yield chunk
        report(len(chunk))


def _has_header_of(base: BaseBlob, data: memoryview, header: Header) -> bool:
    """Return whether a base in memory has the size and the header of a blob."""
    end = header.data_start
    return (
        base.data is not None
        and base.identity.size == len(data)
        and base.data[:end].tobytes() == data[:end].tobytes()
    )


class _BaseAligner:
    """Finds the bytes of a base that each tensor of a blob is compared with.

    Blocks of GGUF are compared with the quantized tensors of the base. Equal data comes first, under any name, and
    for a stacked tensor also slice by slice. Otherwise the tensor of the same name, type and shape is used; if both
    blobs have a single tensor, the names need not match.
    """

    def __init__(
        self,
        data: memoryview,
        header: Header,
        base: BaseBlob,
        base_header: Header,
        *,
        has_rules: bool,
    ) -> None:
        def read_into(out: memoryview, begin: int) -> None:
            out[:] = data[begin : begin + len(out)]

        self._read_into = read_into
        self._has_rules = has_rules
        self._header = header
        self._base = base
        self._base_header = base_header
        self._pieces = BlobIndex(base_header, base.read_into)

    def align(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans of the blob, the header first, with their offsets in the base."""
        tensors = list(self._align_tensors(spans[1:]))
        header = spans[0]
        # An equal header alone is no reason to depend on a base.
        if any(span.base_begin is not None for span in tensors) and self._has_equal(header.size):
            header = header._replace(base_begin=0)
        return [header, *tensors]

    def _has_equal(self, size: int) -> bool:
        """Return whether the first bytes of the base are equal."""
        if size > self._base.identity.size:
            return False
        mine = bytearray(size)
        self._read_into(memoryview(mine), 0)
        return mine == self._base.read(0, size).data

    def _align_tensors(self, spans: Sequence[Span]) -> Iterator[Span]:
        from blobstore.compression.spans import split_rows

        theirs = self._base_header.tensors
        single = (
            next(iter(theirs.values())) if len(self._header.tensors) == len(theirs) == 1 else None
        )
        tensors = [(name, at) for name, at in self._header.tensors.items() if at.end > at.begin]
        blobs = self._read_into, self._base, self._base_header
        rules = find_rules(self._header, *blobs) if self._has_rules else {}
        for span, (name, entry) in zip(spans, tensors, strict=True):
            if name in rules:
                yield from divided(span, rules[name])
                continue
            other, named = single or theirs.get(name), None
            if other is not None and other.spec[1:] == entry.spec[1:]:
                named = self._base_header.data_start + other.begin
            equal = self._find_equal(whole_of(entry, self._header.data_start), named)
            if equal is not None or named is not None:
                yield span._replace(base_begin=named if equal is None else equal)
                continue
            slices = slices_of(entry, self._header.data_start)
            begins = [self._find_equal(piece) for piece in slices]
            if all(begin is None for begin in begins):
                yield span
                continue
            for part, begin in zip(split_rows(span), begins, strict=True):
                yield part._replace(base_begin=begin)

    def _find_equal(self, piece: Piece, preferred: int | None = None) -> int | None:
        """Return the offset of equal data in the base, ``preferred`` if it is there too."""
        if piece.size < MIN_PIECE:
            return None
        return self._pieces.find(piece, self._read_into, preferred)

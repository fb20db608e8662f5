"""Estimates compressed sizes from samples, and fits low-rank factors where they save space.

They save nothing where few elements differ from the base, which a sample shows in little time.

Fitting takes several passes. The base of a small span is kept in memory for them; that of a large one is
read a few rows at a time. If the base is cold, each pass decodes it again. Fitting needs little memory
otherwise (`delta.low_rank_fit`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.base import BaseBlob
from blobstore.compression.delta.codec import as_elements
from blobstore.compression.delta.low_rank import pack
from blobstore.compression.delta.low_rank_fit import can_fit, fit, is_promising
from blobstore.compression.encoder import encode, size_by_rule
from blobstore.compression.spans import Span, split_rows
from blobstore.compression.table import MAX_CHUNK, MAX_FACTORS
from blobstore.compression.transforms import width_of
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Final

    from blobstore.compression.level import Level

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Array = np.ndarray[Any, Any]

_SLICES: Final = 8
"""Of a span, in the middle of each eighth: the first and the last rows of embeddings are often unlike the others."""
_SLICE: Final = 128 << 10
_MAX_IN_MEMORY: Final = 64 << 20
"""Bytes of a base tensor that are kept in memory at most."""
_MIN_COLUMNS: Final = 32
"""Tensors with a smaller last dimension are matrices of the first dimension by all others."""
_SAMPLED_SPANS: Final = 16
"""Spans of one type and shape, such as experts, that represent all of them."""
_STACK_DIMENSIONS: Final = 3
_SAMPLED_MATRICES: Final = 4
"""Matrices of a stack that are tried first."""
_SPARSE: Final = 1 / 8
"""A span is sparse if at most this part of a sample of its elements differs."""
_TINY: Final = 1 << 10
"""Bytes of spans that count as sparse: codes that do not suit one cost little, a part and a chunk cost time."""
_SPARSE_SLICES: Final = 8
_SPARSE_SLICE: Final = 1 << 9
"""Elements of a slice of that sample."""
_COLD_PER_SLICE: Final = 8 << 20
"""Bytes of a cold base that there are at least for each slice, which decodes a chunk."""
_MIN_GAIN: Final[dict[Level, float]] = {"fast": 0.15, "small": 0.01}
"""The fraction of a span that factors must save, because they slow decoding down."""
_ANY_DIGEST: Final = Digest("0" * 64)


def estimate_size(
    data: memoryview,
    spans: Sequence[Span],
    base: BaseBlob | None,
    level: Level,
) -> int:
    """Estimate the compressed size of a blob from slices of spans of each kind.

    The result is seldom too small: factors are fitted to the slices, where they save less than in the
    complete span, and to a stack of matrices as one, where they may save nothing.

    Args:
        data: the blob.
        spans: its spans, with factors or without.
        base: the base of some spans.
        level: the level of compression.
    """
    begins = accumulate((span.size for span in spans), initial=0)
    kinds: dict[object, list[tuple[int, Span]]] = defaultdict(list)
    total = 0.0
    for begin, span in zip(begins, spans, strict=False):
        kind = span.size, span.dtype, span.shape, span.base_begin is None, span.rule is None
        kinds[kind].append((begin, span))
    for same_kind in kinds.values():
        tried = same_kind[:: -(-len(same_kind) // _SAMPLED_SPANS)]
        size = 0.0
        for begin, span in tried:
            if base is not None and span.rule is not None:
                size += size_by_rule(data[begin : begin + span.size], span, base, level)
            else:
                size += _Sample.of(data, begin, span, base).encoded_size(level)
        total += size * len(same_kind) / len(tried)
    return int(total)


def fit_low_rank(
    data: memoryview,
    spans: Sequence[Span],
    base: BaseBlob,
    level: Level,
    look: Callable[[], object] = lambda: None,
) -> Iterator[Span]:
    """Yield the spans, with factors where those save space; stacks with factors are split by rows.

    Sparse spans are marked, and get no factors. ``look`` is called before each range of the base is used,
    and may raise.
    """
    begins = accumulate((span.size for span in spans), initial=0)
    for span, begin in zip(spans, begins, strict=False):
        if span.base_begin is None or span.rule is not None:
            yield span
            continue
        if span.size <= _TINY:
            yield span._replace(is_sparse=True)
            continue
        mine = data[begin : begin + span.size]
        reader = _Reader(span, base, look)
        if _is_sparse(as_elements(mine, span.dtype or DType.U8), reader):
            yield span._replace(is_sparse=True)
        elif span.dtype is None:
            yield span
        elif not _is_stack(span):
            yield _with_factors(mine, span, reader, level)
        else:
            rows = split_rows(span)
            size = rows[0].size
            matrices = [
                (data[at : at + size], row)
                for at, row in zip(range(begin, begin + span.size, size), rows, strict=True)
            ]

            def improved(mine: memoryview, row: Span) -> Span:
                return _with_factors(mine, row, _Reader(row, base, look), level)

            sample = matrices[:: -(-len(rows) // _SAMPLED_MATRICES)]
            if any(improved(*item).factors for item in sample):
                yield from (improved(*item) for item in matrices)
            else:
                yield span


def _is_sparse(elements: Array, reader: _Reader) -> bool:
    """Return whether few elements of a sample differ from those of the base."""
    count, width = 1, len(elements)
    if width > _SPARSE_SLICES * _SPARSE_SLICE:
        width = _SPARSE_SLICE
        is_cheap = reader.is_in_memory  # each slice of a cold base costs a chunk
        count = min(
            _SPARSE_SLICES if is_cheap else 1 + reader.size // _COLD_PER_SLICE, _SPARSE_SLICES
        )
    step = len(elements) // count
    middle = (step - width) // 2
    mine = elements[: count * step].reshape(count, step)[:, middle : middle + width]
    if reader.is_in_memory:
        theirs = reader(0, count * step).reshape(count, step)[:, middle : middle + width]
    else:
        begins = range(middle, count * step, step)
        theirs = np.stack([reader(begin, begin + width).copy() for begin in begins])
    return int(np.count_nonzero(mine != theirs)) <= _SPARSE * mine.size


def _with_factors(data: memoryview, span: Span, reader: _Reader, level: Level) -> Span:
    """Return a span with factors if those save space."""
    columns = _columns(span)
    if span.dtype is None or not can_fit(span.size // width_of(span.dtype), span.dtype, columns):
        return span
    elements = as_elements(data, span.dtype)
    if level == "fast" and not is_promising(elements, reader, span.dtype, columns):
        return span
    reader.keep(_MAX_IN_MEMORY)
    if level != "fast" and reader.are_equal(elements):  # equal elements are not promising
        return span
    found = fit(elements, reader, span.dtype, columns, level)
    if found is None or found.ratio > 1 - _MIN_GAIN[level]:
        return span
    packed = pack(found.factors)
    return span._replace(factors=packed) if len(packed) < min(MAX_FACTORS, span.size) else span


class _Reader:
    """Reads elements of a span's base."""

    def __init__(
        self, span: Span, base: BaseBlob, look: Callable[[], object] = lambda: None
    ) -> None:
        if span.base_begin is None:
            raise ValueError("the span has no base")
        self._base = base
        self._look = look
        self._begin = span.base_begin
        self._dtype = span.dtype or DType.U8
        self._width = width_of(span.dtype)
        self.size = span.size
        """Bytes of the span."""
        self._elements: Array | None = None
        if base.data is not None:
            there = as_elements(base.data[self._begin : self._begin + self.size], self._dtype)
            self._elements = there if there.flags.aligned else None
        self.keep(MAX_CHUNK)  # reading a few rows of a cold base decodes at least a chunk

    def keep(self, most: int) -> None:
        """Read the elements into memory if they have at most so many bytes."""
        if not self.is_in_memory and self.size <= most:
            memory = np.empty(self.size, np.uint8)
            self._base.read_into(memory.data, self._begin)
            self._elements = as_elements(memory, self._dtype)

    @property
    def is_in_memory(self) -> bool:
        """Whether reading decodes nothing."""
        return self._elements is not None or self._base.data is not None

    def __call__(self, begin: int, end: int) -> Array:
        self._look()
        end = min(end, self.size // self._width)
        if self._elements is not None:
            return self._elements[begin:end]
        first, size = self._begin + begin * self._width, (end - begin) * self._width
        return as_elements(self._base.read(first, size), self._dtype)

    def are_equal(self, elements: Array) -> bool:
        """Return whether these elements equal those of the base."""
        step = _MAX_IN_MEMORY // self._width
        return all(
            np.array_equal(elements[begin : begin + step], self(begin, begin + step))
            for begin in range(0, len(elements), step)
        )


class _Sample(NamedTuple):
    """Slices of a span and of its base, in complete rows if it has rows."""

    span: Span
    data: Bytes
    base: Bytes | None

    @classmethod
    def of(cls, data: memoryview, begin: int, span: Span, base: BaseBlob | None) -> _Sample:
        columns = max(_columns(span), 1)
        width = columns * width_of(span.dtype)
        slices = [(0, span.size)]
        if span.size > 2 * _SLICES * _SLICE:
            grain = width if span.size % width == 0 else 1
            length = max(_SLICE // grain, 1) * grain
            middles = span.size * np.arange(1, 2 * _SLICES, 2) // (2 * _SLICES)
            slices = [
                (at, at + length) for at in ((middles - length // 2) // grain * grain).tolist()
            ]
        taken = np.concatenate(
            [np.frombuffer(data[begin + one : begin + end], np.uint8) for one, end in slices]
        )
        theirs = None
        if base is not None and span.base_begin is not None:
            theirs = np.concatenate(
                [base.read(span.base_begin + one, end - one).copy() for one, end in slices]
            )
        return cls(span, taken, theirs)

    def encoded_size(self, level: Level) -> float:
        """Estimate the encoded size of the span, with the factors that suit the sample."""
        begin = None if self.base is None else 0
        span = Span(len(self.data), self.span.dtype, None, begin, blocks=self.span.blocks)
        base = None
        if self.base is not None:
            base = BaseBlob.hot(self.base.data, _ANY_DIGEST)
            if columns := _columns(self.span):
                rows = len(self.data) // width_of(span.dtype) // columns
                span = span._replace(shape=(rows, columns))
                reader = _Reader(span, base)
                if not _is_sparse(as_elements(self.data, span.dtype or DType.U8), reader):
                    span = _with_factors(self.data.data, span, reader, level)
        encoded = encode(
            [self.data.data], [span], lambda _: None, level=level, digest=_ANY_DIGEST, base=base
        )
        stored = sum(chunk.stored_size for chunk in encoded.table.chunks)
        return (stored + len(span.factors or b"")) * self.span.size / len(self.data)


def _is_stack(span: Span) -> bool:
    """Return whether a span is a stack of matrices, as opposed to convolution kernels."""
    return (
        len(span.shape) == _STACK_DIMENSIONS
        and span.shape[0] > 1
        and span.shape[-1] >= _MIN_COLUMNS
    )


def _columns(span: Span) -> int:
    """Return the number of elements per row, or 0 if the tensor has no rows."""
    if len(span.shape) <= 1:
        return 0
    is_wide = span.shape[-1] >= _MIN_COLUMNS
    return span.shape[-1] if is_wide else math.prod(span.shape[1:])

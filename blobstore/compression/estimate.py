"""What the runs of a blob come to, from samples, and factors for those that get smaller by them.

The base of a run is held in memory if it is small, and read by some rows at a time if not; the factors
of a thread take little beside (`delta_fit`). Where a base is cold that costs decoding it some times.
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
from blobstore.compression.encoder import encode
from blobstore.compression.spans import Span, split
from blobstore.compression.table import MAX_FACTORS
from blobstore.compression.transforms import width_of
from blobstore.compression.tuning import Level
from blobstore.core.digest import Digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Final

    from blobstore.compression.delta.low_rank import Factors

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Array = np.ndarray[Any, Any]

_SLICES: Final = 4
_SLICE: Final = 256 << 10
_HELD: Final = 64 << 20
"""Bytes of a base tensor that are held at most."""
_LEAST_COLUMNS: Final = 32
"""Elements in the last dimension of matrices; of fewer, the first dimension is against all others."""
_TRIED_OF_KIND: Final = 16
"""Runs of one type and shape, such as experts, that tell what all of them come to."""
_OF_STACK: Final = 3
"""Dimensions of a stack of matrices."""
_TRIED_OF_STACK: Final = 4
"""Slices that tell whether any of a stack has factors."""
_LEAST_GAIN: Final = {Level.FAST: 0.15, Level.SMALL: 0.01}
"""The part of a run that factors must save: it takes longer to decode."""
_ANY_DIGEST: Final = Digest("0" * 64)


Known = dict[int, "bytes | None"]
"""Which factors runs have, by where they begin, if that is known already."""


def estimate_size(
    data: memoryview, runs: Sequence[Span], base: BaseBlob | None, level: Level, known: Known
) -> int:
    """Return about how many bytes a blob comes to, from some slices of runs of each kind.

    Factors that a run may get are looked for in the slices, where they save less than in the whole, and
    for a stack of matrices in all together, where they may save nothing: so it is seldom too few.

    Args:
        data: the blob.
        runs: what it is made of, with factors or not.
        base: what some runs are compared with.
        level: what is sought.
        known: gets the factors that are found for whole runs.
    """
    begins = accumulate((run.size for run in runs), initial=0)
    alike: dict[object, list[tuple[int, Span]]] = defaultdict(list)
    for begin, run in zip(begins, runs, strict=False):
        alike[run.size, run.dtype, run.shape, run.base_begin is None].append((begin, run))
    total = 0.0
    for all_of_kind in alike.values():
        tried = all_of_kind[:: -(-len(all_of_kind) // _TRIED_OF_KIND)]
        size = 0.0
        for begin, run in tried:
            sample = _Sample.of(data, begin, run, base)
            share, factors = sample.predicted(level)
            size += share * sample.coded(level)
            if len(sample.data) == run.size and not _is_stack(run):
                known[begin] = factors
        total += size * len(all_of_kind) / len(tried)
    return int(total)


def fit_low_rank(
    data: memoryview, runs: Sequence[Span], base: BaseBlob, level: Level, known: Known
) -> Iterator[Span]:
    """Yield the runs, with factors where those make them smaller; stacks of matrices by slices then."""
    begins = accumulate((run.size for run in runs), initial=0)
    for run, begin in zip(runs, begins, strict=False):
        if begin in known:
            yield run._replace(factors=known[begin])
        else:
            yield from _fitted(data[begin : begin + run.size], run, base, level)


def _fitted(data: memoryview, run: Span, base: BaseBlob, level: Level) -> Sequence[Span]:
    if run.base_begin is None or run.dtype is None:
        return [run]
    slices = split(run) if _is_stack(run) else [run]
    step = -(-len(slices) // _TRIED_OF_STACK)
    size = slices[0].size
    for number in range(0, len(slices), step):
        tried = _with_factors(
            data[number * size : (number + 1) * size], slices[number], base, level
        )
        if tried.factors is not None:
            break
    else:
        return [run]
    if len(slices) == 1:
        return [tried]
    return [
        _with_factors(data[number * size : (number + 1) * size], one, base, level)
        for number, one in enumerate(slices)
    ]


def _with_factors(data: memoryview, run: Span, base: BaseBlob, level: Level) -> Span:
    columns = _columns(run)
    if run.dtype is None or not can_fit(run.size // width_of(run.dtype), run.dtype, columns):
        return run
    reader = _Reader(run, base)
    elements = as_elements(data, run.dtype)
    if level is Level.FAST and not is_promising(elements, reader, run.dtype, columns):
        return run
    if reader.are_equal(elements):
        return run
    factors = fit(elements, reader, run.dtype, columns)
    if factors is None:
        return run
    sample = _Sample.of(data, 0, run, base)
    packed = pack(factors)
    if sample.share(sample.of_rows(factors), len(packed)) > 1 - _LEAST_GAIN[level]:
        return run
    return run._replace(factors=packed) if len(packed) < min(MAX_FACTORS, run.size) else run


class _Reader:
    """The elements of a run's base, held if they are few."""

    def __init__(self, run: Span, base: BaseBlob) -> None:
        if run.base_begin is None or run.dtype is None:
            raise ValueError("a run without a base has no such elements")
        self._base = base
        self._begin = run.base_begin
        self._dtype = run.dtype
        self._width = width_of(run.dtype)
        self._held: Array | None = None
        if run.size <= _HELD:
            held = np.empty(run.size, np.uint8)
            base.read_into(held.data, run.base_begin)
            self._held = as_elements(held, run.dtype)

    def __call__(self, begin: int, end: int) -> Array:
        if self._held is not None:
            return self._held[begin:end]
        first, size = self._begin + begin * self._width, (end - begin) * self._width
        return as_elements(self._base.read(first, size), self._dtype)

    def are_equal(self, elements: Array) -> bool:
        """Tell whether these are the base's, with which nothing need be predicted."""
        step = _HELD // self._width
        return all(
            np.array_equal(elements[begin : begin + step], self(begin, begin + step))
            for begin in range(0, len(elements), step)
        )


class _Sample(NamedTuple):
    """Some slices of a run, and of what it is compared with, by whole rows if it has such."""

    run: Span
    data: Bytes
    base: Bytes | None
    rows: Array

    @classmethod
    def of(cls, data: memoryview, begin: int, run: Span, base: BaseBlob | None) -> _Sample:
        columns = max(_columns(run), 1)
        width = columns * width_of(run.dtype)
        slices = list(_slices(run.size, width if run.size % width == 0 else 1))
        taken = np.concatenate(
            [np.frombuffer(data[begin + one : begin + end], np.uint8) for one, end in slices]
        )
        rows = [np.arange(one // width, end // width) for one, end in slices]
        theirs = None
        if base is not None and run.base_begin is not None:
            theirs = np.concatenate(
                [base.read(run.base_begin + one, end - one).copy() for one, end in slices]
            )
        return cls(run, taken, theirs, np.concatenate(rows))

    def of_rows(self, factors: Factors) -> bytes:
        """Return what factors of the run are for the rows of the sample."""
        return pack(factors._replace(left=np.ascontiguousarray(factors.left[:, self.rows])))

    def coded(self, level: Level, factors: bytes | None = None) -> float:
        """Return about what the run comes to, with factors of the sample's rows, but without these."""
        begin = None if self.base is None else 0
        run = Span(len(self.data), self.run.dtype, None, begin, factors)
        base = None if self.base is None else BaseBlob.hot(self.base.data, _ANY_DIGEST)
        table = encode(
            [self.data.data], [run], lambda _: None, level=level, digest=_ANY_DIGEST, base=base
        )
        stored = sum(plane.size for chunk in table.chunks for plane in chunk.planes)
        return stored * self.run.size / len(self.data)

    def share(self, factors: bytes, size: float) -> float:
        """Return to what part of its bytes factors bring a run that takes ``size`` bytes for them.

        The level "fast" is as good a judge of that as any.
        """
        return (self.coded(Level.FAST, factors) + size) / max(self.coded(Level.FAST), 1)

    def predicted(self, level: Level) -> tuple[float, bytes | None]:
        """Return to what part of its bytes such factors bring the run as the sample has, and these."""
        run, columns = self.run, _columns(self.run)
        if self.base is None or run.dtype is None:
            return 1, None
        mine, theirs = as_elements(self.data, run.dtype), as_elements(self.base, run.dtype)
        if not can_fit(len(mine), run.dtype, columns) or np.array_equal(mine, theirs):
            return 1, None
        if level is Level.FAST and not is_promising(mine, theirs, run.dtype, columns):
            return 1, None
        factors = fit(mine, theirs, run.dtype, columns)
        if factors is None:
            return 1, None
        packed = pack(factors)
        sides = len(self.rows) + columns, run.size // width_of(run.dtype) // columns + columns
        share = self.share(packed, len(packed) * sides[1] / sides[0])
        return (share, packed) if share <= 1 - _LEAST_GAIN[level] else (1, None)


def _is_stack(run: Span) -> bool:
    """Tell whether a run is matrices one after the other, and not one of small windows."""
    return len(run.shape) == _OF_STACK and run.shape[0] > 1 and run.shape[-1] >= _LEAST_COLUMNS


def _columns(run: Span) -> int:
    """Return the elements of what is a row of a tensor, if it has rows."""
    if len(run.shape) <= 1:
        return 0
    is_wide = run.shape[-1] >= _LEAST_COLUMNS
    return run.shape[-1] if is_wide else math.prod(run.shape[1:])


def _slices(size: int, grain: int) -> Iterator[tuple[int, int]]:
    """Yield the slices of a run that are tried, of whole rows; a short one is tried whole."""
    if size <= 2 * _SLICES * _SLICE:
        yield 0, size
        return
    length = max(_SLICE // grain, 1) * grain
    for number in range(_SLICES):
        begin = (size - length) * number // (_SLICES - 1) // grain * grain
        yield begin, begin + length

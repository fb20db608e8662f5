"""Which layout and which coders a part gets, by trial on a sample of it."""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.chunks import Way
from blobstore.compression.delta import codec as delta
from blobstore.compression.entropy import Coder, encode_plane
from blobstore.compression.transforms import difference, suitable, width_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from blobstore.compression.transforms import Transform
    from blobstore.core.tensor import DType

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Level(enum.Enum):
    """What is sought: planes that are fast to make and to decode, or the smallest."""

    FAST = "fast"
    SMALL = "small"


class _Effort(NamedTuple):
    ordinary: tuple[Coder, ...]
    """Coders for planes that are more than noise, each tried if the one before is near the best."""
    delta: delta.Effort
    sample: int
    """Bytes that are tried."""
    gain: int
    """A slower coder must save one byte in so many."""
    layout_gain: int
    """A slower layout must save one byte in so many, or in as many as the faster one is worth."""


_EFFORTS: Final = {
    Level.FAST: _Effort((Coder.ZSTD,), delta.Effort.FAST, 1 << 15, 1 << 7, 0),
    Level.SMALL: _Effort(
        (Coder.ZSTD, Coder.ZSTD_SMALL), delta.Effort.SMALL, 1 << 16, 1 << 6, 1 << 10
    ),
}
_NEAR: Final = 1 << 5
"""A coder may be behind by one byte in so many to be near."""
_NOISE: Final = 1 << 4
"""What a code makes smaller by less than one byte in so many is noise."""
_FEW: Final = 1 << 2
"""What a code makes smaller by so much may have two values only."""
_SLICES: Final = 4
_MORE_WITH_BASE: Final = 8
"""Differences come in many small planes; only a larger sample tells what those cost."""


class Choice:
    """The ways for a part, found when the first thread asks, from a copy of some of its elements."""

    def __init__(self, chunk: Bytes, base: Bytes | None, dtype: DType | None, level: Level) -> None:
        self._effort = _EFFORTS[level]
        self._dtype = dtype
        width = width_of(dtype)
        count = self._effort.sample * (1 if base is None else _MORE_WITH_BASE)
        self._sample = _sample(chunk, count, width)
        self._base = None if base is None else _sample(base, count, width)
        self._lock = threading.Lock()
        self._ways: list[Way] | None = None

    def ways(self) -> list[Way]:
        """Return the ways to make chunks, the best first; one that does not suit a chunk falls out."""
        with self._lock:
            if self._ways is None:
                self._ways = self._found()
            return self._ways

    def _found(self) -> list[Way]:
        kinds = list(suitable(self._dtype))
        if self._base is not None:
            kinds.append((difference(self._dtype, self._effort.delta),))
        tried = [found for kind in kinds if (found := self._first(kind)) is not None]
        least = min(size for size, _ in tried)
        first = next(way for size, way in tried if self._is_good(size, least, way.layout))
        rest = sorted(
            (size, number) for number, (size, way) in enumerate(tried) if way is not first
        )
        return [first, *(tried[number][1] for _, number in rest)]

    def _is_good(self, size: int, least: int, layout: Transform) -> bool:
        return size <= least + least // max(layout.worth, self._effort.layout_gain)

    def _first(self, kind: Sequence[Transform]) -> tuple[int, Way] | None:
        return next((found for layout in kind if (found := self._tried(layout)) is not None), None)

    def _tried(self, layout: Transform) -> tuple[int, Way] | None:
        """Return what a layout makes of the sample, and how."""
        planes = layout.split(self._sample, self._base)
        if planes is None:
            return None
        found = [self._coded(plane) for plane in planes]
        return sum(size for _, size in found), Way(layout, [coders for coders, _ in found])

    def _coded(self, plane: Bytes) -> tuple[tuple[Coder, ...], int]:
        """Return the coders that make a plane of the sample smallest, and what it becomes."""
        literal = encode_plane(plane.data, (Coder.HUFFMAN,))
        coders = (Coder.HUFFMAN,) if literal.method else ()
        least = literal.size
        if least <= len(plane) // _FEW:
            bits = encode_plane(plane.data, (Coder.BITS,))
            if bits.method and bits.size < least + least // _NEAR:
                return (Coder.BITS, Coder.HUFFMAN), bits.size
        if self._dtype is not None and least > len(plane) - len(plane) // _NOISE:
            return coders, least  # no order is to be found in what has hardly any frequencies
        for coder in self._effort.ordinary:
            size = encode_plane(plane.data, (coder,)).size
            if size > literal.size + literal.size // _NEAR:
                break
            if size < least - least // self._effort.gain:
                coders, least = (coder,), size
        return coders, least


def _sample(chunk: Bytes, size: int, width: int) -> Bytes:
    """Return a copy of slices of a chunk that have ``size`` bytes together, or of all of it."""
    if len(chunk) <= size:
        return chunk.copy()
    length = size // _SLICES
    step = (len(chunk) - length) // (_SLICES - 1) // width * width
    return np.concatenate(
        [chunk[start : start + length] for start in range(0, _SLICES * step, step)]
    )

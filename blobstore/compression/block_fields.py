"""Splits blocks of GGUF into planes by their fields, which differ in what they hold: scales, codes, signs.

The two bytes of a half are separate fields, because only the upper one has a distribution worth a code. Where a
type keeps the low and the high bits of its codes apart, these are joined again: neither says much alone.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.scratch import scratch
from blobstore.gguf.types import TYPES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from blobstore.gguf.types import GgufType

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_HALF: Final = (1, 1)
_SIZES: Final[dict[str, tuple[int, ...]]] = {
    "Q4_0": (*_HALF, 16),
    "Q4_1": (*_HALF, *_HALF, 16),
    "Q5_0": (*_HALF, 4, 16),
    "Q5_1": (*_HALF, *_HALF, 4, 16),
    "Q8_0": (*_HALF, 32),
    "Q2_K": (16, 64, *_HALF, *_HALF),
    "Q3_K": (32, 64, 8, 4, *_HALF),
    "Q4_K": (*_HALF, *_HALF, 4, 4, 4, 128),
    "Q5_K": (*_HALF, *_HALF, 4, 4, 4, 32, 128),
    "Q6_K": (128, 64, 16, *_HALF),
    "IQ2_S": (*_HALF, 32, 32, 8, 8),
    "IQ3_S": (*_HALF, 64, 8, 32, 4),
    "IQ4_NL": (*_HALF, 16),
    "IQ4_XS": (*_HALF, 1, 1, 4, 128),
    "MXFP4": (1, 16),
    "NVFP4": (4, 32),
}
"""Bytes of the fields of a block, in their order."""


def _bits(packed: Bytes, width: int, count: int) -> Bytes:
    """Return fields of ``width`` bits: ``[..., k]`` becomes ``[..., count, k]``, the lowest first."""
    shifts = np.arange(0, count * width, width, dtype=np.uint8)[:, None]
    found: Bytes = packed[..., None, :] >> shifts
    found &= np.uint8((1 << width) - 1)
    return found


def _packed(fields: Bytes, width: int) -> Bytes:
    """Return bytes of fields; the inverse of :func:`_bits`."""
    shifts = np.arange(0, fields.shape[-2] * width, width, dtype=np.uint8)[:, None]
    found: Bytes = np.bitwise_or.reduce(fields << shifts, axis=-2)
    return found


class _Merge(NamedTuple):
    """How the codes of a type lie in two fields."""

    low: int
    """The number of the field with the low bits."""
    high: int
    low_bits: int
    low_shape: tuple[int, ...]
    """Of the bytes of a block: fields of bits go before the last dimension."""
    high_bits: int
    high_shape: tuple[int, ...]
    are_pairs: bool = False
    """Whether a byte has two codes."""

    def join(self, low: Bytes, high: Bytes) -> Bytes:
        """Return the codes of blocks, ``[n, bytes]``."""
        count = len(low)
        codes = _bits(low.reshape(count, *self.low_shape), self.low_bits, 8 // self.low_bits)
        codes = codes.reshape(count, -1)
        upper = _bits(high.reshape(count, *self.high_shape), self.high_bits, 8 // self.high_bits)
        codes |= upper.reshape(count, -1) << np.uint8(self.low_bits)
        if self.are_pairs:
            half = codes.shape[1] // 2
            codes = codes[:, :half] | codes[:, half:] << np.uint8(4)
        return codes

    def split(self, codes: Bytes) -> tuple[Bytes, Bytes]:
        """Return the low and the high bits of codes, ``[n, bytes]`` each."""
        count = len(codes)
        if self.are_pairs:
            codes = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=1)
        fields = (*self.low_shape[:-1], 8 // self.low_bits, self.low_shape[-1])
        mask = np.uint8((1 << self.low_bits) - 1)
        low = _packed((codes & mask).reshape(count, *fields), self.low_bits)
        fields = (*self.high_shape[:-1], 8 // self.high_bits, self.high_shape[-1])
        upper = codes >> np.uint8(self.low_bits)
        high = _packed(upper.reshape(count, *fields), self.high_bits)
        return low.reshape(count, -1), high.reshape(count, -1)


_MERGED: Final = {
    "Q3_K": _Merge(1, 0, 2, (2, 32), 1, (32,), are_pairs=True),
    "Q5_K": _Merge(8, 7, 4, (4, 32), 1, (32,)),
    "Q6_K": _Merge(0, 1, 4, (2, 64), 2, (2, 32)),
}


def ranges_of(kind: GgufType) -> list[tuple[int, int]]:
    """Return where each field of a block begins and ends."""
    return list(pairwise(accumulate(_SIZES[kind.name], initial=0)))


class BlockFields:
    """The planes of one type of blocks."""

    def __init__(self, kind: GgufType) -> None:
        self.kind = kind
        self._ranges = ranges_of(kind)
        self._merge = _MERGED.get(kind.name)
        self._single = [
            number
            for number in range(len(self._ranges))
            if self._merge is None or number not in self._merge[:2]
        ]
        self._codes = 0
        """Bytes of the codes of a block that are joined."""
        if self._merge is not None:
            self._codes = kind.weights // (2 if self._merge.are_pairs else 1)

    def sizes(self, size: int) -> tuple[int, ...]:
        """Return the size of each plane of ``size`` bytes; none unless these are whole blocks."""
        count, rest = divmod(size, self.kind.size)
        if rest:
            return ()
        singles = (
            count * (end - begin) for begin, end in (self._ranges[at] for at in self._single)
        )
        return (*singles, *([count * self._codes] if self._codes else []))

    def encode(self, chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes] | None:
        """Return the planes of a chunk, valid until this thread's next call; None unless it is whole blocks."""
        if len(chunk) % self.kind.size:
            return None
        blocks = chunk.reshape(-1, self.kind.size)
        planes = []
        for number in self._single:
            begin, end = self._ranges[number]
            plane = scratch(f"field {number}", len(blocks) * (end - begin))
            np.copyto(plane.reshape(len(blocks), -1), blocks[:, begin:end])
            planes.append(plane)
        if self._merge is not None:
            low, high = (blocks[:, slice(*self._ranges[at])] for at in self._merge[:2])
            planes.append(self._merge.join(low, high).reshape(-1))
        return planes

    def decode(self, planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
        """Fill a chunk from its planes."""
        blocks = out.reshape(-1, self.kind.size)
        for number, plane in zip(self._single, planes, strict=False):
            begin, end = self._ranges[number]
            blocks[:, begin:end] = plane.reshape(len(blocks), -1)
        if self._merge is not None:
            parts = self._merge.split(planes[-1].reshape(len(blocks), -1))
            for number, part in zip(self._merge[:2], parts, strict=True):
                blocks[:, slice(*self._ranges[number])] = part


FIELDS: Final = {number: BlockFields(kind) for number, kind in TYPES.items() if kind.name in _SIZES}
"""By the numbers of types in GGUF files."""

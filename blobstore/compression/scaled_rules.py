"""Rules for weights whose scales are tensors of their own, as those of MLX and of 8-bit floats are.

MLX computes codes, scales and biases of a group from its weights alone, so a rule predicts each of the three
tensors. Scales of 8-bit floats may come from anywhere, but are few: the file has a copy of them, and the codes
follow from these and the weights. Rules give the same bits on every machine for all bytes, and also where a
thread takes subnormal numbers for 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.compression.quant_rule import (
    NUMPY_TYPES,
    RECORD,
    SOURCES,
    QuantRule,
    Rule,
    rounded,
    to_float32,
)
from blobstore.compression.scratch import scratch
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged
from blobstore.gguf.types import GgufType

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Final, Self

    from blobstore.compression.quant_rule import Read

    Array = np.ndarray[Any, Any]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MAX_SCALES: Final = 1 << 20
"""Scales of a part at most, because all are kept in memory."""
CODES, SCALES, BIASES = range(3)
"""The tensors of a weight of MLX."""
AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS: Final = (32, 64, 128)
_AFFINE, _FLOAT8 = 3, 4
"""Their versions among rules."""
_MAX_KNOWN: Final = 32
"""Chunks whose scales and biases are kept."""
_PIECE: Final = 1 << 16
"""Weights that are computed at once, so that intermediate values stay in the cache."""
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_USUAL: Final = (np.uint32((127 - 96) << 23), np.uint32((127 + 126) << 23))
"""The bits of 2**-96 and 2**126: groups whose largest magnitude is not between them count as zeros."""
_LEAST_SCALE: Final = np.uint32((127 - 100) << 23)
"""The bits of 2**-100. With a smaller scale, flushed subnormal weights would have other codes than 0."""
_INFINITY: Final = np.uint32(0xFF << 23)
_E4M3_MAX: Final = np.float32(448)


@dataclass(frozen=True)
class AffineRule(Rule):
    """One of the tensors that a weight of MLX is: codes, scales or biases of groups."""

    dtype: DType
    cast: DType
    """The type of scales and biases, which the weights are rounded to first."""
    tensor: int
    """``CODES``, ``SCALES`` or ``BIASES``."""
    bits: int
    group_size: int
    begin: int = 0
    """Where the weights begin in the base; it is not part of the rule."""
    known: dict[tuple[object, ...], tuple[Bytes, Bytes]] | None = field(
        default=None, compare=False, repr=False
    )
    """Scales and biases by what they follow from, which rules of one blob share."""

    @property
    def kind(self) -> GgufType:
        """A group."""
        size = self.group_size * self.bits if self.tensor == CODES else self.cast.bits
        return GgufType(f"int{self.bits}", self.group_size, size // 8)

    @property
    def number(self) -> int:
        """Which of the tensors it is."""
        return self.tensor

    @property
    def _fields(self) -> tuple[int, int, int]:
        return _AFFINE, self.group_size, self.bits

    @classmethod
    def of(cls, fields: tuple[int, ...], dtype: DType, cast: DType) -> Self | None:
        """Return the rule with the types and the other fields of a record; None if no rule has them."""
        number, _, columns, head = fields
        is_known = number <= BIASES and head in AFFINE_BITS and columns in AFFINE_GROUPS
        return cls(dtype, cast, number, head, columns) if is_known else None

    def predict(self, read: Read, offset: int, size: int) -> Bytes:
        """Return ``size`` bytes from ``offset`` on, both multiples of those of a group.

        Takes ``read`` as :meth:`QuantRule.predict`. The result is valid until this thread's next call.
        """
        from blobstore.quantization.quantize_numpy import affine, affine_scales, pack  # few blobs

        begin, length = self.source_size(offset), self.source_size(size)
        known = {} if self.known is None else self.known
        place = self.begin + begin, length, self.dtype, self.cast, *self._fields
        pair = known.get(place)
        if self.tensor != CODES and pair is not None:
            return pair[self.tensor - SCALES]
        groups = read(begin, length).view(NUMPY_TYPES[self.dtype]).reshape(-1, self.group_size)
        out = scratch("quantized", size)
        rows = out.reshape(len(groups), -1)
        step = _PIECE // self.group_size
        factors = np.empty((2, len(groups)), NUMPY_TYPES[self.cast])
        with np.errstate(all="ignore"):
            for start in range(0, len(groups), step):
                values = to_float32(groups[start : start + step])
                if self.cast not in (DType.F32, self.dtype):
                    values = to_float32(rounded(values, self.cast))
                peaks = (values.view(np.uint32) & _MAGNITUDE).max(1)
                values[(peaks < _USUAL[0]) | (peaks >= _USUAL[1])] = 0
                if self.tensor == CODES:
                    codes, *found = affine(values, self.bits)
                    rows[start : start + step] = pack(codes, self.bits).view(np.uint8)
                else:
                    found = [*affine_scales(values, self.bits)]
                factors[:, start : start + step] = [rounded(item, self.cast) for item in found]
        if len(known) >= _MAX_KNOWN:
            known.clear()  # other threads may be looking there
        known[place] = pair = factors[0].view(np.uint8), factors[1].view(np.uint8)
        return out if self.tensor == CODES else pair[self.tensor - SCALES]


@dataclass(frozen=True)
class Float8Rule(Rule):
    """Codes of E4M3: those nearest to weights divided by the scales of their blocks."""

    dtype: DType
    columns: int
    """Weights of a row."""
    block: tuple[int, int]
    """Rows and columns that share a scale; 0 for all."""
    cast: DType = DType.F32
    """The type that quotients are rounded to before: F32, F16 or BF16."""
    scales: Array | None = field(default=None, compare=False, repr=False)
    """A row for each row of blocks, once they are read."""

    @property
    def kind(self) -> GgufType:
        """A weight, whose code is a byte."""
        return GgufType("E4M3", 1, 1)

    def is_possible(self, size: int, chunk_size: int = 0) -> bool:
        """Return whether a part can have ``size`` bytes, in whole rows, and chunks of ``chunk_size``."""
        if not self.columns or size % self.columns or not super().is_possible(size, chunk_size):
            return False
        rows, columns = self._grid(size)
        return rows * columns <= MAX_SCALES

    def scales_size(self, size: int) -> int:
        """Return the bytes of the float32 scales of a part of ``size`` bytes."""
        rows, columns = self._grid(size)
        return rows * columns * 4

    def _grid(self, size: int) -> tuple[int, int]:
        height, width = self.block
        rows = size // self.columns
        return -(-rows // (height or rows)), -(-self.columns // (width or self.columns))

    def with_scales(self, stored: bytes | memoryview, size: int) -> Self:
        """Return the rule with the stored scales of a part of ``size`` bytes."""
        scales = np.frombuffer(stored, "<f4").reshape(self._grid(size)).copy()
        bits = scales.view(np.uint32)
        is_tiny = bits & _MAGNITUDE < _LEAST_SCALE
        bits[is_tiny] = bits[is_tiny] & ~_MAGNITUDE | _INFINITY
        return replace(self, scales=scales)

    @property
    def _fields(self) -> tuple[int, int, int]:
        height, width = self.block
        return _FLOAT8, self.columns, height | width << 16

    @classmethod
    def of(cls, fields: tuple[int, ...], dtype: DType, cast: DType) -> Self | None:
        """Return the rule with these fields, without scales; None if no rule has them."""
        number, _, columns, head = fields
        return None if number else cls(dtype, columns, (head & 0xFFFF, head >> 16), cast)

    def predict(self, read: Read, offset: int, size: int) -> Bytes:
        """Return ``size`` codes from ``offset`` on.

        Takes ``read`` as :meth:`QuantRule.predict`. The result is valid until this thread's next call.
        """
        weights = read(self.source_size(offset), self.source_size(size)).view(
            NUMPY_TYPES[self.dtype]
        )
        out = scratch("quantized", size)
        done = 0
        with np.errstate(all="ignore"):
            for factors in self._factors(offset, offset + size):
                count = factors.size
                values = to_float32(weights[done : done + count])
                values /= factors.reshape(-1)
                out[done : done + count] = self._codes(values)
                done += count
        return out

    def _factors(self, begin: int, end: int) -> Iterator[Array]:
        """Yield the scales of the elements of a range: those of some rows, or of a part of a row."""
        height, width = self.block
        if self.scales is None:
            raise ColdDamaged("codes of 8-bit floats cannot be computed without their scales")
        while begin < end:
            row, column = divmod(begin, self.columns)
            wide = min(self.columns - column, end - begin)
            count = 1
            if wide == self.columns:
                count = min((end - begin) // wide, max(_PIECE // wide, 1))
            scales = self.scales[np.arange(row, row + count) // height if height else [0] * count]
            places = np.arange(column, column + wide) // width if width else np.zeros(wide, np.intp)
            yield scales.take(places, axis=1)
            begin += count * wide

    def _codes(self, values: Array) -> Array:
        """Return the codes of quotients, which are overwritten; NaN counts as the least one."""
        from blobstore.quantization.quantize_numpy import codes_of_halves, upper_halves  # few blobs

        np.fmax(values, -_E4M3_MAX, out=values)
        np.fmin(values, _E4M3_MAX, out=values)
        if self.cast is DType.BF16:
            upper = rounded(values, self.cast)
        else:
            if self.cast is DType.F16:
                values = rounded(values, self.cast).astype(np.float32)
            upper = upper_halves(values)
        found: Array = codes_of_halves(is_e4m3=True).take(upper)
        return found


_FAMILIES: Final[dict[int, type[Rule]]] = {
    1: QuantRule,
    2: QuantRule,
    _AFFINE: AffineRule,
    _FLOAT8: Float8Rule,
}
"""The rules of each version."""


def rule_of(record: bytes | memoryview) -> Rule:
    """Return the rule that bytes of a table hold, without scales.

    Raises:
        ColdDamaged: there is no such rule.
    """
    number, version, source, cast, columns, head = RECORD.unpack(record)
    family, dtype, rounded_to = _FAMILIES.get(version), SOURCES.get(source), SOURCES.get(cast)
    found = None
    # Only rules of blocks take weights in blocks.
    has_types = family is QuantRule or DType.U8 not in {dtype, rounded_to}
    if family is not None and dtype is not None and rounded_to is not None and has_types:
        found = family.of((number, version, columns, head), dtype, rounded_to)
    if found is None:
        raise ColdDamaged(
            f"a rule of version {version} is unknown: {bytes(record).hex()}; a newer program may know it"
        )
    return found

"""Quantizes to the types of GGUF whose blocks follow from their weights alone, as ggml's reference code does.

These are the ``quantize_row_*_ref`` functions of ``ggml-quants.c``: no importance matrix and no search. A rule
takes weights with the blocks as columns, float32 ``[weights of a block, n]``, because numpy is fastest there,
and fills blocks, uint8 ``[n, bytes of a block]``. Operations are in the order of the reference code, because
each of them rounds, and give the same bits on every machine:

- Where several elements are equally large, or are zeros of both signs, the first one counts.
- A block is quantized as if it were zeros if its largest magnitude is not 0 and not in ``_RANGE``, or is
  NaN. Beyond this range scales or their inverses overflow, and converting NaN to integers has no defined result.
- Where a thread flushes subnormal numbers to 0, they equal zeros. Only integers tell them and their signs apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from blobstore.core.escape import quote
from blobstore.errors import UnsupportedDType, UsageError
from blobstore.gguf.types import NUMBERS, TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[Any, Any]
    Rule = Callable[[Array, Array, Array, Array], None]
    """Takes weights, the least and the largest one of each block, and the blocks to fill."""

_RANGE: Final = (np.float32(2.0**-96), np.float32(2.0**126))
_LEAST_NORMAL: Final = np.float32(2.0**-126)
_MINUS_ZERO: Final = np.uint32(1 << 31)
"""The bits of -0. Those of negative numbers are above."""
_BELOW_HALF: Final = np.float32(0.49999997)
"""The float32 below a half. Adding it and truncating rounds halves away from zero, as C's roundf does; adding
a half would also round up the float32 below a half."""
_PIECE: Final = 1 << 16
"""Weights that are computed at once, so that intermediate values stay in the cache."""
_E2M1_LIMITS: Final = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)
"""The largest magnitudes that become 0, 1, 2, 3, 4, 6 and 8; larger ones become 12."""
_E8M0_BIAS: Final = 127
_E2M1_EXPONENT: Final = 2
"""The exponent of the largest value."""


def quantize(type_name: str, weights: Array, out: Array | None = None) -> Array:
    """Return blocks of weights.

    Args:
        type_name: one of :data:`QUANTIZED`.
        weights: contiguous float32 or float16, or uint16 with the bits of bfloat16, of the shape ``(...,
            weights of a row)``.
        out: contiguous uint8 of shape ``(..., bytes of a row)``, which is filled and returned.

    Returns:
        uint8 of shape ``(..., bytes of a row)``.

    Raises:
        UnsupportedDType: the type is not quantized.
        UsageError: rows are not whole blocks, or an array has another type or shape.
    """
    rule = _RULES.get(type_name)
    if rule is None:
        raise UnsupportedDType(
            f"weights are not quantized to type {quote(type_name)}; expected one of "
            f"{', '.join(sorted(QUANTIZED))}"
        )
    kind = TYPES[NUMBERS[type_name]]
    is_float = weights.dtype in (np.float32, np.float16, np.uint16) and weights.flags.c_contiguous
    if not is_float or not weights.ndim or weights.shape[-1] % kind.weights:
        raise UsageError(
            f"weights of {type_name} are {weights.dtype} {list(weights.shape)}, expected contiguous float32, "
            f"float16 or uint16 and rows of a multiple of {kind.weights}"
        )
    shape = (*weights.shape[:-1], weights.shape[-1] // kind.weights * kind.size)
    if out is None:
        out = np.empty(shape, np.uint8)
    elif out.dtype != np.uint8 or out.shape != shape or not out.flags.c_contiguous:
        raise UsageError(
            f"out is {out.dtype} {list(out.shape)}, expected contiguous uint8 {list(shape)}"
        )
    rows = weights.reshape(-1, kind.weights)
    blocks = out.reshape(len(rows), kind.size)
    step = _PIECE // kind.weights
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), step):
            _quantize_piece(rule, rows[start : start + step], blocks[start : start + step])
    return out


def _quantize_piece(rule: Rule, rows: Array, blocks: Array) -> None:
    columns = np.empty(rows.shape[::-1], np.float32)
    if rows.dtype == np.uint16:
        bits = columns.view(np.uint32)
        np.copyto(bits, rows.T)
        bits <<= 16
    else:
        np.copyto(columns, rows.T)
    low, high = columns.min(0), columns.max(0)
    peak = np.maximum(high, -low)
    is_usable = (peak >= _RANGE[0]) & (peak < _RANGE[1])
    if not is_usable.all():
        is_usable |= np.bitwise_or.reduce(columns.view(np.uint32)) << 1 == 0
        for values in (columns.T, low, high):
            values[~is_usable] = 0
    rule(columns, low, high, blocks)


def _first(columns: Array, is_sought: Array) -> Array:
    """Return the first of the sought elements of each column."""
    found: Array = columns[is_sought.argmax(0), np.arange(columns.shape[1])]
    return found


def _peak(low: Array, high: Array) -> Array:
    """Return the largest magnitude of each block."""
    return np.abs(np.maximum(high, -low))


def _signed_peak(columns: Array, low: Array, high: Array) -> Array:
    """Return the element of each block with the largest magnitude, and 0 rather than -0."""
    found = np.where(-low > high, low, high) + np.float32(0)
    ties = np.flatnonzero((-low == high) & (high > 0))
    if len(ties):
        tied = columns[:, ties]
        found[ties] = _first(tied, np.abs(tied) == high[ties])
    return found


def _least(columns: Array, low: Array) -> Array:
    """Return the least element of each block, the first of zeros; for a subnormal one, the zero of its sign."""
    small = np.flatnonzero(np.abs(low) < _LEAST_NORMAL)
    if len(small):
        bits = columns[:, small].view(np.uint32)
        first = _first(bits, bits << 1 == 0)
        is_negative = (bits > _MINUS_ZERO).any(0) | (first == _MINUS_ZERO)
        low[small] = np.where(is_negative, np.float32(-0.0), np.float32(0))
    return low


def _extent(low: Array, high: Array) -> Array:
    """Return the largest less the least element of each block, and 0 rather than -0."""
    return high - low + np.float32(0)


def _inverse(scales: Array) -> Array:
    return np.where(scales == 0, np.float32(0), 1 / scales)


def _halves(scales: Array) -> Array:
    """Return scales as the bytes of float16, ``[n, 2]``."""
    return scales.astype("<f2").view(np.uint8).reshape(-1, 2)


def _nibbles(codes: Array) -> Array:
    """Return the codes of a block of 32 as 16 bytes, ``[n, 16]``."""
    packed = codes[16:] << 4
    packed |= codes[:16] & 15
    return packed.T


def _fifth_bits(codes: Array) -> Array:
    """Return the highest bits of codes of 5 bits as 4 bytes, ``[n, 4]``."""
    return np.packbits(codes >> 4, axis=0, bitorder="little").T


def _rounded(columns: Array, inverse: Array) -> Array:
    """Return the integers nearest to scaled weights, halves away from zero."""
    columns *= inverse
    columns += np.copysign(_BELOW_HALF, columns)
    return columns.astype(np.int8)


def _signed_codes(columns: Array, scales: Array, most: int) -> Array:
    """Return codes around the middle of 0 to ``most``."""
    columns *= _inverse(scales)
    columns += np.float32((most + 1) // 2 + 0.5)
    np.minimum(columns, most, out=columns)
    return columns.astype(np.uint8)


def _offset_codes(columns: Array, low: Array, scales: Array, most: int) -> Array:
    """Return codes from 0, the least weight, to ``most``."""
    columns -= low
    columns *= _inverse(scales)
    columns += np.float32(0.5)
    np.minimum(columns, most, out=columns)
    return columns.astype(np.uint8)


def _q4_0(columns: Array, low: Array, high: Array, out: Array) -> None:
    scales = _signed_peak(columns, low, high) / np.float32(-8)
    out[:, :2] = _halves(scales)
    out[:, 2:] = _nibbles(_signed_codes(columns, scales, 15))


def _q4_1(columns: Array, low: Array, high: Array, out: Array) -> None:
    low = _least(columns, low)
    scales = _extent(low, high) / np.float32(15)
    out[:, :2], out[:, 2:4] = _halves(scales), _halves(low)
    out[:, 4:] = _nibbles(_offset_codes(columns, low, scales, 15))


def _q5_0(columns: Array, low: Array, high: Array, out: Array) -> None:
    scales = _signed_peak(columns, low, high) / np.float32(-16)
    codes = _signed_codes(columns, scales, 31)
    out[:, :2], out[:, 2:6], out[:, 6:] = _halves(scales), _fifth_bits(codes), _nibbles(codes)


def _q5_1(columns: Array, low: Array, high: Array, out: Array) -> None:
    low = _least(columns, low)
    scales = _extent(low, high) / np.float32(31)
    codes = _offset_codes(columns, low, scales, 31)
    out[:, :2], out[:, 2:4] = _halves(scales), _halves(low)
    out[:, 4:8], out[:, 8:] = _fifth_bits(codes), _nibbles(codes)


def _q8_0(columns: Array, low: Array, high: Array, out: Array) -> None:
    scales = _peak(low, high) / np.float32(127)
    out[:, :2] = _halves(scales)
    out[:, 2:] = _rounded(columns, _inverse(scales)).view(np.uint8).T


def _mxfp4(columns: Array, low: Array, high: Array, out: Array) -> None:
    peak = _peak(low, high)
    # The reference takes the logarithm in float32, where some numbers below a power of two reach its own.
    powers = np.floor(np.log2(peak, dtype=np.float64).astype(np.float32))
    powers = np.where(peak > 0, powers, -_E8M0_BIAS).astype(np.int32)
    exponents = np.maximum(powers + (_E8M0_BIAS - _E2M1_EXPONENT), 0)
    columns *= np.ldexp(np.float32(1), np.where(peak > 0, 128 - exponents, 0))
    out[:, 0] = exponents
    out[:, 1:] = _nibbles(e2m1_codes(columns))


def e2m1_codes(values: Array) -> Array:
    """Return the codes of the nearest values of E2M1, twice as large; NaN counts as 0."""
    magnitudes = np.abs(values)
    codes = np.zeros(values.shape, np.uint8)
    for limit in _E2M1_LIMITS:
        codes += magnitudes > limit
    codes |= ((values < 0) & (codes > 0)).view(np.uint8) << 3
    return codes


def _ternary(columns: Array, scales: Array) -> Array:
    return (_rounded(columns, _inverse(scales)) + np.int8(1)).view(np.uint8)


def _tq1_0(columns: Array, low: Array, high: Array, out: Array) -> None:
    scales = _peak(low, high)
    codes = _ternary(columns, scales)
    powers = np.array([81, 27, 9, 3, 1], np.uint8)[:, None, None]
    at = 0
    for begin, end, count in ((0, 160, 5), (160, 240, 5), (240, 256, 4)):
        size = (end - begin) // count
        parts = codes[begin:end].reshape(count, size, -1) * powers[:count]
        digits = parts.sum(0, dtype=np.uint16)
        out[:, at : at + size] = ((digits * 256 + 242) // 243).T  # a fraction of 256, rounded up
        at += size
    out[:, at:] = _halves(scales)


def _tq2_0(columns: Array, low: Array, high: Array, out: Array) -> None:
    scales = _peak(low, high)
    codes = _ternary(columns, scales).reshape(2, 4, 32, -1)
    codes <<= np.array([0, 2, 4, 6], np.uint8)[:, None, None]
    out[:, :64] = np.bitwise_or.reduce(codes, axis=1).reshape(64, -1).T
    out[:, 64:] = _halves(scales)


_RULES: Final[dict[str, Rule]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
}
QUANTIZED: Final = frozenset(_RULES)
"""The names of the types that weights are quantized to."""

"""Computes the codes of blocks of GGUF from their scales and the weights, as ggml's quantizers do last.

The quantizers search for the scales of a block, by the importance matrix if there is one. Most of them then
compute each code again, from the scale that the block keeps: it is the level nearest to the weight. So the
codes follow from the weights and the scales, without the search. Where ggml takes a scale before it is
rounded to float16, or the codes of the search, a few codes differ.

Operations are those of ggml, in float32 and in its order, and give the same bits on every machine for all
bytes: scales may be infinite, NaN or 0. They are also the same where a thread flushes subnormal numbers to 0:
no scale is subnormal, and divided by the least one, 2**-24, a subnormal weight is still nearest to 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from blobstore.gguf.k_quants import iq4_xs_scales, q3_k_scales, scales_and_minima
from blobstore.gguf.quantize import e2m1_codes
from blobstore.gguf.simple_blocks import E4M3, LEVELS, half

if TYPE_CHECKING:
    from collections.abc import Callable

    Array = np.ndarray[Any, Any]

_PIECE: Final = 1 << 15
"""Weights that are computed at once, so that intermediate values stay in the cache."""
_TO_INTEGER: Final = 1.5 * 2**23
"""Added to a small float32, this leaves the nearest integer in its lowest bits, the even one of two."""
_ZERO: Final = 256
"""Where the code of 0 is in the table of codes by halves."""
_CODES_BY_HALVES: Final = np.searchsorted(
    LEVELS[1:].astype(np.int64) + LEVELS[:-1], np.arange(-_ZERO, _ZERO), side="right"
).astype(np.uint8)
"""The code of the level nearest to a number, the upper one of two, by the halves that are not above it."""


_E8M0: Final = np.ldexp(np.float32(1), np.where(np.arange(256) > 3, np.arange(256) - 128, -999))
"""The scales of MXFP4; 0 where a subnormal weight could have another code than 0."""


def _packed(codes: Array, bits: int) -> Array:
    """Return bytes of fields, the lowest first: ``[..., 8 / bits, k]`` becomes ``[..., k]``."""
    found: Array = codes[..., 0, :].copy()
    for place in range(1, 8 // bits):
        found |= codes[..., place, :] * np.uint8(1 << place * bits)
    return found


class _Layout(NamedTuple):
    """How the codes of a type follow from its scales, and where they lie."""

    begin: int
    """Of the codes in a block; all other bytes are scales."""
    end: int
    scales: Callable[[Array], tuple[Array, Array | None]]
    """Returns the scales of the parts of blocks, ``[n, parts]``, and what is added to weights before, if anything."""
    pack: Callable[[Array], tuple[Array, ...]]
    """Returns the fields that codes ``[n, weights]`` are stored in, in their order."""
    least: int = 0
    most: int = 0
    """The range of the quotient; the code is the distance from ``least``. Both are 0 for codes of levels or E2M1."""
    is_e2m1: bool = False


def _scale(blocks: Array) -> tuple[Array, None]:
    return half(blocks, 0), None


def _mxfp4(blocks: Array) -> tuple[Array, None]:
    return _E8M0.take(blocks[:, :1]), None


def _nvfp4(blocks: Array) -> tuple[Array, None]:
    return E4M3.take(blocks[:, :4]), None


def _scale_and_least(blocks: Array) -> tuple[Array, Array]:
    return half(blocks, 0), -half(blocks, 2)


def _k_minima(blocks: Array) -> tuple[Array, Array]:
    scales, minima = scales_and_minima(blocks[:, 4:16])
    return half(blocks, 0) * scales, half(blocks, 2) * minima


def _q2_k(blocks: Array) -> tuple[Array, Array]:
    packed = blocks[:, :16]
    return half(blocks, 80) * (packed & 15), half(blocks, 82) * (packed >> 4)


def _q3_k(blocks: Array) -> tuple[Array, None]:
    return half(blocks, 108) * q3_k_scales(blocks), None


def _q6_k(blocks: Array) -> tuple[Array, None]:
    return half(blocks, 208) * blocks[:, 192:208].view(np.int8), None


def _iq4_xs(blocks: Array) -> tuple[Array, None]:
    return half(blocks, 0) * iq4_xs_scales(blocks), None


def _pack_q2_k(codes: Array) -> tuple[Array]:
    return (_packed(codes.reshape(-1, 2, 4, 32), 2),)


def _pack_q4_k(codes: Array) -> tuple[Array]:
    return (_packed(codes.reshape(-1, 4, 2, 32), 4),)


def _pack_q3_k(codes: Array) -> tuple[Array, Array]:
    parts = codes.reshape(-1, 2, 4, 32)
    return _packed((codes >> 2).reshape(-1, 8, 32), 1), _packed(parts & 3, 2)


def _pack_q5_k(codes: Array) -> tuple[Array, Array]:
    high = _packed((codes >> 4).reshape(-1, 8, 32), 1)
    return high, _packed((codes & 15).reshape(-1, 4, 2, 32), 4)


def _pack_q6_k(codes: Array) -> tuple[Array, Array]:
    low = _packed((codes & 15).reshape(-1, 2, 2, 64), 4)
    return low, _packed((codes >> 4).reshape(-1, 2, 4, 32), 2)


def _pack_nibbles(codes: Array) -> tuple[Array]:
    return (_packed(codes.reshape(-1, 2, 16), 4),)


def _pack_nvfp4(codes: Array) -> tuple[Array]:
    return (_packed(codes.reshape(-1, 4, 2, 8), 4),)


def _pack_fives(codes: Array) -> tuple[Array, Array]:
    high = np.packbits(codes >> 4, axis=1, bitorder="little")
    return high, _packed((codes & 15).reshape(-1, 2, 16), 4)


_LAYOUTS: Final = {
    "Q2_K": _Layout(16, 80, _q2_k, _pack_q2_k, 0, 3),
    "Q3_K": _Layout(0, 96, _q3_k, _pack_q3_k, -4, 3),
    "Q4_K": _Layout(16, 144, _k_minima, _pack_q4_k, 0, 15),
    "Q5_K": _Layout(16, 176, _k_minima, _pack_q5_k, 0, 31),
    "Q6_K": _Layout(0, 192, _q6_k, _pack_q6_k, -32, 31),
    "Q4_0": _Layout(2, 18, _scale, _pack_nibbles, -8, 7),
    "Q4_1": _Layout(4, 20, _scale_and_least, _pack_nibbles, 0, 15),
    "Q5_0": _Layout(2, 22, _scale, _pack_fives, -16, 15),
    "Q5_1": _Layout(4, 24, _scale_and_least, _pack_fives, 0, 31),
    "IQ4_NL": _Layout(2, 18, _scale, _pack_nibbles),
    "IQ4_XS": _Layout(8, 136, _iq4_xs, _pack_nibbles),
    "MXFP4": _Layout(1, 17, _mxfp4, _pack_nibbles, is_e2m1=True),
    "NVFP4": _Layout(4, 36, _nvfp4, _pack_nvfp4, is_e2m1=True),
}
CODED: Final = frozenset(_LAYOUTS)
"""The names of the types whose codes follow from their scales."""


def codes_of(type_name: str) -> range:
    """Return which bytes of a block of a type are codes."""
    layout = _LAYOUTS[type_name]
    return range(layout.begin, layout.end)


def fill_codes(type_name: str, weights: Array, blocks: Array) -> None:
    """Set the codes of blocks whose scales are set.

    Args:
        type_name: one of :data:`CODED`.
        weights: contiguous float32 or float16, or uint16 with the bits of bfloat16, as many as the blocks have.
        blocks: uint8 of shape ``[n, bytes of a block]``.
    """
    rows = weights.reshape(len(blocks), -1)
    step = _PIECE // rows.shape[1]
    layout = _LAYOUTS[type_name]
    # Scales may be infinite, NaN or subnormal: all bytes are valid. The state is that of a thread.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            _fill(layout, rows[start : start + step], blocks[start : start + step])


def _fill(layout: _Layout, rows: Array, blocks: Array) -> None:
    values = np.empty(rows.shape, np.float32)
    if rows.dtype == np.uint16:
        bits = values.view(np.uint32)
        np.copyto(bits, rows)
        np.left_shift(bits, 16, out=bits)
    else:
        np.copyto(values, rows)
    scales, added = layout.scales(blocks)
    parts = values.reshape(*scales.shape, -1)
    if added is not None:
        parts += added[..., None]
    if layout.most or layout.is_e2m1:
        # Divided by 0, a subnormal weight is infinite, or NaN if it is flushed. Divided by NaN, all are NaN.
        parts /= np.where(scales == 0, np.float32(np.nan), scales)[..., None]
        if layout.is_e2m1:
            codes = e2m1_codes(values)
        else:
            codes = _nearest_integers(values, layout.least, layout.most)
    else:
        parts *= np.where(scales == 0, np.float32(0), 1 / scales)[..., None]
        codes = _nearest_levels(values)
    at = layout.begin
    for field in layout.pack(codes):
        packed = field.reshape(len(blocks), -1)
        blocks[:, at : at + packed.shape[1]] = packed
        at += packed.shape[1]


def _nearest_integers(values: Array, least: int, most: int) -> Array:
    """Return how far the nearest integers are from the least one; NaN counts as that."""
    np.fmax(values, np.float32(least), out=values)
    np.fmin(values, np.float32(most), out=values)
    values += np.float32(_TO_INTEGER - least)
    return values.view(np.uint32).astype(np.uint8)


def _nearest_levels(values: Array) -> Array:
    """Return the codes of the nearest levels; NaN counts as the least one."""
    np.fmax(values, np.float32(LEVELS[0]), out=values)
    np.fmin(values, np.float32(LEVELS[-1]), out=values)
    values *= np.float32(2)  # which is exact
    np.floor(values, out=values)
    values += np.float32(_ZERO)
    return _CODES_BY_HALVES.take(values.astype(np.intp))

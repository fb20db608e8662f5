"""Decodes the types of GGUF whose codes select rows of a grid; see ``simple_blocks``."""

from __future__ import annotations

from typing import Final

import numpy as np

from blobstore.gguf.iq_grids import grid
from blobstore.gguf.simple_blocks import Array, Decoder, fields, half

_SEVEN: Final = np.array([0, 7, 14, 21], np.uint32)
_BYTES: Final = np.arange(256, dtype=np.uint8)
_SIGNS: Final = np.where(
    np.unpackbits(_BYTES[:, None], axis=1, bitorder="little"), np.float32(-1), np.float32(1)
)
"""The factors of eight weights, by a byte of signs."""
_EVEN_SIGNS: Final = _SIGNS[
    _BYTES[:128] | np.unpackbits(_BYTES[:128, None], axis=1).sum(1).astype(np.uint8) % 2 << 7
]
"""The same by seven bits: the eighth sign makes the number of minuses even."""


def _words(blocks: Array, begin: int, end: int, kind: str) -> Array:
    return blocks[:, begin:end].view(kind)


def _fill(out: Array, scales: Array, points: Array, signs: Array) -> None:
    """Fill the weights: parts with a scale each, of grid points with signs."""
    parts = out.reshape(*scales.shape, -1)
    np.multiply(points.reshape(parts.shape), signs.reshape(parts.shape), out=parts)
    parts *= scales[..., None]


def _quarters(blocks: Array, at: int) -> Array:
    """Return the scales of the 16 parts of IQ2_XS and IQ2_S, whose 4 bits begin at a byte."""
    codes = fields(blocks[:, at : at + 8, None], 4).reshape(-1, 16)
    return half(blocks, 0) * (codes + np.float32(0.5)) * np.float32(0.25)


def _iq2_xxs(blocks: Array, out: Array) -> None:
    groups = blocks[:, 2:].reshape(-1, 8, 8)
    words = np.ascontiguousarray(groups[..., 4:]).view("<u4")
    scales = half(blocks, 0) * ((words[..., 0] >> 28).astype(np.float32) + np.float32(0.5))
    signs = _EVEN_SIGNS[words >> _SEVEN & 127]
    _fill(out, scales * np.float32(0.25), grid("IQ2_XXS")[groups[..., :4]], signs)


def _iq2_xs(blocks: Array, out: Array) -> None:
    words = _words(blocks, 2, 66, "<u2")
    _fill(out, _quarters(blocks, 66), grid("IQ2_XS")[words & 511], _EVEN_SIGNS[words >> 9])


def _iq2_s(blocks: Array, out: Array) -> None:
    high = fields(blocks[:, 66:74, None], 2).reshape(-1, 32)
    codes = blocks[:, 2:34] | high.astype(np.uint16) << 8
    _fill(out, _quarters(blocks, 74), grid("IQ2_S")[codes], _SIGNS[blocks[:, 34:66]])


def _iq3_xxs(blocks: Array, out: Array) -> None:
    words = _words(blocks, 66, 98, "<u4")
    scales = half(blocks, 0) * ((words >> 28).astype(np.float32) + np.float32(0.5))
    signs = _EVEN_SIGNS[words[..., None] >> _SEVEN & 127]
    _fill(out, scales * np.float32(0.5), grid("IQ3_XXS")[blocks[:, 2:66]], signs)


def _iq3_s(blocks: Array, out: Array) -> None:
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little")
    codes = blocks[:, 2:66] | high.astype(np.uint16) << 8
    scales = fields(blocks[:, 106:, None], 4).reshape(-1, 8) * np.float32(2) + np.float32(1)
    _fill(out, half(blocks, 0) * scales, grid("IQ3_S")[codes], _SIGNS[blocks[:, 74:106]])


def _shifted(out: Array, scales: Array, codes: Array, is_down: Array) -> None:
    """Fill the weights of IQ1_S and IQ1_M: grid points, an eighth up or down, times a scale."""
    weights = out.reshape(-1, 32, 8)
    shifts = np.where(is_down, np.float32(-0.125), np.float32(0.125))
    np.add(grid("IQ1_S")[codes], shifts[..., None], out=weights)
    weights *= scales[..., None]


def _iq1_s(blocks: Array, out: Array) -> None:
    words = _words(blocks, 34, 50, "<u2")
    high = words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7
    scales = half(blocks, 0) * ((words >> 12 & 7) * np.float32(2) + np.float32(1))
    codes = blocks[:, 2:34] | high.reshape(-1, 32) << 8
    _shifted(out, scales.repeat(4, 1), codes, (words >> 15).repeat(4, 1))


def _iq1_m(blocks: Array, out: Array) -> None:
    words = _words(blocks, 48, 56, "<u2")
    tops = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    factor = np.bitwise_or.reduce(tops, 1).view(np.float16).astype(np.float32)[:, None]
    parts = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 16)
    scales = factor * (parts * np.float32(2) + np.float32(1))
    high = fields(blocks[:, 32:48, None], 4).reshape(-1, 32)
    codes = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    _shifted(out, scales.repeat(2, 1), codes, high & 8)


DECODERS: Final[dict[str, Decoder]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}

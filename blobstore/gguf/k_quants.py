"""Decodes the types of GGUF with 256 weights in a block, and scales of its parts; see ``simple_blocks``."""

from __future__ import annotations

from typing import Final

import numpy as np

from blobstore.gguf.simple_blocks import LEVELS, Array, Decoder, fields, half, nibbles


def scales_and_minima(packed: Array) -> tuple[Array, Array]:
    """Return the 6-bit scales and minima of eight parts, ``[n, 8]`` each, from 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], 1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], 1)
    return scales, minima


def q3_k_scales(blocks: Array) -> Array:
    """Return the scales of the parts of blocks of Q3_K, int8 ``[n, 16]``."""
    low = nibbles(blocks[:, 96:104]).reshape(-1, 16)
    high = fields(blocks[:, 104:108], 2).reshape(-1, 16)
    return _signed(low, high)


def iq4_xs_scales(blocks: Array) -> Array:
    """Return the scales of the parts of blocks of IQ4_XS, int8 ``[n, 8]``."""
    low = fields(blocks[:, 4:8, None], 4).reshape(-1, 8)
    high = fields(blocks[:, 2:4, None], 2).reshape(-1, 8)
    return _signed(low, high)


def _signed(low: Array, high: Array) -> Array:
    """Return integers of 6 bits around 0 from their low and their high bits."""
    scales: Array = (low | high << 4).view(np.int8) - np.int8(32)
    return scales


def _minus(blocks: Array, codes: Array, out: Array) -> None:
    """Fill the weights of a type with 6-bit scales and minima: scale times code, minus minimum."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    weights = out.reshape(-1, 8, 32)
    np.copyto(weights, codes.reshape(-1, 8, 32))
    weights *= (half(blocks, 0) * scales)[..., None]
    weights -= (half(blocks, 2) * minima)[..., None]


def _q2_k(blocks: Array, out: Array) -> None:
    scales = blocks[:, :16]
    weights = out.reshape(-1, 16, 16)
    np.copyto(weights, fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16))
    weights *= (half(blocks, 80) * (scales & 15))[..., None]
    weights -= (half(blocks, 82) * (scales >> 4))[..., None]


def _q3_k(blocks: Array, out: Array) -> None:
    codes = fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    high = fields(blocks[:, :32], 1)
    high *= 4  # numpy multiplies many bytes at once, and shifts them one by one
    codes |= high
    signed = codes.view(np.int8)
    signed -= 4
    weights = out.reshape(-1, 16, 16)
    np.copyto(weights, signed.reshape(-1, 16, 16))
    weights *= (half(blocks, 108) * q3_k_scales(blocks))[..., None]


def _q4_k(blocks: Array, out: Array) -> None:
    _minus(blocks, nibbles(blocks[:, 16:].reshape(-1, 4, 32)), out)


def _q5_k(blocks: Array, out: Array) -> None:
    codes = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = fields(blocks[:, 16:48], 1)
    high *= 16
    codes |= high
    _minus(blocks, codes, out)


def _q6_k(blocks: Array, out: Array) -> None:
    codes = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    high *= 16
    codes |= high
    signed = codes.view(np.int8)
    signed -= 32
    weights = out.reshape(-1, 16, 16)
    np.copyto(weights, signed.reshape(-1, 16, 16))
    weights *= (half(blocks, 208) * blocks[:, 192:208].view(np.int8))[..., None]


def _iq4_xs(blocks: Array, out: Array) -> None:
    weights = out.reshape(-1, 8, 32)
    codes = nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32)
    np.copyto(weights, LEVELS.take(codes))
    weights *= (half(blocks, 0) * iq4_xs_scales(blocks))[..., None]


DECODERS: Final[dict[str, Decoder]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}

"""Decodes the types of GGUF whose blocks have one scale, or one per 16 weights.

A decoder takes blocks, uint8 ``[n, bytes of a block]``, and fills weights, float32 ``[n, weights of a block]``.
Operations are in the order of ggml's reference code, because each of them rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]
Decoder = Callable[[Array, Array], None]

LEVELS: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
"""The values of the codes of IQ4_NL and IQ4_XS."""
_E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of the codes, so that they are integers; the scales are halved. There is no -0."""
_E8M0: Final = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)


def _e4m3() -> Array:
    """Return half of the value of each scale of NVFP4, whose highest bit is ignored."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.where(
        exponent == 0, np.ldexp(mantissa / 2, -9), np.ldexp(1 + mantissa / 8, exponent - 8)
    )
    return np.where((codes == 0) | (codes == 127), 0, values).astype(np.float32)


E4M3: Final = _e4m3()


def half(blocks: Array, at: int) -> Array:
    """Return the float16 at a byte of each block, as float32 ``[n, 1]``."""
    return blocks[:, at : at + 2].view("<f2").astype(np.float32)


def nibbles(packed: Array) -> Array:
    """Return the low halves of bytes, then the high ones: ``[..., k]`` becomes ``[..., 2, k]``."""
    codes = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0, :])
    np.right_shift(packed, 4, out=codes[..., 1, :])
    return codes


def fields(packed: Array, bits: int) -> Array:
    """Return the fields of bytes, lowest first: ``[..., k]`` becomes ``[..., 8 / bits, k]``."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes: Array = packed[..., None, :] >> shifts
    codes &= np.uint8((1 << bits) - 1)
    return codes


def _fives(blocks: Array, at: int) -> Array:
    codes = nibbles(blocks[:, at + 4 :]).reshape(-1, 32)
    high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    high *= 16  # numpy multiplies many bytes at once, and shifts them one by one
    codes |= high
    return codes


def _q4_0(blocks: Array, out: Array) -> None:
    codes = nibbles(blocks[:, 2:]).reshape(-1, 32).view(np.int8)
    codes -= 8
    np.copyto(out, codes)
    out *= half(blocks, 0)


def _q4_1(blocks: Array, out: Array) -> None:
    np.copyto(out, nibbles(blocks[:, 4:]).reshape(-1, 32))
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _q5_0(blocks: Array, out: Array) -> None:
    codes = _fives(blocks, 2).view(np.int8)
    codes -= 16
    np.copyto(out, codes)
    out *= half(blocks, 0)


def _q5_1(blocks: Array, out: Array) -> None:
    np.copyto(out, _fives(blocks, 4))
    out *= half(blocks, 0)
    out += half(blocks, 2)


def _q8_0(blocks: Array, out: Array) -> None:
    np.copyto(out, blocks[:, 2:].view(np.int8))
    out *= half(blocks, 0)


def _q1_0(blocks: Array, out: Array) -> None:
    codes = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").view(np.int8)
    codes *= 2
    codes -= 1
    np.copyto(out, codes)
    out *= half(blocks, 0)


def _q2_0(blocks: Array, out: Array) -> None:
    codes = fields(blocks[:, 2:, None], 2).reshape(-1, 64).view(np.int8)
    codes -= 1
    np.copyto(out, codes)
    out *= half(blocks, 0)


def _iq4_nl(blocks: Array, out: Array) -> None:
    np.copyto(out, LEVELS.take(nibbles(blocks[:, 2:]).reshape(-1, 32)))
    out *= half(blocks, 0)


def _mxfp4(blocks: Array, out: Array) -> None:
    np.copyto(out, _E2M1.take(nibbles(blocks[:, 1:]).reshape(-1, 32)))
    out *= _E8M0.take(blocks[:, :1])


def _nvfp4(blocks: Array, out: Array) -> None:
    codes = nibbles(blocks[:, 4:].reshape(-1, 4, 8)).reshape(-1, 4, 16)
    weights = out.reshape(-1, 4, 16)
    np.copyto(weights, _E2M1.take(codes))
    weights *= E4M3.take(blocks[:, :4])[..., None]


def _tq1_0(blocks: Array, out: Array) -> None:
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = [
        (blocks[:, None, begin:end] * powers[:count]).reshape(len(blocks), -1)
        for begin, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    # A byte is a fraction of 256; three times it is the next digit, and the rest.
    digits = (np.concatenate(parts, 1).astype(np.uint16) * 3 >> 8).astype(np.int8)
    digits -= 1
    np.copyto(out, digits)
    out *= half(blocks, 52)


def _tq2_0(blocks: Array, out: Array) -> None:
    codes = fields(blocks[:, :64].reshape(-1, 2, 32), 2).reshape(-1, 256).view(np.int8)
    codes -= 1
    np.copyto(out, codes)
    out *= half(blocks, 64)


DECODERS: Final[dict[str, Decoder]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}

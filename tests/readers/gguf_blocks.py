"""A second, simple reader of the blocks of GGUF, one weight at a time.

It was written from docs/reference/format.md alone.

The grids are arguments, because the document has no numbers of theirs. As a program, it prints the golden
vectors ``tests/vectors/gguf.json``, with the grids of the package gguf::

    python -m tests.readers.gguf_blocks > tests/vectors/gguf.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

F32 = np.float32
Grid = Sequence[Sequence[float]]
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Block(NamedTuple):
    """The bytes of a block, and the grid of its type."""

    data: bytes
    grid: Grid

    def half(self, at: int) -> np.float32:
        return F32(np.frombuffer(self.data, "<f2", 1, at)[0])

    def word(self, at: int, size: int = 2) -> int:
        return int.from_bytes(self.data[at : at + size], "little")

    def signed(self, at: int) -> int:
        return int.from_bytes(self.data[at : at + 1], "little", signed=True)

    def bits(self, at: int, number: int, width: int) -> int:
        """Return field ``number`` of ``width`` bits, lowest first, of the bytes from ``at`` on."""
        byte, place = divmod(number * width, 8)
        return self.data[at + byte] >> place & (1 << width) - 1

    def low_first(self, at: int, number: int, count: int) -> int:
        """Return code ``number`` of ``count``, the low halves of the bytes from ``at`` on first."""
        return self.data[at + number % (count // 2)] >> 4 * (number // (count // 2)) & 15


def _q4_0(b: Block, j: int) -> np.float32:
    return b.half(0) * F32(b.low_first(2, j, 32) - 8)


def _q4_1(b: Block, j: int) -> np.float32:
    return b.half(0) * F32(b.low_first(4, j, 32)) + b.half(2)


def _q5_0(b: Block, j: int) -> np.float32:
    return b.half(0) * F32(b.low_first(6, j, 32) + 16 * b.bits(2, j, 1) - 16)


def _q5_1(b: Block, j: int) -> np.float32:
    return b.half(0) * F32(b.low_first(8, j, 32) + 16 * b.bits(4, j, 1)) + b.half(2)


def _q8_0(b: Block, j: int) -> np.float32:
    return F32(b.signed(2 + j)) * b.half(0)


def _q1_0(b: Block, j: int) -> np.float32:
    return F32(2 * b.bits(2, j, 1) - 1) * b.half(0)


def _q2_0(b: Block, j: int) -> np.float32:
    return F32(b.bits(2, j, 2) - 1) * b.half(0)


def _iq4_nl(b: Block, j: int) -> np.float32:
    return b.half(0) * F32(LEVELS[b.low_first(2, j, 32)])


def _mxfp4(b: Block, j: int) -> np.float32:
    return F32(np.ldexp(1.0, b.data[0] - 128)) * F32(E2M1[b.low_first(1, j, 32)])


def _nvfp4(b: Block, j: int) -> np.float32:
    part, rest = divmod(j, 16)
    code = b.data[part]
    exponent, mantissa = code >> 3 & 15, code & 7
    scale = mantissa * 2.0**-9 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    scale = 0.0 if code in {0, 127} else scale / 2
    return F32(scale) * F32(E2M1[b.low_first(4 + 8 * part, rest, 16)])


def _tq1_0(b: Block, i: int) -> np.float32:
    if i < 160:
        number, byte = divmod(i, 32)
    elif i < 240:
        number, byte = divmod(i - 160, 16)
        byte += 32
    else:
        number, byte = divmod(i - 240, 4)
        byte += 48
    digit = (b.data[byte] * 3**number % 256 * 3 >> 8) - 1
    return F32(digit) * b.half(52)


def _strided(b: Block, at: int, i: int) -> int:
    """Return the 2-bit code of weight ``i`` of 256: 32 bytes have the codes of 128 weights."""
    return b.data[at + 32 * (i // 128) + i % 32] >> 2 * (i // 32 % 4) & 3


def _tq2_0(b: Block, i: int) -> np.float32:
    return F32(_strided(b, 0, i) - 1) * b.half(64)


def _q2_k(b: Block, i: int) -> np.float32:
    scale = b.data[i // 16]
    product = b.half(80) * F32(scale & 15) * F32(_strided(b, 16, i))
    return product - b.half(82) * F32(scale >> 4)


def _q3_k(b: Block, i: int) -> np.float32:
    part = i // 16
    low = b.data[96 + part % 8] >> 4 * (part // 8) & 15
    high = b.data[104 + part % 4] >> 2 * (part // 4) & 3
    code = _strided(b, 32, i) - (0 if b.data[i % 32] >> i // 32 & 1 else 4)
    return b.half(108) * F32(low + 16 * high - 32) * F32(code)


def _scale_and_minimum(b: Block, at: int, part: int) -> tuple[int, int]:
    s = b.data[at : at + 12]
    if part < 4:
        return s[part] & 63, s[part + 4] & 63
    return (
        (s[part + 4] & 15) + 16 * (s[part - 4] >> 6),
        (s[part + 4] >> 4) + 16 * (s[part] >> 6),
    )


def _q4_k(b: Block, i: int, at: int = 16, high: int = 0) -> np.float32:
    part = i // 32
    scale, minimum = _scale_and_minimum(b, 4, part)
    code = (b.data[at + 32 * (part // 2) + i % 32] >> 4 * (part % 2) & 15) + 16 * high
    return b.half(0) * F32(scale) * F32(code) - b.half(2) * F32(minimum)


def _q5_k(b: Block, i: int) -> np.float32:
    return _q4_k(b, i, 48, b.data[16 + i % 32] >> i // 32 & 1)


def _q6_k(b: Block, i: int) -> np.float32:
    half, rest = divmod(i, 128)
    code = b.data[64 * half + rest % 64] >> 4 * (rest // 64) & 15
    code += 16 * (b.data[128 + 32 * half + rest % 32] >> 2 * (rest // 32) & 3)
    return b.half(208) * F32(b.signed(192 + i // 16)) * F32(code - 32)


def _iq4_xs(b: Block, i: int) -> np.float32:
    part, rest = divmod(i, 32)
    scale = b.bits(4, part, 4) + 16 * b.bits(2, part, 2) - 32
    return b.half(0) * F32(scale) * F32(LEVELS[b.low_first(8 + 16 * part, rest, 32)])


def _sign(signs: int, place: int) -> np.float32:
    return F32(-1 if signs >> place & 1 else 1)


def _even(signs: int) -> int:
    """Return seven signs with the eighth, which makes the number of minuses even."""
    return signs + 128 * (signs.bit_count() % 2)


def _iq2_xxs(b: Block, i: int) -> np.float32:
    part, k, j = i // 32, i // 8 % 4, i % 8
    word = b.word(2 + 8 * part + 4, 4)
    scale = b.half(0) * (F32(0.5) + F32(word >> 28)) * F32(0.25)
    point = b.grid[b.data[2 + 8 * part + k]][j]
    return scale * F32(point) * _sign(_even(word >> 7 * k & 127), j)


def _quarter(b: Block, at: int, i: int) -> np.float32:
    return b.half(0) * (F32(0.5) + F32(b.bits(at, i // 16, 4))) * F32(0.25)


def _iq2_xs(b: Block, i: int) -> np.float32:
    word = b.word(2 + 2 * (i // 8))
    point = b.grid[word & 511][i % 8]
    return _quarter(b, 66, i) * F32(point) * _sign(_even(word >> 9), i % 8)


def _iq2_s(b: Block, i: int) -> np.float32:
    k = i // 8
    point = b.grid[b.data[2 + k] + 256 * b.bits(66, k, 2)][i % 8]
    return _quarter(b, 74, i) * F32(point) * _sign(b.data[34 + k], i % 8)


def _iq3_xxs(b: Block, i: int) -> np.float32:
    word = b.word(66 + 4 * (i // 32), 4)
    scale = b.half(0) * (F32(0.5) + F32(word >> 28)) * F32(0.5)
    point = b.grid[b.data[2 + i // 4]][i % 4]
    return scale * F32(point) * _sign(_even(word >> 7 * (i // 8 % 4) & 127), i % 8)


def _iq3_s(b: Block, i: int) -> np.float32:
    k = i // 4
    scale = b.half(0) * F32(1 + 2 * b.bits(106, i // 32, 4))
    point = b.grid[b.data[2 + k] + 256 * b.bits(66, k, 1)][i % 4]
    return scale * F32(point) * _sign(b.data[74 + i // 8], i % 8)


def _iq1_s(b: Block, i: int) -> np.float32:
    word, k = b.word(34 + 2 * (i // 32)), i // 8
    point = b.grid[b.data[2 + k] + 256 * (word >> 3 * (k % 4) & 7)][i % 8]
    shift = F32(-0.125 if word >> 15 else 0.125)
    return b.half(0) * F32(2 * (word >> 12 & 7) + 1) * (F32(point) + shift)


def _iq1_m(b: Block, i: int) -> np.float32:
    k = i // 8
    words = [b.word(48 + 2 * number) for number in range(4)]
    bits = sum((word >> 12) << 4 * number for number, word in enumerate(words))
    factor = F32(np.array([bits], "<u2").view("<f2")[0])
    scale = factor * F32(2 * (words[k // 8] >> 3 * (k // 2 % 4) & 7) + 1)
    nibble = b.bits(32, k, 4)
    point = b.grid[b.data[k] + 256 * (nibble & 7)][i % 8]
    return scale * (F32(point) + F32(-0.125 if nibble >> 3 else 0.125))


RULES: Mapping[str, tuple[int, int, Callable[[Block, int], np.float32]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q1_0": (128, 18, _q1_0),
    "Q2_0": (64, 18, _q2_0),
    "IQ4_NL": (32, 18, _iq4_nl),
    "MXFP4": (32, 17, _mxfp4),
    "NVFP4": (64, 36, _nvfp4),
    "TQ1_0": (256, 54, _tq1_0),
    "TQ2_0": (256, 66, _tq2_0),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
    "IQ4_XS": (256, 136, _iq4_xs),
    "IQ2_XXS": (256, 66, _iq2_xxs),
    "IQ2_XS": (256, 74, _iq2_xs),
    "IQ2_S": (256, 82, _iq2_s),
    "IQ3_XXS": (256, 98, _iq3_xxs),
    "IQ3_S": (256, 110, _iq3_s),
    "IQ1_S": (256, 50, _iq1_s),
    "IQ1_M": (256, 56, _iq1_m),
}
"""Weights and bytes of a block, and the value of a weight, by type."""


def read_blocks(type_name: str, data: bytes, grid: Grid = ()) -> bytes:
    """Return the weights of blocks as little-endian float32.

    Args:
        type_name: as llama.cpp spells it.
        data: any number of blocks.
        grid: the points of the type, if it has some.
    """
    weights, size, rule = RULES[type_name]
    blocks = [Block(data[at : at + size], grid) for at in range(0, len(data), size)]
    with np.errstate(all="ignore"):
        values = [rule(block, number) for block in blocks for number in range(weights)]
    return np.array(values, "<f4").tobytes()


def grid_of_peer(type_name: str) -> Grid:
    """Return the points of a type as the package gguf has them; none if it has no grid."""
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, type_name, None)
    traits: Any = gguf.quants._type_traits.get(kind)  # type: ignore[arg-type]
    if type_name == "IQ1_M":
        traits = gguf.quants.IQ1_S
    if traits is None or not hasattr(traits, "init_grid"):
        return ()
    traits.init_grid()
    if traits.grid is None:
        return ()
    found: Grid = traits.grid.reshape(traits.grid_shape).tolist()
    return found


def vectors() -> Iterator[dict[str, str]]:
    """Yield random blocks of each type, whose numbers are finite, with their values."""
    random = np.random.default_rng(33)
    for name, (weights, size, _) in RULES.items():
        grid = grid_of_peer(name)
        while True:
            data = random.integers(0, 256, max(128 // weights, 1) * size, np.uint8).tobytes()
            plain = read_blocks(name, data, grid)
            if np.isfinite(np.frombuffer(plain, "<f4")).all():
                break
        yield {"type": name, "blocks": data.hex(), "plain": plain.hex()}


if __name__ == "__main__":
    print(json.dumps(list(vectors()), indent=1))  # noqa: T201 - this is the file

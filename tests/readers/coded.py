"""A second, simple reader of blocks whose scales are kept, for docs/reference/cold-format.md.

It was written from that document and docs/reference/format.md alone. One weight after the other; numpy's float32
scalars round after each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from tests.readers.quantized import block_weights

F32 = np.float32
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Of each type: weights and bytes of a block, the bytes of its codes, and the fields before and behind them.
_TYPES = {
    2: (32, 18, (2, 18), (1, 1), ()),
    3: (32, 20, (4, 20), (1, 1, 1, 1), ()),
    6: (32, 22, (2, 22), (1, 1), ()),
    7: (32, 24, (4, 24), (1, 1, 1, 1), ()),
    10: (256, 84, (16, 80), (16,), (1, 1, 1, 1)),
    11: (256, 110, (0, 96), (), (8, 4, 1, 1)),
    12: (256, 144, (16, 144), (1, 1, 1, 1, 4, 4, 4), ()),
    13: (256, 176, (16, 176), (1, 1, 1, 1, 4, 4, 4), ()),
    14: (256, 210, (0, 192), (), (16, 1, 1)),
    20: (32, 18, (2, 18), (1, 1), ()),
    23: (256, 136, (8, 136), (1, 1, 1, 1, 4), ()),
    39: (32, 17, (1, 17), (1,), ()),
    40: (64, 36, (4, 36), (4,), ()),
}
_RANGES = {2: (-8, 7), 3: (0, 15), 6: (-16, 15), 7: (0, 31), 10: (0, 3), 11: (-4, 3)}
_RANGES |= {12: (0, 15), 13: (0, 31), 14: (-32, 31)}


def kept_sizes(number: int, size: int) -> list[int]:
    """Return the sizes of the planes with scales of ``size`` bytes of blocks."""
    _, block, _, before, behind = _TYPES[number]
    assert size % block == 0
    return [size // block * field for field in (*before, *behind)]


def fill_blocks(rule: bytes, base: bytes, planes: list[bytes], begin: int, size: int) -> bytes:
    """Return ``size`` bytes of blocks from ``begin`` on, with their scales and the codes that follow.

    ``base`` begins with the first weight of the part.
    """
    number = rule[0]
    count, block, codes, before, behind = _TYPES[number]
    weights = block_weights(rule, base, (begin + size) // block * count)[begin // block * count :]
    found = bytearray()
    for at in range(size // block):
        fields = [
            plane[at * field : (at + 1) * field]
            for plane, field in zip(planes, (*before, *behind), strict=True)
        ]
        kept = b"".join(fields[: len(before)]) + bytes(codes[1] - codes[0])
        data = bytearray(kept + b"".join(fields[len(before) :]))
        with np.errstate(all="ignore"):
            for i, x in enumerate(weights[at * count : (at + 1) * count]):
                _STORE[number](data, i, _code(number, bytes(data), i, F32(x)))
        found += data
    return bytes(found)


def _half(data: bytes, at: int) -> np.float32:
    return F32(np.frombuffer(data, "<f2", 1, at)[0])


def _six_bits(data: bytes, part: int) -> tuple[int, int]:
    s = data[4:16]
    if part < 4:
        return s[part] % 64, s[part + 4] % 64
    return s[part + 4] % 16 + 16 * (s[part - 4] // 64), s[part + 4] // 16 + 16 * (s[part] // 64)


def _scale(number: int, data: bytes, i: int) -> tuple[np.float32, np.float32 | None]:
    """Return D and M of a weight."""
    if number in {3, 7}:
        return _half(data, 0), -_half(data, 2)
    if number == 10:
        s = data[i // 16]
        return _half(data, 80) * F32(s % 16), _half(data, 82) * F32(s // 16)
    if number == 11:
        k = i // 16
        a = data[96 + k % 8] >> 4 * (k // 8) & 15
        a += 16 * (data[104 + k % 4] >> 2 * (k // 4) & 3)
        return _half(data, 108) * F32(a - 32), None
    if number in {12, 13}:
        a, b = _six_bits(data, i // 32)
        return _half(data, 0) * F32(a), _half(data, 2) * F32(b)
    if number == 14:
        s = int.from_bytes(data[192 + i // 16 : 193 + i // 16], "little", signed=True)
        return _half(data, 208) * F32(s), None
    if number == 23:
        k = i // 32
        a = data[4 + k // 2] >> 4 * (k % 2) & 15
        a += 16 * (data[2 + k // 4] >> 2 * (k % 4) & 3)
        return _half(data, 0) * F32(a - 32), None
    if number == 39:
        return F32(2.0 ** (data[0] - 128) if data[0] > 3 else 0), None
    if number == 40:
        return _half_of_e4m3(data[i // 16]), None
    return _half(data, 0), None


def _half_of_e4m3(s: int) -> np.float32:
    if s in {0, 127}:
        return F32(0)
    exponent, mantissa = divmod(s % 128, 8)
    value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return F32(value / 2)


def _code(number: int, data: bytes, i: int, x: np.float32) -> int:
    d, m = _scale(number, data, i)
    if number in {20, 23}:
        v = x * (F32(1) / d if d != 0 else F32(0))
        if np.isnan(v):
            return 0
        return sum(bool(v >= (low + high) / 2) for low, high in pairwise(LEVELS))
    if number in {39, 40}:
        v = x / d if d != 0 else F32(0)
        q = sum(bool(limit < abs(v)) for limit in (0.5, 1.5, 2.5, 3.5, 5, 7, 10))
        return q + 8 if v < 0 and q else q
    least, most = _RANGES[number]
    v = (x if m is None else x + m) / d
    if d == 0 or np.isnan(v) or v < least:
        return 0
    return (most if v > most else int(np.rint(v))) - least


def _nibble(at: int, count: int = 32) -> Callable[[bytearray, int, int], None]:
    def store(data: bytearray, i: int, code: int) -> None:
        part, j = divmod(i, count)
        half = count // 2
        data[at + part * half + j % half] |= code % 16 << 4 * (j // half)

    return store


def _five(data: bytearray, at: int, j: int, code: int) -> None:
    data[at + j // 8] |= code // 16 << j % 8
    _nibble(at + 4)(data, j, code)


def _two_bits(data: bytearray, at: int, i: int, code: int) -> None:
    data[at + 32 * (i // 128) + i % 32] |= code % 4 << 2 * (i // 32 % 4)


def _q3_k(data: bytearray, i: int, code: int) -> None:
    data[i % 32] |= code // 4 << i // 32
    _two_bits(data, 32, i, code)


def _q5_k(data: bytearray, i: int, code: int) -> None:
    data[16 + i % 32] |= code // 16 << i // 32
    _nibble(48, 64)(data, i, code)


def _q6_k(data: bytearray, i: int, code: int) -> None:
    _nibble(0, 128)(data, i, code)
    data[128 + 32 * (i // 128) + i % 32] |= code // 16 << 2 * (i % 128 // 32)


_STORE: dict[int, Callable[[bytearray, int, int], None]] = {
    2: _nibble(2),
    3: _nibble(4),
    6: lambda data, j, code: _five(data, 2, j, code),
    7: lambda data, j, code: _five(data, 4, j, code),
    10: lambda data, i, code: _two_bits(data, 16, i, code),
    11: _q3_k,
    12: _nibble(16, 64),
    13: _q5_k,
    14: _q6_k,
    20: _nibble(2),
    23: _nibble(8),
    39: _nibble(1),
    40: _nibble(4, 16),
}

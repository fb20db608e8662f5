"""A second, simple reader of blocks that are quantized from a base, for docs/reference/cold-format.md.

It was written from the document alone. One weight after the other; Python's floats are rounded to float32 after each operation, which is exact.
"""

from __future__ import annotations

import math
import struct

_TYPES = {
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    34: (256, 54),
    35: (256, 66),
}
_TYPES |= {39: (32, 17)}


def read_blocks(rule: bytes, base: bytes, size: int) -> bytes:
    """Return ``size`` bytes of blocks that a rule makes of the weights that ``base`` begins with."""
    weights_of_block, block_size = _TYPES[rule[0]]
    assert rule[1] == 1
    assert size % block_size == 0
    count = size // block_size * weights_of_block
    weights = block_weights(rule, base, count)
    return b"".join(
        _block(rule[0], weights[at : at + weights_of_block])
        for at in range(0, count, weights_of_block)
    )


def block_weights(rule: bytes, base: bytes, count: int) -> list[float]:
    """Return the weights of blocks in their order, of whole heads if rows are permuted."""
    _, _, source, cast, columns, head = struct.unpack("<BBBBII", rule)
    count += -count % (head * columns or 1)
    weights = _weights(source, base, count)
    if cast == 8 != source:
        blocks = (_block(8, weights[at : at + 32]) for at in range(0, count, 32))
        weights = _weights(8, b"".join(blocks), count)
    elif cast != source:
        weights = [_cast(cast, x) for x in weights]
    if head:
        rows = [weights[at : at + columns] for at in range(0, count, columns)]
        assert len(rows) % head == 0
        weights = []
        for first in range(0, len(rows), head):
            for i in range(head // 2):
                weights += rows[first + i] + rows[first + i + head // 2]
    return weights


def _cast(cast: int, x: float) -> float:
    if cast == 1:
        (rounded,) = struct.unpack("<e", _half(x))
        return float(rounded)
    if cast == 30:
        (bits,) = struct.unpack("<I", struct.pack("<f", x))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) % 2**32 >> 16
        (rounded,) = struct.unpack("<f", struct.pack("<HH", 0, bits))
        return float(rounded)
    assert cast == 0
    return x


def _weights(source: int, base: bytes, count: int) -> list[float]:
    if source == 8:
        blocks = (struct.unpack_from("<e32b", base, at) for at in range(0, count // 32 * 34, 34))
        return [_product(d, q) for d, *codes in blocks for q in codes]
    if source == 30:
        halves = struct.unpack_from(f"<{count}H", base)
        return list(struct.unpack(f"<{count}f", b"".join(struct.pack("<HH", 0, x) for x in halves)))
    return list(struct.unpack_from(f"<{count}{'f' if source == 0 else 'e'}", base))


def _product(d: float, q: int) -> float:
    return math.nan if math.isinf(d) and not q else d * q


def _f32(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def _half(value: float) -> bytes:
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", math.copysign(math.inf, value))


def _round(value: float) -> int:
    return int(math.copysign(math.floor(abs(value) + 0.5), value))  # exact in float64


def _block(number: int, weights: list[float]) -> bytes:
    peak = max(map(abs, weights))
    if any(map(math.isnan, weights)) or (peak and not 2.0**-96 <= peak < 2.0**126):
        weights, peak = [0.0] * len(weights), 0.0
    if number == 39:
        return _mxfp4(weights, peak)
    if number in {8, 34, 35}:
        d = _f32(peak / 127) if number == 8 else peak
        inverse = _f32(1 / d) if d else 0.0
        codes = [_round(_f32(x * inverse)) for x in weights]
        if number == 8:
            return _half(d) + struct.pack("<32b", *codes)
        trits = [code + 1 for code in codes]
        return (_digits(trits) if number == 34 else _fields(trits)) + _half(d)
    most = 15 if number in {2, 3} else 31
    if number in {2, 6}:
        top = next(x for x in weights if abs(x) == peak) if peak else 0.0
        d = _f32(top / -((most + 1) // 2))
        head, low, shift = _half(d), 0.0, (most + 1) // 2 + 0.5
    else:
        low = min(weights)  # the first of equal ones
        d = _f32(_f32(max(weights) - low) / most)
        head, shift = _half(d) + _half(low), 0.5
    inverse = _f32(1 / d) if d else 0.0
    codes = [min(math.floor(_f32(_f32(_f32(x - low) * inverse) + shift)), most) for x in weights]
    high = sum((code >> 4) << place for place, code in enumerate(codes))
    return head + (struct.pack("<I", high) if most == 31 else b"") + _low(codes)


def _low(codes: list[int]) -> bytes:
    return bytes(codes[k] % 16 + codes[k + 16] % 16 * 16 for k in range(16))


def _digits(codes: list[int]) -> bytes:
    found = []
    for begin, rows, columns in ((0, 5, 32), (160, 5, 16), (240, 4, 4)):
        for column in range(columns):
            v = sum(81 // 3**row * codes[begin + row * columns + column] for row in range(rows))
            found.append(-(-256 * v // 243))
    return bytes(found)


def _fields(codes: list[int]) -> bytes:
    return bytes(
        sum(codes[128 * a + k + 32 * b] << 2 * b for b in range(4))
        for a in range(2)
        for k in range(32)
    )


def _mxfp4(weights: list[float], peak: float) -> bytes:
    if not peak:
        return bytes(17)
    e = math.floor(_f32(math.log2(peak))) + 125
    codes = []
    for x in weights:
        scaled = abs(x) * 2.0 ** (128 - e)
        q = sum(limit < scaled for limit in (0.5, 1.5, 2.5, 3.5, 5, 7, 10))
        codes.append(q + 8 if x < 0 and q else q)
    return bytes([e]) + _low(codes)

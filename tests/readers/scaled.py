"""A second, simple reader of weights whose scales are tensors of their own, for docs/reference/cold-format.md.

It was written from sections 7.4 and 7.5 alone. One weight after the other; numpy's float32 scalars round after each
operation.
"""

from __future__ import annotations

import math
import struct

import numpy as np

from tests.readers.quantized import block_weights

F32 = np.float32


def read_affine(rule: bytes, base: bytes, size: int) -> bytes:
    """Return ``size`` bytes of codes, scales or biases of the weights that ``base`` begins with."""
    tensor, version, source, cast, group, bits = struct.unpack("<BBBBII", rule)
    assert version == 3
    block = group * bits // 8 if tensor == 0 else 4 if cast == 0 else 2
    assert size % block == 0
    plain = struct.pack("<BBBBII", 0, 3, source, 0 if cast == source else cast, 0, 0)
    weights = block_weights(plain, base, size // block * group)
    found = b""
    with np.errstate(all="ignore"):
        for at in range(0, len(weights), group):
            codes, scale, bias = _affine([F32(x) for x in weights[at : at + group]], bits)
            if tensor == 0:
                stream = sum(code << place * bits for place, code in enumerate(codes))
                found += stream.to_bytes(block, "little")
            else:
                found += _stored(cast, (scale, bias)[tensor - 1])
    return found


def _affine(weights: list[np.float32], bits: int) -> tuple[list[int], np.float32, np.float32]:
    peak = max(abs(x) for x in weights)
    if any(map(math.isnan, weights)) or not 2.0**-96 <= peak < 2.0**126:
        weights = [F32(0)] * len(weights)
    low, high, most = min(weights), max(weights), 2**bits - 1
    scale = max((high - low) / F32(most), F32(1e-7))
    edge = low if abs(low) > abs(high) else high
    if not abs(low) > abs(high):
        scale = -scale
    count, bias = _even(edge / scale), F32(0)
    if count:
        scale, bias = edge / F32(count), edge
    codes = [min(max(_even((x - bias) / scale), 0), most) for x in weights]
    return codes, scale, bias


def _even(value: np.float32) -> int:
    return round(float(value))  # which is the even one of two


def _stored(cast: int, value: np.float32) -> bytes:
    if cast == 0:
        return value.tobytes()
    if cast == 1:
        return value.astype(np.float16).tobytes()
    return struct.pack("<H", _upper_half(value))


def _upper_half(value: np.float32) -> int:
    (bits,) = struct.unpack("<I", value.tobytes())
    return int((bits + 0x7FFF + (bits >> 16 & 1)) % 2**32 >> 16)


def read_float8(rule: bytes, scales: bytes, base: bytes, size: int) -> bytes:
    """Return ``size`` codes of the weights that ``base`` begins with."""
    kind, version, source, cast, columns, head = struct.unpack("<BBBBII", rule)
    assert (kind, version) == (0, 4)
    assert size % columns == 0
    rows = size // columns
    height, width = head % 2**16 or rows, head // 2**16 or columns
    across = -(-columns // width)
    assert len(scales) == 4 * across * -(-rows // height)
    factors = np.frombuffer(scales, "<f4")
    plain = struct.pack("<BBBBII", 0, 4, source, 0, 0, 0)
    found = bytearray()
    with np.errstate(all="ignore"):
        for at, x in enumerate(block_weights(plain, base, size)):
            scale = factors[at // columns // height * across + at % columns // width]
            if abs(scale) < 2.0**-100:
                scale = np.copysign(F32(np.inf), scale)
            found.append(_float8(F32(x) / scale, cast))
    return bytes(found)


def _float8(quotient: np.float32, cast: int) -> int:
    value = F32(-448) if np.isnan(quotient) else min(max(quotient, F32(-448)), F32(448))
    if cast == 1:
        value = F32(np.float16(value))
    elif cast == 30:
        value = np.array([_upper_half(value) << 16], np.uint32).view(F32)[0]
    magnitude = abs(float(value))
    sign = 128 if math.copysign(1, value) < 0 else 0
    nearest = min(range(127), key=lambda code: (abs(_value(code) - magnitude), code % 2))
    return sign + nearest


def _value(code: int) -> float:
    exponent, mantissa = divmod(code, 8)
    if not exponent:
        return mantissa * 2.0**-9
    return float((8 + mantissa) * 2.0 ** (exponent - 10))

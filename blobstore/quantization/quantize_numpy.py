"""Quantization in numpy: the reference implementation and specification of the types.

All results equal those of MLX 0.32.4 on a CPU, bit for bit, for all finite inputs. The order and the
precision of the steps below are therefore part of the format. Arithmetic is in float32; "rounded"
means to the element type of the input (or of the affine scales), to nearest, ties to even.

*affine*: with lo and hi the extremes of a group and n the largest code, the scale is (hi - lo) / n, at
least 1e-7, negative unless the extreme of larger magnitude is lo. If that extreme, the edge, is not
within half a scale of zero, the scale becomes edge / round(edge / scale) and the bias the edge;
otherwise the bias is 0. A code is round((x - bias) / scale), clamped to 0..n, computed before scale and bias
are rounded. The value is code * scale, rounded, plus bias, rounded.

*nvfp4*: the scale is max|x| / 6, rounded, then as E4M3, at most 448. *mxfp4*, *mxfp8*: max|x| / 6 or
448, rounded, then rounded up to a power of two, as exponent + 127 in a byte (which overflows for the
smallest values, as in MLX); 127 for a group of zeros. A code is that of x / scale, rounded: for E2M1 the
nearest, ties to the one nearer to zero, never -0; for E4M3 to nearest even. The value is that of the
code times the rounded scale, rounded. A global scale of nvfp4 is multiplied by the scale first, with
no rounding before the end.

*symmetric*: the value is (code - 2^(bits - 1)) * scale, rounded to the type of the scale. MLX has no such
type, and nothing is quantized to it.

In groups of nvfp4 that are too large for their scale, all E2M1 values may be equally near in float32.
The code is then the first of 0, 0.5, 1, 1.5, 2, 3, 4, 6, -0, -0.5, ...
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from blobstore.quantization.fp8 import decode_stack
from blobstore.quantization.tiles import untiled
from blobstore.safetensors.numpy import BF16

if TYPE_CHECKING:
    from blobstore.quantization.formats import QuantFormat

    Array = np.ndarray[Any, Any]

_INFINITY = {np.dtype(np.float32): 0x7F800000, np.dtype(np.float16): 0x7C00, BF16: 0x7F80}
"""The bit pattern of infinity; those of NaNs are greater."""
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E4M3_MAX = np.float32(448)
_E2M1_MAX = np.float32(6)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_CODES = np.concatenate([_E2M1, -_E2M1])
_E2M1_BOUNDS = (_E2M1[1:] + _E2M1[:-1]) / 2
# Beyond this, the float32 distances to several codes may be equal, and the first code wins.
_E2M1_FAR = np.float32(2**20)
_E4M3_CODES: np.ndarray[Any, Any] = np.arange(256, dtype=np.uint8).view(_E4M3).astype(np.float32)
# The two values of each byte, combined into one item.
_E2M1_PAIRS = _E2M1_CODES[np.stack([np.arange(256) & 15, np.arange(256) >> 4], 1)].view("u8")[:, 0]
_LEAST_SCALE = np.float32(1e-7)
_EXPONENT_BIAS = 127
_PLACES = {bits: [(place, *divmod(place * bits, 8)) for place in range(8)] for bits in (2, 3, 5, 6)}
"""The byte and bit where each of eight codes begins; eight codes of n bits take n bytes."""
_PIECE = 1 << 17
"""Elements that are computed at once, so that intermediate values stay in the cache."""


class Quantized(NamedTuple):
    """A packed weight: uint32 words, one scale per group, and biases for affine types."""

    weight: Array
    scale: Array
    bias: Array | None


def first_nonfinite(array: Array) -> int | None:
    """Return the flat index of the first infinity or NaN, which cannot be quantized."""
    size, infinity = array.itemsize, _INFINITY[array.dtype]
    sign = 1 << (8 * size - 1)
    bits, signed = array.view(f"u{size}"), array.view(f"i{size}")
    # Bit patterns sort like magnitudes within each sign, so no temporary array is needed.
    if int(signed.max(initial=0)) < infinity and int(bits.max(initial=0)) < sign + infinity:
        return None
    return int(np.argmax((bits & bits.dtype.type(sign - 1)) >= infinity))


def quantize(array: Array, item: QuantFormat, group_size: int) -> Quantized:
    """Quantize finite values along the last dimension.

    Args:
        array: float32, float16 or bfloat16 of shape ``(..., columns)``, with complete groups in each row.
        item: the quantization type.
        group_size: elements that share a scale.

    Returns:
        Words of shape ``(..., columns * bits / 32)``, scales and biases ``(..., columns / group_size)``.
    """
    *rows, columns = array.shape
    groups = array.reshape(-1, group_size)
    count = len(groups)
    words = np.empty((count, item.words(group_size)), np.uint32)
    scales = np.empty(count, np.uint8 if item.mode != "affine" else array.dtype)
    biases = np.empty(count, array.dtype) if item.has_bias else None
    height = max(_PIECE // group_size, 1)
    # Subnormal scales and extreme outliers overflow and underflow as in MLX.
    with np.errstate(all="ignore"):
        for start in range(0, count, height):
            piece = slice(start, start + height)
            if biases is not None:
                codes, scales[piece], biases[piece] = affine(groups[piece], item.bits)
            else:
                codes, scales[piece] = _float(groups[piece], item.mode)
            words[piece] = pack(codes, item.bits)
    shape = (*rows, columns // group_size)
    return Quantized(
        words.reshape(*rows, item.words(columns)),
        scales.reshape(shape),
        None if biases is None else biases.reshape(shape),
    )


def dequantize(
    weight: Array,
    scale: Array | None,
    bias: Array | None,
    item: QuantFormat,
    group_size: int,
    dtype: str,
    global_scale: float | None = None,
) -> Array:
    """Return packed values as an array of ``dtype``, shape ``(..., columns)``.

    Args:
        weight: uint32 words of shape ``(..., words)``, or the values of an fp8 weight.
        scale: one value per group; a float type for integers and fp8, uint8 otherwise. None for blocks of GGUF,
            whose weight is uint8.
        bias: one value per group for affine types, else None.
        item: the quantization type.
        group_size: elements that share a scale.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        global_scale: factor of the scales of an nvfp4 weight, in float32.
    """
    if item.block_bytes:
        from blobstore.gguf.dequantize import dequantize as dequantize_blocks  # few models

        values: Array = dequantize_blocks(item.gguf_name, weight)
        return values.astype(dtype, copy=False)
    assert scale is not None  # noqa: S101 - only blocks have none
    *rows, words = weight.shape
    columns = item.columns(words)
    if item.is_tiled:
        scale = untiled(scale, rows[0], columns // group_size)
        if item.bits == 4:  # half a byte
            codes = np.ascontiguousarray(weight).view(np.uint8)
            weight = (codes >> 4 | codes << 4).view(weight.dtype)
    if item.float8 is not None:
        return decode_stack(weight, scale, item.float8, dtype)
    count = scale.size
    packed = np.ascontiguousarray(weight).reshape(count, item.words(group_size))
    scales = np.ascontiguousarray(scale).reshape(count, 1)
    biases = None if bias is None else np.ascontiguousarray(bias).reshape(count, 1)
    known = np.dtype(dtype)
    result = np.empty((count, group_size), known)
    height = max(_PIECE // group_size, 1)
    with np.errstate(all="ignore"):
        for start in range(0, count, height):
            piece = slice(start, start + height)
            if biases is not None:
                numbers = _unpack(packed[piece], item.bits).astype(np.float32)
                numbers *= scales[piece].astype(np.float32)
                numbers = numbers.astype(scale.dtype).astype(np.float32)
                numbers += biases[piece].astype(np.float32)
                result[piece] = numbers.astype(scale.dtype)
            elif item.mode == "symmetric":
                numbers = _unpack(packed[piece], item.bits).astype(np.float32)
                numbers -= np.float32(item.offset)
                numbers *= scales[piece].astype(np.float32)
                result[piece] = numbers.astype(scale.dtype)
            else:
                if item.mode == "nvfp4":
                    factor = _E4M3_CODES.take(scales[piece])
                else:
                    powers = scales[piece].astype(np.int32) - _EXPONENT_BIAS
                    factor = np.ldexp(np.float32(1), powers)
                if global_scale is None:
                    factor = factor.astype(known).astype(np.float32)
                else:
                    factor = factor * np.float32(global_scale)
                stream = packed[piece].view(np.uint8)
                is_e4m3 = item.bits == 8  # a byte
                values = _E4M3_CODES.take(stream) if is_e4m3 else _E2M1_PAIRS.take(stream)
                result[piece] = values.view(np.float32) * factor
    return result.reshape(*rows, columns)


def affine(groups: Array, bits: int) -> tuple[Array, Array, Array]:
    """Return the codes of groups, ``[n, group size]``, and the scale and the bias of each in float32."""
    numbers = groups.astype(np.float32)
    scale, bias = affine_scales(numbers, bits)
    numbers -= bias[:, None]
    # A scale is zero if a constant group is too large for its steps; its codes are 0.
    numbers /= np.where(scale != 0, scale, np.float32(1))[:, None]
    np.rint(numbers, out=numbers)
    np.clip(numbers, 0, np.float32((1 << bits) - 1), out=numbers)
    return numbers.astype(np.uint8), scale, bias


def affine_scales(numbers: Array, bits: int) -> tuple[Array, Array]:
    """Return the scale and the bias of each group of float32."""
    top = np.float32((1 << bits) - 1)
    columns = np.ascontiguousarray(numbers.T)  # numpy reduces short rows slowly
    low, high = columns.min(axis=0), columns.max(axis=0)
    is_low = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / top, _LEAST_SCALE)
    scale = np.where(is_low, scale, -scale)
    edge = np.where(is_low, low, high)
    steps = np.rint(edge / scale)
    scale = np.where(steps != 0, edge / steps, scale)
    return scale, np.where(steps != 0, edge, np.float32(0))


def _float(groups: Array, mode: str) -> tuple[Array, Array]:
    numbers = groups.astype(np.float32)
    largest = np.ascontiguousarray(np.abs(numbers).T).max(axis=0)
    limit = _E4M3_MAX if mode == "mxfp8" else _E2M1_MAX
    exact = (largest / limit).astype(groups.dtype).astype(np.float32)
    if mode == "nvfp4":
        scales = np.minimum(exact, _E4M3_MAX).astype(_E4M3).view(np.uint8)
        factor = _E4M3_CODES[scales]
        numbers /= np.where(factor == 0, np.float32(np.inf), factor)[:, None]
        numbers = numbers.astype(groups.dtype, copy=False).astype(np.float32, copy=False)
    else:
        mantissa, exponent = np.frexp(exact)  # from 0.5 to 1
        exponent -= mantissa == 0.5  # a power of two
        scales = (exponent + _EXPONENT_BIAS).astype(np.uint8)
        numbers /= np.ldexp(np.float32(1), exponent)[:, None]
    codes: Array = codes_of_halves(is_e4m3=mode == "mxfp8").take(upper_halves(numbers))
    if mode == "nvfp4":
        far = exact > _E2M1_FAR
        if far.any():
            codes[far] = np.abs(numbers[far, :, None] - _E2M1_CODES).argmin(axis=2)
    return codes, scales


def upper_halves(numbers: Array) -> Array:
    """Return the upper 16 bits of float32. The lowest of these is set if any bit below is set.

    The bits that decide between two codes are all above it.
    """
    bits = numbers.view(np.uint32)
    upper = bits & np.uint32(0xFFFF)
    upper += np.uint32(0xFFFF)
    upper |= bits
    upper >>= np.uint32(16)
    return upper


@cache
def codes_of_halves(*, is_e4m3: bool) -> Array:
    """Return the codes of all 16-bit patterns, the upper halves of float32: of E4M3, or of E2M1."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(BF16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        if is_e4m3:
            return np.clip(numbers, -_E4M3_MAX, _E4M3_MAX).astype(_E4M3).view(np.uint8)
        codes = np.searchsorted(_E2M1_BOUNDS, np.abs(numbers)).astype(np.uint8)
        codes[(numbers < 0) & (codes != 0)] += 8
    return codes


def pack(codes: Array, bits: int) -> Array:
    """Return the codes of each row as words, one little-endian stream of bits."""
    if bits == 8:  # a byte
        return codes.view(np.uint32)
    if bits == 4:  # half a byte
        pairs = codes.view(np.uint16)
        return (pairs | pairs >> np.uint16(4)).astype(np.uint8).view(np.uint32)
    places = codes.reshape(-1, 8)
    stream = np.zeros((len(places), bits), np.uint8)
    for place, byte, shift in _PLACES[bits]:
        stream[:, byte] |= places[:, place] << np.uint8(shift)
        if shift + bits > 8:  # continues in the next byte
            stream[:, byte + 1] |= places[:, place] >> np.uint8(8 - shift)
    return stream.reshape(len(codes), -1).view(np.uint32)


def _unpack(words: Array, bits: int) -> Array:
    """Return the codes in rows of words; see :func:`pack`."""
    data = words.astype("<u4", copy=False).view(np.uint8)
    if bits == 8:  # a byte
        return data
    if bits == 4:  # half a byte
        pairs = data.astype("<u2")
        pairs |= pairs << np.uint16(4)
        pairs &= np.uint16(0x0F0F)
        return pairs.view(np.uint8)
    stream = data.reshape(-1, bits)
    places = np.empty((len(stream), 8), np.uint8)
    for place, byte, shift in _PLACES[bits]:
        code = stream[:, byte] >> np.uint8(shift)
        if shift + bits > 8:  # continues in the next byte
            code |= stream[:, byte + 1] << np.uint8(8 - shift)
        places[:, place] = code
    places &= np.uint8((1 << bits) - 1)
    return places.reshape(len(words), -1)

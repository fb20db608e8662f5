"""Transforms of floating-point values: exponents, which repeat, apart from bits that are noise.

A 16-bit value ``s eeeeeeee mmmmmmm`` becomes the byte ``e`` in one plane and the byte ``s m`` in another.
A 32-bit value is such a value with 16 more bits of noise below. The code uses casts, masks and products
of whole arrays, which compile to vector instructions; strided slices take five times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression import exponents
from blobstore.compression.scratch import scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Words = np.ndarray[Any, np.dtype[np.uint16]]

_U2, _I2, _U4 = np.dtype("<u2"), np.dtype("<i2"), np.dtype("<u4")
# Constants, because creating one takes as long as a short loop.
_NOISE = np.uint16(0x807F)
_SHIFT_7 = np.uint16(1 << 7)
_SHIFT_8 = np.uint16(1 << 8)
_SHIFT_16 = np.uint32(1 << 16)


class FloatTransform(NamedTuple):
    """Splits bfloat16 or float32 values into planes.

    The planes are the exponents, then the noise (signs and mantissas), then the lower 16 bits of
    32-bit values. Paired exponents are two planes: a list of exceptions and the pairs.
    """

    width: int
    """Bytes of a value: 2 or 4."""
    paired: bool
    """Whether exponents are stored two per byte, which needs an even number of values."""
    split_low: bool = False
    """Whether the lower 16 bits are two planes of bytes instead of one of words."""

    def sizes(self, elements: int) -> tuple[int, ...]:
        """Return the sizes of the planes; none if this number of values does not suit."""
        if self.paired and elements % 2:
            return ()
        upper: tuple[int, ...] = (elements,)
        if self.paired:
            upper = -exponents.list_limit(elements), elements // 2
        if self.width == _U2.itemsize:
            return *upper, elements
        lower = (elements, elements) if self.split_low else (elements * 2,)
        return *upper, elements, *lower

    def encode(self, chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes] | None:
        """Return the planes, or None if the exponents do not suit pairs."""
        if self.paired and len(chunk) % (2 * self.width):
            return None
        if self.width == _U2.itemsize:
            upper, lower = chunk.view(_U2), None
        else:
            values, wide = chunk.view(_U4), scratch("wide", len(chunk)).view(_U4)
            upper, lower = (scratch(name, len(chunk) // 2).view(_U2) for name in ("upper", "lower"))
            np.copyto(lower, values, casting="unsafe")
            np.right_shift(values, np.uint32(16), out=wide)
            np.copyto(upper, wide, casting="unsafe")
        powers, noise = _split_words(upper)
        upper_planes: tuple[Bytes, ...] = (powers,)
        if self.paired:
            packed = exponents.pack(powers)
            if packed is None:
                return None
            upper_planes = packed
        if lower is None:
            return *upper_planes, noise
        lower_planes = _split_bytes(lower) if self.split_low else (lower.view(np.uint8),)
        return *upper_planes, noise, *lower_planes

    def decode(self, planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
        """Write the values."""
        is_wide = self.width != _U2.itemsize
        upper = (scratch("upper", len(out) // 2) if is_wide else out).view(_U2)
        powers, rest = planes[0], planes[1:]
        if self.paired:
            powers, rest = scratch("powers", len(upper)), planes[2:]
            exponents.unpack(planes[0], planes[1], powers)
        _join_words(powers, rest[0], upper)
        if is_wide:
            lower = _join_bytes(*rest[1:]) if self.split_low else rest[1].view(_U2)
            values, wide = out.view(_U4), scratch("wide", len(out)).view(_U4)
            np.copyto(values, upper)
            np.multiply(values, _SHIFT_16, out=values)
            np.copyto(wide, lower)
            np.bitwise_or(values, wide, out=values)


def e4m3_sizes(elements: int) -> tuple[int, ...]:
    """Return the sizes of the planes: pairs of exponents, and pairs of signs and mantissas."""
    return () if elements % 2 else (elements // 2, elements // 2)


def encode_e4m3(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes] | None:
    """Return a plane of exponents and one of signs and mantissas, each with two values per byte."""
    if len(chunk) % 2:
        return None
    half = len(chunk) // 2
    pairs, rest = scratch("pairs", half), scratch("rest", half)
    first, second = chunk[:half], chunk[half:]
    np.right_shift(first, np.uint8(3), out=pairs)
    np.bitwise_and(pairs, np.uint8(0x0F), out=pairs)
    _add_bits(pairs, np.multiply, second, 2, 0xF0)
    # The second value takes the bits of the first one's exponent: its mantissa at 3, its sign at 6.
    np.bitwise_and(first, np.uint8(0x87), out=rest)
    _add_bits(rest, np.right_shift, second, 1, 0x40)
    _add_bits(rest, np.multiply, second, 8, 0x38)
    return pairs, rest


def decode_e4m3(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    """Write the values."""
    pairs, rest = planes
    half = len(pairs)
    work = scratch("shifted", half)
    first, second = out[:half], out[half:]
    np.bitwise_and(pairs, np.uint8(0x0F), out=first)
    np.multiply(first, np.uint8(8), out=first)
    np.bitwise_and(rest, np.uint8(0x87), out=work)
    np.bitwise_or(first, work, out=first)
    np.right_shift(pairs, np.uint8(1), out=second)
    np.bitwise_and(second, np.uint8(0x78), out=second)
    _add_bits(second, np.right_shift, rest, 3, 0x07)
    _add_bits(second, np.multiply, rest, 2, 0x80)


def _add_bits(target: Bytes, move: np.ufunc, values: Bytes, by: int, mask: int) -> None:
    """Set the bits of ``target`` that values have under a mask once they are moved."""
    work = scratch("shifted", len(values))
    move(values, np.uint8(by), out=work)
    np.bitwise_and(work, np.uint8(mask), out=work)
    np.bitwise_or(target, work, out=target)


def _split_words(words: Words) -> tuple[Bytes, Bytes]:
    """Return the exponents, and the signs with the mantissas."""
    count = len(words)
    work, noise = (scratch(name, count * 2).view(_U2) for name in ("words", "noise"))
    powers, rest = scratch("powers", count), scratch("rest", count)
    np.right_shift(words, np.uint16(7), out=work)
    np.copyto(powers, work, casting="unsafe")
    np.bitwise_and(words, _NOISE, out=noise)
    np.right_shift(noise, np.uint16(8), out=work)  # leaves only the sign, in its place
    np.bitwise_or(noise, work, out=noise)
    np.copyto(rest, noise, casting="unsafe")
    return powers, rest


def _join_words(powers: Bytes, rest: Bytes, words: Words) -> None:
    work = scratch("words", len(words) * 2).view(_U2)
    # Extending the sign copies it to the top bit; the mask clears the copies in between.
    np.copyto(words.view(_I2), rest.view(np.int8))
    np.bitwise_and(words, _NOISE, out=words)
    np.copyto(work, powers)
    np.multiply(work, _SHIFT_7, out=work)  # twice as fast as a shift
    np.bitwise_or(words, work, out=words)


def _split_bytes(words: Words) -> tuple[Bytes, Bytes]:
    """Return the upper and the lower bytes of words, which are overwritten."""
    upper, lower = scratch("higher", len(words)), scratch("lowest", len(words))
    np.copyto(lower, words, casting="unsafe")
    np.right_shift(words, np.uint16(8), out=words)
    np.copyto(upper, words, casting="unsafe")
    return upper, lower


def _join_bytes(upper: Bytes, lower: Bytes) -> Words:
    words = scratch("lower", len(upper) * 2).view(_U2)
    work = scratch("words", len(upper) * 2).view(_U2)
    np.copyto(words, upper)
    np.multiply(words, _SHIFT_8, out=words)
    np.copyto(work, lower)
    np.bitwise_or(words, work, out=words)
    return words

"""Planes of floating-point numbers: the exponents, which are few, apart from bits like noise.

A number of 16 bits, ``s eeeeeeee mmmmmmm``, becomes the byte ``e`` in one plane and the byte ``s m``
in another. Numbers of 32 bits are such numbers with 16 more bits of noise below. All is done with
casts, masks and products of whole arrays, which processors do on many elements at once; slices with
steps take five times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.compression import exponents
from blobstore.compression.scratch import scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Words = np.ndarray[Any, np.dtype[np.uint16]]

_U2, _I2, _U4 = np.dtype("<u2"), np.dtype("<i2"), np.dtype("<u4")
# Made once, for making them takes as long as a short loop.
_NOISE = np.uint16(0x807F)
_SHIFT_7 = np.uint16(1 << 7)
_SHIFT_8 = np.uint16(1 << 8)
_SHIFT_16 = np.uint32(1 << 16)


def bf16_sizes(elements: int) -> tuple[int, ...]:
    """Return the sizes of the planes: exponents, and signs with mantissas."""
    return elements, elements


def split_bf16(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes]:
    """Return the exponents, and signs with mantissas."""
    return _split_words(chunk.view(_U2))


def merge_bf16(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    """Write numbers."""
    _merge_words(planes[0], planes[1], out.view(_U2))


def bf16_pair_sizes(elements: int) -> tuple[int, ...]:
    """Return the sizes of the planes: a list, pairs of exponents, and signs with mantissas."""
    if elements % 2:
        return ()
    return -exponents.list_limit(elements), elements // 2, elements


def split_bf16_pairs(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes] | None:
    """Return the list, pairs of exponents, and signs with mantissas."""
    return _split_pairs(chunk.view(_U2))


def merge_bf16_pairs(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    """Write numbers."""
    _merge_pairs(planes, out.view(_U2))


def f32_sizes(elements: int) -> tuple[int, ...]:
    """Return the sizes of the planes: as those of the upper halves, and the lower halves."""
    return elements, elements, elements * 2


def split_f32(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes]:
    """Return the planes of the upper halves, and the lower halves as they are."""
    upper, lower = _halves(chunk)
    return *_split_words(upper), lower.view(np.uint8)


def merge_f32(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    """Write numbers."""
    upper = scratch("upper", len(out) // 2).view(_U2)
    _merge_words(planes[0], planes[1], upper)
    _join(upper, planes[2], out)


def f32_pair_sizes(elements: int) -> tuple[int, ...]:
    """Return the sizes of the planes: as the pairs of the upper halves, and the lower halves."""
    return () if elements % 2 else (*bf16_pair_sizes(elements), elements * 2)


def split_f32_pairs(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes] | None:
    """Return the planes of the upper halves, exponents as pairs, and the lower halves."""
    upper, lower = _halves(chunk)
    planes = _split_pairs(upper)
    return None if planes is None else (*planes, lower.view(np.uint8))


def merge_f32_pairs(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    """Write numbers."""
    upper = scratch("upper", len(out) // 2).view(_U2)
    _merge_pairs(planes, upper)
    _join(upper, planes[3], out)


def f32_byte_sizes(elements: int) -> tuple[int, ...]:
    """Return the sizes of the planes: as those of the upper halves, and two of bytes."""
    return (elements,) * 4


def split_f32_bytes(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes]:
    """Return the planes of the upper halves, the higher of the lower bytes, and the lowest."""
    upper, lower = _halves(chunk)
    return *_split_words(upper), *_split_bytes(lower)


def merge_f32_bytes(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    """Write numbers."""
    upper = scratch("upper", len(out) // 2).view(_U2)
    _merge_words(planes[0], planes[1], upper)
    _join(upper, _merge_bytes(planes[2], planes[3]), out)


def f32_byte_pair_sizes(elements: int) -> tuple[int, ...]:
    """Return the sizes of the planes: as the pairs of the upper halves, and two of bytes."""
    return () if elements % 2 else (*bf16_pair_sizes(elements), elements, elements)


def split_f32_byte_pairs(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes] | None:
    """Return the planes of the upper halves, exponents as pairs, and two of bytes as above."""
    upper, lower = _halves(chunk)
    planes = _split_pairs(upper)
    return None if planes is None else (*planes, *_split_bytes(lower))


def merge_f32_byte_pairs(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    """Write numbers."""
    upper = scratch("upper", len(out) // 2).view(_U2)
    _merge_pairs(planes, upper)
    _join(upper, _merge_bytes(planes[3], planes[4]), out)


def e4m3_sizes(elements: int) -> tuple[int, ...]:
    """Return the sizes of the planes: pairs of exponents, and pairs of signs with mantissas."""
    return () if elements % 2 else (elements // 2, elements // 2)


def split_e4m3(chunk: Bytes, _base: Bytes | None) -> Sequence[Bytes] | None:
    """Return the exponents of two numbers to a byte, and so signs with mantissas."""
    if len(chunk) % 2:
        return None
    half = len(chunk) // 2
    pairs, rest, work = scratch("pairs", half), scratch("rest", half), scratch("shifted", half)
    first, second = chunk[:half], chunk[half:]
    np.right_shift(first, np.uint8(3), out=pairs)
    np.bitwise_and(pairs, np.uint8(0x0F), out=pairs)
    np.multiply(second, np.uint8(2), out=work)
    np.bitwise_and(work, np.uint8(0xF0), out=work)
    np.bitwise_or(pairs, work, out=pairs)
    # The second number's bits lie where the first one's exponent was: the mantissa at 3, the sign at 6.
    np.bitwise_and(first, np.uint8(0x87), out=rest)
    np.right_shift(second, np.uint8(1), out=work)
    np.bitwise_and(work, np.uint8(0x40), out=work)
    np.bitwise_or(rest, work, out=rest)
    np.multiply(second, np.uint8(8), out=work)
    np.bitwise_and(work, np.uint8(0x38), out=work)
    np.bitwise_or(rest, work, out=rest)
    return pairs, rest


def merge_e4m3(planes: Sequence[Bytes], out: Bytes, _base: Bytes | None) -> None:
    """Write numbers."""
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
    np.right_shift(rest, np.uint8(3), out=work)
    np.bitwise_and(work, np.uint8(0x07), out=work)
    np.bitwise_or(second, work, out=second)
    np.multiply(rest, np.uint8(2), out=work)
    np.bitwise_and(work, np.uint8(0x80), out=work)
    np.bitwise_or(second, work, out=second)


def _split_words(words: Words) -> tuple[Bytes, Bytes]:
    """Return exponents, and signs with mantissas."""
    count = len(words)
    work, noise = (scratch(name, count * 2).view(_U2) for name in ("words", "noise"))
    powers, rest = scratch("powers", count), scratch("rest", count)
    np.right_shift(words, np.uint16(7), out=work)
    np.copyto(powers, work, casting="unsafe")
    np.bitwise_and(words, _NOISE, out=noise)
    np.right_shift(noise, np.uint16(8), out=work)  # the sign alone, to where it belongs
    np.bitwise_or(noise, work, out=noise)
    np.copyto(rest, noise, casting="unsafe")
    return powers, rest


def _merge_words(powers: Bytes, rest: Bytes, words: Words) -> None:
    work = scratch("words", len(words) * 2).view(_U2)
    # Signed, so that the sign is at the top afterwards too, and in between, from where it goes.
    np.copyto(words.view(_I2), rest.view(np.int8))
    np.bitwise_and(words, _NOISE, out=words)
    np.copyto(work, powers)
    np.multiply(work, _SHIFT_7, out=work)  # twice as fast as a shift
    np.bitwise_or(words, work, out=words)


def _split_pairs(words: Words) -> Sequence[Bytes] | None:
    if len(words) % 2:
        return None
    powers, rest = _split_words(words)
    packed = exponents.pack(powers)
    return None if packed is None else (*packed, rest)


def _merge_pairs(planes: Sequence[Bytes], words: Words) -> None:
    powers = scratch("powers", len(words))
    exponents.unpack(planes[0], planes[1], powers)
    _merge_words(powers, planes[2], words)


def _split_bytes(words: Words) -> tuple[Bytes, Bytes]:
    """Return the upper bytes and the lower bytes of words, which are used up."""
    upper, lower = scratch("higher", len(words)), scratch("lowest", len(words))
    np.copyto(lower, words, casting="unsafe")
    np.right_shift(words, np.uint16(8), out=words)
    np.copyto(upper, words, casting="unsafe")
    return upper, lower


def _merge_bytes(upper: Bytes, lower: Bytes) -> Bytes:
    """Return the words that have these bytes, as bytes."""
    words = scratch("lower", len(upper) * 2).view(_U2)
    work = scratch("words", len(upper) * 2).view(_U2)
    np.copyto(words, upper)
    np.multiply(words, _SHIFT_8, out=words)
    np.copyto(work, lower)
    np.bitwise_or(words, work, out=words)
    return words.view(np.uint8)


def _halves(chunk: Bytes) -> tuple[Words, Words]:
    """Return the upper and the lower halves of numbers of 32 bits."""
    values = chunk.view(_U4)
    upper, lower = (scratch(name, len(chunk) // 2).view(_U2) for name in ("upper", "lower"))
    wide = scratch("wide", len(chunk)).view(_U4)
    np.copyto(lower, values, casting="unsafe")
    np.right_shift(values, np.uint32(16), out=wide)
    np.copyto(upper, wide, casting="unsafe")
    return upper, lower


def _join(upper: Words, lower: Bytes, out: Bytes) -> None:
    values = out.view(_U4)
    wide = scratch("wide", len(out)).view(_U4)
    np.copyto(values, upper)
    np.multiply(values, _SHIFT_16, out=values)
    np.copyto(wide, lower.view(_U2))
    np.bitwise_or(values, wide, out=values)

"""Stores which elements of a chunk differ, as the gaps between them.

Elements are numbered in the order of their classes, so that the gaps of a class have one narrow
distribution. A gap has low bits, which are stored as they are, and a high part, which is a byte. The
number of low bits of a class suits its mean gap: then the high parts of all classes are distributed
alike, and share one Huffman code.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.compression.entropy import Method, declared_size, decode_plane, encode_plane
from blobstore.compression.scratch import scratch
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from blobstore.compression.entropy import Coder

    Array = np.ndarray[Any, Any]

_LOW_BITS: Final = 3
"""Bits of the field that has the number of low bits of a class."""
_MAX_LOW: Final = (1 << _LOW_BITS) - 1
_FIELD: Final = 3
"""Bytes of a class's number of elements that differ, and of low bits."""
_HIGH_BITS: Final = 3
"""Bits of the mean high part."""
_MORE: Final = 255
"""A byte of a high part that is followed by another one, to be added."""
_PLANE: Final = struct.Struct("<BI")
_BRANCHED: Final = 9
_RARE: Final = 1 << 6
"""numpy branches on elements if at most a tenth are True, which costs time if more than so many are."""


def nonzero(mask: Array) -> Array:
    """Return the indexes of the True elements of a mask; this is fast if they are rare."""
    whole = len(mask) & ~7
    words = mask[:whole].view(np.uint64)
    places = _true(words != 0)
    within = words.take(places).view(np.bool).nonzero()[0]
    found: Array = places.take(within >> 3)
    found <<= 3
    within &= 7
    found += within
    if whole == len(mask):
        return found
    return np.concatenate([found, np.flatnonzero(mask[whole:]) + whole])


def _true(flags: Array) -> Array:
    """Return the indexes of the True elements of flags.

    numpy branches on each element if at most a tenth are True, which takes longer than to look at all unless
    they are very rare. So some more are appended.
    """
    count = len(flags)
    found = int(np.count_nonzero(flags))
    if not count // _RARE < found <= count // _BRANCHED:
        return flags.nonzero()[0]
    longer = scratch("delta flags", count + count // _BRANCHED + 1).view(np.bool)
    longer[:count] = flags
    longer[count:] = True
    return longer.nonzero()[0][:found]


def counts_of(ranks: Array, sizes: Sequence[int]) -> list[int]:
    """Return how many of some ascending ranks are in each class, given the sizes of the classes."""
    if len(sizes) == 1:
        return [len(ranks)]
    found: list[int] = np.diff(ranks.searchsorted(np.cumsum(sizes)), prepend=0).tolist()
    return found


def encode(
    ranks: Array, counts: Sequence[int], sizes: Sequence[int], coders: Sequence[Coder]
) -> bytes:
    """Return stored ranks.

    Args:
        ranks: the numbers of elements in the order of their classes, ascending.
        counts: how many of them each class has.
        sizes: how many elements each class has in total.
        coders: the coders to try on the high parts.
    """
    gaps = np.empty(len(ranks), np.int64)
    np.subtract(ranks[1:], ranks[:-1], out=gaps[1:])
    gaps -= 1
    fields, packed, at, start = [], [], 0, 0
    for count, size in zip(counts, sizes, strict=True):
        mine = gaps[at : at + count]
        low = 0
        if count:
            mine[0] = ranks[at] - start
            total = int(ranks[at + count - 1]) - start + 1 - count
            low = _low_bits_for(total // count)
        fields.append((count << _LOW_BITS | low).to_bytes(_FIELD, "little"))
        if low:
            packed.append(_pack(mine, low))
            mine >>= low
        at, start = at + count, start + size
    plane = encode_plane(_to_bytes(gaps).data, coders)
    return b"".join([*fields, _PLANE.pack(plane.method, plane.size), plane.data, *packed])


def decode(stored: memoryview, sizes: Sequence[int]) -> tuple[Array, list[int]]:
    """Return ranks, and how many of them each class has.

    Args:
        stored: what :func:`encode` returned.
        sizes: how many elements each class has in total.

    Raises:
        ColdDamaged: the ranks cannot be decoded, or are not within their classes.
        struct.error: the bytes end too early.
    """
    at = _FIELD * len(sizes)
    method, size = _PLANE.unpack_from(stored, at)
    fields = [
        int.from_bytes(stored[begin : begin + _FIELD], "little") for begin in range(0, at, _FIELD)
    ]
    classes = [(field >> _LOW_BITS, field & _MAX_LOW) for field in fields]
    at += _PLANE.size
    behind = at + size
    end = behind + sum(_packed_size(count, low) for count, low in classes)
    if end != len(stored):
        raise ColdDamaged(f"the places of differences take {end} bytes, not {len(stored)}")
    for (count, _), most in zip(classes, sizes, strict=True):
        if count > most:
            raise ColdDamaged(f"{count} of {most} differences cannot be listed")
    total = sum(count for count, _ in classes)
    highs = _high_bytes(method, stored[at:behind], total + sum(sizes) // _MORE)
    ranks = _from_bytes(highs, total)
    at = start = 0
    for (count, low), most in zip(classes, sizes, strict=True):
        if count:
            mine = ranks[at : at + count]
            if low:
                mine <<= low
                taken = _packed_size(count, low)
                mine += _unpack(stored[behind : behind + taken], low, count)
                behind += taken
            mine += 1
            mine.cumsum(out=mine)
            if mine[-1] > most:
                raise ColdDamaged(f"difference {mine[-1] - 1} of {most} cannot be listed")
            mine += start - 1
        at, start = at + count, start + most
    return ranks, [count for count, _ in classes]


def _low_bits_for(mean: int) -> int:
    """Return the number of low bits that suits the mean gap of a class."""
    return min(max(mean.bit_length() - _HIGH_BITS, 0), _MAX_LOW)


def _to_bytes(highs: Array) -> Array:
    if not len(highs) or highs.max() < _MORE:
        return highs.astype(np.uint8)
    long = np.flatnonzero(highs >= _MORE)  # few, and numpy divides slowly
    times, rest = np.divmod(highs[long], _MORE)
    found = highs.astype(np.uint8)
    found[long] = rest
    return np.insert(found, long.repeat(times), np.uint8(_MORE))


def _from_bytes(stored: Array, count: int) -> Array:
    """Return ``count`` high parts.

    Raises:
        ColdDamaged: there is another number of them.
    """
    last = stored != _MORE
    many = int(np.count_nonzero(last))
    if many != count or (len(stored) and not last[-1]):
        raise ColdDamaged(f"there are {many} gaps for {count} differences")
    if len(stored) == count:
        return stored.astype(np.int64)
    return np.diff(np.cumsum(stored, dtype=np.int64)[last], prepend=0)


def _high_bytes(method: int, stored: memoryview, most: int) -> Array:
    """Return the bytes of the high parts, of which there are at most ``most``."""
    if method not in {Method.RAW, Method.ZSTD}:
        raise ColdDamaged(f"gaps between differences have the unknown method {method}")
    size = len(stored) if method == Method.RAW else declared_size(stored)
    if not 0 <= size <= most:
        raise ColdDamaged(f"the gaps between differences cannot take {size} bytes")
    plane = scratch("delta plane", size)
    decode_plane(method, stored, plane.data)
    return plane


def _packed_size(count: int, low: int) -> int:
    """Return the bytes that the low bits of a class take."""
    return -(-count * low // 8)


def _pack(gaps: Array, low: int) -> bytes:
    """Return the low bits of the gaps of a class, one after the other, each from its lowest on."""
    words = np.zeros((-(-len(gaps) // 8), 8), "<u8")
    np.bitwise_and(gaps, (1 << low) - 1, out=words.reshape(-1)[: len(gaps)], casting="unsafe")
    joined = words @ _factors(low)  # faster than shifts
    packed: bytes = joined.view(np.uint8).reshape(-1, 8)[:, :low].tobytes()
    return packed[: _packed_size(len(gaps), low)]


def _unpack(stored: memoryview, low: int, count: int) -> Array:
    """Reverse :func:`_pack`."""
    many = -(-count // 8)
    packed = np.zeros(many * low, np.uint8)
    packed[: len(stored)] = np.frombuffer(stored, np.uint8)
    words = np.zeros((many, 8), np.uint8)
    words[:, :low] = packed.reshape(many, low)
    spread = words.view("<i8") >> _shifts(low).astype(np.int64)
    spread &= (1 << low) - 1
    return spread.reshape(-1)[:count]


@cache
def _factors(low: int) -> Array:
    """Return the factors that shift the low bits of eight gaps to their places in a word."""
    return np.left_shift(np.uint64(1), _shifts(low))


@cache
def _shifts(low: int) -> Array:
    """Return the positions of the low bits of eight gaps in a word; they have at most 56 bits."""
    return np.arange(0, 8 * low, low, dtype=np.uint64)

"""Planes of exponents stored as pairs: two per byte, if nearly all lie in a window of sixteen.

Half the symbols take half the time to decode. A plane ``e`` of ``n`` exponents becomes ``n / 2`` bytes:
byte ``k`` holds ``e[k] - base`` in its lower half and ``e[k + n / 2] - base`` in its upper half. Exponents
outside the window ``base .. base + 15`` are listed separately, in order of position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.compression.scratch import scratch
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from typing import Final

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]
    Positions = np.ndarray[Any, np.dtype[np.int64]]

_WINDOW: Final = 16
_RARE: Final = 1 << 9
"""The first window may miss one exponent in so many before a better one is searched."""
_LIMIT: Final = 1 << 6
"""A window may miss at most one exponent in so many; with more, pairs would be too large."""
_FAR: Final = 0xFFFF
_ENTRY: Final = 3
_LOWER: Final = np.uint8(_WINDOW - 1)
_UPPER: Final = np.uint8(4)
_ABOVE: Final = np.uint64(0xF0F0F0F0F0F0F0F0)
"""The bits of eight exponents, minus their base, that are 0 inside the window."""


def list_limit(elements: int) -> int:
    """Return the maximum size of the list in bytes."""
    return 1 + _ENTRY * (elements // _LIMIT + elements // _FAR + 1)


def pack(exponents: Bytes) -> tuple[Bytes, Bytes] | None:
    """Return the list and the pairs, or None if too many exponents lie outside of any window.

    The number of exponents must be even.
    """
    count = len(exponents)
    shifted = scratch("shifted", count)
    base = max(int(exponents.max()) - _WINDOW + 1, 0)
    outside = _outside(exponents, base, shifted)
    if len(outside) > count // _RARE:
        # Take the window that misses the fewest.
        counts = np.cumsum(np.bincount(exponents, minlength=256))
        inside = counts[_WINDOW - 1 :].copy()
        inside[1:] -= counts[:-_WINDOW]
        base = int(inside.argmax())
        outside = _outside(exponents, base, shifted)
        if len(outside) > count // _LIMIT:
            return None
    if len(outside):
        shifted[outside] = 0
    # List the base, the gaps between positions as 16 bits each, and the exponents there.
    gaps = np.diff(outside, prepend=0)
    if len(gaps) and int(gaps.max()) > _FAR:  # bridge wide gaps with exponents inside the window
        outside = np.union1d(outside, np.arange(0, count, _FAR))
        gaps = np.diff(outside, prepend=0)
    start = np.array([base], np.uint8)
    listed = np.concatenate([start, gaps.astype("<u2").view(np.uint8), exponents[outside]])
    pairs = scratch("pairs", count // 2)
    np.multiply(shifted[count // 2 :], np.uint8(_WINDOW), out=pairs)
    np.bitwise_or(pairs, shifted[: count // 2], out=pairs)
    return listed, pairs


def unpack(listed: Bytes, pairs: Bytes, exponents: Bytes) -> None:
    """Write the exponents of a list and pairs.

    Raises:
        ColdDamaged: the list is malformed, or has positions out of range.
    """
    half = len(pairs)
    np.bitwise_and(pairs, _LOWER, out=exponents[:half])
    np.right_shift(pairs, _UPPER, out=exponents[half:])
    if not len(listed) or len(listed) % _ENTRY != 1:
        raise ColdDamaged(f"a list of exponents cannot have {len(listed)} bytes")
    np.add(exponents, listed[0], out=exponents)
    count = len(listed) // _ENTRY
    if count:
        gaps = listed[1 : 1 + 2 * count].tobytes()
        positions = np.cumsum(np.frombuffer(gaps, "<u2"), dtype=np.int64)
        if positions[-1] >= len(exponents):
            raise ColdDamaged(
                f"a list of exponents has position {positions[-1]} of {len(exponents)}"
            )
        exponents[positions] = listed[1 + 2 * count :]


def _outside(exponents: Bytes, base: int, shifted: Bytes) -> Positions:
    """Write the exponents minus ``base``, and return the positions of those outside the window."""
    np.subtract(exponents, np.uint8(base), out=shifted)  # those below wrap around to large values
    whole = len(shifted) & ~7
    # Test eight at a time, because there are few: searching single bytes is slower than the coder.
    eights = shifted[:whole].view(np.uint64)
    work = scratch("words", whole).view(np.uint64)
    np.bitwise_and(eights, _ABOVE, out=work)
    found = np.flatnonzero(work != 0)[:, None] * 8 + np.arange(8)
    positions: Positions = np.concatenate([found.ravel(), np.arange(whole, len(shifted))])
    outside: Positions = positions[shifted[positions] >= _WINDOW]
    return outside

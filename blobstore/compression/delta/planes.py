"""Stores differences as planes: two or four per byte, one per byte, or several bytes each.

A Huffman code spends at least one bit, and time, on every symbol. So if nearly all differences are -1, 0
and 1, four of them are one symbol; if nearly all are within 7 of zero, two are. The others get an escape
code and are listed after the plane. The bytes of wider differences are planes. Each but the highest
counts from -128, so that small differences of either sign have zeros above. Neighbouring classes of one
form are one segment, in which each class begins a block with its own codes.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.entropy import Coder, Plane, decode_plane, encode_plane
from blobstore.compression.scratch import scratch
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Final

    Array = np.ndarray[Any, Any]

_LEAST_BITS: Final = 1.02
"""Minimum cost of a symbol of a Huffman code."""
_WASTED_BITS: Final = 0.04
"""Excess of a symbol's code over its entropy; it also represents decoding time."""
_SEGMENT_BITS: Final = 1000
"""Cost of a segment, most of which represents decoding time."""
_PLACES_BITS: Final = 24
"""Cost of a class whose nonzero differences are listed, besides the gaps between them."""
_LEAST_BLOCK: Final = 1 << 10
"""Minimum size of a block with its own Huffman table, in bytes."""


class Form(enum.IntEnum):
    """The form of a segment; from ``BYTES`` on, ``form - BYTES + 1`` planes of bytes.

    Behind ``GAPS``, the nonzero differences are listed in the form ``form - GAPS`` (`listed`).
    """

    ZERO = 0
    CRUMBS = 1
    NIBBLES = 2
    ESCAPED = 3
    BYTES = 4
    GAPS = 16


_BYTE: Final = 8
"""Bits of a byte."""
_BITS: Final = (0, 2, 4, _BYTE)
"""Bits per difference in the forms with escapes; the lowest value is the escape code."""
_FACTORS: Final = {
    bits: np.left_shift(np.uint8(1), np.arange(0, _BYTE, bits, dtype=np.uint8)).reshape(-1, 1)
    for bits in _BITS[1:-1]
}
"""Factors that shift the differences of a byte to their places in it."""


class Segment(NamedTuple):
    """Encoded differences."""

    form: int
    planes: list[Plane]
    escapes: int = 0
    """The number of differences that are replaced with an escape code."""
    escaped: bytes = b""
    """These differences, unless they are a plane."""


def planes_of(form: int, escapes: int = 0) -> int:
    """Return the number of planes of a form with so many escapes.

    Raises:
        ColdDamaged: there is no such form.
    """
    inner = form - Form.GAPS if form > Form.GAPS else form
    if inner >= Form.BYTES + 8:
        raise ColdDamaged(f"differences have the unknown form {form}")
    count = max(inner - Form.BYTES + 1, min(inner, 1))
    return count if inner == form else 1 + count + (escapes > 0)


def largest(form: int) -> int:
    """Return the largest difference that a form with escapes has a code for."""
    return (1 << (_BITS[form] - 1)) - 1


class Histogram(NamedTuple):
    """Estimated counts of the values in the differences of each class, scaled from a sample."""

    small: Array
    """Of shape (classes, 257): the differences from -128 to 127, and all others."""
    bytes: list[Array]
    """Of shape (classes, 256) each: the bytes of the differences, the lowest first."""

    @classmethod
    def of(cls, sample: Array, classes: Array, many: int, scale: float) -> Histogram:
        """Count a sample of signed differences; each stands for ``scale`` of them.

        Args:
            sample: the differences.
            classes: the class of each of them.
            many: the number of classes.
            scale: the number of differences that each one represents.
        """
        rest = sample.astype(np.int64)
        first = classes.astype(np.int64)
        small = _counts(first, rest.clip(-128, 128) + 128, many, 257) * scale
        planes = []
        for _ in range(sample.itemsize):
            low = rest.astype(np.int8)
            planes.append(_counts(first, low.view(np.uint8), many, 256) * scale)
            rest = (rest - low) >> 8
        return cls(small, planes)

    def merged(self) -> Histogram:
        """Return the counts of all classes as one."""
        planes = [values.sum(axis=0, keepdims=True) for values in self.bytes]
        return Histogram(self.small.sum(axis=0, keepdims=True), planes)

    def costs(self) -> Array:
        """Estimate the bits of each class in the forms from `CRUMBS` to `BYTES`."""
        return self._costs(_BYTE * len(self.bytes))

    def listed_costs(self) -> Array:
        """Estimate the bits of each class in these forms behind the places of nonzero differences."""
        zeros = self.small[:, 128]
        listed = Histogram(self.small.copy(), [values.copy() for values in self.bytes])
        for values, zero in [(listed.small, 128), *((values, 0) for values in listed.bytes)]:
            values[:, zero] = np.maximum(values[:, zero] - zeros, 0)
        sizes, nonzero = self.bytes[0].sum(axis=1), listed.bytes[0].sum(axis=1)
        entropy = xlogx(sizes) - xlogx(nonzero) - xlogx(sizes - nonzero)
        places = _code_bits(entropy, nonzero) + _PLACES_BITS
        costs: Array = listed._costs(_BYTE) + places[:, None]
        # If most differences are 1 and -1, codes of one bit and two are too long for single symbols.
        ones = listed.small[:, 127] + listed.small[:, 129]
        excess = ones * (0.5 + np.log2(np.maximum(ones, 1) / np.maximum(nonzero, 1)))
        costs[:, Form.ESCAPED - 1 :] += np.maximum(excess, 0)[:, None]
        return costs

    def _costs(self, escape_bits: int) -> Array:
        width, sizes = len(self.bytes), self.bytes[0].sum(axis=1)
        logs = xlogx(self.small)
        costs = np.full((len(sizes), len(_BITS)), np.inf)
        for form, bits in enumerate(_BITS):
            if 0 < bits < _BYTE * width:
                half = (1 << (bits - 1)) - 1
                inside = slice(128 - half, 129 + half)
                escapes = np.maximum(sizes - self.small[:, inside].sum(axis=1), 0)
                entropy = xlogx(sizes) - logs[:, inside].sum(axis=1) - xlogx(escapes)
                codes = _code_bits(entropy, sizes * bits / _BYTE)
                costs[:, form - 1] = codes + escape_bits * escapes
        costs[:, -1] = _WASTED_BITS * sizes  # even an empty plane takes time
        for values in self.bytes:
            used = (values > 0).sum(axis=1)
            entropy = xlogx(sizes) - xlogx(values).sum(axis=1)
            costs[:, -1] += np.minimum(_code_bits(entropy, sizes), _BYTE * sizes) * (used > 1)
        return costs


def choose(costs: Array, width: int) -> list[tuple[int, int]]:
    """Return the number of classes and the form of each segment.

    Args:
        costs: the bits of each class in each form, as :meth:`Histogram.costs` returns them; those of
            :meth:`Histogram.listed_costs` may follow.
        width: bytes of a difference.
    """
    total, came = costs[0], []
    for cost in costs[1:]:
        best = int(total.argmin())
        switched = total[best] + _SEGMENT_BITS < total
        came.append(np.where(switched, best, np.arange(len(total))))
        total = np.where(switched, total[best] + _SEGMENT_BITS, total) + cost
    forms = [int(total.argmin())]
    for origin in reversed(came):
        forms.append(int(origin[forms[-1]]))
    segments: list[tuple[int, int]] = []
    for choice in reversed(forms):
        form = choice % len(_BITS) + 1
        form = form if form < Form.BYTES else Form.BYTES + width - 1
        form += Form.GAPS * (choice // len(_BITS))
        count = segments.pop()[0] if segments and segments[-1][1] == form else 0
        segments.append((count + 1, form))
    return segments


def _counts(classes: Array, values: Array, many: int, size: int) -> Array:
    return np.bincount(classes * size + values, minlength=many * size).reshape(many, size)


def xlogx(counts: Array | int) -> Any:
    """Return ``counts * log2(counts)``, 0 for 0."""
    return counts * np.log2(np.maximum(counts, 1))


def _code_bits(entropy: Array, symbols: Array) -> Array:
    """Return the bits of Huffman codes, including their minimum and overhead."""
    return np.maximum(entropy + _WASTED_BITS * symbols, _LEAST_BITS * symbols)


def encode(differences: Array, sizes: Sequence[int], form: int, coders: Sequence[Coder]) -> Segment:
    """Encode differences; the result does not reference ``differences``.

    Args:
        differences: the differences of some classes.
        sizes: the number of differences in each class.
        form: the form from :func:`choose`, up to `GAPS`.
        coders: the coders to try on the planes; the second only if the first saves much.
    """
    if form == Form.ZERO:
        return Segment(form, [])
    if form >= Form.BYTES:
        planes, starts, rest = [], _block_starts(sizes, 8), differences
        for number in range(differences.itemsize):
            low = rest.astype(np.int8)
            planes.append(coded_plane(low.view(np.uint8), starts, coders))
            if number + 1 < differences.itemsize:
                rest = (rest - low) >> 8
                if not rest.any():
                    break
        return Segment(Form.BYTES + len(planes) - 1, planes)
    escapes = (magnitudes(differences) > largest(form)).nonzero()[0]
    plane = escaped_plane(differences, escapes, sizes, form, coders)
    return Segment(form, [plane], len(escapes), differences[escapes].tobytes())


def magnitudes(differences: Array) -> Array:
    """Return the distances of signed differences from zero, unsigned."""
    found: Array = np.abs(differences).view(f"<u{differences.itemsize}")
    return found


def escaped_plane(
    differences: Array, escapes: Array, sizes: Sequence[int], form: int, coders: Sequence[Coder]
) -> Plane:
    """Return the plane of a form with escapes, which are at these places."""
    bits = _BITS[form]
    small = differences.astype(np.int8)
    small[escapes] = -largest(form) - 1
    return coded_plane(_pack(small.view(np.uint8), bits), _block_starts(sizes, bits), coders)


def decode(form: int, planes: Iterator[tuple[int, memoryview]], escaped: Array, out: Array) -> None:
    """Decode differences of a form up to `GAPS` into ``out``.

    Raises:
        ColdDamaged: a plane is damaged, or the number of escape codes is wrong.
    """
    if len(escaped) and (form == Form.ZERO or form >= Form.BYTES):
        raise ColdDamaged(f"{len(escaped)} escaped differences in a form without escapes")
    if form == Form.ZERO:
        out[:] = 0
    elif form >= Form.BYTES:
        count = form - Form.BYTES + 1
        if count > out.itemsize:
            raise ColdDamaged(f"elements of {out.itemsize} bytes cannot have {count} planes")
        np.copyto(out, _plane(planes, len(out)).view(np.int8))
        wider = scratch("delta wider", out.nbytes).view(out.dtype)
        for number in range(1, count):
            np.copyto(wider, _plane(planes, len(out)).view(np.int8))
            np.left_shift(wider, 8 * number, out=wider)
            np.add(out, wider, out=out)
    else:
        bits = _BITS[form]
        codes = _plane(planes, -(-len(out) * bits // 8))
        _unpack(codes, bits, out)
        if len(escaped):
            code = -(1 << (bits - 1))
            is_escape = codes.view(np.int8) == code if bits == _BYTE else out == code
            places = np.flatnonzero(is_escape)
            if len(places) != len(escaped):
                raise ColdDamaged(f"{len(places)} escape codes for {len(escaped)} differences")
            out[places] = escaped


def _block_starts(sizes: Sequence[int], bits: int) -> list[int]:
    """Return the offsets in a packed plane where a class begins in any of its bit positions."""
    if len(sizes) == 1:
        return []
    total = sum(sizes)
    part = -(-total * bits // 8)
    starts: list[int] = []
    for place in sorted({int(end) % part for end in np.cumsum(sizes)}):
        if place - (starts[-1] if starts else 0) >= _LEAST_BLOCK and part - place >= _LEAST_BLOCK:
            starts.append(place)
    return starts


def coded_plane(plane: Array, starts: Sequence[int], coders: Sequence[Coder]) -> Plane:
    """Return a stored plane that does not reference ``plane``; blocks of their own begin at ``starts``."""
    coded = encode_plane(plane.data, coders[:1], block_starts=starts)
    if len(coders) > 1 and coded.size < len(plane) // 3:  # it may have long repetitions
        coded = min(coded, encode_plane(plane.data, coders[1:]), key=lambda one: one.size)
    return coded if coded.method else Plane(coded.method, bytes(coded.data), coded.size)


def _plane(planes: Iterator[tuple[int, memoryview]], size: int) -> Array:
    method, stored = next(planes)
    plane = scratch("delta plane", size)
    decode_plane(method, stored, plane.data)
    return plane


def _pack(small: Array, bits: int) -> Array:
    if bits == _BYTE:
        return small
    count = _BYTE // bits
    size = -(-len(small) // count)
    padded = np.zeros((count, size), np.uint8)
    np.bitwise_and(small, (1 << bits) - 1, out=padded.reshape(-1)[: len(small)])
    padded *= _FACTORS[bits]
    packed: Array = np.bitwise_or.reduce(padded, axis=0)
    return packed


def _unpack(codes: Array, bits: int, out: Array) -> None:
    if bits == _BYTE:
        np.copyto(out, codes.view(np.int8))
        return
    size = len(codes)
    shifted = scratch("delta shifted", size)
    signed = shifted.view(np.int8)
    for number in range(8 // bits):
        part = out[number * size : (number + 1) * size]
        factor = 1 << (8 - bits * (number + 1))
        np.multiply(codes, factor, out=shifted)  # shifts of bytes to the left are slow in numpy
        np.right_shift(signed, 8 - bits, out=signed)
        np.copyto(part, signed[: len(part)])

"""A chunk of a tensor as what differs from the same elements of another tensor, bit for bit.

Elements are compared as integers. The bits of a float of one sign sort like its value, so a step of
some units in the last place is a difference of as many, across powers of two as well; subtraction
wraps around, so that every pattern of bits has one difference from every other. Differences are
grouped by the exponent of what they start from (`delta_groups`) and every group takes the form that
suits it (`delta_segments`). Where much is equal, blocks of equal elements are left out first. What a chunk is coded against is in the caller's hands: the elements of a
base, or what is predicted from them (`delta_prediction`). docs/cold-format.md has the bytes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.delta import planes as segments
from blobstore.compression.delta.groups import (
    MAX_CLASSES,
    Classes,
    choose_classes,
    classes_of,
    gather,
    group,
    has_classes,
    scatter,
)
from blobstore.compression.entropy import Coder, decode_plane, encode_plane
from blobstore.compression.scratch import scratch
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Final

    from blobstore.compression.delta.groups import Groups
    from blobstore.core.tensor import DType

    Array = np.ndarray[Any, Any]

_LEAST_GROUPED: Final = 1 << 10
"""Elements below which a chunk is one class."""
_BLOCK: Final = 64
"""Elements that are left out together where none of them differs."""
_MOST: Final = 0.9
"""The part of blocks that may differ where some are left out."""
_SAMPLE: Final = 1 << 13
_HEAD: Final = struct.Struct("<BBB")
_SEGMENT: Final = struct.Struct("<BBI")
_PLANE: Final = struct.Struct("<BI")


class DeltaSettings(NamedTuple):
    """How much work to put into encoding a delta."""

    classes: int
    """Exponent classes at most."""
    min_gain: float
    """The fraction of a chunk that classes must save, because they double the decoding time."""
    coders: Sequence[Coder]
    """Coders to try on each plane."""


FAST: Final = DeltaSettings(6, 0.17, (Coder.HUFFMAN,))
SMALL: Final = DeltaSettings(8, 0.0, (Coder.HUFFMAN, Coder.ZSTD))


def as_elements(data: Any, dtype: DType) -> Array:
    """Return the bytes of a tensor as the integers that a chunk is coded by."""
    width = dtype.bits // 8 if dtype.bits in {8, 16, 32, 64} else 1
    return np.frombuffer(data, np.dtype(f"<u{width}"))


def encode_chunk(chunk: Array, start: Array, dtype: DType, settings: DeltaSettings) -> bytes:
    """Return what tells ``chunk`` from ``start``.

    Args:
        chunk: elements, as :func:`as_elements` gives them.
        start: as many elements that the decoder has too.
        dtype: the type of both.
        settings: what to try.
    """
    changed = _changed(chunk, start)
    if changed is None:
        return _encode_all(chunk, start, dtype, settings)
    inner = _encode_all(_blocks(chunk, changed), _blocks(start, changed), dtype, settings)
    coded = encode_plane(np.packbits(changed).data, settings.coders)
    head = _HEAD.pack(0, 0, 0) + _PLANE.pack(coded.method, coded.size)
    return b"".join([head, coded.data, inner])


def decode_chunk(stored: memoryview, start: Array, dtype: DType, out: Array) -> None:
    """Undo :func:`encode_chunk`; ``out`` may be ``start``.

    Raises:
        ColdDamaged: it is no such chunk. What is in ``out`` then is undefined.
    """
    try:
        _, many, _ = _HEAD.unpack_from(stored)
        if many:
            _decode_all(stored, start, dtype, out)
            return
        method, size = _PLANE.unpack_from(stored, _HEAD.size)
        at = _HEAD.size + _PLANE.size
        changed = _unpacked(method, stored[at : at + size], len(start) // _BLOCK)
        inner = _blocks(start, changed)
        _decode_all(stored[at + size :], inner, dtype, inner)
    except struct.error as error:
        raise ColdDamaged(f"the head of a chunk of differences is cut short: {error}") from None
    np.copyto(out, start)
    rest = len(start) % _BLOCK
    whole = len(start) - rest
    out[:whole].reshape(-1, _BLOCK)[changed] = inner[: len(inner) - rest].reshape(-1, _BLOCK)
    out[whole:] = inner[len(inner) - rest :]


def _changed(chunk: Array, start: Array) -> Array | None:
    """Return which blocks of elements differ, or nothing if that is all, nearly all or none."""
    step = max(len(chunk) // _SAMPLE, 1)
    if len(chunk) < _LEAST_GROUPED or 2 * np.count_nonzero(
        chunk[::step] == start[::step]
    ) * step < len(chunk):
        return None
    whole = len(chunk) - len(chunk) % _BLOCK
    differs = (chunk[:whole] != start[:whole]).view(np.uint64).reshape(-1, _BLOCK // 8)
    changed: Array = np.bitwise_or.reduce(differs, axis=1) != 0
    return changed if 0 < np.count_nonzero(changed) < _MOST * len(changed) else None


def _blocks(elements: Array, changed: Array) -> Array:
    """Return a copy of the blocks that differ, and of what is behind the last block."""
    whole = len(changed) * _BLOCK
    kept = elements[:whole].reshape(-1, _BLOCK)[changed].ravel()
    return np.concatenate([kept, elements[whole:]])


def _unpacked(method: int, stored: memoryview, size: int) -> Array:
    packed = scratch("delta plane", -(-size // 8))
    decode_plane(method, stored, packed.data)
    return np.unpackbits(packed, count=size).view(np.bool)


def _encode_all(chunk: Array, start: Array, dtype: DType, settings: DeltaSettings) -> bytes:
    difference = scratch("delta difference", chunk.nbytes).view(chunk.dtype)
    np.subtract(chunk, start, out=difference)
    classes = _chosen(difference, start, dtype, settings)
    stream, sizes = difference, [len(chunk)]
    if classes.many > 1:
        even = len(chunk) & ~1
        groups = group(start[:even], dtype, classes)
        stream = scratch("delta stream", chunk.nbytes).view(chunk.dtype)
        gather(difference[:even], groups, stream[:even])
        stream[even:] = difference[even:]
        sizes = _with_rest(groups, len(chunk) - even)
    return _encode_stream(stream.view(f"<i{chunk.itemsize}"), sizes, classes, settings)


def _chosen(difference: Array, start: Array, dtype: DType, settings: DeltaSettings) -> Classes:
    """Return the classes that are worth their time."""
    one = Classes(0, 1)
    if not has_classes(dtype) or len(start) < _LEAST_GROUPED:
        return one
    classes = choose_classes(start, dtype, settings.classes)
    if not settings.min_gain:
        return classes
    step = max(len(start) // _SAMPLE, 1)
    numbers = classes_of(start[::step], dtype, classes)
    sample = difference[::step][numbers.argsort(kind="stable")].view(f"<i{difference.itemsize}")
    apart = segments.bits_of(sample, np.bincount(numbers, minlength=classes.many).tolist())
    together = segments.bits_of(sample, [len(sample)])
    return classes if apart <= (1 - settings.min_gain) * together else one


def _decode_all(stored: memoryview, start: Array, dtype: DType, out: Array) -> None:
    classes, parts, at = _parse_head(stored)
    stream = scratch("delta stream", start.nbytes).view(start.dtype)
    sizes, groups, even = [len(start)], None, len(start) & ~1
    if classes.many > 1:
        if not has_classes(dtype):
            raise ColdDamaged(f"differences in classes, which {dtype.value} has none of")
        groups = group(start[:even], dtype, classes)
        sizes = _with_rest(groups, len(start) - even)
    _decode_stream(stored[at:], stream.view(f"<i{start.itemsize}"), sizes, parts)
    difference = stream
    if groups is not None:
        difference = scratch("delta difference", start.nbytes).view(start.dtype)
        scatter(stream[:even], groups, difference[:even])
        difference[even:] = stream[even:]
    np.add(start, difference, out=out)


def _with_rest(groups: Groups, rest: int) -> list[int]:
    """Return the sizes of the classes; the last holds the odd element as well."""
    return [*groups.sizes[:-1], groups.sizes[-1] + rest]


def _encode_stream(
    stream: Array, sizes: list[int], classes: Classes, settings: DeltaSettings
) -> bytes:
    heads, tables, bodies = [], [], []
    at = number = 0
    for count, form in segments.choose(stream, sizes):
        within = sizes[number : number + count]
        number += count
        end = at + sum(within)
        segment = segments.encode(stream[at:end], within, form, settings.coders)
        at = end
        escapes = len(segment.escaped) // stream.itemsize
        heads.append(_SEGMENT.pack(count, segment.form, escapes))
        tables += [_PLANE.pack(plane.method, plane.size) for plane in segment.planes]
        bodies += [*(plane.data for plane in segment.planes), segment.escaped]
    return b"".join([_HEAD.pack(*classes, len(heads)), *heads, *tables, *bodies])


def _parse_head(stored: memoryview) -> tuple[Classes, list[tuple[int, int, int, Any]], int]:
    classes, many = Classes(*_HEAD.unpack_from(stored)[:2]), stored[2]
    if not 1 <= classes.many <= min(MAX_CLASSES, 256 - classes.first):
        raise ColdDamaged(f"{classes.many} classes of differences from {classes.first} on")
    at = _HEAD.size
    heads = [_SEGMENT.unpack_from(stored, at + _SEGMENT.size * number) for number in range(many)]
    at += _SEGMENT.size * many
    counts = [head[0] for head in heads]
    if 0 in counts or sum(counts) != classes.many:
        raise ColdDamaged(f"the segments of a chunk of differences have not {classes.many} classes")
    parts = []
    for count, form, escapes in heads:
        planes = segments.planes_of(form)
        table = [_PLANE.unpack_from(stored, at + _PLANE.size * number) for number in range(planes)]
        at += _PLANE.size * planes
        parts.append((count, form, escapes, table))
    return classes, parts, at


def _decode_stream(body: memoryview, stream: Array, sizes: list[int], parts: list[Any]) -> None:
    at = number = position = 0

    def taken(size: int) -> memoryview:
        nonlocal at
        if size > len(body) - at:
            raise ColdDamaged("a chunk of differences is cut short")
        at += size
        return body[at - size : at]

    for count, form, escapes, table in parts:
        size = sum(sizes[number : number + count])
        number += count
        planes: Iterator[tuple[int, memoryview]] = iter(
            [(method, taken(stored)) for method, stored in table]
        )
        escaped = np.frombuffer(taken(escapes * stream.itemsize), stream.dtype)
        segments.decode(form, planes, escaped, stream[position : position + size])
        position += size
    if at != len(body):
        raise ColdDamaged(f"a chunk of differences has {len(body) - at} bytes too many")

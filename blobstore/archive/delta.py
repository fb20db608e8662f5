"""A chunk of a tensor as what differs from the same elements of another tensor, bit for bit.

Elements are compared as integers. The bits of a float of one sign sort like its value, so a step of
some units in the last place is a difference of as many, across powers of two as well; subtraction
wraps around, so that every pattern of bits has one difference from every other. Differences are
grouped by the exponent of what they start from (`delta_groups`) and every group takes the form that
suits it (`delta_segments`). What a chunk is coded against is in the caller's hands: the elements of a
base, or what is predicted from them (`delta_prediction`). docs/cold-format.md has the bytes.
"""

from __future__ import annotations

import enum
import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.archive import delta_segments as segments
from blobstore.archive.delta_groups import (
    MAX_CLASSES,
    choose_thresholds,
    gather,
    group,
    has_classes,
    lanes_of,
    scatter,
)
from blobstore.archive.entropy import Coder
from blobstore.archive.scratch import scratch
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Final

    from blobstore.archive.delta_groups import Groups, Thresholds
    from blobstore.tensor import DType

    Array = np.ndarray[Any, Any]

_LEAST_GROUPED: Final = 1 << 11
"""Elements below which a chunk is one class."""
_HEAD: Final = struct.Struct("<BB")
_SEGMENT: Final = struct.Struct("<BBI")
_PLANE: Final = struct.Struct("<BI")


class Effort(enum.Enum):
    """How many classes are told apart, and what is tried on each plane."""

    FAST = (3, (Coder.HUFFMAN,))
    SMALL = (8, (Coder.HUFFMAN, Coder.ZSTD))

    classes: int
    coders: Sequence[Coder]

    def __init__(self, classes: int, coders: Sequence[Coder]) -> None:
        self.classes = classes
        self.coders = coders


def as_elements(data: Any, dtype: DType) -> Array:
    """Return the bytes of a tensor as the integers that a chunk is coded by."""
    width = dtype.bits // 8 if dtype.bits in {8, 16, 32, 64} else 1
    return np.frombuffer(data, np.dtype(f"<u{width}"))


def encode_chunk(chunk: Array, start: Array, dtype: DType, effort: Effort) -> bytes:
    """Return what tells ``chunk`` from ``start``.

    Args:
        chunk: elements, as :func:`as_elements` gives them.
        start: as many elements that the decoder has too.
        dtype: the type of both.
        effort: what to try.
    """
    difference = scratch("delta difference", chunk.nbytes).view(chunk.dtype)
    np.subtract(chunk, start, out=difference)
    thresholds: Thresholds = ()
    if has_classes(dtype) and len(chunk) >= _LEAST_GROUPED:
        thresholds = choose_thresholds(start, dtype, effort.classes)
    stream, sizes = difference, [len(chunk)]
    if thresholds:
        whole = _whole(start, thresholds)
        groups = group(start[:whole], dtype, thresholds)
        stream = scratch("delta stream", chunk.nbytes).view(chunk.dtype)
        gather(difference[:whole], groups, stream[:whole])
        stream[whole:] = difference[whole:]
        sizes = _with_rest(groups, len(chunk) - whole)
    return _encode_stream(stream.view(f"<i{chunk.itemsize}"), sizes, thresholds, effort)


def decode_chunk(stored: memoryview, start: Array, dtype: DType, out: Array) -> None:
    """Undo :func:`encode_chunk`; ``out`` may be ``start``.

    Raises:
        ColdDamaged: it is no such chunk. What is in ``out`` then is undefined.
    """
    try:
        thresholds, parts, at = _parse_head(stored)
    except struct.error as error:
        raise ColdDamaged(f"the head of a chunk of differences is cut short: {error}") from None
    stream = scratch("delta stream", start.nbytes).view(start.dtype)
    sizes, groups, whole = [len(start)], None, 0
    if thresholds:
        if not has_classes(dtype):
            raise ColdDamaged(f"differences in classes, which {dtype.value} has none of")
        whole = _whole(start, thresholds)
        groups = group(start[:whole], dtype, thresholds)
        sizes = _with_rest(groups, len(start) - whole)
    _decode_stream(stored[at:], stream.view(f"<i{start.itemsize}"), sizes, parts)
    difference = stream
    if groups is not None:
        difference = scratch("delta difference", start.nbytes).view(start.dtype)
        scatter(stream[:whole], groups, difference[:whole])
        difference[whole:] = stream[whole:]
    np.add(start, difference, out=out)


def _whole(start: Array, thresholds: Thresholds) -> int:
    """Return how many elements are whole units; those behind them are not sorted."""
    return len(start) - len(start) % lanes_of(start.itemsize, len(thresholds) + 1)


def _with_rest(groups: Groups, rest: int) -> list[int]:
    """Return the sizes of the classes; the last holds those behind the units as well."""
    return [*groups.sizes[:-1], groups.sizes[-1] + rest]


def _encode_stream(
    stream: Array, sizes: list[int], thresholds: Thresholds, effort: Effort
) -> bytes:
    heads, tables, bodies = [], [], []
    at = number = 0
    for count, form in segments.choose(stream, sizes):
        within = sizes[number : number + count]
        number += count
        end = at + sum(within)
        segment = segments.encode(stream[at:end], within, form, effort.coders)
        at = end
        escapes = len(segment.escaped) // stream.itemsize
        heads.append(_SEGMENT.pack(count, segment.form, escapes))
        tables += [_PLANE.pack(plane.method, plane.size) for plane in segment.planes]
        bodies += [*(plane.data for plane in segment.planes), segment.escaped]
    head = _HEAD.pack(len(thresholds), len(heads))
    return b"".join([head, bytes(thresholds), *heads, *tables, *bodies])


def _parse_head(stored: memoryview) -> tuple[Thresholds, list[tuple[int, int, int, Any]], int]:
    steps, many = _HEAD.unpack_from(stored)
    at = _HEAD.size + steps
    thresholds = tuple(stored[_HEAD.size : at])
    if steps >= MAX_CLASSES or any(here >= after for here, after in pairwise((0, *thresholds))):
        raise ColdDamaged(f"classes of differences begin at {thresholds}")
    heads = [_SEGMENT.unpack_from(stored, at + _SEGMENT.size * number) for number in range(many)]
    at += _SEGMENT.size * many
    if [head[0] for head in heads if not head[0]] or sum(head[0] for head in heads) != steps + 1:
        raise ColdDamaged(f"the segments of a chunk of differences have not {steps + 1} classes")
    parts = []
    for classes, form, escapes in heads:
        planes = segments.planes_of(form)
        table = [_PLANE.unpack_from(stored, at + _PLANE.size * number) for number in range(planes)]
        at += _PLANE.size * planes
        parts.append((classes, form, escapes, table))
    return thresholds, parts, at


def _decode_stream(body: memoryview, stream: Array, sizes: list[int], parts: list[Any]) -> None:
    at = number = position = 0

    def taken(size: int) -> memoryview:
        nonlocal at
        if size > len(body) - at:
            raise ColdDamaged("a chunk of differences is cut short")
        at += size
        return body[at - size : at]

    for classes, form, escapes, table in parts:
        size = sum(sizes[number : number + classes])
        number += classes
        planes: Iterator[tuple[int, memoryview]] = iter(
            [(method, taken(stored)) for method, stored in table]
        )
        escaped = np.frombuffer(taken(escapes * stream.itemsize), stream.dtype)
        segments.decode(form, planes, escaped, stream[position : position + size])
        position += size
    if at != len(body):
        raise ColdDamaged(f"a chunk of differences has {len(body) - at} bytes too many")

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
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.archive import delta_segments as segments
from blobstore.archive.delta_groups import (
    MAX_CLASSES,
    Classes,
    choose_classes,
    gather,
    group,
    has_classes,
    scatter,
)
from blobstore.archive.entropy import Coder
from blobstore.archive.scratch import scratch
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Final

    from blobstore.archive.delta_groups import Groups
    from blobstore.archive.entropy import Plane
    from blobstore.tensor import DType

    Array = np.ndarray[Any, Any]

MAX_ELEMENTS: Final = 1 << 20
"""Elements of the largest chunk."""
_LEAST_GROUPED: Final = 1 << 11
"""Elements below which a chunk is one class."""
_HEAD: Final = struct.Struct("<HBB")
_SEGMENT: Final = struct.Struct("<BBI")
_PLANE: Final = struct.Struct("<BI")


class Effort(enum.Enum):
    """How many classes are told apart, and what is tried on each plane."""

    FAST = (8, (Coder.HUFFMAN,))
    SMALL = (10, (Coder.HUFFMAN, Coder.ZSTD))

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
        chunk: elements, as :func:`as_elements` gives them; one of 2**20 at most.
        start: as many elements that the decoder has too.
        dtype: the type of both.
        effort: what to try.
    """
    even = len(chunk) & ~1
    difference = scratch("delta difference", chunk.nbytes).view(chunk.dtype)
    np.subtract(chunk, start, out=difference)
    classes = Classes(0, 1)
    if has_classes(dtype) and even >= _LEAST_GROUPED:
        classes = choose_classes(start, dtype, effort.classes)
    stream, sizes = difference, [len(chunk)]
    if classes.count > 1:
        groups = group(start[:even], dtype, classes)
        stream = scratch("delta stream", chunk.nbytes).view(chunk.dtype)
        gather(difference[:even], groups, stream[:even])
        stream[even:] = difference[even:]
        sizes = _with_rest(groups, len(chunk) - even)
    return _encode_stream(stream.view(f"<i{chunk.itemsize}"), sizes, classes, effort)


def decode_chunk(stored: memoryview, start: Array, dtype: DType, out: Array) -> None:
    """Undo :func:`encode_chunk`; ``out`` may be ``start``.

    Raises:
        ColdDamaged: it is no such chunk. What is in ``out`` then is undefined.
    """
    try:
        classes, parts, at = _parse_head(stored)
    except (struct.error, ValueError) as error:
        raise ColdDamaged(f"the head of a chunk of differences is damaged: {error}") from None
    even = len(start) & ~1
    stream = scratch("delta stream", start.nbytes).view(start.dtype)
    sizes, groups = [len(start)], None
    if classes.count > 1:
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


def _encode_stream(stream: Array, sizes: list[int], classes: Classes, effort: Effort) -> bytes:
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
    return b"".join([_HEAD.pack(*classes, len(heads)), *heads, *tables, *bodies])


def _parse_head(stored: memoryview) -> tuple[Classes, list[tuple[int, int, int, list[Any]]], int]:
    first, count, many = _HEAD.unpack_from(stored)
    if not 1 <= count <= MAX_CLASSES or many > count:
        raise ColdDamaged(f"{many} segments of {count} classes in a chunk of differences")
    at = _HEAD.size
    heads = [_SEGMENT.unpack_from(stored, at + _SEGMENT.size * number) for number in range(many)]
    at += _SEGMENT.size * many
    if sum(head[0] for head in heads) != count:
        raise ColdDamaged(f"the segments of a chunk of differences have not {count} classes")
    parts = []
    for classes, form, escapes in heads:
        planes = segments.planes_of(form)
        table = [_PLANE.unpack_from(stored, at + _PLANE.size * number) for number in range(planes)]
        at += _PLANE.size * planes
        parts.append((classes, form, escapes, table))
    return Classes(first, count), parts, at


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

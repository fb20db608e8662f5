"""Encodes a chunk as exact differences from the same elements of a prediction.

Elements are compared as integers. The bits of floats of one sign sort like their values, so a step of
a few units in the last place is a difference of a few, even across powers of two. Subtraction wraps
around, so any bit pattern has one difference from any other. Differences are grouped by the exponent
of the prediction (`groups`), and each group is stored in the form that suits it (`planes`). If few elements
differ, these are listed (`listed`). If they are in few blocks, blocks of equal elements are omitted first. The caller supplies the prediction: the elements
of a base, or what low-rank factors predict from them (`low_rank`). The bytes are specified in
docs/reference/cold-format.md.
"""

from __future__ import annotations

import struct
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from blobstore.compression.delta import listed, planes
from blobstore.compression.delta.groups import (
    MAX_CLASSES,
    Classes,
    choose_classes,
    classes_of,
    gather,
    group,
    has_classes,
    indexes_of,
    scatter,
)
from blobstore.compression.entropy import Coder, decode_plane, encode_plane
from blobstore.compression.scratch import scratch
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from blobstore.compression.delta.groups import Groups
    from blobstore.core.tensor import DType

    Array = np.ndarray[Any, Any]

_LEAST_GROUPED: Final = 1 << 10
"""Smaller chunks have one class."""
_BLOCK: Final = listed.BLOCK
"""Elements per block that is omitted if all are equal."""
_MOST: Final = 0.9
"""Equal blocks are omitted only if at most this fraction of blocks differs."""
_SAMPLE: Final = 1 << 14
"""Elements of the sample that classes and forms are chosen from."""
_DIGITS: Final = np.maximum(np.arange(256) - 126, 0)
"""Bits of a difference after its length, which is the exponent of float32: the sign and lower digits."""
_UNSIGNED: Final = {bits: np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)}
"""Integers by their bits."""
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
    sparse: float
    """Elements that differ are listed only if they are at most this fraction of each block with any."""
    sparse_classes: int
    """Exponent classes at most if they are listed."""


FAST: Final = DeltaSettings(6, 0.17, (Coder.HUFFMAN,), 0.12, 1)
SMALL: Final = DeltaSettings(8, 0.0, (Coder.HUFFMAN, Coder.ZSTD), 0.25, MAX_CLASSES)


def as_elements(data: Any, dtype: DType) -> Array:
    """Return the bytes of a tensor as the integers that the delta codec works on."""
    return np.frombuffer(data, _UNSIGNED.get(dtype.bits, _UNSIGNED[8]))


def encode_chunk(chunk: Array, predicted: Array, dtype: DType, settings: DeltaSettings) -> bytes:
    """Encode the differences of ``chunk`` from ``predicted``.

    Args:
        chunk: elements, as returned by :func:`as_elements`.
        predicted: as many elements, which the decoder knows too.
        dtype: the type of both.
        settings: the effort to make.
    """
    words = listed.differing_words(chunk, predicted)
    found = listed.find(chunk, predicted, words, settings.sparse)
    if found is not None:
        stored = _encode_listed(*found, len(chunk), settings.coders)
        if settings.sparse_classes > 1 and has_classes(dtype) and len(chunk) >= _LEAST_GROUPED:
            in_classes = _encode_all(chunk, predicted, dtype, settings, is_sparse=True)
            stored = min(stored, in_classes, key=len)
        return stored
    changed = _changed(words, chunk.itemsize)
    if changed is None or not _are_few(chunk, predicted):
        return _encode_all(chunk, predicted, dtype, settings)
    inner = _encode_all(_blocks(chunk, changed), _blocks(predicted, changed), dtype, settings)
    coded = encode_plane(np.packbits(changed).data, settings.coders)
    head = _HEAD.pack(0, 0, 0) + _PLANE.pack(coded.method, coded.size)
    return b"".join([head, coded.data, inner])


def estimate_bits(chunk: Array, predicted: Array) -> float:
    """Return about how many bits the differences need: those of their lengths, and their digits.

    This orders predictions of one chunk as :func:`encode_chunk` does, in a fraction of the time.
    """
    difference = (chunk - predicted).view(f"<i{chunk.itemsize}").astype(np.float32)
    lengths = np.right_shift(difference.view(np.uint32), 23).astype(np.uint8)  # drops the sign
    counts = np.bincount(lengths, minlength=256)
    entropy = planes.xlogx(len(chunk)) - planes.xlogx(counts).sum()
    return float(entropy + counts @ _DIGITS)


def decode_chunk(stored: memoryview, predicted: Array, dtype: DType, out: Array) -> None:
    """Reverse :func:`encode_chunk`; ``out`` may be ``predicted``.

    Raises:
        ColdDamaged: the chunk cannot be decoded. The content of ``out`` is then undefined.
    """
    try:
        _, many, _ = _HEAD.unpack_from(stored)
        if many:
            _decode_all(stored, predicted, dtype, out)
            return
        method, size = _PLANE.unpack_from(stored, _HEAD.size)
        at = _HEAD.size + _PLANE.size
        many_blocks = len(predicted) // _BLOCK
        packed = scratch("delta plane", -(-many_blocks // 8))
        decode_plane(method, stored[at : at + size], packed.data)
        changed = np.unpackbits(packed, count=many_blocks).view(np.bool)
        inner = _blocks(predicted, changed)
        _decode_all(stored[at + size :], inner, dtype, inner)
    except struct.error as error:
        raise ColdDamaged(f"the head of a chunk of differences is truncated: {error}") from None
    np.copyto(out, predicted)
    rest = len(predicted) % _BLOCK
    whole = len(predicted) - rest
    out[:whole].reshape(-1, _BLOCK)[changed] = inner[: len(inner) - rest].reshape(-1, _BLOCK)
    out[whole:] = inner[len(inner) - rest :]


def _changed(words: Array, width: int) -> Array | None:
    """Return a mask of the blocks that differ, or None if (nearly) all or none of them do.

    Args:
        words: the mask of words of the chunk that differ.
        width: the bytes of an element, which are the words of eight elements.
    """
    many = len(words) * 8 // (width * _BLOCK)
    if many * _BLOCK < _LEAST_GROUPED:
        return None
    words = words[: many * width * _BLOCK // 8]
    if np.count_nonzero(words) >= _MOST * len(words):
        return None  # at least as many blocks have any of these words
    per_block = words.view(np.uint64).reshape(many, width)
    changed: Array = (
        reduce(np.bitwise_or, per_block.T) != 0
    )  # numpy's reduction of short rows is slow
    return changed if 0 < np.count_nonzero(changed) < _MOST * many else None


def _are_few(chunk: Array, predicted: Array) -> bool:
    """Return whether at most half of the elements differ."""
    differs = scratch("delta differs", len(chunk)).view(np.bool)
    np.not_equal(chunk, predicted, out=differs)
    return 2 * int(np.count_nonzero(differs)) <= len(chunk)


def _encode_listed(places: Array, differences: Array, size: int, coders: Sequence[Coder]) -> bytes:
    """Encode a chunk of ``size`` elements as one class, and list the differences at ``places``."""
    signed = differences.view(f"<i{differences.itemsize}")
    segment = listed.encode(signed, places, [size], None, coders)
    return _joined(Classes(0, 1), [(1, segment)])


def _blocks(elements: Array, changed: Array) -> Array:
    """Return a copy of the selected blocks and of the elements after the last block."""
    whole = len(changed) * _BLOCK
    kept = elements[:whole].reshape(-1, _BLOCK)[changed].ravel()
    return np.concatenate([kept, elements[whole:]])


def _encode_all(
    chunk: Array,
    predicted: Array,
    dtype: DType,
    settings: DeltaSettings,
    *,
    is_sparse: bool = False,
) -> bytes:
    """Encode all differences; if they are sparse, those of some classes may be listed."""
    difference = scratch("delta difference", chunk.nbytes).view(chunk.dtype)
    np.subtract(chunk, predicted, out=difference)
    classes, segments = _chosen(difference, predicted, dtype, settings, is_sparse=is_sparse)
    stream, sizes = difference, [len(chunk)]
    if classes.many > 1:
        even = len(chunk) & ~1
        groups = group(predicted[:even], dtype, classes)
        stream = scratch("delta stream", chunk.nbytes).view(chunk.dtype)
        gather(difference[:even], groups, stream[:even])
        stream[even:] = difference[even:]
        sizes = _with_rest(groups, len(chunk) - even)
    signed = stream.view(f"<i{chunk.itemsize}")
    return _encode_stream(signed, sizes, classes, segments, settings.coders)


def _chosen(
    difference: Array,
    predicted: Array,
    dtype: DType,
    settings: DeltaSettings,
    *,
    is_sparse: bool,
) -> tuple[Classes, list[tuple[int, int]]]:
    """Return the classes to use, several only if they save enough, and the form of each segment."""
    if not difference.any():
        return Classes(0, 1), [(1, planes.Form.ZERO)]
    many = settings.sparse_classes if is_sparse else settings.classes
    classes, histogram = _sampled(difference, predicted, dtype, many)
    costs = histogram.costs()
    if is_sparse:
        costs = np.hstack([costs, histogram.listed_costs()])
        return classes, planes.choose(costs, difference.itemsize)
    if settings.min_gain and classes.many > 1:
        together = histogram.merged().costs()
        if costs.min(axis=1).sum() > (1 - settings.min_gain) * together.min():
            classes, costs = Classes(0, 1), together
    return classes, planes.choose(costs, difference.itemsize)


def _sampled(
    difference: Array, predicted: Array, dtype: DType, many: int
) -> tuple[Classes, planes.Histogram]:
    """Return at most ``many`` classes, and a histogram of a sample of the differences."""
    step = max(len(difference) // _SAMPLE, 1)
    sample, theirs = difference[::step], predicted[::step]
    classes, numbers = Classes(0, 1), np.zeros(len(sample), np.uint8)
    if has_classes(dtype) and len(predicted) >= _LEAST_GROUPED:
        classes = choose_classes(theirs, dtype, many)
        numbers = classes_of(theirs, dtype, classes)
    signed, scale = sample.view(f"<i{sample.itemsize}"), len(difference) / len(sample)
    return classes, planes.Histogram.of(signed, numbers, classes.many, scale)


def _decode_all(stored: memoryview, predicted: Array, dtype: DType, out: Array) -> None:
    classes, parts, at = _parse_head(stored)
    bodies = _split(stored[at:], parts, predicted.itemsize)
    sizes, groups, even = [len(predicted)], None, len(predicted) & ~1
    if classes.many > 1:
        if not has_classes(dtype):
            raise ColdDamaged(f"differences of {dtype.value} cannot have classes")
        groups = group(predicted[:even], dtype, classes)
        sizes = _with_rest(groups, len(predicted) - even)
    if any(part[1] > planes.Form.GAPS for part in parts):
        ranks, differences = _decode_sparse(sizes, parts, bodies, predicted.dtype)
        places = ranks if groups is None else indexes_of(ranks, groups)
        np.copyto(out, predicted)
        differences += out.take(places)  # they are in the processor's cache now
        out[places] = differences
        return
    stream = scratch("delta stream", predicted.nbytes).view(predicted.dtype)
    _decode_stream(stream.view(f"<i{predicted.itemsize}"), sizes, parts, bodies)
    difference = stream
    if groups is not None:
        difference = scratch("delta difference", predicted.nbytes).view(predicted.dtype)
        scatter(stream[:even], groups, difference[:even])
        difference[even:] = stream[even:]
    np.add(predicted, difference, out=out)


def _with_rest(groups: Groups, rest: int) -> list[int]:
    """Return the sizes of the classes; the last one includes the odd element."""
    return [*groups.sizes[:-1], groups.sizes[-1] + rest]


def _encode_stream(
    stream: Array,
    sizes: list[int],
    classes: Classes,
    segments: list[tuple[int, int]],
    coders: Sequence[Coder],
) -> bytes:
    encoded = []
    at = number = 0
    for count, form in segments:
        within = sizes[number : number + count]
        number += count
        end = at + sum(within)
        encode = listed.encode_segment if form > planes.Form.GAPS else planes.encode
        encoded.append((count, encode(stream[at:end], within, form, coders)))
        at = end
    return _joined(classes, encoded)


def _joined(classes: Classes, segments: Sequence[tuple[int, planes.Segment]]) -> bytes:
    """Return the bytes of segments, each with its number of classes."""
    heads, tables, bodies = [], [], []
    for count, segment in segments:
        heads.append(_SEGMENT.pack(count, segment.form, segment.escapes))
        tables += [_PLANE.pack(plane.method, plane.size) for plane in segment.planes]
        bodies += [*(plane.data for plane in segment.planes), segment.escaped]
    return b"".join([_HEAD.pack(*classes, len(heads)), *heads, *tables, *bodies])


def _parse_head(stored: memoryview) -> tuple[Classes, list[tuple[int, int, int, Any]], int]:
    classes, many = Classes(*_HEAD.unpack_from(stored)[:2]), stored[2]
    if not 1 <= classes.many <= min(MAX_CLASSES, 256 - classes.first):
        raise ColdDamaged(
            f"a chunk of differences cannot have {classes.many} classes from {classes.first} on"
        )
    at = _HEAD.size
    heads = [_SEGMENT.unpack_from(stored, at + _SEGMENT.size * number) for number in range(many)]
    at += _SEGMENT.size * many
    counts = [head[0] for head in heads]
    if 0 in counts or sum(counts) != classes.many:
        raise ColdDamaged(
            f"the segments of a chunk of differences do not have {classes.many} classes"
        )
    parts = []
    for count, form, escapes in heads:
        plane_count = planes.planes_of(form, escapes)
        table = [
            _PLANE.unpack_from(stored, at + _PLANE.size * number) for number in range(plane_count)
        ]
        at += _PLANE.size * plane_count
        parts.append((count, form, escapes, table))
    return classes, parts, at


def _split(
    body: memoryview, parts: list[Any], width: int
) -> list[tuple[list[tuple[int, memoryview]], memoryview]]:
    """Return the planes and the escapes of each segment.

    Raises:
        ColdDamaged: the chunk ends too early or too late.
    """
    at = 0

    def taken(size: int) -> memoryview:
        nonlocal at
        if size > len(body) - at:
            raise ColdDamaged("a chunk of differences is truncated")
        at += size
        return body[at - size : at]

    bodies = []
    for _, form, escapes, table in parts:
        stored = [(method, taken(size)) for method, size in table]
        bodies.append((stored, taken(escapes * width if form < planes.Form.GAPS else 0)))
    if at != len(body):
        raise ColdDamaged(f"a chunk of differences has {len(body) - at} bytes too many")
    return bodies


def _decode_stream(stream: Array, sizes: list[int], parts: list[Any], bodies: list[Any]) -> None:
    number = position = 0
    for (count, form, _, _), (stored, escaped) in zip(parts, bodies, strict=True):
        size = sum(sizes[number : number + count])
        number += count
        segment = stream[position : position + size]
        position += size
        planes.decode(form, iter(stored), np.frombuffer(escaped, stream.dtype), segment)


def _decode_sparse(
    sizes: list[int], parts: list[Any], bodies: list[Any], dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Return the differences that may not be zero, and their numbers in the order of the classes.

    The equal elements take no time. Classes in which most elements differ are small.
    """
    signed = np.dtype(f"<i{dtype.itemsize}")
    ranks, differences = [], []
    number = position = 0
    for (count, form, escapes, _), (stored, escaped) in zip(parts, bodies, strict=True):
        within = sizes[number : number + count]
        number += count
        size = sum(within)
        if form > planes.Form.GAPS:
            places, found = listed.decode(form, stored, escapes, within, signed)
            places += position
        else:
            places, found = np.arange(position, position + size), np.empty(size, signed)
            planes.decode(form, iter(stored), np.frombuffer(escaped, signed), found)
        position += size
        ranks.append(places)
        differences.append(found)
    if len(parts) == 1:
        return ranks[0], differences[0].view(dtype)
    return np.concatenate(ranks), np.concatenate(differences).view(dtype)

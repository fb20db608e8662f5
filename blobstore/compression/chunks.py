"""Encoding and decoding of one chunk: bytes to stored planes and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32  # tens of gigabytes per second, and it releases the GIL

from blobstore.compression.entropy import Coder, Method, declared_size, decode_plane, encode_plane
from blobstore.compression.scratch import scratch
from blobstore.compression.table import Chunk, StoredPlane
from blobstore.compression.transforms import IDENTITY
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from blobstore.compression.entropy import Plane
    from blobstore.compression.transforms import Transform

    Array = np.ndarray[Any, Any]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]


_PROBE: Final = 1 << 13
"""Bytes of a plane that are tested for whether it can be compressed."""


class Pipeline(NamedTuple):
    """One way to encode chunks: a transform, and the coders to try on each of its planes."""

    transform: Transform
    coders: Sequence[Sequence[Coder]]


def encode_chunk(
    chunk: Bytes,
    base: Array | None,
    pipelines: Sequence[Pipeline],
    prepared: Sequence[Bytes] | None = None,
) -> tuple[Chunk, list[Plane]]:
    """Encode a chunk with the first applicable pipeline, or store it raw if that is not smaller.

    The planes are valid until this thread encodes again.

    Args:
        chunk: aligned bytes.
        base: as many bytes of the base, or the weights of blocks whose scales are kept.
        pipelines: the best first.
        prepared: the planes that the first pipeline's transform makes, if they are known.
    """
    for transform, coders in pipelines:
        split = transform.encode(chunk, base) if prepared is None else prepared
        prepared = None
        limits = transform.sizes(len(chunk) // transform.width)
        if split is None or not _are_possible(split, limits):
            continue
        planes = [
            encode_plane(plane.data, tried or _coders_after_probe(plane))
            for plane, tried in zip(split, coders, strict=True)
        ]
        if sum(plane.size for plane in planes) < len(chunk):
            return _entry(chunk, transform, planes, limits), planes
        break
    planes = [encode_plane(chunk.data, ())]
    return _entry(chunk, IDENTITY[1], planes, (len(chunk),)), planes


def decode_chunk(
    entry: Chunk, transform: Transform, stored: memoryview, out: Bytes, base: Array | None
) -> None:
    """Decode a chunk into ``out`` and verify it.

    Args:
        entry: its entry in the table.
        transform: the transform that the entry names.
        stored: its planes, one after the other.
        out: aligned memory of the chunk's size.
        base: what it was encoded against, if the transform needs a base.

    Raises:
        ColdDamaged: the planes cannot be decoded, or do not match the checksum.
    """
    sizes = transform.sizes(len(out) // transform.width)
    planes: list[Bytes] = []
    checked = []
    at = 0
    for number, ((method, size), limit) in enumerate(zip(entry.planes, sizes, strict=True)):
        plane = stored[at : at + size]
        at += size
        if _is_checked(method, limit):
            checked.append(plane)
        if method == Method.RAW:
            planes.append(np.frombuffer(plane, np.uint8))
            continue
        decoded_size = limit if limit >= 0 else declared_size(plane)
        if not 0 <= decoded_size <= abs(limit):
            raise ColdDamaged(f"a plane of at most {abs(limit)} bytes declares {decoded_size}")
        # A plane that is the chunk itself needs no intermediate memory.
        is_chunk = limit == len(out)
        decoded = out if is_chunk else scratch(f"plane {number}", decoded_size)
        decode_plane(method, plane, decoded.data)
        planes.append(decoded)
    if planes[0] is not out:
        transform.decode(planes, out, base)
    checksum = crc32(out)
    for plane in checked:
        checksum = crc32(plane, checksum)
    if checksum != entry.checksum:
        raise ColdDamaged("a chunk does not match its checksum: the file or the base is altered")


def _are_possible(planes: Sequence[Bytes], limits: Sequence[int]) -> bool:
    """Return whether decoders accept planes of these sizes; differences may be longer than the chunk."""
    return all(len(plane) <= abs(limit) for plane, limit in zip(planes, limits, strict=True))


def _coders_after_probe(plane: Bytes) -> Sequence[Coder]:
    """Return coders for a plane that was noise in the sample; chunks of one tensor may differ."""
    if len(plane) < 2 * _PROBE:
        return ()
    middle = len(plane) // 2
    probe = encode_plane(plane[middle : middle + _PROBE].data)
    return (Coder.HUFFMAN,) if probe.method else ()


def _entry(
    chunk: Bytes, transform: Transform, planes: Sequence[Plane], limits: Sequence[int]
) -> Chunk:
    checksum = crc32(chunk)
    for plane, limit in zip(planes, limits, strict=True):
        if _is_checked(plane.method, limit):
            checksum = crc32(plane.data, checksum)
    stored = tuple(StoredPlane(plane.method, plane.size) for plane in planes)
    return Chunk(checksum, transform.number, stored)


def _is_checked(method: int, limit: int) -> bool:
    """Return whether the checksum covers a stored plane: the chunk's bytes do not determine it."""
    return method != Method.RAW or limit < 0

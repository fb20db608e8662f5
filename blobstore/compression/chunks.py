"""One chunk: its bytes to stored planes and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from zlib_ng.zlib_ng import crc32  # at tens of gigabytes a second, and other threads run meanwhile

from blobstore.compression.entropy import Coder, Method, declared_size, decode_plane, encode_plane
from blobstore.compression.scratch import scratch
from blobstore.compression.table import Chunk, Stored
from blobstore.compression.transforms import WHOLE
from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from blobstore.compression.entropy import Plane
    from blobstore.compression.transforms import Transform

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]


_PROBE: Final = 1 << 13
"""Bytes of a plane that tell whether it is noise."""


class Way(NamedTuple):
    """How chunks are made: a layout, and the coders to try on each of its planes."""

    layout: Transform
    coders: Sequence[Sequence[Coder]]


def encode_chunk(
    chunk: Bytes, base: Bytes | None, ways: Sequence[Way]
) -> tuple[Chunk, list[Plane]]:
    """Return a chunk as the first way makes it that suits it, or raw if that is not smaller.

    The planes are good until the thread encodes again.

    Args:
        chunk: aligned bytes.
        base: as many bytes of the base.
        ways: the best first.
    """
    for layout, coders in ways:
        split = layout.split(chunk, base)
        if split is None:
            continue
        planes = [
            encode_plane(plane.data, tried or _probed(plane))
            for plane, tried in zip(split, coders, strict=True)
        ]
        if sum(plane.size for plane in planes) < len(chunk):
            sizes = layout.sizes(len(chunk) // layout.width)
            return _entry(chunk, layout, sizes, planes), planes
        break
    layout = WHOLE[1]
    planes = [encode_plane(chunk.data, ())]
    return _entry(chunk, layout, (len(chunk),), planes), planes


def decode_chunk(
    entry: Chunk, layout: Transform, stored: memoryview, out: Bytes, base: Bytes | None
) -> None:
    """Write the chunk whose planes are ``stored``, and check it.

    Args:
        entry: what the table says of it.
        layout: the one that the entry names.
        stored: its planes, one after the other.
        out: as many bytes as the chunk has, aligned.
        base: as many bytes of the base, where the layout needs one.

    Raises:
        ColdDamaged: the planes cannot be decoded, or are not those of this chunk.
    """
    sizes = layout.sizes(len(out) // layout.width)
    planes: list[Bytes] = []
    checked = []
    at = 0
    for number, ((method, size), limit) in enumerate(zip(entry.planes, sizes, strict=True)):
        plane = stored[at : at + size]
        at += size
        if _is_checked(method, limit):
            checked.append(plane)
        # A chunk that is its own plane needs no memory in between.
        target = out if limit == len(out) else None
        planes.append(_decoded(number, method, plane, limit, target))
    if planes[0] is not out:
        layout.merge(planes, out, base)
    check = crc32(out)
    for plane in checked:
        check = crc32(plane, check)
    if check != entry.check:
        raise ColdDamaged("a chunk is not what its check sum says: the file or the base is altered")


def _probed(plane: Bytes) -> Sequence[Coder]:
    """Return what to try on a plane that was noise in the sample: chunks of a tensor may differ."""
    if len(plane) < 2 * _PROBE:
        return ()
    middle = len(plane) // 2
    probe = encode_plane(plane[middle : middle + _PROBE].data)
    return (Coder.HUFFMAN,) if probe.method else ()


def _entry(chunk: Bytes, layout: Transform, sizes: Sequence[int], planes: Sequence[Plane]) -> Chunk:
    check = crc32(chunk)
    for plane, limit in zip(planes, sizes, strict=True):
        if _is_checked(plane.method, limit):
            check = crc32(plane.data, check)
    stored = tuple(Stored(plane.method, plane.size) for plane in planes)
    return Chunk(check, layout.number, stored)


def _is_checked(method: int, limit: int) -> bool:
    """Tell whether a plane's own bytes count: those that the chunk's bytes do not determine."""
    return method != Method.RAW or limit < 0


def _decoded(
    number: int, method: int, plane: memoryview, limit: int, target: Bytes | None
) -> Bytes:
    """Return a plane, raw ones where they lie, others in ``target`` or in memory of the thread."""
    if method == Method.RAW:
        return np.frombuffer(plane, np.uint8)
    size = limit if limit >= 0 else declared_size(plane)
    if not 0 <= size <= abs(limit):
        raise ColdDamaged(f"a plane of at most {abs(limit)} bytes declares {size}")
    out = scratch(f"plane {number}", size) if target is None else target
    decode_plane(method, plane, out.data)
    return out

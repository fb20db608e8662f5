"""One plane of a chunk, stored as the smallest of raw bytes, Huffman codes and ordinary zstd.

Both codes are plain zstd frames, and a decoder need not know which it is given. The Huffman coder
is zstd with a match finder that is too weak to find anything: what remains are literals, which for
the bytes of weights are smaller and several times faster than what the stock levels make of them.
Planes hold at most :data:`MAX_PLANE` bytes; up to 128 KiB are one block with one table of codes.
"""

from __future__ import annotations

import enum
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zstandard

from blobstore.errors import ColdDamaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Final

    from typing_extensions import Buffer

MAX_PLANE: Final = 1 << 20
"""Bytes of the largest plane that is written or read."""
_LEAST_GAIN: Final = 1 << 7
"""A coded plane must save this part of its bytes, for raw ones cost nothing to decode."""
_OVERHEAD: Final = 12
"""Bytes of the smallest frame: shorter planes stay raw."""


class Method(enum.IntEnum):
    """How a plane is stored; the value is the one in the file."""

    RAW = 0
    ZSTD = 1
    BITS = 2
    """Two bytes, and then a bit for each byte of the plane that says which, the first uppermost."""


class Coder(enum.Enum):
    """What may be tried on a plane; from 0 on it is the level of zstd, 0 its coder of literals alone."""

    BITS = -1
    """A Huffman code has a bit for each of two values too, but false matches make it longer."""
    HUFFMAN = 0
    ZSTD = 3
    ZSTD_SMALL = 19


class Plane(NamedTuple):
    """A plane as it is stored. Raw ones are views of what was given."""

    method: Method
    data: bytes | memoryview
    size: int
    """Bytes of ``data``."""


def encode_plane(
    plane: Buffer,
    coders: Iterable[Coder] = (Coder.HUFFMAN,),
    *,
    least_gain: int = _LEAST_GAIN,
    cuts: Sequence[int] = (),
) -> Plane:
    """Return the smallest form of a plane, raw unless a coder saves one byte in ``least_gain``.

    Args:
        plane: contiguous bytes.
        coders: what to try.
        least_gain: how many bytes of the plane must let a coder save one.
        cuts: where in the plane blocks with codes of their own begin, in order.
    """
    view = memoryview(plane).cast("B")
    size = len(view)
    best = Plane(Method.RAW, view, size)
    if size <= _OVERHEAD:
        return best
    limit = size - max(size // least_gain, 1)
    for coder in coders:
        method = Method.BITS if coder is Coder.BITS else Method.ZSTD
        data = _bits(view) if coder is Coder.BITS else _compress(_compressor(coder), view, cuts)
        if data is not None and len(data) <= limit and len(data) < best.size:
            best = Plane(method, data, len(data))
    return best


def _bits(view: memoryview) -> bytes | None:
    """Return a plane of two values as bits, None if it has more."""
    plane = np.frombuffer(view, np.uint8)
    low, high = plane.min(), plane.max()
    is_high = plane == high
    if np.count_nonzero(is_high) + np.count_nonzero(plane == low) < len(plane):
        return None
    return bytes([low, high]) + np.packbits(is_high).tobytes()


def _compress(compressor: zstandard.ZstdCompressor, view: memoryview, cuts: Sequence[int]) -> bytes:
    if not cuts:
        return compressor.compress(view)
    frame = compressor.compressobj(size=len(view))
    parts = []
    for start, end in pairwise((0, *cuts, len(view))):
        parts += [frame.compress(view[start:end]), frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, frame.flush()])


def decode_plane(method: int, stored: Buffer, out: Buffer) -> None:
    """Write the plane that ``stored`` is into all of ``out``.

    Nothing is allocated but what ``out`` has: a frame that declares another size is refused unread.

    Raises:
        ColdDamaged: it is no such plane.
    """
    target = memoryview(out).cast("B")
    if method == Method.RAW:
        source = memoryview(stored).cast("B")
        if len(source) != len(target):
            raise ColdDamaged(
                f"a raw plane of {len(source)} bytes where {len(target)} are expected"
            )
        target[:] = source
    elif method == Method.ZSTD:
        _decompress(stored, target)
    elif method == Method.BITS:
        _unpack_bits(stored, target)
    else:
        raise ColdDamaged(f"a plane is stored by method {method}, which is unknown")


def declared_size(stored: Buffer) -> int:
    """Return how many bytes a frame says that it holds, which may be any number.

    Raises:
        ColdDamaged: it is no frame.
    """
    try:
        return zstandard.get_frame_parameters(memoryview(stored).cast("B")).content_size
    except zstandard.ZstdError as error:
        raise ColdDamaged(f"a frame cannot be decoded: {error}") from None


def _unpack_bits(stored: Buffer, target: memoryview) -> None:
    source = np.frombuffer(memoryview(stored), np.uint8)
    if len(source) != 2 + -(-len(target) // 8):
        raise ColdDamaged(f"{len(source)} bytes cannot hold {len(target)} bits and two values")
    plane = np.frombuffer(target, np.uint8)
    np.copyto(plane, np.unpackbits(source[2:], count=len(target)))
    np.multiply(plane, source[1] ^ source[0], out=plane)
    np.bitwise_xor(plane, source[0], out=plane)


def _decompress(stored: Buffer, target: memoryview) -> None:
    source = memoryview(stored).cast("B")
    try:
        facts = zstandard.get_frame_parameters(source)
        if facts.content_size != len(target):
            raise ColdDamaged(
                f"a frame declares {facts.content_size} bytes where {len(target)} are expected"
            )
        # With the whole frame and the whole target at hand, zstd decodes straight into the target.
        count = _local.decompressor.stream_reader(source).readinto(target)
    except zstandard.ZstdError as error:
        raise ColdDamaged(f"a frame cannot be decoded: {error}") from None
    if count != len(target):
        raise ColdDamaged(f"a frame ends after {count} bytes of {len(target)}")


class _Local(threading.local):
    """Contexts of a thread, which take longer to make than a plane to code."""

    def __init__(self) -> None:
        self.compressors: dict[Coder, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_PLANE)


_local = _Local()


def _compressor(coder: Coder) -> zstandard.ZstdCompressor:
    compressor = _local.compressors.get(coder)
    if compressor is None:
        compressor = zstandard.ZstdCompressor(compression_params=_parameters(coder))
        _local.compressors[coder] = compressor
    return compressor


def _parameters(coder: Coder) -> zstandard.ZstdCompressionParameters:
    frame = {"write_content_size": 1, "write_checksum": 0, "write_dict_id": 0}
    if coder is not Coder.HUFFMAN:
        return zstandard.ZstdCompressionParameters.from_level(coder.value, **frame)
    return zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        chain_log=6,
        search_log=1,
        target_length=0,  # above 0, this strategy stops coding literals
        window_log=17,
        **frame,
    )

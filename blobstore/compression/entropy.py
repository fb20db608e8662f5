"""Entropy coding of planes: each is stored as the smallest of raw bytes, Huffman codes and zstd.

Both codes are plain zstd frames, so a decoder need not distinguish them. The Huffman coder is zstd
with a match finder that is too weak to find anything. Only literals remain; for the bytes of weights
they are smaller, and several times faster, than the output of the standard levels. Planes have at most
:data:`MAX_PLANE` bytes; up to 128 KiB share one block with one Huffman table.
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
"""Maximum size of a plane in bytes."""
_MIN_GAIN: Final = 1 << 7
"""A coder must save one byte in so many, because raw planes cost nothing to decode."""
_OVERHEAD: Final = 12
"""Size of the smallest frame in bytes: shorter planes stay raw."""
_LITERALS_ONLY: Final = {
    "strategy": zstandard.STRATEGY_FAST,
    "min_match": 7,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "target_length": 0,  # above 0, this strategy leaves literals uncompressed
    "window_log": 17,
}


class Method(enum.IntEnum):
    """How a plane is stored, as numbered in the file."""

    RAW = 0
    ZSTD = 1
    BITS = 2
    """Two values, then one bit per byte of the plane that selects one, the highest bit first."""


class Coder(enum.Enum):
    """A coder to try on a plane. Values above 0 are zstd levels; 0 is zstd without matches."""

    BITS = -1
    """A Huffman code spends one bit per value too, but accidental matches make it longer."""
    HUFFMAN = 0
    ZSTD = 3
    ZSTD_SMALL = 19

    __hash__ = object.__hash__  # as fast as identity, for members are singletons


class Plane(NamedTuple):
    """A plane in stored form. A raw plane is a view of the original."""

    method: Method
    data: bytes | memoryview
    size: int
    """Size of ``data`` in bytes."""


def encode_plane(
    plane: Buffer,
    coders: Iterable[Coder] = (Coder.HUFFMAN,),
    *,
    block_starts: Sequence[int] = (),
) -> Plane:
    """Return the smallest form of a plane, raw unless a coder saves enough.

    Args:
        plane: contiguous bytes.
        coders: the coders to try.
        block_starts: ascending offsets in the plane where blocks with their own Huffman table begin.
    """
    view = memoryview(plane).cast("B")
    size = len(view)
    best = Plane(Method.RAW, view, size)
    if size <= _OVERHEAD:
        return best
    limit = size - max(size // _MIN_GAIN, 1)
    for coder in coders:
        method = Method.BITS if coder is Coder.BITS else Method.ZSTD
        data = _bits(view) if coder is Coder.BITS else _compress(coder, view, block_starts)
        if data is not None and len(data) <= limit and len(data) < best.size:
            best = Plane(method, data, len(data))
    return best


def _bits(view: memoryview) -> bytes | None:
    """Return a plane of two values as bits, or None if it has more values."""
    plane = np.frombuffer(view, np.uint8)
    low, high = plane.min(), plane.max()
    is_high = plane == high
    if np.count_nonzero(is_high) + np.count_nonzero(plane == low) < len(plane):
        return None
    return bytes([low, high]) + np.packbits(is_high).tobytes()


def _compress(coder: Coder, view: memoryview, block_starts: Sequence[int]) -> bytes:
    compressor = _local.compressors.get(coder)
    if compressor is None:
        frame_options = {"write_content_size": 1, "write_checksum": 0, "write_dict_id": 0}
        parameters = zstandard.ZstdCompressionParameters
        compressor = zstandard.ZstdCompressor(
            compression_params=parameters(**_LITERALS_ONLY, **frame_options)
            if coder is Coder.HUFFMAN
            else parameters.from_level(coder.value, **frame_options)
        )
        _local.compressors[coder] = compressor
    if not block_starts:
        return compressor.compress(view)
    frame = compressor.compressobj(size=len(view))
    parts = []
    for start, end in pairwise((0, *block_starts, len(view))):
        parts += [frame.compress(view[start:end]), frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, frame.flush()])


def decode_plane(method: int, stored: Buffer, out: Buffer) -> None:
    """Decode a plane into ``out``, which it must fill exactly.

    A frame that declares another size is rejected before it is decoded, so no memory is allocated.

    Raises:
        ColdDamaged: the plane cannot be decoded, or has another size.
    """
    target = memoryview(out).cast("B")
    if method == Method.RAW:
        source = memoryview(stored).cast("B")
        if len(source) != len(target):
            raise ColdDamaged(f"a raw plane has {len(source)} bytes, expected {len(target)}")
        target[:] = source
    elif method == Method.ZSTD:
        _decompress(stored, target)
    elif method == Method.BITS:
        bits = np.frombuffer(memoryview(stored), np.uint8)
        if len(bits) != 2 + -(-len(target) // 8):
            raise ColdDamaged(f"{len(bits)} bytes cannot hold {len(target)} bits and two values")
        plane = np.frombuffer(target, np.uint8)
        np.copyto(plane, np.unpackbits(bits[2:], count=len(target)))
        np.multiply(plane, bits[1] ^ bits[0], out=plane)
        np.bitwise_xor(plane, bits[0], out=plane)
    else:
        raise ColdDamaged(f"a plane has the unknown method {method}")


def declared_size(stored: Buffer) -> int:
    """Return the content size that a frame declares; it is not verified.

    Raises:
        ColdDamaged: the bytes are not a frame.
    """
    try:
        return zstandard.get_frame_parameters(memoryview(stored).cast("B")).content_size
    except zstandard.ZstdError as error:
        raise ColdDamaged(f"a frame cannot be decoded: {error}") from None


def _decompress(stored: Buffer, target: memoryview) -> None:
    source = memoryview(stored).cast("B")
    try:
        parameters = zstandard.get_frame_parameters(source)
        if parameters.content_size != len(target):
            raise ColdDamaged(
                f"a frame declares {parameters.content_size} bytes, expected {len(target)}"
            )
        # Given the complete frame and target, zstd decodes directly into the target.
        count = _local.decompressor.stream_reader(source).readinto(target)
    except zstandard.ZstdError as error:
        raise ColdDamaged(f"a frame cannot be decoded: {error}") from None
    if count != len(target):
        raise ColdDamaged(f"a frame ends after {count} bytes of {len(target)}")


class _Local(threading.local):
    """The zstd contexts of a thread: creating one takes longer than coding a plane."""

    def __init__(self) -> None:
        self.compressors: dict[Coder, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_PLANE)


_local = _Local()

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zstandard

from blobstore.compression.chunks import Way, decode_chunk, encode_chunk
from blobstore.compression.delta.codec import Effort
from blobstore.compression.entropy import Coder, Method
from blobstore.compression.table import Chunk, Stored
from blobstore.compression.transforms import BF16, BF16_PAIRS, WHOLE, difference, layout_of
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged
from tests.support.cold import noise, weights

if TYPE_CHECKING:
    from blobstore.compression.transforms import Transform

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
HUFFMAN = (Coder.HUFFMAN,)
CHUNK = np.frombuffer(weights(DType.BF16, 20_000), np.uint8)
PAIRS = Way(BF16_PAIRS, ((), HUFFMAN, ()))


def encoded(chunk: Bytes, *ways: Way, base: Bytes | None = None) -> tuple[Chunk, bytes]:
    entry, planes = encode_chunk(chunk, base, ways)
    return entry, b"".join(bytes(plane.data) for plane in planes)


def decoded(entry: Chunk, stored: bytes, size: int, base: Bytes | None = None) -> Bytes:
    layout: Transform | None = layout_of(entry.layout, 2)
    assert layout is not None
    out = np.empty(size, np.uint8)
    decode_chunk(entry, layout, memoryview(stored), out, base)
    return out


def test_a_chunk_comes_back() -> None:
    entry, stored = encoded(CHUNK, PAIRS)

    assert entry.layout == BF16_PAIRS.number
    assert len(stored) == sum(plane.size for plane in entry.planes) < 0.7 * len(CHUNK)
    assert decoded(entry, stored, len(CHUNK)).tobytes() == CHUNK.tobytes()


def test_a_way_that_does_not_suit_is_passed_over() -> None:
    odd = CHUNK[:-2]

    entry, stored = encoded(odd, PAIRS, Way(BF16, (HUFFMAN, ())))

    assert entry.layout == BF16.number
    assert decoded(entry, stored, len(odd)).tobytes() == odd.tobytes()


@pytest.mark.parametrize("ways", [(), (Way(BF16, (HUFFMAN, HUFFMAN)),), (PAIRS,)])
def test_what_does_not_get_smaller_is_raw(ways: tuple[Way, ...]) -> None:
    chunk = np.frombuffer(noise(3000), np.uint8)

    entry, stored = encoded(chunk, *ways)

    assert entry == Chunk(zlib.crc32(chunk.data), 0, (Stored(Method.RAW, 3000),))
    assert stored == chunk.tobytes()
    assert decoded(entry, stored, 3000).tobytes() == chunk.tobytes()


def test_the_check_sum_covers_lists_and_coded_planes_too() -> None:
    entry, stored = encoded(CHUNK, PAIRS)
    (_, listed), (_, pairs), _ = entry.planes

    assert entry.planes[0].method == Method.RAW
    assert entry.check == zlib.crc32(CHUNK.tobytes() + stored[: listed + pairs])


@pytest.mark.parametrize("place", [0, 3, 60, 5000, -1])
def test_rejects_planes_that_were_altered(place: int) -> None:
    entry, stored = encoded(CHUNK, PAIRS)
    damaged = bytearray(stored)
    damaged[place] ^= 4

    with pytest.raises(ColdDamaged):
        decoded(entry, bytes(damaged), len(CHUNK))


def test_rejects_a_list_that_declares_more_than_a_list_has() -> None:
    planes = (Stored(Method.ZSTD, 20), Stored(Method.RAW, 500), Stored(Method.RAW, 1000))
    bomb = zstandard.compress(bytes(1 << 20))[:20].ljust(20, b"\0")

    with pytest.raises(ColdDamaged, match="declares 1048576"):
        decoded(Chunk(0, BF16_PAIRS.number, planes), bomb + noise(1500), 2000)


def test_a_delta_needs_the_same_base_again() -> None:
    base = CHUNK.copy()
    chunk = CHUNK.copy()
    chunk[::50] ^= 1
    way = Way(difference(DType.BF16, Effort.FAST), ((),))
    entry, stored = encoded(chunk, way, base=base)

    assert len(stored) < len(chunk) // 8
    assert decoded(entry, stored, len(chunk), base).tobytes() == chunk.tobytes()
    base[100] ^= 1
    with pytest.raises(ColdDamaged, match="the file or the base is altered"):
        decoded(entry, stored, len(chunk), base)


def test_whole_chunks_of_any_width_are_one_layout() -> None:
    assert {layout.number for layout in WHOLE.values()} == {0}

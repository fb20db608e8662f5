from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import zstandard

from blobstore.compression.chunks import Pipeline, decode_chunk, encode_chunk
from blobstore.compression.delta.codec import FAST
from blobstore.compression.entropy import Coder, Method, encode_plane
from blobstore.compression.table import Chunk, StoredPlane
from blobstore.compression.transforms import (
    BF16,
    BF16_PAIRS,
    IDENTITY,
    Transform,
    delta_transform,
    transform_of,
)
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged
from tests.support.cold import noise, weights

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
HUFFMAN = (Coder.HUFFMAN,)
CHUNK = np.frombuffer(weights(DType.BF16, 20_000), np.uint8)
PAIRS = Pipeline(BF16_PAIRS, ((), HUFFMAN, ()))


def encoded(chunk: Bytes, *pipelines: Pipeline, base: Bytes | None = None) -> tuple[Chunk, bytes]:
    entry, planes = encode_chunk(chunk, base, pipelines)
    return entry, b"".join(bytes(plane.data) for plane in planes)


def decoded(entry: Chunk, stored: bytes, size: int, base: Bytes | None = None) -> Bytes:
    transform: Transform | None = transform_of(entry.transform, 2)
    assert transform is not None
    out = np.empty(size, np.uint8)
    decode_chunk(entry, transform, memoryview(stored), out, base)
    return out


def test_a_chunk_survives_a_round_trip() -> None:
    entry, stored = encoded(CHUNK, PAIRS)
    assert entry.transform == BF16_PAIRS.number
    assert len(stored) == sum(plane.size for plane in entry.planes) < 0.7 * len(CHUNK)
    assert decoded(entry, stored, len(CHUNK)).tobytes() == CHUNK.tobytes()


def test_skips_a_pipeline_that_is_not_applicable() -> None:
    odd = CHUNK[:-2]
    entry, stored = encoded(odd, PAIRS, Pipeline(BF16, (HUFFMAN, ())))
    assert entry.transform == BF16.number
    assert decoded(entry, stored, len(odd)).tobytes() == odd.tobytes()


@pytest.mark.parametrize("pipelines", [(), (Pipeline(BF16, (HUFFMAN, HUFFMAN)),), (PAIRS,)])
def test_stores_incompressible_chunks_raw(pipelines: tuple[Pipeline, ...]) -> None:
    chunk = np.frombuffer(noise(3000), np.uint8)
    entry, stored = encoded(chunk, *pipelines)
    assert entry == Chunk(zlib.crc32(chunk.data), 0, (StoredPlane(Method.RAW, 3000),))
    assert stored == chunk.tobytes()
    assert decoded(entry, stored, 3000).tobytes() == chunk.tobytes()


def test_the_checksum_covers_lists_and_compressed_planes() -> None:
    entry, stored = encoded(CHUNK, PAIRS)
    (_, listed), (_, pairs), _ = entry.planes
    assert entry.planes[0].method == Method.RAW
    assert entry.checksum == zlib.crc32(CHUNK.tobytes() + stored[: listed + pairs])


@pytest.mark.parametrize("place", [0, 3, 60, 5000, -1])
def test_rejects_altered_planes(place: int) -> None:
    entry, stored = encoded(CHUNK, PAIRS)
    damaged = bytearray(stored)
    damaged[place] ^= 4
    with pytest.raises(ColdDamaged):
        decoded(entry, bytes(damaged), len(CHUNK))


def test_rejects_a_list_that_declares_too_many_bytes() -> None:
    planes = (
        StoredPlane(Method.ZSTD, 20),
        StoredPlane(Method.RAW, 500),
        StoredPlane(Method.RAW, 1000),
    )
    bomb = zstandard.compress(bytes(1 << 20))[:20].ljust(20, b"\0")
    with pytest.raises(ColdDamaged, match="declares 1048576"):
        decoded(Chunk(0, BF16_PAIRS.number, planes), bomb + noise(1500), 2000)


def test_a_delta_needs_the_same_base_to_decode() -> None:
    base = CHUNK.copy()
    chunk = CHUNK.copy()
    chunk[::50] ^= 1
    pipeline = Pipeline(delta_transform(DType.BF16, FAST), ((),))
    entry, stored = encoded(chunk, pipeline, base=base)

    assert len(stored) < len(chunk) // 8
    assert decoded(entry, stored, len(chunk), base).tobytes() == chunk.tobytes()
    base[100] ^= 1
    with pytest.raises(ColdDamaged, match="the file or the base is altered"):
        decoded(entry, stored, len(chunk), base)


def test_differences_longer_than_the_chunk_are_not_stored() -> None:
    """Decoders reject them, even where they compress to less than the chunk."""
    base = np.frombuffer(weights(DType.BF16, 16), np.uint8)
    chunk = base.copy()
    chunk[1::4] += 1
    differences = delta_transform(DType.BF16, FAST)
    (plane,) = differences.encode(chunk, base) or ()
    assert encode_plane(plane.data, HUFFMAN).size < len(chunk) < len(plane)
    entry, stored = encoded(chunk, Pipeline(differences, (HUFFMAN,)), base=base)
    assert decoded(entry, stored, len(chunk), base).tobytes() == chunk.tobytes()


def test_the_identity_has_one_number_for_all_widths() -> None:
    assert {transform.number for transform in IDENTITY.values()} == {0}


@pytest.mark.parametrize(
    ("size", "begin", "method"),
    [
        (1 << 14, 0, Method.ZSTD),
        (1 << 16, 1 << 15, Method.ZSTD),  # the middle is probed
        (1 << 16, 1 << 16, Method.RAW),
        ((1 << 14) - 1, 0, Method.RAW),  # too small to be worth it
    ],
)
def test_a_plane_that_was_noise_in_the_sample_is_probed(
    size: int, begin: int, method: Method
) -> None:
    chunk = np.frombuffer(noise(size), np.uint8).copy()
    chunk[begin:] %= 7
    entry, _ = encoded(chunk, Pipeline(IDENTITY[1], ((),)))
    assert [plane.method for plane in entry.planes] == [method]

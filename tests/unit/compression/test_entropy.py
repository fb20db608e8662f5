from __future__ import annotations

import threading

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from blobstore.compression.entropy import Coder, Method, declared_size, decode_plane, encode_plane
from blobstore.errors import ColdDamaged
from tests.support.cold import noise

SKEWED = np.frexp(np.random.default_rng(1).standard_normal(1 << 17))[1].astype(np.uint8).tobytes()
"""The exponents of weights: few values, no order."""
EVERY = tuple(Coder)


def decoded(method: int, stored: bytes | memoryview, size: int) -> bytes:
    out = bytearray(size)
    decode_plane(method, stored, out)
    return bytes(out)


@pytest.mark.slow
@given(st.binary(max_size=3000), st.sets(st.sampled_from(EVERY)))
def test_every_plane_comes_back(plane: bytes, coders: set[Coder]) -> None:
    stored = encode_plane(plane, coders)
    assert stored.size == len(stored.data) <= len(plane)
    assert decoded(stored.method, stored.data, len(plane)) == plane


def test_codes_literals_near_their_entropy_where_stock_levels_find_false_matches() -> None:
    counts = np.bincount(np.frombuffer(SKEWED, np.uint8))
    shares = counts[counts > 0] / len(SKEWED)
    entropy = -float((shares * np.log2(shares)).sum()) * len(SKEWED) / 8
    literal = encode_plane(SKEWED, (Coder.HUFFMAN,))
    assert literal.method == Method.ZSTD
    assert literal.size < 1.03 * entropy
    assert literal.size < encode_plane(SKEWED, (Coder.ZSTD,)).size
    assert encode_plane(SKEWED, (Coder.ZSTD, Coder.HUFFMAN)).size == literal.size


def test_finds_repeats_when_asked_to() -> None:
    plane = noise(20_000) * 5
    assert encode_plane(plane, (Coder.HUFFMAN,)).method == Method.RAW
    assert encode_plane(plane, (Coder.HUFFMAN, Coder.ZSTD)).size < 21_000


@pytest.mark.parametrize("values", [(0, 128), (7, 8), (255, 0), (3, 3)])
@pytest.mark.parametrize("count", [100, 101, 10_000])
def test_two_values_are_a_bit_each(values: tuple[int, int], count: int) -> None:
    bits = np.random.default_rng(2).integers(0, 2, count)
    plane = np.array(values, np.uint8)[bits].tobytes()
    stored = encode_plane(plane, (Coder.BITS,))
    assert (stored.method, stored.size) == (Method.BITS, 2 + -(-count // 8))
    assert decoded(stored.method, stored.data, count) == plane


def test_three_values_are_not_bits() -> None:
    assert encode_plane(bytes([1, 2, 3]) * 100, (Coder.BITS,)).method == Method.RAW


def test_false_matches_make_bits_worth_it() -> None:
    plane = np.random.default_rng(2).integers(0, 2, 1 << 17).astype(np.uint8).tobytes()
    chosen = encode_plane(plane, (Coder.HUFFMAN, Coder.BITS))
    assert chosen.method == Method.BITS
    assert chosen.size < 0.9 * encode_plane(plane).size


@pytest.mark.parametrize("size", [0, 1, 2, 14, 16])
def test_rejects_bits_of_another_size(size: int) -> None:
    with pytest.raises(ColdDamaged, match="100 bits and two values"):
        decoded(Method.BITS, bytes(size), 100)


def test_planes_that_save_too_little_stay_raw() -> None:
    assert encode_plane(noise(100_000) + bytes(2000)).method == Method.ZSTD
    assert encode_plane(noise(100_000) + bytes(600)).method == Method.RAW


def test_raw_planes_are_not_copied() -> None:
    plane = bytearray(noise(100))
    stored = encode_plane(plane)
    plane[0] ^= 1
    assert bytes(stored.data) == bytes(plane)


@pytest.mark.parametrize("size", [0, 1, 12])
def test_short_planes_stay_raw(size: int) -> None:
    assert encode_plane(bytes(size), EVERY).method == Method.RAW


def test_decodes_into_the_middle_of_memory() -> None:
    out = np.full(len(SKEWED) + 20, 255, np.uint8)
    decode_plane(Method.ZSTD, encode_plane(SKEWED).data, out[10:-10].data)
    assert out[10:-10].tobytes() == SKEWED
    assert set(out[:10]) | set(out[-10:]) == {255}


def test_threads_code_at_the_same_time() -> None:
    planes = [np.roll(np.frombuffer(SKEWED, np.uint8), turn).tobytes() for turn in range(8)]
    back: dict[int, bytes] = {}

    def work(number: int) -> None:
        for _ in range(5):
            stored = encode_plane(planes[number], EVERY[:2])
            back[number] = decoded(stored.method, stored.data, len(SKEWED))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert back == dict(enumerate(planes))


MAGIC = zstandard.MAGIC_NUMBER.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("method", "stored", "message"),
    [
        (Method.RAW, b"abc", "a raw plane has 3 bytes, expected 100"),
        (3, b"abc", "unknown method 3"),
        (
            Method.ZSTD,
            zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100)),
            "declares",
        ),
        (
            Method.ZSTD,
            MAGIC + bytes([0b1100_0000, 21 << 3]) + (100).to_bytes(8, "little"),
            "a frame cannot be decoded",
        ),
    ],
    ids=["raw of another size", "unknown method", "no size", "large window"],
)
def test_rejects_an_invalid_plane(method: int, stored: bytes, message: str) -> None:
    with pytest.raises(ColdDamaged, match=message):
        decoded(method, stored, 100)


@pytest.mark.parametrize("size", [0, 99, 101, 1 << 17])
def test_rejects_a_frame_of_another_size(size: int) -> None:
    frame = zstandard.compress(bytes(100))
    with pytest.raises(ColdDamaged, match=f"declares 100 bytes, expected {size}"):
        decoded(Method.ZSTD, frame, size)


@pytest.mark.parametrize("stored", [b"", b"no frame at all", MAGIC])
def test_rejects_bytes_that_are_not_a_frame(stored: bytes) -> None:
    with pytest.raises(ColdDamaged, match="a frame cannot be decoded"):
        decoded(Method.ZSTD, stored, 100)
    with pytest.raises(ColdDamaged, match="a frame cannot be decoded"):
        declared_size(stored)


def test_rejects_a_frame_that_is_cut_anywhere() -> None:
    frame = bytes(encode_plane(SKEWED[:2000]).data)
    for size in range(len(frame)):
        with pytest.raises(ColdDamaged):
            decoded(Method.ZSTD, frame[:size], 2000)


def test_returns_the_size_that_a_frame_declares() -> None:
    assert declared_size(zstandard.compress(bytes(12345))) == 12345

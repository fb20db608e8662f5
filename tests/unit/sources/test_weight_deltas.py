"""The changes of tensors as trainers write them, both ways, and what is refused."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import blake3
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import DamagedSource
from blobstore.sources.weight_deltas import CHECKSUMS, Encoding, Patch, encode_change, new_checksum
from tests.readers.weight_versions import checksum


def patch(frame: bytes, encoding: Encoding, new: bytes, kind: str = "adler32") -> Patch:
    pieces: Iterator[memoryview] = (
        memoryview(frame)[at : at + 7] for at in range(0, len(frame), 7)
    )
    return Patch(pieces, encoding, len(new), kind, checksum(kind, new), "here")


def applied(made: Patch, old: bytes, size: int) -> bytes:
    """Return the bytes that a patch makes of ``old``, some at a time."""
    found = bytearray(old)
    if not old:
        made.finish()
    for at in range(0, len(old), size):
        made.apply(memoryview(found)[at : at + size])
    return bytes(found)


@pytest.mark.parametrize("kind", CHECKSUMS)
def test_checksums_are_those_of_the_libraries(kind: str) -> None:
    data = bytes(range(256)) * 9
    made = new_checksum(kind)
    made.update(memoryview(data)[:100])
    made.update(memoryview(data)[100:])
    expected = {
        "adler32": f"{zlib.adler32(data):08x}",
        "blake3": blake3.blake3(data).hexdigest(),
        "xxh3-128": xxhash.xxh3_128(data).hexdigest(),
    }
    assert made.hexdigest() == expected[kind]


@given(
    st.binary(max_size=300),
    st.lists(st.tuples(st.integers(0, 299), st.integers(1, 255)), max_size=20),
    st.sampled_from(["xor", "overwrite"]),
    st.integers(1, 400),
)
def test_a_change_makes_the_new_bytes_of_the_old_ones(
    old: bytes, changes: list[tuple[int, int]], encoding: Encoding, size: int
) -> None:
    new = bytearray(old)
    for at, value in changes:
        if at < len(new):
            new[at] ^= value
    frame = encode_change(memoryview(old), memoryview(new), encoding)
    if frame is None:
        assert bytes(new) == old
    else:
        assert applied(patch(frame, encoding, bytes(new)), old, size) == bytes(new)


def test_a_byte_that_is_listed_twice_gets_its_last_value() -> None:
    at = np.array([5, 2, 5, 2], "<u4")
    payload = np.array([4], "<u4").tobytes() + at.tobytes() + bytes([1, 2, 3, 4])
    new = bytes([0, 0, 4, 0, 0, 3, 0])
    frame = zstandard.ZstdCompressor().compress(payload)
    assert applied(patch(frame, "overwrite", new), bytes(7), 3) == new


def test_a_small_frame_does_not_become_many_positions() -> None:
    count = 2**20 + 1
    payload = np.array([count], "<u4").tobytes() + bytes(5 * count)
    frame = zstandard.ZstdCompressor().compress(payload)
    assert len(frame) < 2000
    old = bytes(count)
    with pytest.raises(DamagedSource, match="here: the bytes that change are not in order"):
        applied(Patch(iter([memoryview(frame)]), "overwrite", count, "adler32", "", "here"), old, 1)


def test_an_empty_tensor_has_a_checksum_too() -> None:
    frame = zstandard.ZstdCompressor().compress(b"")
    patch(frame, "xor", b"").finish()
    with pytest.raises(DamagedSource, match="here: the new bytes have the checksum"):
        Patch(iter([memoryview(frame)]), "xor", 0, "adler32", "1", "here").finish()


def test_the_window_of_a_frame_is_limited() -> None:
    options = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    made = zstandard.ZstdCompressor(compression_params=options).compressobj()
    frame = made.compress(bytes(100)) + made.flush()
    with pytest.raises(DamagedSource, match="not a frame of zstd"):
        applied(patch(frame, "xor", bytes(100)), bytes(100), 100)


def test_a_frame_that_is_skipped_does_not_hide_the_window() -> None:
    data = bytes(8)
    frame = encode_change(memoryview(data), memoryview(bytes(7) + b"x"), "xor")
    assert frame is not None
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + bytes(4)
    with pytest.raises(DamagedSource, match="^here: not a frame of zstd$"):
        Patch(iter([memoryview(skipped + frame)]), "xor", 8, "adler32", "0", "here")


def test_an_empty_frame_does_not_hide_the_window_of_the_next() -> None:
    options = zstandard.ZstdCompressionParameters(window_log=20)
    made = zstandard.ZstdCompressor(compression_params=options).compressobj()
    frame = made.compress(bytes(100)) + made.flush()
    empty = zstandard.FRAME_HEADER + bytes(2) + b"\x01\0\0"  # its window has 1 KiB
    assert zstandard.ZstdDecompressor().decompressobj().decompress(empty) == b""
    with pytest.raises(DamagedSource, match="not a frame of zstd"):
        applied(patch(empty + frame, "xor", bytes(100)), bytes(100), 100)


def overwrite(positions: list[int], values: bytes, count: int | None = None) -> bytes:
    """Return what a frame of this encoding has; ``count`` replaces the one that is right."""
    head = np.array([len(positions) if count is None else count, *positions], "<u4")
    return head.tobytes() + values


@pytest.mark.parametrize(
    ("encoding", "payload", "message"),
    [
        ("xor", bytes(7), "the change ends too early"),
        ("xor", bytes(9), "the change is larger than the tensor"),
        ("overwrite", b"\1\0", "the change ends too early"),
        ("overwrite", overwrite([], b"", 9), "9 bytes change of a tensor of 8 bytes"),
        ("overwrite", overwrite([1, 8], b"ab"), "byte 8 changes of a tensor of 8 bytes"),
        ("overwrite", overwrite([8, 1], b"ab"), "byte 8 changes of a tensor of 8 bytes"),
        ("overwrite", overwrite([1, 2], b"a"), "the change ends too early"),
        ("overwrite", overwrite([1], b"\0\0"), "the change is larger than the tensor"),
    ],
)
def test_a_change_of_another_size_is_refused(
    encoding: Encoding, payload: bytes, message: str
) -> None:
    frame = zstandard.ZstdCompressor().compress(payload)
    with pytest.raises(DamagedSource, match=f"^here: {message}"):
        applied(patch(frame, encoding, bytes(8)), bytes(8), 5)


def test_new_bytes_with_another_checksum_are_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(8))
    with pytest.raises(DamagedSource, match="the new bytes have the checksum"):
        applied(patch(frame, "xor", b"expected"), bytes(8), 5)


def test_nothing_is_encoded_where_nothing_changes() -> None:
    assert encode_change(memoryview(b"abc"), memoryview(b"abc"), "overwrite") is None


def test_of_many_unordered_positions_the_last_value_of_each_counts() -> None:
    # More than numpy sorts by insertion, which keeps the order of equal ones by itself.
    positions = [number % 7 for number in range(700)]
    values = bytes(number % 251 for number in range(700))
    new = bytearray(700)
    for at, value in zip(positions, values, strict=True):
        new[at] = value
    frame = zstandard.ZstdCompressor().compress(overwrite(positions, values))
    assert applied(patch(frame, "overwrite", bytes(new)), bytes(700), 50) == new

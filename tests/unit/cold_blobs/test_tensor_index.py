from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blobstore.cold_blobs.tensor_index import (
    MIN_PIECE,
    BlobIndex,
    Piece,
    TensorIndex,
    pieces_of,
    slices_of,
)
from blobstore.core.digest import Digest
from blobstore.safetensors.header import PREFIX_SIZE, parse_header
from tests.support.cold import noise
from tests.support.models import blob

if TYPE_CHECKING:
    from blobstore.cold_blobs.tensor_index import Read
    from blobstore.safetensors.header import Header

SIZE = 8 * MIN_PIECE
"""More bytes than are read first."""


def header_of(data: bytes) -> Header:
    end = PREFIX_SIZE + int.from_bytes(data[:PREFIX_SIZE], "little")
    return parse_header(data[PREFIX_SIZE:end], len(data))


def reading(data: bytes) -> Read:
    def read(out: memoryview, begin: int) -> None:
        out[:] = data[begin : begin + len(out)]

    return read


def test_pieces_are_tensors_and_slices_of_stacks() -> None:
    data = blob(
        ("stack", "U8", (3, 2, SIZE // 2), noise(3 * SIZE)),
        ("matrix", "U8", (2, SIZE), noise(2 * SIZE)),
        ("small", "U8", (MIN_PIECE - 1,), noise(MIN_PIECE - 1)),
    )
    header = header_of(data)
    found = list(pieces_of(header))
    start = header.data_start
    assert found == [
        (Piece(start, 3 * SIZE, 8), [Piece(start + n * SIZE, SIZE, 8) for n in range(3)]),
        (Piece(start + 3 * SIZE, 2 * SIZE, 8), []),
    ]


def test_small_and_single_slices_are_not_pieces() -> None:
    shapes = [("U8", (1, 2, SIZE)), ("F4", (2, 2, SIZE)), ("U8", (2 * SIZE // 64, 1, 64))]
    for code, shape in shapes:
        data = blob(("x", code, shape, noise(2 * SIZE)))
        header = header_of(data)
        assert slices_of(header.tensors["x"], header.data_start) == []


def test_finds_a_piece_by_its_bytes() -> None:
    one, other = noise(SIZE, 1), noise(SIZE, 2)
    data = blob(("a", "U8", (SIZE,), one), ("b", "U8", (2, 1, SIZE), other + one))
    pieces = BlobIndex(header_of(data), reading(data))
    for content in (one, other):
        assert pieces.find(Piece(0, SIZE, 8), reading(content)) == data.index(content)
    assert pieces.find(Piece(0, SIZE, 8), reading(noise(SIZE, 3))) is None
    assert pieces.find(Piece(0, SIZE, 16), reading(one)) is None


@pytest.mark.parametrize("place", [0, 100, SIZE // 4, SIZE - 1])
def test_a_single_byte_makes_pieces_different(place: int) -> None:
    one = noise(SIZE, 1)
    other = bytearray(one)
    other[place] ^= 1
    data = blob(("a", "U8", (SIZE,), one))
    begin = data.index(one)
    pieces = BlobIndex(header_of(data), reading(data))
    assert pieces.find(Piece(0, SIZE, 8), reading(one), begin) == begin
    assert pieces.find(Piece(0, SIZE, 8), reading(bytes(other)), begin) is None
    assert indexed(data, blob(("b", "U8", (SIZE,), bytes(other)))) == {}


def test_constant_pieces_are_not_found() -> None:
    data = blob(("a", "U8", (SIZE,), bytes(SIZE)))
    pieces = BlobIndex(header_of(data), reading(data))
    assert pieces.find(Piece(0, SIZE, 8), reading(bytes(SIZE))) is None
    assert indexed(data, blob(("b", "U8", (SIZE,), bytes(SIZE)))) == {}


def test_finds_pieces_with_a_constant_middle() -> None:
    content = noise(100) + bytes(SIZE - 100)
    one, other = (blob((name, "U8", (SIZE,), content)) for name in "ab")
    assert indexed(one, other) == {(0, 1): SIZE, (1, 0): SIZE}


def indexed(*blobs: bytes) -> dict[tuple[int, int], int]:
    """Return how many bytes of a blob another one has too, for the pairs that have any."""
    index = TensorIndex()
    digests = [Digest.of(data) for data in blobs]
    for digest, data in zip(digests, blobs, strict=True):
        index.add(digest, header_of(data), lambda data=data: reading(data))  # type: ignore[misc]
    assert list(index) == digests
    return {
        (one, other): count
        for one, mine in enumerate(digests)
        for other, theirs in enumerate(digests)
        if one != other and (count := index.count_equal(mine, theirs))
    }


def test_counts_the_bytes_that_blobs_share() -> None:
    parts = [noise(SIZE, seed) for seed in range(4)]
    stack = blob(("stack", "U8", (4, 1, SIZE), b"".join(parts)))
    single = blob(("x", "U8", (SIZE,), parts[2]))
    other = blob(("y", "U8", (SIZE,), noise(SIZE, 9)))
    assert indexed(stack, single, other) == {(0, 1): SIZE, (1, 0): SIZE}

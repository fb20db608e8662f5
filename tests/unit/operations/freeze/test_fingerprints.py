from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.operations.freeze.fingerprints import (
    MIN_PIECE,
    Fingerprint,
    FingerprintIndex,
    Piece,
    fingerprint_of,
    pieces_of,
    slices_of,
)
from blobstore.safetensors.header import PREFIX_SIZE, parse_header
from tests.support.cold import noise
from tests.support.models import blob

if TYPE_CHECKING:
    from blobstore.operations.freeze.fingerprints import Read
    from blobstore.safetensors.header import Header

SIZE = 2 * MIN_PIECE


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
    pieces = FingerprintIndex(header_of(data), reading(data))
    where = {bytes_: data.index(bytes_) for bytes_ in (one, other)}
    for bytes_, place in where.items():
        assert pieces.find(fingerprint_of(Piece(0, SIZE, 8), reading(bytes_))) == place
    assert pieces.find(fingerprint_of(Piece(0, SIZE, 8), reading(noise(SIZE, 3)))) is None
    assert pieces.find(fingerprint_of(Piece(0, SIZE, 16), reading(one))) is None


def test_constant_pieces_have_no_fingerprint() -> None:
    data = blob(("a", "U8", (SIZE,), bytes(SIZE)))
    pieces = FingerprintIndex(header_of(data), reading(data))
    assert fingerprint_of(Piece(0, SIZE, 8), reading(bytes(SIZE))) is None
    assert pieces.find(None) is None
    assert pieces.find(Fingerprint((SIZE, 8), bytes(192))) is None

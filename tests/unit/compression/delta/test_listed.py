from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard

from blobstore.compression.delta.listed import decode, encode
from blobstore.compression.delta.planes import Form
from blobstore.compression.entropy import Coder, Method
from blobstore.errors import ColdDamaged

SIGNED = np.dtype("<i2")
RANKS = np.arange(0, 1000, 9)
"""Places of the differences in two classes, of 600 and 400 elements."""
SIZES = [600, 400]


def places(count: int = 2, *, method: int = Method.RAW, highs: bytes = b"\x01\x01") -> memoryview:
    """Return the plane of places of a class."""
    fields = (count << 3).to_bytes(3, "little")
    return memoryview(fields + struct.pack("<BI", method, len(highs)) + highs)


@pytest.mark.parametrize("form", [None, Form.CRUMBS, Form.NIBBLES, Form.ESCAPED, Form.BYTES])
@pytest.mark.parametrize("largest", [1, 5, 200, 30_000])
def test_returns_places_and_differences(form: int | None, largest: int) -> None:
    random = np.random.default_rng(largest)
    differences = random.choice([-largest, -1, 1, largest], len(RANKS)).astype(SIGNED)
    segment = encode(differences, RANKS, SIZES, form, [Coder.HUFFMAN])
    stored = [(plane.method, memoryview(plane.data)) for plane in segment.planes]
    ranks, found = decode(segment.form, stored, segment.escapes, SIZES, SIGNED)
    assert np.array_equal(ranks, RANKS)
    assert np.array_equal(found, differences)


@pytest.mark.parametrize(
    ("form", "stored", "escapes", "message"),
    [
        (18, [(1, places()), (0, memoryview(b"\x11"))], 0, "have the method 1"),
        (18, [(2, places()), (0, memoryview(b"\x11"))], 0, "have the method 2"),
        (18, [(0, places()), (0, memoryview(b"\x88")), (0, memoryview(bytes(6)))], 3, "3 escaped"),
        (18, [(0, places()), (0, memoryview(b"\x88")), (0, memoryview(bytes(2)))], 2, "raw plane"),
        (18, [(0, places()), (0, memoryview(b"\x11")), (0, memoryview(bytes(2)))], 1, "0 escape"),
        (18, [(0, places()), (0, memoryview(b"\x88"))], 0, None),
        (18, [(0, places()), (0, memoryview(b"\x11\x11"))], 0, "raw plane has 2 bytes"),
        (
            20,
            [(0, places()), (0, memoryview(b"\x11\x11")), (0, memoryview(bytes(4)))],
            2,
            "without",
        ),
        (22, [(0, places()), *[(0, memoryview(b"\x11\x11"))] * 3], 0, "cannot have 3 planes"),
    ],
)
def test_refuses_impossible_segments(
    form: int, stored: list[tuple[int, memoryview]], escapes: int, message: str | None
) -> None:
    if message is None:  # the code of an escape without one is the least number of its bits
        assert decode(form, stored, escapes, [10], SIGNED)[1].tolist() == [-8, -8]
        return
    with pytest.raises(ColdDamaged, match=message):
        decode(form, stored, escapes, [10], SIGNED)


@pytest.mark.parametrize(
    ("plane", "escapes"),
    [
        (places((1 << 21) - 1), 0),
        (places(highs=zstandard.compress(bytes(1 << 26)), method=Method.ZSTD), 0),
        (places(), (1 << 32) - 1),
    ],
    ids=["many differences", "a large frame", "many escapes"],
)
def test_sizes_that_a_segment_states_take_no_memory(plane: memoryview, escapes: int) -> None:
    stored = [(0, plane), (0, memoryview(b"\x88")), (0, memoryview(b""))]
    tracemalloc.start()
    try:
        with pytest.raises(ColdDamaged):
            decode(18, stored, escapes, [1 << 19], SIGNED)
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
    finally:
        tracemalloc.stop()

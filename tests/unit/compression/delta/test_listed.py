from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard

from blobstore.compression.delta.listed import decode, differing_words, encode, find
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


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 7, 8, 1000, 1003])
@pytest.mark.parametrize("step", [1, 3, 20, 2000])
def test_finds_the_elements_that_differ(width: int, size: int, step: int) -> None:
    random = np.random.default_rng(size)
    predicted = random.integers(0, 256, size * width).astype(np.uint8).view(f"<u{width}")
    expected = size - 1 - np.arange(0, size, step)[::-1]  # the last element differs
    expected_differences = random.choice([-1, 1], len(expected))
    chunk = predicted.copy()
    chunk[expected] += expected_differences.astype(chunk.dtype)
    found = find(chunk, predicted, differing_words(chunk, predicted), 1.0)
    assert found is not None
    assert found[0].tolist() == expected.tolist()
    assert found[1].tolist() == (chunk - predicted)[expected].tolist()


@pytest.mark.parametrize(
    ("changed", "share"),
    [
        (slice(0, 4096), 0.5),  # more words than elements may differ
        (slice(0, 4096, 2), 0.4),  # too many elements, of which there are two in a word
        (slice(0, 64), 0.25),  # a whole block, known from its words
        (slice(0, 40, 4), 0.15),  # too many of its block, known from the elements
        (slice(0, 0), 0.5),  # none
    ],
)
def test_finds_nothing_where_elements_are_no_few_scattered_ones(
    changed: slice, share: float
) -> None:
    predicted = np.zeros(4096, np.uint16)
    chunk = predicted.copy()
    chunk[changed] = 1
    assert find(chunk, predicted, differing_words(chunk, predicted), share) is None

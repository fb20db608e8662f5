from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from blobstore.compression.delta.gaps import counts_of, decode, encode, nonzero
from blobstore.compression.entropy import Coder
from blobstore.errors import ColdDamaged
from tests.support.samples import samples

Array = np.ndarray[Any, Any]
_CODERS = (Coder.HUFFMAN,)


def stored(ranks: Array, sizes: list[int]) -> bytes:
    return encode(ranks, counts_of(ranks, sizes), sizes, _CODERS)


def scattered(count: int, share: float, seed: int = 0) -> Array:
    return np.flatnonzero(np.random.default_rng(seed).random(count) < share)


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([0, 0.001, 0.02, 0.4, 1])), min_size=1)
)
@hypothesis_settings(max_examples=samples(100), deadline=None)
def test_gives_back_the_places_in_classes_of_any_size(classes: list[tuple[int, float]]) -> None:
    sizes = [size for size, _ in classes]
    begins = np.cumsum([0, *sizes])
    ranks = np.concatenate(
        [begins[number] + scattered(size, share) for number, (size, share) in enumerate(classes)]
    )
    found, counts = decode(memoryview(stored(ranks, sizes)), sizes)
    assert np.array_equal(found, ranks)
    assert counts == counts_of(ranks, sizes)


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 510, 511, 32_639, 32_640, 1 << 19])
def test_gives_back_gaps_of_any_size(gap: int) -> None:
    ranks = np.array([gap, 2 * gap + 1, 2 * gap + 2])
    sizes = [2 * gap + 3]
    assert np.array_equal(decode(memoryview(stored(ranks, sizes)), sizes)[0], ranks)


@pytest.mark.parametrize("share", [0.0005, 0.005, 0.02, 0.05, 0.15])
def test_takes_about_the_entropy_of_the_places(share: float) -> None:
    count = 1 << 19
    ranks = scattered(count, share)
    part = len(ranks) / count
    entropy = -count * (part * np.log2(part) + (1 - part) * np.log2(1 - part)) / 8
    assert len(stored(ranks, [count])) < 1.04 * entropy + 60


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 1003])
@pytest.mark.parametrize("share", [0, 0.01, 0.3, 1])
def test_finds_every_true_element(size: int, share: float) -> None:
    mask = np.random.default_rng(1).random(size) < share
    assert np.array_equal(nonzero(mask), np.flatnonzero(mask))


def fields(*classes: tuple[int, int]) -> bytes:
    return b"".join((count << 3 | low).to_bytes(3, "little") for count, low in classes)


def raw(highs: bytes, lows: bytes = b"", *, method: int = 0) -> bytes:
    return struct.pack("<BI", method, len(highs)) + highs + lows


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (fields((11, 0)) + raw(bytes(11)), "11 of 10 differences"),
        (fields((2, 0)) + raw(bytes(1)), "1 gaps for 2"),
        (fields((2, 0)) + raw(bytes(3)), "cannot take 3 bytes"),
        (fields((1, 0)) + raw(b"\xff"), "0 gaps for 1"),
        (fields((1, 0)) + raw(b"\xff\x01"), "cannot take 2 bytes"),
        (fields((1, 0)) + raw(b"\x0a"), "difference 10 of 10"),
        (fields((2, 0)) + raw(b"\x04\x05"), "difference 10 of 10"),
        (fields((1, 1)) + raw(b"\x04"), "take 10 bytes, not 9"),
        (fields((1, 7)) + raw(b"\x00", b"\x0a"), "difference 10 of 10"),
        (fields((1, 0)) + raw(b"\x00", b"\x00"), "not 10"),
        (fields((1, 0)) + raw(b"\x00", method=2), "unknown method 2"),
        (fields((1, 0)) + raw(b"\x00", method=9), "unknown method 9"),
        (fields((1, 0)) + raw(b"\x00", method=1), "cannot be decoded"),
        (fields((0, 0)) + raw(b"\x00"), "cannot take 1 bytes"),
    ],
)
def test_refuses_impossible_places(damaged: bytes, message: str) -> None:
    with pytest.raises(ColdDamaged, match=message):
        decode(memoryview(damaged), [10])


def test_refuses_a_place_in_the_next_class() -> None:
    damaged = fields((1, 0), (1, 0)) + raw(b"\x05\x00")
    with pytest.raises(ColdDamaged, match="difference 5 of 5"):
        decode(memoryview(damaged), [5, 5])

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from blobstore.compression import transforms as layouts
from blobstore.compression.entropy import Coder
from blobstore.compression.tuning import Choice, Level
from blobstore.core.tensor import DType
from tests.support.cold import noise, text, weights

if TYPE_CHECKING:
    from blobstore.compression.chunks import Way
    from blobstore.compression.transforms import Transform


def ways(
    data: bytes, dtype: DType | None, level: Level = Level.FAST, base: bytes | None = None
) -> list[Way]:
    start = None if base is None else np.frombuffer(base, np.uint8)
    return Choice(np.frombuffer(data, np.uint8), start, dtype, level).ways()


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (DType.BF16, layouts.BF16_PAIRS),
        (DType.F16, layouts.BYTES_2),
        (DType.F32, layouts.F32_PAIRS),
        (DType.F8_E4M3, layouts.E4M3),
        (DType.F8_E5M2, layouts.WHOLE[1]),
        (DType.F64, layouts.BYTES_8),
        (DType.I8, layouts.WHOLE[1]),
    ],
)
def test_weights_of_a_type_get_its_layout(dtype: DType, layout: Transform) -> None:
    assert ways(weights(dtype, 1 << 17), dtype)[0].layout.number == layout.number


def test_the_noise_of_mantissas_is_not_tried() -> None:
    assert ways(weights(DType.BF16, 1 << 17), DType.BF16)[0].coders[1:] == [(Coder.HUFFMAN,), ()]


def test_rounded_floats_get_planes_of_bytes() -> None:
    numbers = np.frombuffer(weights(DType.F32, 1 << 17), np.float32)
    rounded = numbers.astype(np.float16).astype(np.float32).tobytes()

    assert ways(rounded, DType.F32)[0].layout is layouts.F32_BYTE_PAIRS


def test_exponents_without_a_window_are_planes_of_their_own() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 14, 1 << 16).astype(np.uint16) << 1
    numbers = bits.view(ml_dtypes.bfloat16)

    assert layouts.BF16_PAIRS not in [way.layout for way in ways(numbers.tobytes(), DType.BF16)]


def test_a_plane_of_two_values_is_bits() -> None:
    numbers = np.frombuffer(weights(DType.F32, 1 << 16), np.uint32) & 0xFFFFFF80

    first = ways(numbers.tobytes(), DType.F32)[0]

    assert first.layout is layouts.F32_BYTE_PAIRS
    assert first.coders[-1][0] is Coder.BITS


def test_repeats_get_an_ordinary_coder() -> None:
    first = ways(noise(1000) * 200, None)[0]

    assert first.layout is layouts.WHOLE[1]
    assert first.coders == [(Coder.ZSTD,)]


def test_small_tries_a_slow_coder_on_what_is_more_than_noise() -> None:
    words = text(300)

    assert ways(words, None, Level.SMALL)[0].coders == [(Coder.ZSTD_SMALL,)]
    assert ways(words, None)[0].coders == [(Coder.ZSTD,)]


def test_a_near_base_wins_and_a_far_one_does_not() -> None:
    data = weights(DType.BF16, 1 << 18)
    near = bytearray(data)
    near[::100] = bytes(byte ^ 1 for byte in near[::100])

    assert ways(data, DType.BF16, base=bytes(near))[0].layout.needs_base
    first, *others = ways(data, DType.BF16, base=weights(DType.BF16, 1 << 18, seed=1))
    assert first.layout is layouts.BF16_PAIRS
    assert any(way.layout.needs_base for way in others)


def test_looks_at_all_of_a_chunk() -> None:
    half = weights(DType.BF16, 1 << 16)
    zeros_first = ways(bytes(len(half)) + half, DType.BF16)[0]

    assert zeros_first.coders[-1] != ()  # the noise of half of the elements is none


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_tiny_parts_have_ways_too(size: int) -> None:
    assert ways(noise(2 * size), DType.BF16)
    assert ways(noise(size), None)

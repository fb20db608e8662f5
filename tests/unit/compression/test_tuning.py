from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from blobstore.compression import transforms
from blobstore.compression.chunks import Pipeline
from blobstore.compression.entropy import Coder
from blobstore.compression.level import Level
from blobstore.compression.transforms import Transform
from blobstore.compression.tuning import choose_pipelines
from blobstore.core.tensor import DType
from tests.support.cold import noise, text, weights


def pipelines(
    data: bytes, dtype: DType | None, level: Level = "fast", base: bytes | None = None
) -> list[Pipeline]:
    start = None if base is None else np.frombuffer(base, np.uint8)
    return choose_pipelines(np.frombuffer(data, np.uint8), start, dtype, level).pipelines


@pytest.mark.parametrize(
    ("dtype", "transform"),
    [
        (DType.BF16, transforms.BF16_PAIRS),
        (DType.F16, transforms.BYTES_2),
        (DType.F32, transforms.F32_PAIRS),
        (DType.F8_E4M3, transforms.E4M3),
        (DType.F8_E5M2, transforms.IDENTITY[1]),
        (DType.F64, transforms.BYTES_8),
        (DType.I8, transforms.IDENTITY[1]),
    ],
)
def test_weights_get_the_transform_of_their_type(dtype: DType, transform: Transform) -> None:
    assert pipelines(weights(dtype, 1 << 17), dtype)[0].transform.number == transform.number


def test_does_not_try_to_compress_mantissas() -> None:
    assert pipelines(weights(DType.BF16, 1 << 17), DType.BF16)[0].coders[1:] == [
        (Coder.HUFFMAN,),
        (),
    ]


def test_rounded_floats_get_bytewise_planes() -> None:
    numbers = np.frombuffer(weights(DType.F32, 1 << 17), np.float32)
    rounded = numbers.astype(np.float16).astype(np.float32).tobytes()
    assert pipelines(rounded, DType.F32)[0].transform is transforms.F32_BYTE_PAIRS


def test_exponents_outside_of_any_window_are_not_paired() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 14, 1 << 16).astype(np.uint16) << 1
    numbers = bits.view(ml_dtypes.bfloat16)
    assert transforms.BF16_PAIRS not in [
        pipeline.transform for pipeline in pipelines(numbers.tobytes(), DType.BF16)
    ]


def test_a_plane_with_two_values_is_stored_as_bits() -> None:
    numbers = np.frombuffer(weights(DType.F32, 1 << 16), np.uint32) & 0xFFFFFF80
    first = pipelines(numbers.tobytes(), DType.F32)[0]
    assert first.transform is transforms.F32_BYTE_PAIRS
    assert first.coders[-1][0] is Coder.BITS


def test_repetitions_are_compressed_with_zstd() -> None:
    first = pipelines(noise(1000) * 200, None)[0]
    assert first.transform is transforms.IDENTITY[1]
    assert first.coders == [(Coder.ZSTD,)]


def test_level_small_tries_a_slow_coder() -> None:
    words = text(300)
    assert pipelines(words, None, "small")[0].coders == [(Coder.ZSTD_SMALL,)]
    assert pipelines(words, None)[0].coders == [(Coder.ZSTD,)]


def test_a_similar_base_is_used_and_a_different_one_is_not() -> None:
    data = weights(DType.BF16, 1 << 18)
    near = bytearray(data)
    near[::100] = bytes(byte ^ 1 for byte in near[::100])
    assert pipelines(data, DType.BF16, base=bytes(near))[0].transform.needs_base
    first, *others = pipelines(data, DType.BF16, base=weights(DType.BF16, 1 << 18, seed=1))
    assert first.transform is transforms.BF16_PAIRS
    assert any(pipeline.transform.needs_base for pipeline in others)


def test_samples_all_regions_of_a_chunk() -> None:
    half = weights(DType.BF16, 1 << 16)
    zeros_first = pipelines(bytes(len(half)) + half, DType.BF16)[0]
    assert zeros_first.coders[-1] != ()  # half of the mantissas can be compressed


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_tiny_parts_have_ways_too(size: int) -> None:
    assert pipelines(noise(2 * size), DType.BF16)
    assert pipelines(noise(size), None)

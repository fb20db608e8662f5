"""The content of each plane; test_transforms.py has the round trips."""

from __future__ import annotations

from typing import Any

import numpy as np

from blobstore.compression.float_planes import FloatTransform, encode_e4m3

_SIGN, _EXPONENT, _MANTISSA = 1, 0b01111010, 0b0110101
_HIGH = _SIGN << 15 | _EXPONENT << 7 | _MANTISSA


def planes_of(split: Any, dtype: str, *values: int) -> list[list[int]]:
    planes = split(np.array(values, dtype).view(np.uint8), None)
    return [plane.tolist() for plane in planes]


def test_bf16_has_exponents_and_noise() -> None:
    assert planes_of(FloatTransform(2, paired=False).encode, "<u2", _HIGH) == [
        [_EXPONENT],
        [_SIGN << 7 | _MANTISSA],
    ]


def test_bf16_has_pairs_of_exponents() -> None:
    listed, pairs, noise = planes_of(
        FloatTransform(2, paired=True).encode, "<u2", _HIGH, _HIGH - (2 << 7)
    )
    assert listed == [_EXPONENT - 15]
    assert pairs == [15 | 13 << 4]
    assert noise == [_SIGN << 7 | _MANTISSA] * 2


def test_f32_keeps_the_lower_halves() -> None:
    planes = planes_of(FloatTransform(4, paired=False).encode, "<u4", _HIGH << 16 | 0xABCD)
    assert planes == [[_EXPONENT], [_SIGN << 7 | _MANTISSA], [0xCD, 0xAB]]


def test_f32_can_split_the_lower_halves_into_bytes() -> None:
    planes = planes_of(
        FloatTransform(4, paired=False, split_low=True).encode, "<u4", _HIGH << 16 | 0xABCD
    )
    assert planes == [[_EXPONENT], [_SIGN << 7 | _MANTISSA], [0xAB], [0xCD]]


def test_e4m3_keeps_the_bits_of_the_first_value_in_place() -> None:
    first, second = 0b1_1010_011, 0b0_0101_110
    assert planes_of(encode_e4m3, "u1", first, second) == [[0b0101_1010], [0b1_0_110_011]]

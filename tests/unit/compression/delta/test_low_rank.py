from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from blobstore.compression.delta.low_rank import (
    MAX_SIDE,
    Factors,
    LowRankPredictor,
    can_predict,
    pack,
    quantized,
    unpack,
)
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged
from tests.unit.compression.delta.test_codec import bf16

Array = np.ndarray[Any, Any]


def some_factors(rank: int, rows: int, columns: int, exponent: int = -20) -> Factors:
    random = np.random.default_rng(rank)
    sides = (random.integers(-127, 128, (rank, size)).astype(np.int8) for size in (rows, columns))
    return Factors(tuple(exponent - number % 3 for number in range(rank)), *sides)


def exact(factors: Factors) -> Array:
    """Return the product in float64, which has all of it."""
    powers = 2.0 ** np.array(factors.exponents)[:, None]
    return (factors.left * powers).T @ factors.right.astype(np.float64)


def test_factors_become_bytes_and_factors_again() -> None:
    factors = some_factors(5, 70, 300)
    found = unpack(memoryview(pack(factors)), 70 * 300)
    assert found.exponents == factors.exponents
    assert np.array_equal(found.left, factors.left)
    assert np.array_equal(found.right, factors.right)


@pytest.mark.parametrize("rank", [1, 4, 64])
def test_32_bit_prediction_is_one_rounding_of_the_exact_sum(rank: int) -> None:
    factors = some_factors(rank, 40, 50)._replace(exponents=(-20,) * rank)
    base = np.random.default_rng(0).standard_normal(2000, np.float32)
    wanted = (base.astype(np.float64) + exact(factors).ravel()).astype(np.float32)
    found = LowRankPredictor(factors, DType.F32).predict(base.view(np.uint32), 0)
    assert np.array_equal(found, wanted.view(np.uint32))


def test_16_bit_predictions_are_rounded_to_the_nearest() -> None:
    factors = some_factors(3, 40, 50)
    values = np.random.default_rng(0).standard_normal(2000, np.float32)
    wanted = (values.astype(np.float16) + exact(factors).ravel()).astype(np.float32)
    half = values.astype(np.float16).view(np.uint16)
    found = LowRankPredictor(factors, DType.F16).predict(half, 0)
    assert np.array_equal(found, wanted.astype(np.float16).view(np.uint16))
    found = LowRankPredictor(factors, DType.BF16).predict(bf16(values), 0)
    wide = (bf16(values).astype(np.uint32) << 16).view(np.float32)
    nearest = bf16((wide + exact(factors).ravel()).astype(np.float32))
    assert np.array_equal(found, nearest)


def test_what_is_added_does_not_depend_on_the_order_of_sums() -> None:
    factors = some_factors(60, 33, 64)
    shuffled = np.random.default_rng(1).permutation(60)
    other = Factors(
        tuple(np.array(factors.exponents)[shuffled].tolist()),
        factors.left[shuffled],
        factors.right[shuffled],
    )
    base = np.random.default_rng(0).standard_normal(33 * 64, np.float32).view(np.uint32)
    one = LowRankPredictor(factors, DType.F32).predict(base, 0).copy()
    assert np.array_equal(LowRankPredictor(other, DType.F32).predict(base, 0), one)


@pytest.mark.parametrize("first", [0, 1, 49, 50, 777])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_part_is_predicted_as_it_is_in_the_whole(first: int, rank: int) -> None:
    base = bf16(np.random.default_rng(0).standard_normal(2000, np.float32))
    prediction = LowRankPredictor(some_factors(rank, 40, 50), DType.BF16)
    whole = prediction.predict(base, 0).copy()
    part = prediction.predict(base[first : first + 333], first)
    assert np.array_equal(part, whole[first : first + 333])


@pytest.mark.parametrize(
    ("dtype", "odd"),
    [
        (DType.BF16, [0, 0x8000, 1, 0x807F, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF]),
        (DType.F16, [0, 0x8000, 1, 0x83FF, 0x7C00, 0xFC00, 0x7E01, 0xFFFF]),
        (DType.F32, [0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF]),
    ],
)
def test_numbers_that_processors_treat_differently_stay(dtype: DType, odd: list[int]) -> None:
    base = np.array(odd * 4, f"<u{dtype.bits // 8}")
    found = LowRankPredictor(some_factors(2, 4, 8), dtype).predict(base, 0)
    assert np.array_equal(found, base)


def test_only_floats_that_numpy_adds_are_predicted() -> None:
    assert [dtype for dtype in DType if can_predict(dtype)] == [DType.F16, DType.BF16, DType.F32]


@pytest.mark.parametrize("limit", [15, 127])
def test_quantized_factors_are_near_what_they_stand_for(limit: int) -> None:
    random = np.random.default_rng(0)
    left, right = random.standard_normal((90, 3)), random.standard_normal((3, 70))
    left *= [1e-3, 2e-4, 1e-9]
    factors = quantized(left.astype(np.float32).T, right.astype(np.float32), limit)
    assert factors is not None
    error = exact(factors) - left @ right
    assert np.abs(error).max() < 3 / limit * np.abs(left @ right).max()
    assert unpack(memoryview(pack(factors)), 90 * 70).rank == 3


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e30, np.inf])
def test_nothing_stands_for_what_no_factors_reach(size: float) -> None:
    side = np.full((40, 1), size, np.float32)
    assert quantized(side.T, np.ones((1, 40), np.float32), 127) is None


def test_every_shorter_form_is_refused() -> None:
    stored = pack(some_factors(3, 40, 50))
    for size in range(len(stored)):
        with pytest.raises(ColdDamaged):
            unpack(memoryview(stored)[:size], 2000)
    with pytest.raises(ColdDamaged, match="end at byte"):
        unpack(memoryview(stored + b"\0"), 2000)


def test_flipped_bits_raise_no_other_error() -> None:
    stored = bytearray(pack(some_factors(2, 40, 50)))
    refused = 0
    for place in range(len(stored) * 8):
        stored[place >> 3] ^= 1 << (place & 7)
        try:
            unpack(memoryview(stored), 2000)
        except ColdDamaged:
            refused += 1
        stored[place >> 3] ^= 1 << (place & 7)
    assert refused > 8 * 9


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (some_factors(1, 40, 51), "rank 1, 40 by 51, for 2000"),
        (some_factors(65, 40, 50), "rank 65"),
        (some_factors(3, 1000, 2), "rank 3, 1000 by 2, for 2000"),
        (some_factors(2, 40, 50)._replace(exponents=(-20, -9)), "not exact"),
        (some_factors(1, 40, 50)._replace(exponents=(-101,)), "not exact"),
        (some_factors(1, 40, 50)._replace(exponents=(61,)), "not exact"),
    ],
    ids=["shape", "rank", "more than it has", "too far apart", "too small", "too large"],
)
def test_refuses_factors_that_do_not_fit(factors: Factors, message: str) -> None:
    with pytest.raises(ColdDamaged, match=message):
        unpack(memoryview(pack(factors)), 2000)


def test_refuses_a_size_that_the_tensor_has_not_before_memory_is_taken() -> None:
    stored = struct.pack("<BII", 64, 1 << 31, 1 << 31) + bytes(100)
    with pytest.raises(ColdDamaged, match="for 2000 elements"):
        unpack(memoryview(stored), 2000)


def factors(exponents: tuple[int, ...], rows: int, columns: int) -> Factors:
    """Return factors of which the last term alone is not zero; its elements are 64."""
    sides = [np.zeros((len(exponents), size), np.int8) for size in (rows, columns)]
    for side in sides:
        side[-1] = 64
    return Factors(exponents, *sides)


def test_a_sum_of_2_to_the_24_is_not_exact() -> None:
    assert unpack(memoryview(pack(factors((0, 11), 2, 3))), 6).exponents == (0, 11)
    with pytest.raises(ColdDamaged, match="not exact"):
        unpack(memoryview(pack(factors((0, 12), 2, 3))), 6)


def test_a_side_has_a_limit() -> None:
    assert unpack(memoryview(pack(factors((0,), 1, MAX_SIDE))), MAX_SIDE).rank == 1
    with pytest.raises(ColdDamaged, match=f"factors of rank 1, 1 by {MAX_SIDE + 1}"):
        unpack(memoryview(pack(factors((0,), 1, MAX_SIDE + 1))), MAX_SIDE + 1)

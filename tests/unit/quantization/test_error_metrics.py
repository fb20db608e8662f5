from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from blobstore.quantization.error_metrics import ErrorStats, WorstGroup, relative_error, snr_db

Array = np.ndarray[Any, Any]


def of(numbers: Any, base: Any, group_size: int = 2) -> ErrorStats:
    deviation = ErrorStats(group_size)
    deviation.add(0, 0, np.asarray(numbers), np.asarray(base))
    return deviation


def test_sums_squares_and_finds_the_largest_difference() -> None:
    found = of([[1.0, 2.0, 3.0, 4.5]], [[1.0, -1.0, 3.0, 4.0]])
    assert found.squared_error == 9.25
    assert found.squared_base == 27
    assert found.max_abs_error == 3
    assert found.worst == WorstGroup(math.sqrt(9 / 2), 0, 0, 2)
    assert found.nonfinite == 0


def test_computes_with_more_precision_than_its_input() -> None:
    base = np.full((1, 4096), 0.1, np.float16)
    found = of(base + np.float16(0.05), base, 64)
    step = float((base + np.float16(0.05) - base.astype(np.float64))[0, 0])
    assert found.squared_error == pytest.approx(4096 * step**2, rel=1e-14)
    assert found.squared_base == pytest.approx(4096 * float(base[0, 0]) ** 2, rel=1e-14)


def test_the_last_group_of_a_row_may_be_shorter() -> None:
    base = np.ones((2, 5))
    numbers = base.copy()
    numbers[1, 4] = 3
    assert of(numbers, base).worst == WorstGroup(2.0, 1, 4, 1)
    assert of(base[:, :1] * 2, base[:, :1], 64).worst == WorstGroup(1.0, 0, 0, 1)


def test_locates_the_worst_group_in_the_tensor() -> None:
    found = ErrorStats(2)
    base = np.ones((2, 4))
    worse = base.copy()
    worse[1, 3] = 2
    found.add(0, 0, base * 1.1, base)
    found.add(10, 20, worse, base)
    found.add(30, 0, worse, base)
    assert found.worst == WorstGroup(math.sqrt(1 / 2), 11, 22, 2)
    assert found.squared_base == 24


def test_an_error_against_zeros_is_infinite() -> None:
    base = np.array([[0.0, 0.0, 0.0, 0.0, 1.0, 1.0]])
    assert of([[0.0, 0.0, 1e-9, 0.0, 9.0, 1.0]], base).worst == WorstGroup(math.inf, 0, 2, 2)
    assert of([[0.0, 0.0, 0.0, 0.0, 9.0, 1.0]], base).worst == WorstGroup(math.sqrt(32), 0, 4, 2)


def test_equal_values_have_no_worst_group() -> None:
    found = of([[0.0, -0.0, 5.0]], [[-0.0, 0.0, 5.0]])
    assert (found.squared_error, found.max_abs_error, found.worst) == (0, 0, None)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e200, -1e300])
def test_leaves_out_values_that_cannot_be_squared(odd: float) -> None:
    for numbers, base in (([odd, 2.0], [1.0, 1.0]), ([1.0, 2.0], [odd, 1.0])):
        found = of([numbers], [base])
        assert found.nonfinite == 1
        assert (found.squared_error, found.squared_base, found.max_abs_error) == (1, 1, 1)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e300])
def test_the_same_value_on_both_sides_is_equal(odd: float) -> None:
    found = of([[odd, 2.0]], [[odd, 2.0]])
    assert (found.nonfinite, found.max_abs_error, found.squared_base) == (0, 0, 4)


def test_infinities_of_opposite_sign_differ() -> None:
    assert of([[math.inf]], [[-math.inf]]).nonfinite == 1
    assert of([[math.inf]], [[math.nan]]).nonfinite == 1


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.uint8, np.int64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)
def test_accepts_every_type(dtype: Any) -> None:
    ones, zeros = np.ones((1, 2), dtype), np.zeros((1, 2), dtype)
    assert of(ones, zeros).squared_error == 2
    assert of(zeros, ones).squared_error == 2  # and nothing wraps below zero


def test_accepts_complex_values() -> None:
    found = of([[3 + 4j]], [[0j]])
    assert (found.squared_error, found.max_abs_error) == (25, 5)
    assert of([[complex(math.nan, 0)]], [[0j]]).nonfinite == 1


def test_ratios_with_zero_are_distinguished() -> None:
    assert (relative_error(0, 0), snr_db(0, 0)) == (0, math.inf)
    assert (relative_error(0, 4), snr_db(0, 4)) == (0, math.inf)
    assert (relative_error(1, 0), snr_db(1, 0)) == (math.inf, -math.inf)
    assert (relative_error(1, 100), snr_db(10, 100)) == (0.1, 10)
    assert relative_error(1e300, 1e-300) == pytest.approx(1e300)

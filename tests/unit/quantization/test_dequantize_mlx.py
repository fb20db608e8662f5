from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from blobstore.quantization import quantize_numpy as reference
from blobstore.quantization.formats import FORMATS, QuantFormat
from tests.unit.quantization.test_quantize_numpy import (
    FLOATS,
    SYMMETRIC,
    Array,
    any_packed,
    assert_same,
    every_float,
    every_form,
    to_mlx,
    to_numpy,
)

mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
engine = import_module("blobstore.quantization.dequantize_mlx")


def dequantized(packed: Iterable[Array | None], *options: Any) -> Array:
    given = [None if array is None else to_mlx(array) for array in packed]
    with mx.stream(mx.cpu):
        found = engine.dequantize(*given, *options)
        mx.eval(found)
    return to_numpy(found)


@pytest.mark.slow
@every_form
@every_float
def test_dequantizes_as_the_reference_does(dtype: str, item: QuantFormat, group_size: int) -> None:
    packed = any_packed(item, group_size, dtype)
    for name in FLOATS:
        found = dequantized(packed, item, group_size, name)
        assert_same(found, reference.dequantize(*packed, item, group_size, name))


@pytest.mark.parametrize("name", FLOATS)
def test_applies_a_global_scale_as_the_reference_does(name: str) -> None:
    item = FORMATS["nvfp4"]
    packed = any_packed(item, 16, "float32")
    found = dequantized(packed, item, 16, name, 0.37)
    assert_same(found, reference.dequantize(*packed, item, 16, name, 0.37))


def test_a_global_scale_is_the_largest_magnitude_of_mlx_divided_by_2688() -> None:
    item, largest = FORMATS["nvfp4"], np.float32(3.3)
    weight, scale, _ = any_packed(item, 16, "float32")
    with mx.stream(mx.cpu):
        theirs = mx.dequantize(
            to_mlx(weight), to_mlx(scale), mode="nvfp4", global_scale=mx.array(largest)
        )
        mx.eval(theirs)
    ours = reference.dequantize(
        weight, scale, None, item, 16, "float32", float(largest / np.float32(448 * 6))
    )
    assert_same(ours, to_numpy(theirs))


@every_form
def test_dequantizes_a_single_row_and_no_rows(item: QuantFormat, group_size: int) -> None:
    packed = any_packed(item, group_size, "float32")
    for place in ((0,), (slice(0, 0),), (slice(0, 0), np.newaxis)):
        bias = None if packed.bias is None else packed.bias[place]
        arrays = packed.weight[place], packed.scale[place], bias
        found = dequantized(arrays, item, group_size, "float32")
        assert_same(found, reference.dequantize(*arrays, item, group_size, "float32"))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 5), (3, 3, 1)])
@pytest.mark.parametrize("global_scale", [None, 0.37])
def test_dequantizes_an_odd_number_of_groups(
    shape: tuple[int, ...], global_scale: float | None
) -> None:
    item, random = FORMATS["nvfp4"], np.random.default_rng(1)
    weight = random.integers(0, 2**32, (*shape[:-1], shape[-1] * 2), dtype=np.uint32)
    scale = random.integers(0, 120, shape, dtype=np.uint8)
    found = dequantized((weight, scale, None), item, 16, "float32", global_scale)
    expected = reference.dequantize(weight, scale, None, item, 16, "float32", global_scale)
    assert_same(found, expected)


@SYMMETRIC
@every_float
def test_dequantizes_symmetric_integers_as_the_reference_does(
    dtype: str, item: QuantFormat, group_size: int
) -> None:
    packed = any_packed(item, group_size, dtype)
    for name in FLOATS:
        expected = reference.dequantize(*packed, item, group_size, name)
        assert_same(dequantized(packed, item, group_size, name), expected)
        row = packed.weight[0], packed.scale[0], None
        assert_same(dequantized(row, item, group_size, name), expected[0])

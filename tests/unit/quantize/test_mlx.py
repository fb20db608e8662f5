from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from blobstore.quantize import reference
from blobstore.quantize.formats import FORMATS, QuantFormat
from tests.unit.quantize.test_reference import (
    FLOATS,
    any_packed,
    assert_same,
    every_float,
    every_form,
    patterns,
    to_mlx,
    to_numpy,
)

mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
engine = pytest.importorskip("blobstore.quantize.mlx", reason="MLX does not run on this machine")


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_same(one, other)


@every_form
@every_float
def test_quantizes_as_the_reference_does(dtype: str, item: QuantFormat, group_size: int) -> None:
    array = patterns(dtype)["normal"]
    expected = reference.quantize(array, item, group_size)
    assert_equal(engine.quantize(array, item, group_size), expected)


def test_quantizes_on_many_threads_at_once() -> None:
    item = FORMATS["int4"]
    random = np.random.default_rng(3)
    arrays = [random.normal(size=(64, 512)).astype(np.float32) for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda array: engine.quantize(array, item, 64), arrays))
    for array, quantized in zip(arrays, found, strict=True):
        assert_equal(quantized, reference.quantize(array, item, 64))


def test_arrays_that_are_not_contiguous_are_quantized() -> None:
    array = np.random.default_rng(3).normal(size=(64, 512)).astype(np.float32)[:, ::4]
    item = FORMATS["int8"]
    assert_equal(engine.quantize(array, item, 64), reference.quantize(array.copy(), item, 64))


@every_form
@every_float
def test_dequantizes_as_the_reference_does(dtype: str, item: QuantFormat, group_size: int) -> None:
    packed = any_packed(item, group_size, dtype)
    arrays = [None if array is None else to_mlx(array) for array in packed]
    for name in FLOATS:
        with mx.stream(mx.cpu):
            found = engine.dequantize(*arrays, item, group_size, name)
            mx.eval(found)
        assert_same(to_numpy(found), reference.dequantize(*packed, item, group_size, name))


@pytest.mark.parametrize("name", FLOATS)
def test_a_global_scale_means_what_it_means_to_the_reference(name: str) -> None:
    item = FORMATS["nvfp4"]
    weight, scale, _ = any_packed(item, 16, "float32")
    with mx.stream(mx.cpu):
        found = engine.dequantize(to_mlx(weight), to_mlx(scale), None, item, 16, name, 0.25)
        mx.eval(found)
    expected = reference.dequantize(weight, scale, None, item, 16, name, 0.25)
    assert_same(to_numpy(found), expected)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from blobstore.quantization import dequantize_torch as engine
from blobstore.quantization import quantize_numpy as reference
from blobstore.quantization.formats import FORMATS, QuantFormat
from blobstore.safetensors.numpy import BF16
from tests.unit.quantization.test_quantize_numpy import (
    FLOATS,
    SYMMETRIC,
    any_packed,
    assert_same,
    bits_of,
    every_float,
    every_form,
)

Array = np.ndarray[Any, Any]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def to_torch(array: Array) -> torch.Tensor:
    if array.dtype == BF16:
        return torch.from_numpy(bits_of(array).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.uint16).numpy().view(BF16)
    return tensor.cpu().numpy()


def compare(
    packed: reference.Quantized,
    item: QuantFormat,
    group_size: int,
    device: str,
    global_scale: float | None = None,
) -> None:
    weight, scale, bias = (
        None if array is None else to_torch(array).to(device) for array in packed
    )
    assert weight is not None
    assert scale is not None
    for name in FLOATS:
        found = engine.dequantize(weight, scale, bias, item, group_size, name, global_scale)
        expected = reference.dequantize(*packed, item, group_size, name, global_scale)
        assert_same(to_numpy(found), expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@every_form
@every_float
def test_dequantizes_as_the_reference_does(
    dtype: str, item: QuantFormat, group_size: int, device: str
) -> None:
    compare(any_packed(item, group_size, dtype), item, group_size, device)


@pytest.mark.parametrize("device", DEVICES)
def test_applies_a_global_scale_as_the_reference_does(device: str) -> None:
    item = FORMATS["nvfp4"]
    compare(any_packed(item, 16, "float32"), item, 16, device, 0.37)


@every_form
def test_stacks_and_large_weights_are_computed_in_pieces(
    item: QuantFormat, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engine._PIECE, "cpu", 1000)
    packed = any_packed(item, group_size, "bfloat16")
    stack = [None if array is None else array.reshape(4, 4, -1) for array in packed]
    assert stack[0] is not None
    assert stack[1] is not None
    compare(reference.Quantized(stack[0], stack[1], stack[2]), item, group_size, "cpu")


def test_dequantizes_an_empty_weight() -> None:
    item = FORMATS["int4"]
    weight, scale = torch.empty((0, 16), dtype=torch.uint32), torch.empty((0, 4))
    found = engine.dequantize(weight, scale, scale, item, 32, "float16")
    assert (found.shape, found.dtype) == ((0, 128), torch.float16)


@pytest.mark.parametrize("device", DEVICES)
@every_form
def test_dequantizes_a_part_of_a_larger_tensor(
    item: QuantFormat, group_size: int, device: str
) -> None:
    def half(array: Array) -> torch.Tensor:
        both = to_torch(np.concatenate([array, array], axis=-1)).to(device)
        return both[..., both.shape[-1] // 2 :]

    packed = any_packed(item, group_size, "float16")
    weight, scale, bias = packed
    halves = half(weight), half(scale), None if bias is None else half(bias)
    found = engine.dequantize(*halves, item, group_size, "float32")
    assert_same(to_numpy(found), reference.dequantize(*packed, item, group_size, "float32"))


def test_tables_are_kept_in_no_memory_of_a_device() -> None:
    engine._table.cache_clear()
    engine._float_scale.cache_clear()
    try:
        with torch.device("meta"):
            engine._table(4, torch.float32)
            engine._float_scale("mxfp4")
        assert engine._table(4, torch.float32).device.type == "cpu"
        assert engine._float_scale("mxfp4").device.type == "cpu"
    finally:
        engine._table.cache_clear()
        engine._float_scale.cache_clear()


@pytest.mark.parametrize("device", DEVICES)
@SYMMETRIC
@every_float
def test_dequantizes_symmetric_integers_as_the_reference_does(
    dtype: str, item: QuantFormat, group_size: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engine._PIECE, "cpu", 1000)
    compare(any_packed(item, group_size, dtype), item, group_size, device)

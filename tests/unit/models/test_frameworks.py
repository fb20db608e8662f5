from __future__ import annotations

import pytest
import torch

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UnsupportedDType, UsageError
from blobstore.models.frameworks import (
    FLOATS,
    NAMES,
    ArrayTarget,
    checked_dtype,
    dequantizer,
    original_dtype,
)
from blobstore.quantization.formats import FORMATS
from blobstore.safetensors.numpy import as_array


@pytest.mark.parametrize("dtype", NAMES)
def test_affine_scales_have_the_type_of_the_weight(dtype: DType) -> None:
    name = original_dtype(FORMATS["int4"], dtype)
    assert FLOATS[name] is dtype


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_weights_of_float_types_were_bfloat16(name: str) -> None:
    assert original_dtype(FORMATS[name], DType.U8) == "bfloat16"


def test_an_element_type_is_checked() -> None:
    assert checked_dtype("float16") == "float16"
    with pytest.raises(UsageError, match="dtype must be bfloat16, float16 or float32, got 'F16'"):
        checked_dtype("F16")


def test_every_framework_has_functions_of_its_own() -> None:
    made = [ArrayTarget.of(framework, "cpu").convert for framework in ("numpy", "torch")]
    assert [function.__module__ for function in made] == [
        "blobstore.safetensors.numpy",
        "blobstore.safetensors.torch",
    ]
    assert dequantizer("numpy").__module__ == "blobstore.quantization.quantize_numpy"
    assert dequantizer("torch").__module__ == "blobstore.quantization.dequantize_torch"


def test_mlx_has_functions_of_its_own() -> None:
    pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    assert ArrayTarget.of("mlx", "cpu").convert.__module__ == "blobstore.safetensors.mlx"
    assert dequantizer("mlx").__module__ == "blobstore.quantization.dequantize_mlx"


def test_rejects_an_unknown_framework_or_device() -> None:
    with pytest.raises(UsageError, match="framework must be numpy, torch or mlx, got 'jax'"):
        ArrayTarget.of("jax", "cpu")
    with pytest.raises(UsageError, match="device 'cuda' requires framework torch; numpy takes cpu"):
        ArrayTarget.of("numpy", "cuda")


@pytest.mark.parametrize("device", ["nothing", "cuda:99", "cuda:x"])
def test_rejects_a_device_that_torch_does_not_have(device: str) -> None:
    with pytest.raises(UsageError, match=f"torch has no device '{device}' here: [A-Z]"):
        ArrayTarget.of("torch", device)


def test_other_devices_get_copies() -> None:
    convert = ArrayTarget.of("torch", "meta").convert
    found = convert(memoryview(bytearray(8)), 4, TensorSpec("a", DType.U16, (2,)))
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.uint16, (2,))
    with pytest.raises(UnsupportedDType, match="tensor 'a': torch has no type"):
        convert(memoryview(bytearray(8)), 0, TensorSpec("a", DType.F6_E2M3, (4,)))


@pytest.mark.parametrize(
    ("framework", "device"),
    [("torch", "cpu"), ("torch", "mps"), ("torch", "meta"), ("numpy", "cpu"), ("mlx", "cpu")],
)
def test_only_cuda_has_a_stream(framework: str, device: str) -> None:
    assert ArrayTarget(framework, device, as_array).stream() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_stream_to_a_missing_device_is_an_error() -> None:
    for device in ("cuda", "cuda:1"):
        with pytest.raises(UsageError, match=f"torch has no device '{device}' here: "):
            ArrayTarget("torch", device, as_array).stream()

from __future__ import annotations

import pytest

from blobstore.errors import UsageError
from blobstore.frameworks import (
    FLOATS,
    NAMES,
    checked_dtype,
    converter,
    dequantizer,
    original_dtype,
)
from blobstore.quantize.formats import FORMATS
from blobstore.tensor import DType


@pytest.mark.parametrize("dtype", NAMES)
def test_affine_scales_tell_what_the_weight_was(dtype: DType) -> None:
    name = original_dtype(FORMATS["int4"], dtype)
    assert FLOATS[name] is dtype


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_scales_of_float_types_do_not(name: str) -> None:
    assert original_dtype(FORMATS[name], DType.U8) == "bfloat16"


def test_an_element_type_is_checked() -> None:
    assert checked_dtype("float16") == "float16"
    with pytest.raises(UsageError, match="dtype must be bfloat16, float16 or float32, got 'F16'"):
        checked_dtype("F16")


def test_every_framework_has_its_own() -> None:
    made = [converter(framework, "cpu") for framework in ("numpy", "torch")]
    assert [function.__module__ for function in made] == [
        "blobstore.safetensors.numpy",
        "blobstore.safetensors.torch",
    ]
    assert dequantizer("numpy").__module__ == "blobstore.quantize.reference"
    assert dequantizer("torch").__module__ == "blobstore.quantize.torch"


def test_mlx_has_its_own() -> None:
    pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    assert converter("mlx", "cpu").__module__ == "blobstore.safetensors.mlx"
    assert dequantizer("mlx").__module__ == "blobstore.quantize.mlx"


def test_an_unknown_framework_or_device_is_told() -> None:
    with pytest.raises(UsageError, match="framework must be numpy, torch or mlx, got 'jax'"):
        converter("jax", "cpu")
    with pytest.raises(UsageError, match="device 'cuda' is for torch only; numpy takes cpu"):
        converter("numpy", "cuda")

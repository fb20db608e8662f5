from __future__ import annotations

from typing import Any

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.quantization.published_schemes import quantization_key, scheme_name, scheme_of_tensor

PLAIN = {"norm.weight": TensorSpec("norm.weight", DType.BF16, (8,))}


@pytest.mark.parametrize(
    ("name", "dtype", "scheme"),
    [
        ("gptq.qweight", DType.I32, "gptq or awq"),
        ("svdquant.qweight", DType.I8, "svdquant"),
        ("a.qweight", DType.I32, "unknown"),
        ("a.weight.absmax", DType.F32, "bitsandbytes"),
        ("a.weight.quant_state.bitsandbytes__fp4", DType.U8, "bitsandbytes"),
        ("a.weight:qdata", DType.F8_E4M3, "torchao"),
        ("a._weight_qdata", DType.I8, "torchao"),
        ("a.W_q", DType.U8, "hqq"),
        ("a.q_weight", DType.I32, "exl2"),
        ("a.trellis", DType.I16, "exl3"),
        ("int8.SCB", DType.F32, "bitsandbytes"),
        ("a.weight", DType.U8, ""),
        ("qweight", DType.I32, ""),
        ("a.W_q", DType.F32, ""),
        ("a.q_weight", DType.BF16, ""),
        ("a.trellis", DType.F16, ""),
        ("norm.SCB", DType.F32, ""),
        ("other.SCB", DType.F32, ""),
    ],
)
def test_names_of_tensors_tell_the_scheme(name: str, dtype: DType, scheme: str) -> None:
    specs = {name: TensorSpec(name, dtype, (8, 8)), **PLAIN}
    specs["int8.weight"] = TensorSpec("int8.weight", DType.I8, (8, 8))
    for scales in ("gptq.scales", "svdquant.wscales"):
        specs[scales] = TensorSpec(scales, DType.F16, (1, 8))
    assert scheme_of_tensor(specs[name], specs) == scheme
    assert scheme_name(specs, {}) == scheme


@pytest.mark.parametrize(
    ("section", "scheme"),
    [
        ({"quant_method": "AWQ", "bits": 4}, "awq"),
        ({"quant_method": "eetq"}, "eetq"),
        ({"quant_method": "\x1b[2J"}, "unknown"),
        ({"quant_method": "x" * 41}, "unknown"),
        ({"quant_method": 7}, "unknown"),
        ({"bits": 4, "group_size": 64}, "mlx"),
        ({}, ""),
    ],
)
def test_the_config_tells_the_scheme(section: dict[str, Any], scheme: str) -> None:
    assert scheme_name(PLAIN, {"quantization_config": section}) == scheme


def test_a_config_that_names_no_scheme_leaves_it_to_the_tensors() -> None:
    specs = {"a.W_q": TensorSpec("a.W_q", DType.U8, (8, 8))}
    assert scheme_name(specs, {"quantization_config": {"nbits": 4}}) == "hqq"


def test_keys_of_headers_about_quantization() -> None:
    assert quantization_key(["format", "_quantization_metadata", "Scale"]) == "Scale"
    assert quantization_key(["format", "modelspec.title"]) == ""
    assert quantization_key(["modelspec.quantization", "ss_scale_weight_norms"]) == ""

from __future__ import annotations

from typing import Any

import pytest

from blobstore.quantization.schemes import quantization_key, scheme_name, scheme_of_tensor


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("a.qweight", "gptq or awq"),
        ("a.weight.absmax", "bitsandbytes"),
        ("a.weight.quant_state.bitsandbytes__fp4", "bitsandbytes"),
        ("a.weight:qdata", "torchao"),
        ("a._weight_qdata", "torchao"),
        ("a.W_q", "hqq"),
        ("a.weight", ""),
        ("qweight", ""),
    ],
)
def test_names_of_tensors_tell_the_scheme(name: str, scheme: str) -> None:
    assert scheme_of_tensor(name) == scheme
    assert scheme_name(["norm.weight", name], {}) == scheme


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
    assert scheme_name(["norm.weight"], {"quantization_config": section}) == scheme


def test_a_config_that_names_no_scheme_leaves_it_to_the_tensors() -> None:
    assert scheme_name(["a.W_q"], {"quantization_config": {"nbits": 4}}) == "hqq"


def test_keys_of_headers_about_quantization() -> None:
    assert quantization_key(["format", "_quantization_metadata", "Scale"]) == "Scale"
    assert quantization_key(["format", "modelspec.title"]) == ""

from __future__ import annotations

import pytest

from blobstore.errors import UnsupportedSource
from blobstore.quantize.prequantized import refuse_prequantized
from blobstore.tensor import DTYPES, TensorSpec


def specs(*tensors: tuple[str, str]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, DTYPES[code], (4, 4)) for name, code in tensors}


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("model.q_proj.scales", "BF16"),
        ("model.q_proj.weight_packed", "U8"),
        ("model.q_proj.weight_scale", "F8_E4M3"),
        ("model.q_proj.weight_scale_inv", "F32"),
        ("model.q_proj.qweight", "I32"),
        ("model.q_proj.weight", "F8_E4M3"),
        ("model.q_proj.weight", "F8_E5M2"),
    ],
)
def test_refuses_a_tensor_that_means_nothing_without_its_scales(name: str, code: str) -> None:
    with pytest.raises(UnsupportedSource, match=f"'{name}' \\({code}\\).*not supported yet"):
        refuse_prequantized(specs(("model.norm.weight", "BF16"), (name, code)))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("model.q_proj.weight", "BF16"),
        ("router.scale", "F32"),
        ("layer.bias", "F32"),
        ("f8.x", "F8_E4M3"),
        ("model.packed.weight", "U32"),
        ("scales.weight", "F32"),
    ],
)
def test_takes_a_tensor_that_only_looks_like_one(name: str, code: str) -> None:
    refuse_prequantized(specs((name, code)))

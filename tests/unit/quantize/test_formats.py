from __future__ import annotations

from typing import Any

import pytest

from blobstore.quantize.formats import FORMATS

AFFINE = {"int4": 4, "int8": 8}


@pytest.mark.parametrize("name", FORMATS)
def test_the_table_says_what_mlx_does(name: str) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    known = FORMATS[name]
    with mx.stream(mx.cpu):
        weight = mx.ones((4, 128), dtype=mx.bfloat16)
        if name in AFFINE:
            options: dict[str, Any] = {"group_size": known.group_size, "bits": AFFINE[name]}
        else:
            options = {"mode": name}  # these modes have one group size, and MLX knows it
        packed, scales, *_ = mx.quantize(weight, **options)
    assert known.name == name
    assert packed.dtype == mx.uint32
    assert packed.shape[-1] * known.pack_factor == 128
    assert scales.shape[-1] * known.group_size == 128

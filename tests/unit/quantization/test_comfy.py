from __future__ import annotations

import pytest

from blobstore.quantization.comfy import is_stale


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.comfy_quant", True),
        ("scaled_fp8", True),
        ("model.scaled_fp8", True),
        ("unscaled_fp8", False),
        ("comfy_quant.weight", False),
    ],
)
def test_knows_markers_by_their_names(name: str, expected: bool) -> None:
    assert is_stale(name) is expected

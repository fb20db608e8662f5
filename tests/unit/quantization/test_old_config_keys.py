"""Config keys from before transformers 5."""

from __future__ import annotations

from typing import Any

import pytest

from blobstore.quantization.old_config_keys import with_old_keys

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("new", "added"),
    [
        ({"num_local_experts": 8}, {"num_experts": 8}),
        ({"num_local_experts": 8, "num_experts": 9}, {}),
        ({"rope_parameters": ROPE}, {"rope_theta": 5e5, "rope_scaling": None}),
        ({"rope_parameters": ROPE, "rope_theta": 1e4, "rope_scaling": YARN}, {}),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e6}},
            {"rope_theta": 1e6, "rope_scaling": YARN},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
            {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_scaling": None},
        ),
        (
            {"rope_parameters": {FULL: {**YARN, "rope_theta": 1e6}, SLIDING: ROPE}},
            {"rope_theta": 1e6, "rope_scaling": YARN, "rope_local_base_freq": 5e5},
        ),
        ({"rope_parameters": {FULL: ROPE}}, {"rope_theta": 5e5, "rope_scaling": None}),
        ({"rope_parameters": {FULL: 3, SLIDING: {}}}, {}),
        ({"rope_parameters": {FULL: {}, SLIDING: {}}}, {}),
        ({"rope_parameters": None, "num_experts": 4}, {}),
        ({"layer_types": [SLIDING, FULL, SLIDING, FULL]}, {"sliding_window_pattern": 2}),
        ({"layer_types": [SLIDING, SLIDING, FULL, SLIDING]}, {"sliding_window_pattern": 3}),
        ({"layer_types": [SLIDING, FULL], "sliding_window_pattern": "LG"}, {}),
        ({"layer_types": [SLIDING, FULL, FULL]}, {}),
        ({"layer_types": [SLIDING, SLIDING]}, {}),
        ({"layer_types": [FULL, FULL]}, {}),
        ({"layer_types": 3}, {}),
        ({"rope_theta": 1e4, "text_config": 3}, {}),
    ],
)
def test_adds_the_keys_that_mlx_lm_reads(new: dict[str, Any], added: dict[str, Any]) -> None:
    before = dict(new)
    assert with_old_keys(new) == {**new, **added}
    assert new == before


def test_adds_keys_to_the_config_of_the_text_model_too() -> None:
    config = {"model_type": "x", "text_config": {"num_local_experts": 2}}
    found = with_old_keys(config)
    assert found["text_config"] == {"num_local_experts": 2, "num_experts": 2}
    assert "num_experts" not in found

from __future__ import annotations

from typing import Any

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobstoreError
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.mlx_layout import exported_config, joined_experts, mlx_name

INT4, INT8 = FORMATS["int4"], FORMATS["int8"]
EXPERTS = "model.layers.0.mlp.experts"
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("name", "suffix", "expected"),
    [
        ("a.weight", "", "a.weight"),
        ("a.weight", ".scale", "a.scales"),
        ("a.weight", ".bias", "a.biases"),
        ("experts.gate_up_proj", ".scale", "experts.gate_up_proj.scales"),
    ],
)
def test_qparams_have_the_names_of_mlx(name: str, suffix: str, expected: str) -> None:
    assert mlx_name(name, suffix) == expected


def test_rejects_a_global_scale() -> None:
    with pytest.raises(
        BlobstoreError, match=r"tensor 'a\.weight' has a global scale .* dequantize"
    ):
        mlx_name("a.weight", ".global_scale")


def specs(*names: str, shape: tuple[int, ...] = (4, 8)) -> list[TensorSpec]:
    return [TensorSpec(name, DType.U32, shape) for name in names]


def test_experts_are_joined_by_number() -> None:
    names = [f"{EXPERTS}.{number}.up_proj.weight" for number in (10, *range(10))]
    expected = [f"{EXPERTS}.{number}.up_proj.weight" for number in range(11)]
    joined = {"model.layers.0.mlp.switch_mlp.up_proj.weight": expected}
    assert joined_experts(specs(*names)) == joined


def test_qparams_of_experts_are_joined_too() -> None:
    kinds = ("weight", "scales", "biases")
    found = joined_experts(specs(*(f"{EXPERTS}.0.up_proj.{kind}" for kind in kinds)))
    assert list(found) == [f"model.layers.0.mlp.switch_mlp.up_proj.{kind}" for kind in kinds]


@pytest.mark.parametrize(("theirs", "ours"), [("w1", "gate"), ("w2", "down"), ("w3", "up")])
def test_the_projections_of_mixtral_are_renamed(theirs: str, ours: str) -> None:
    (name,) = joined_experts(specs(f"model.layers.3.block_sparse_moe.experts.0.{theirs}.weight"))
    assert name == f"model.layers.3.block_sparse_moe.switch_mlp.{ours}_proj.weight"


@pytest.mark.parametrize(("theirs", "ours"), [("up_proj", "fc1"), ("down_proj", "fc2")])
def test_the_projections_of_nemotron_h_are_renamed(theirs: str, ours: str) -> None:
    (name,) = joined_experts(specs(f"backbone.layers.3.mixer.experts.0.{theirs}.weight"))
    assert name == f"backbone.layers.3.mixer.switch_mlp.{ours}.weight"


@pytest.mark.parametrize("numbers", [(1, 2), (0, 2), (0, 1, 3)])
def test_experts_with_a_gap_are_not_joined(numbers: tuple[int, ...]) -> None:
    assert joined_experts(specs(*(f"{EXPERTS}.{n}.up_proj.weight" for n in numbers))) == {}


def test_experts_of_different_shapes_are_not_joined() -> None:
    first, second = (f"{EXPERTS}.{number}.up_proj.weight" for number in (0, 1))
    assert joined_experts([*specs(first), *specs(second, shape=(4, 16))]) == {}


@pytest.mark.parametrize(
    "name",
    [f"{EXPERTS}.0.up_proj.bias", f"{EXPERTS}.0.weight", f"{EXPERTS}.01.up_proj.weight", "a"],
)
def test_other_tensors_are_not_experts(name: str) -> None:
    assert joined_experts(specs(name)) == {}


def test_the_config_has_the_type_of_most_weights_and_the_exceptions() -> None:
    types = {"a.weight": (INT4, 64), "b.weight": (INT8, 64), "c.weight": (INT4, 64)}
    config = exported_config({"model_type": "m"}, types)
    usual = {"group_size": 64, "bits": 4, "mode": "affine"}
    described = {**usual, "b": {**usual, "bits": 8}}
    both = {"quantization": described, "quantization_config": described}
    assert config == {"model_type": "m", **both}


@pytest.mark.parametrize("kind", ["scales", "biases"])
def test_experts_with_different_qparams_are_not_joined(kind: str) -> None:
    weights = specs(*(f"{EXPERTS}.{number}.up_proj.weight" for number in (0, 1)))
    qparams = [
        *specs(f"{EXPERTS}.0.up_proj.{kind}", shape=(4, 2)),
        *specs(f"{EXPERTS}.1.up_proj.{kind}", shape=(4, 1)),
    ]
    assert joined_experts([*weights, *qparams]) == {}
    assert joined_experts([*weights, qparams[0]]) == {}


def test_experts_are_not_joined_if_one_is_plain() -> None:
    packed = specs(*(f"{EXPERTS}.{number}.up_proj.weight" for number in (0, 1)))
    other = specs(f"{EXPERTS}.0.down_proj.weight")
    joined = joined_experts([*packed, *other], [f"{EXPERTS}.2.up_proj.weight", "a.weight"])
    assert list(joined) == ["model.layers.0.mlp.switch_mlp.down_proj.weight"]


def test_removes_the_settings_of_another_scheme() -> None:
    config = {"quantization_config": FP8, "text_config": {"quantization_config": FP8, "x": 1}}
    assert exported_config(config, {}) == {"text_config": {"x": 1}}
    packed = exported_config(config, {"a.weight": (FORMATS["mxfp8"], 32)})
    assert packed is not None
    assert packed["quantization_config"] == {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    assert packed["text_config"] == {"x": 1}


@pytest.mark.parametrize("types", [{}, {"a.weight": (FORMATS["mxfp4"], 32)}])
def test_removes_the_type_of_quantized_experts(types: Any) -> None:
    for dtype in ("fp4", "fp8"):
        config = {"expert_dtype": dtype, "text_config": {"expert_dtype": dtype}, "x": 1}
        changed = exported_config(config, types)
        assert changed is not None
        assert "expert_dtype" not in changed
        assert changed["text_config"] == {}
    assert exported_config({"expert_dtype": "bf16"}, {}) is None


def test_a_correct_config_is_unchanged() -> None:
    assert exported_config({"model_type": "m"}, {}) is None
    assert exported_config({"quantization": {"bits": 4}}, {"a.weight": (INT4, 64)}) is None


def test_the_first_of_equally_common_types_is_the_default() -> None:
    types = {"a.weight": (INT8, 64), "b.weight": (INT4, 64)}
    config = exported_config({}, types)
    assert config is not None
    assert config["quantization"]["bits"] == 8


@pytest.mark.parametrize(
    "stale",
    [
        None,
        {},
        [4],
        {"bits": 4},
        {"bits": 8, "group_size": 32},
        {"bits": 8, "group_size": 64, "mode": "mxfp8"},
        {"bits": 8, "group_size": 64, "mode": "unknown"},
        {"bits": 8, "group_size": 64, "a": {"bits": 4, "group_size": 64}},
        {"bits": 8, "group_size": 64, "a": False},
    ],
)
def test_replaces_quantization_settings_that_contradict_the_weights(stale: Any) -> None:
    types = {"a.weight": (INT8, 64)}
    described = {"group_size": 64, "bits": 8, "mode": "affine"}
    expected = {"quantization": described, "quantization_config": described}
    assert exported_config({"quantization": stale}, types) == expected
    assert exported_config({"quantization": described}, types) is None


ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5}


def test_a_config_for_packed_weights_has_the_keys_that_mlx_lm_reads() -> None:
    rope = {"rope_parameters": ROPE, "rope_scaling": None}
    types = {"a.weight": (INT4, 64)}

    changed = exported_config(rope, types)

    assert changed is not None
    assert changed["rope_theta"] == 5e5
    assert changed["rope_parameters"] == rope["rope_parameters"]
    stated = {"quantization": changed["quantization"], **rope}
    assert exported_config(stated, types) == {**stated, "rope_theta": 5e5}
    assert exported_config({**stated, "rope_theta": 1e4}, types) is None
    assert exported_config(rope, {}) is None

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.quantization.choose_format import POLICIES, Policy, PolicyName
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.model_facts import ModelFacts

LAYER = "model.layers.0"

Shapes = dict[str, tuple[int, ...]]


def specs(shapes: Shapes) -> list[TensorSpec]:
    return [TensorSpec(name, DType.BF16, shape) for name, shape in shapes.items()]


def decisions(
    config: Mapping[str, Any], shapes: Shapes, policy: PolicyName = "recommended"
) -> dict[str, str]:
    """Return the type of each tensor, or the reason for which it is kept."""
    decider = Policy(FORMATS["int4"], name=policy, config=config, specs=specs(shapes))
    found = {spec.name: decider.decide(spec) for spec in specs(shapes)}
    return {
        name: decision.item.name if decision.item else decision.reason
        for name, decision in found.items()
    }


def role(config: Mapping[str, Any], name: str, shape: tuple[int, ...] = (64, 128)) -> str | None:
    return ModelFacts(config).role(TensorSpec(name, DType.BF16, shape))


LLAMA4: Shapes = {
    f"{LAYER}.feed_forward.experts.gate_up_proj": (4, 128, 512),
    f"{LAYER}.feed_forward.experts.down_proj": (4, 256, 128),
}
QWEN3_VL_MOE: Shapes = {
    "model.language_model.layers.0.mlp.experts.gate_up_proj": (4, 128, 192),
    "model.language_model.layers.0.mlp.experts.down_proj": (4, 96, 128),
}
GPT_OSS: Shapes = {
    f"{LAYER}.mlp.experts.gate_up_proj": (4, 128, 256),
    f"{LAYER}.mlp.experts.gate_up_proj_bias": (4, 256),
    f"{LAYER}.mlp.experts.down_proj": (4, 128, 128),
    f"{LAYER}.mlp.experts.down_proj_bias": (4, 128),
}
GPT2: Shapes = {
    "transformer.h.0.attn.c_attn.weight": (128, 384),
    "transformer.h.0.attn.c_proj.weight": (128, 128),
    "transformer.h.0.mlp.c_fc.weight": (128, 512),
    "transformer.h.0.mlp.c_proj.weight": (512, 128),
}
UPRIGHT: Shapes = {
    f"{LAYER}.mlp.experts.gate_up_proj": (4, 512, 128),
    f"{LAYER}.mlp.experts.down_proj": (4, 128, 256),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        ({"text_config": {"hidden_size": 128}}, LLAMA4),
        ({"text_config": {"hidden_size": 128}, "vision_config": {}}, QWEN3_VL_MOE),
        ({"hidden_size": 128}, GPT_OSS),
        ({"n_embd": 128}, GPT2),
        ({"decoder": {"n_embd": 128}}, GPT2),
    ],
    ids=["llama4", "qwen3-vl-moe", "gpt-oss", "gpt2", "decoder"],
)
def test_keeps_weights_that_are_stored_transposed(
    config: dict[str, Any], shapes: Shapes, policy: PolicyName
) -> None:
    weights = {name for name in shapes if not name.endswith("bias")}
    found = decisions(config, shapes, policy)
    assert {name for name, why in found.items() if why == "stored transposed"} == weights


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        ({"hidden_size": 128}, UPRIGHT),
        ({"hidden_size": 128}, {**UPRIGHT, f"{LAYER}.mlp.experts.down_proj": (4, 128, 128)}),
        # The same names are those of Linear modules in GPT-BigCode and the first Qwen.
        ({"n_embd": 128}, {name: shape[::-1] for name, shape in GPT2.items()}),
        ({}, LLAMA4),
        ({"hidden_size": 96}, LLAMA4),
        ({"hidden_size": "128"}, LLAMA4),
        # Experts of a smaller width than the model; that one side has its hidden size is an accident.
        ({"hidden_size": 512}, UPRIGHT),
        ({"hidden_size": 128}, {f"{LAYER}.mlp.experts.3.down_proj.weight": (256, 128)}),
    ],
)
def test_quantizes_the_same_weights_if_nothing_says_that_they_are_transposed(
    config: dict[str, Any], shapes: Shapes
) -> None:
    assert set(decisions(config, shapes).values()) <= {"int4", "int8"}


def test_only_one_projection_of_dbrx_is_transposed() -> None:
    prefix = "transformer.blocks.0.ffn.experts.mlp"
    shapes: Shapes = {f"{prefix}.{part}": (1024, 128) for part in ("w1", "v1", "w2")}
    assert list(decisions({"d_model": 128}, shapes).values()) == [
        "int4",
        "int4",
        "stored transposed",
    ]


def test_an_override_quantizes_what_is_stored_transposed() -> None:
    overrides = [("*experts*", FORMATS["int4"])]
    policy = Policy(
        FORMATS["int4"], config={"hidden_size": 128}, specs=specs(GPT_OSS), overrides=overrides
    )
    decision = policy.decide(specs(GPT_OSS)[0])
    assert decision.item == FORMATS["int4"]
    assert policy.notices() == ()


def test_a_notice_names_what_is_stored_transposed() -> None:
    policy = Policy(FORMATS["int4"], config={"n_embd": 128}, specs=specs(GPT2))
    assert policy.notices() == ()
    for spec in specs(GPT2):
        policy.decide(spec)
        policy.decide(spec)
    (notice,) = policy.notices()
    assert notice.startswith("kept 'transformer.h.0.attn.c_attn.weight' and 3 more unquantized: ")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("embed_out.weight", "head"),
        ("output.weight", "head"),
        ("transformer.output_layer.weight", "head"),
        ("cls.predictions.decoder.weight", "head"),
        ("model.layers.61.shared_head.head.weight", "head"),
        # As many rows as tokens, by accident.
        ("model.layers.3.attention.output.weight", None),
        ("model.layers.3.mlp.up_proj.weight", None),
    ],
)
@pytest.mark.parametrize(
    "config",
    [
        {"vocab_size": 64},
        {"text_config": {"vocab_size": 64}},
        {"padded_vocab_size": 64},
        {"thinker_config": {"text_config": {"vocab_size": 64}}},
    ],
)
def test_what_has_a_row_per_token_is_an_embedding_or_head(
    config: dict[str, Any], name: str, expected: str | None
) -> None:
    assert role(config, name) == expected
    assert role(config, name, (65, 128)) is None


@pytest.mark.parametrize(
    "key",
    [
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_routed_experts",
        "moe_num_experts",
    ],
)
@pytest.mark.parametrize(
    "name",
    ["mlp.selector", "moe.choose", "block_sparse_moe.layer", "ffn.chooser", "feed_forward.route"],
)
def test_what_has_a_row_per_expert_is_a_router(key: str, name: str) -> None:
    assert role({key: 64}, f"{LAYER}.{name}.weight") == "router"
    assert role({key: [64, 64]}, f"{LAYER}.{name}.weight") == "router"
    assert role({key: 32}, f"{LAYER}.{name}.weight") is None
    assert role({key: 64}, f"{LAYER}.self_attn.o_proj.weight") is None


@pytest.mark.parametrize("name", ["mlp.gate.down_proj", "router.fc1", "mlp.gate.router_mlp.fc2"])
def test_everything_in_a_router_of_experts_is_a_router(name: str) -> None:
    assert role({"num_experts": 16}, f"{LAYER}.{name}.weight") == "router"
    assert role({}, f"{LAYER}.{name}.weight") is None


@pytest.mark.parametrize(
    "name", ["mlp.shared_expert.up_proj", "mlp.shared_expert.gate.up", "mlp.gate_proj"]
)
def test_projections_with_as_many_rows_as_experts_are_no_routers(name: str) -> None:
    assert role({"num_experts": 64}, f"{LAYER}.{name}.weight") is None


def test_numbers_of_unexpected_types_are_ignored() -> None:
    for value in ("64", 64.0, True, None, {"a": 64}, [[64]], -64):
        config = {"vocab_size": value, "num_experts": value, "hidden_size": value}
        assert role(config, "lm_head.weight") is None
        assert role(config, f"{LAYER}.mlp.selector.weight") is None


@pytest.mark.slow
def test_deep_configs_are_not_searched_to_the_end() -> None:
    config: dict[str, Any] = {"vocab_size": 64}
    for _ in range(100_000):
        config = {"text_config": config}
    assert role(config, "lm_head.weight") is None


LANGUAGE: Shapes = {
    "language_model.model.layers.0.self_attn.q_proj.weight": (256, 128),
    "language_model.model.layers.0.self_attn.o_proj.weight": (128, 256),
    "language_model.model.layers.0.mlp.up_proj.weight": (512, 128),
}
OTHERS: Shapes = {
    "sam.blocks.0.attn.qkv.weight": (192, 64),
    "sam.blocks.0.mlp.lin1.weight": (256, 64),
    # As many inputs as the language model has, but only here.
    "sam.blocks.0.mlp.lin2.weight": (64, 128),
    "merger.mlp.0.weight": (128, 128),
    "projection.weight": (128, 64),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"hidden_size": 128}, "vision_config": {"hidden_size": 64}},
        {"hidden_size": 128, "vision_config": {}},
        {"hidden_size": 128, "audio_config": {}},
        {"thinker_config": {"text_config": {"hidden_size": 128}, "audio_config": {}}},
        {"llm_config": {"hidden_size": 128}},
    ],
)
def test_keeps_what_is_outside_the_layers_of_a_multimodal_models_language_model(
    config: dict[str, Any], policy: PolicyName
) -> None:
    found = decisions(config, {**LANGUAGE, **OTHERS}, policy)
    assert {found[name] for name in LANGUAGE} == {"int4"}
    assert {found[name] for name in OTHERS} == {"outside the language model's layers"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("lm_head.weight", "int8"), ("language_model.model.embed_tokens.weight", "embedding")],
)
def test_embeddings_and_heads_are_no_towers_even_if_their_size_is_unknown(
    name: str, expected: str
) -> None:
    config = {"hidden_size": 128, "vision_config": {}}
    assert decisions(config, {**LANGUAGE, name: (64, 128)})[name] == expected


@pytest.mark.parametrize("config", [{"hidden_size": 128}, {"vision_config": {}}])
def test_nothing_is_a_tower_without_a_config_that_has_both_models(config: dict[str, Any]) -> None:
    assert set(decisions(config, {**LANGUAGE, **OTHERS}).values()) == {"int4"}

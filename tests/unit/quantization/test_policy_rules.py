from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UnsupportedSource
from blobstore.quantization.choose_format import Decision, Policy
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.policy_rules import ARCHITECTURES, GENERIC, UNIFORM, Schedule

SHAPE = (64, 128)
"""Fits the groups of every type."""
LAYERS = "model.layers"


def decision(
    config: Mapping[str, Any], name: str, to: str = "int4", shape: tuple[int, ...] = SHAPE
) -> Decision:
    return Policy(FORMATS[to], config=config).decide(TensorSpec(name, DType.BF16, shape))


def decide(
    config: Mapping[str, Any], name: str, to: str = "int4", shape: tuple[int, ...] = SHAPE
) -> str | None:
    item = decision(config, name, to, shape).item
    return None if item is None else item.name


def scheduled(
    config: Mapping[str, Any], template: str, layers: int, to: str, eight: str | None
) -> list[int]:
    """Return the layers whose tensor gets ``eight`` instead of the requested type."""
    types = [decide(config, template.format(layer), to) for layer in range(layers)]
    assert set(types) <= {eight, to}
    return [layer for layer, item in enumerate(types) if item == eight]


def test_a_schedule_has_both_ends_and_every_third_layer_between() -> None:
    schedule = Schedule()
    assert [layer for layer in range(16) if schedule.has(layer, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]
    assert [layer for layer in range(30) if schedule.has(layer, 30)] == (
        [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
    )
    assert [layer for layer in range(4) if schedule.has(layer, 4)] == [2, 3]
    assert schedule.has(0, 1)


def test_a_schedule_has_layers_after_the_last() -> None:
    assert Schedule().has(17, 16)


def test_a_cadence_can_end_early() -> None:
    schedule = Schedule(cadence_eighths=4, cadence_offset=-4)
    assert [layer for layer in range(40) if schedule.has(layer, 40)] == (
        [0, 1, 2, 3, 4, 7, 10, 13, 35, 36, 37, 38, 39]
    )
    assert [layer for layer in range(41) if schedule.has(layer, 41)] == (
        [0, 1, 2, 3, 4, 7, 10, 13, 35, 36, 37, 38, 39, 40]
    )
    assert [layer for layer in range(46) if schedule.has(layer, 46)] == (
        [0, 1, 2, 3, 4, 7, 10, 13, 16, 40, 41, 42, 43, 44, 45]
    )


def test_every_table_ends_with_a_rule_for_all_tensors() -> None:
    for rules in (GENERIC, UNIFORM):
        last = rules[-1]
        assert (last.names, last.unless, last.layers) == (("*",), (), "any")
        assert (last.requested, last.experts, last.num_experts) == (None, None, None)


def test_architectures_with_schedules_know_their_number_of_layers() -> None:
    for architecture in ARCHITECTURES:
        needs = any(rule.layers not in {"any", "dense"} for rule in architecture.rules)
        assert needs == bool(architecture.layers_keys)


SIXTEEN = [0, 1, 4, 7, 10, 13, 14, 15]
FIRST = f"{LAYERS}.2"
"""A layer that is not scheduled, of sixteen."""

GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 16}


@pytest.mark.parametrize("section", ["num_experts", "text_config"])
def test_gemma4_with_eight_experts_promotes_all_keys_and_values(section: str) -> None:
    experts = {"num_experts": 8}
    config = {**GEMMA4, **(experts if section in experts else {section: experts})}
    for part in ("k_proj", "v_proj"):
        assert decide(config, f"{FIRST}.self_attn.{part}.weight") == "int8"
    assert decide(config, f"{FIRST}.mlp.down_proj.weight") == "int4"
    assert decide({**GEMMA4, "num_experts": 9}, f"{FIRST}.self_attn.k_proj.weight") == "int4"


def test_reasons_mention_the_schedule() -> None:
    name = LAYERS + ".{}.self_attn.v_proj.weight"
    scheduled = "sensitive projection of a scheduled layer"
    assert decision(GEMMA4, name.format(0)).reason == f"{scheduled}, 8 bits"
    assert decision(GEMMA4, name.format(0), "nvfp4", (64, 48)).reason == (
        f"{scheduled}, but last dimension 48 is not a multiple of 32"
    )
    assert decision(GEMMA4, name.format(2)).reason == (
        "sensitive projection, but its layer is not scheduled"
    )
    assert decision(GEMMA4, f"{FIRST}.self_attn.k_proj.weight").reason == "key projection"


@pytest.mark.parametrize("config", [GEMMA4, {**GEMMA4, "num_experts": 8}])
@pytest.mark.parametrize("to", ["int8", "mxfp8"])
@pytest.mark.parametrize("part", ["self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"])
def test_8_bit_types_need_no_promotion(config: dict[str, Any], to: str, part: str) -> None:
    decided = decision(config, f"{FIRST}.{part}.weight", to)
    assert (decided.item, decided.reason) == (FORMATS[to], "requested type")


def test_gemma4_without_a_number_of_layers_has_the_generic_promotions() -> None:
    config = {"architectures": ["Gemma4ForCausalLM"]}
    for part in ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"):
        assert decide(config, f"{FIRST}.{part}.weight") == "int8"
    assert decide(config, "model.embed_tokens.weight") == "int8"


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3NextForCausalLM",
        "Qwen3NextMoeForCausalLM",
    ],
)
@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("linear_attn.in_proj_a", None),
        ("linear_attn.in_proj_b", None),
        ("linear_attn.in_proj_ba", None),
        ("linear_attn.in_proj_qkv", "int4"),
        ("linear_attn.out_proj", "int4"),
        ("self_attn.v_proj", "int8"),
    ],
)
def test_qwen3_next(architecture: str, part: str, expected: str | None) -> None:
    assert decide({"architectures": [architecture]}, f"{FIRST}.{part}.weight") == expected


def test_other_qwen3_models_have_only_the_generic_rules() -> None:
    config = {"architectures": ["Qwen3MoeForCausalLM"]}
    assert decide(config, f"{FIRST}.linear_attn.in_proj_a.weight") == "int4"


COHERE = {"architectures": ["Cohere2MoeForCausalLM"], "num_hidden_layers": 16}


GLIMMER = {
    "architectures": ["MuseGlimmerForConditionalGeneration"],
    "text_config": {"num_hidden_layers": 16},
}


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_muse_glimmer_gives_all_attention_8_bits(part: str) -> None:
    name = f"{FIRST}.self_attn.{part}.weight"
    assert decision(GLIMMER, name).reason == "attention, 8 bits"
    assert decision(GLIMMER, name, "int8").reason == "requested type"


NEMOTRON = {
    "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
    "llm_config": {"num_hidden_layers": 16},
}
BACKBONE = "language_model.backbone.layers"


GEMMA4_CASES = [
    ("model.embed_tokens.weight", "int4", "int8"),
    ("model.embed_tokens.weight", "nvfp4", "mxfp8"),
    ("model.embed_tokens_per_layer.weight", "int4", None),
    ("model.per_layer.embed_tokens.weight", "int4", None),
    (f"{LAYERS}.0.self_attn.k_proj.weight", "int4", "int4"),
    (f"{LAYERS}.0.self_attn.q_proj.weight", "int4", "int4"),
    (f"{LAYERS}.0.self_attn.v_proj.weight", "int8", "int8"),
    ("model.v_proj.weight", "int4", "int4"),
    ("model.vision_tower.layers.0.self_attn.v_proj.weight", "int4", None),
    ("model.visual.layers.0.self_attn.v_proj.weight", "int4", None),
    ("model.audio_tower.layers.0.self_attn.v_proj.weight", "int4", None),
    (f"{LAYERS}.0.router.proj.weight", "int4", None),
    (f"{LAYERS}.0.self_attn.k_norm.weight", "int4", None),
    ("lm_head.weight", "int4", "int8"),
]
COHERE_CASES = [
    ("model.embed_tokens.weight", "int4", "int8"),
    ("model.embed_tokens.weight", "mxfp8", "mxfp8"),
    (f"{LAYERS}.0.mlp.gate.weight", "int4", None),
    (f"{LAYERS}.0.self_attn.q_proj.weight", "int4", "int4"),
    (f"{FIRST}.self_attn.v_proj.weight", "int8", "int8"),
]
GLIMMER_CASES = [
    (f"{FIRST}.self_attn.q_proj.weight", "int4", "int8"),
    (f"{FIRST}.self_attn.k_proj.weight", "nvfp4", "mxfp8"),
    (f"{FIRST}.self_attn.v_proj.weight", "int4", "int8"),
    (f"{FIRST}.self_attn.o_proj.weight", "int4", "int8"),
    (f"{FIRST}.mlp.up_proj.weight", "int4", "int4"),
    ("model.embed_tokens.weight", "int4", "int8"),
    ("model.vision_model.embed_tokens.weight", "int4", None),
    ("model.vision_model.layers.0.self_attn.q_proj.weight", "int4", None),
    ("model.vision_model.lm_head.weight", "int4", None),
]
NEMOTRON_CASES = [
    *((f"{BACKBONE}.2.mixer.{part}_proj.weight", "nvfp4", "mxfp8") for part in "qkvo"),
    (f"{BACKBONE}.2.mixer.q_proj.weight", "int4", "int4"),
    (f"{BACKBONE}.2.mixer.out_proj.weight", "int4", "int4"),
    (f"{BACKBONE}.2.mixer.experts.down_proj.weight", "int4", "int8"),
    (f"{BACKBONE}.2.mixer.in_proj.weight", "nvfp4", "nvfp4"),
    (f"{BACKBONE}.2.mixer.experts.0.up_proj.weight", "nvfp4", "nvfp4"),
    ("backbone.mixer.out_proj.weight", "nvfp4", "mxfp8"),
    ("language_model.backbone.embeddings.weight", "nvfp4", "mxfp8"),
    ("language_model.backbone.embeddings.weight", "int4", "int8"),
    ("language_model.lm_head.weight", "nvfp4", "mxfp8"),
    (f"{BACKBONE}.2.mixer.conv1d.weight", "nvfp4", None),
    (f"{BACKBONE}.2.mixer.gate.weight", "nvfp4", None),
    ("vision_model.blocks.0.proj.weight", "int4", None),
    ("vision_model.mixer.q_proj.weight", "nvfp4", None),
    ("mlp1.1.weight", "int4", None),
    ("sound_encoder.layers.0.self_attn.q_proj.weight", "int4", None),
    ("sound_projection.linear1.weight", "int4", None),
    ("model.mlp1.1.weight", "int4", "int4"),
]


@pytest.mark.parametrize(
    ("config", "case"),
    [
        *product([GEMMA4], GEMMA4_CASES),
        *product([COHERE], COHERE_CASES),
        *product([GLIMMER], GLIMMER_CASES),
        *product([NEMOTRON], NEMOTRON_CASES),
    ],
)
def test_an_architecture_decides_by_name(
    config: dict[str, Any], case: tuple[str, str, str | None]
) -> None:
    name, to, expected = case
    assert decide(config, name, to) == expected


MIXER = ("out_proj", "down_proj", "experts.3.down_proj", "experts.down_proj")


@pytest.mark.parametrize(
    ("config", "template", "parts", "targets"),
    [
        (
            GEMMA4,
            f"{LAYERS}.{{}}.",
            ("self_attn.v_proj", "mlp.down_proj", "experts.down_proj"),
            ("int4", "nvfp4", "mxfp4"),
        ),
        (
            COHERE,
            f"{LAYERS}.{{}}.",
            ("self_attn.v_proj", "self_attn.k_proj", "mlp.down_proj", "mlp.experts.down_proj"),
            ("int4", "nvfp4"),
        ),
        (
            GLIMMER,
            f"{LAYERS}.{{}}.",
            ("self_attn.gate_proj", "self_attn.output_gate_proj", "mlp.down_proj"),
            ("int4", "mxfp4"),
        ),
        (
            NEMOTRON,
            f"{BACKBONE}.{{}}.mixer.",
            (*MIXER, "shared_experts.down_proj"),
            ("nvfp4", "mxfp4"),
        ),
    ],
    ids=["Gemma4", "Cohere2Moe", "MuseGlimmer", "NemotronH"],
)
def test_promotes_sensitive_projections_by_schedule(
    config: dict[str, Any], template: str, parts: tuple[str, ...], targets: tuple[str, ...]
) -> None:
    for part in parts:
        for to in targets:
            eight = "int8" if to == "int4" else "mxfp8"
            assert scheduled(config, f"{template}{part}.weight", 16, to, eight) == SIXTEEN


LAGUNA = {
    "architectures": ["LagunaForCausalLM"],
    "num_hidden_layers": 40,
    "mlp_only_layers": [0, 5],
}
LAGUNA_SCHEDULE = [0, 1, 2, 3, 4, 7, 10, 13, 35, 36, 37, 38, 39]


def named(name: str, **config: Any) -> dict[str, Any]:
    return {"architectures": [name], **config}


SIXTEEN_LAYERS = {"num_hidden_layers": 16}
GEMMAS = ["Gemma4ForConditionalGeneration", "Gemma4UnifiedForCausalLM"]
GEMMAS += ["Gemma4AssistantForCausalLM", "gemma4_unified"]
LISTED = named("LagunaForCausalLM", mlp_layer_types=["sparse"] * 40)


@pytest.mark.parametrize(
    ("config", "name", "to", "expected"),
    [
        *(
            (named(name, text_config=SIXTEEN_LAYERS), "mlp.down", "int4", SIXTEEN)
            for name in GEMMAS
        ),
        (
            named("MuseGlimmerForConditionalGeneration", **SIXTEEN_LAYERS),
            "mlp.down",
            "int4",
            SIXTEEN,
        ),
        (named("NemotronHForCausalLM", **SIXTEEN_LAYERS), "mixer.out", "nvfp4", SIXTEEN),
        (LAGUNA, "mlp.shared_expert.down", "nvfp4", LAGUNA_SCHEDULE),
        (LAGUNA, "mlp.shared_experts.down", "nvfp4", LAGUNA_SCHEDULE),
        (LISTED, "mlp.shared_expert.down", "nvfp4", LAGUNA_SCHEDULE),
        (LAGUNA, "mlp.experts.down", "mxfp8", LAGUNA_SCHEDULE),  # kept, not promoted
        (LAGUNA, "mlp.experts.down", "nvfp4", []),
    ],
)
def test_promotions_follow_the_schedule_of_the_architecture(
    config: dict[str, Any], name: str, to: str, expected: list[int]
) -> None:
    eight = {"int4": "int8", "nvfp4": "mxfp8", "mxfp8": None}[to]
    layers = 40 if "Laguna" in config["architectures"][0] else 16
    assert scheduled(config, f"{LAYERS}.{{}}.{name}_proj.weight", layers, to, eight) == expected


@pytest.mark.parametrize(
    ("part", "nvfp4", "mxfp8"),
    [
        ("mlp.shared_expert.down_proj.weight", "nvfp4", None),
        ("mlp.shared_expert.up_proj.weight", "nvfp4", "mxfp8"),
        ("mlp.experts.3.gate_proj.weight", "nvfp4", "mxfp8"),
        ("mlp.experts.3.down_proj.weight", "nvfp4", "mxfp8"),
        ("mlp.experts.gate_up_proj", "nvfp4", "mxfp8"),
        ("mlp.gate.weight", None, None),
        ("mlp.shared_expert_gate.weight", None, None),
        ("self_attn.q_proj.weight", "nvfp4", None),
        ("self_attn.k_proj.weight", "nvfp4", None),
        ("self_attn.v_proj.weight", "nvfp4", None),
        ("self_attn.o_proj.weight", "nvfp4", None),
        ("self_attn.g_proj.weight", "nvfp4", None),
        ("mlp.down_proj.weight", None, None),
        ("something.weight", None, None),
    ],
)
def test_laguna(part: str, nvfp4: str | None, mxfp8: str | None) -> None:
    assert decide(LAGUNA, f"{LAYERS}.20.{part}", "nvfp4") == nvfp4
    assert decide(LAGUNA, f"{LAYERS}.20.{part}", "mxfp8") == mxfp8


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_laguna_promotes_embeddings_and_the_head(name: str) -> None:
    assert decide(LAGUNA, name, "nvfp4") == "mxfp8"


@pytest.mark.parametrize(
    ("config", "name", "columns", "expected"),
    [
        (GEMMA4, "model.embed_tokens.weight", 48, "nvfp4"),
        (GEMMA4, "model.embed_tokens.weight", 40, None),
        (GEMMA4, f"{LAYERS}.0.self_attn.v_proj.weight", 48, "nvfp4"),
        (GEMMA4, f"{FIRST}.self_attn.v_proj.weight", 48, "nvfp4"),
        (GEMMA4 | {"num_experts": 8}, f"{LAYERS}.0.self_attn.v_proj.weight", 48, "nvfp4"),
        (GEMMA4 | {"num_experts": 8}, f"{FIRST}.self_attn.v_proj.weight", 48, "nvfp4"),
        (COHERE, "model.embed_tokens.weight", 48, None),
        (GLIMMER, "model.embed_tokens.weight", 48, "nvfp4"),
        (GLIMMER, f"{FIRST}.self_attn.q_proj.weight", 48, "nvfp4"),
        (NEMOTRON, f"{BACKBONE}.0.mixer.q_proj.weight", 48, "nvfp4"),
        (NEMOTRON, f"{BACKBONE}.0.mixer.out_proj.weight", 48, "nvfp4"),
        (NEMOTRON, "backbone.embeddings.weight", 48, None),
        (LAGUNA, "model.embed_tokens.weight", 48, None),
        (LAGUNA, "lm_head.weight", 48, None),
    ],
)
def test_tensors_that_8_bits_do_not_fit_get_the_requested_type_or_are_kept(
    config: dict[str, Any], name: str, columns: int, expected: str | None
) -> None:
    assert decide(config, name, "nvfp4", (64, columns)) == expected


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        ({"mlp_only_layers": [0, 5]}, {0, 5}),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, {1}),
        ({"mlp_layer_types": ["sparse", "dense"], "mlp_only_layers": [3]}, {1, 3}),
        ({}, {0}),
    ],
)
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_laguna_quantizes_only_dense_layers(
    config: dict[str, Any], dense: set[int], part: str
) -> None:
    config = {"architectures": ["LagunaForCausalLM"], "num_hidden_layers": 40, **config}
    template = f"{LAYERS}.{{}}.mlp.{part}.weight"
    types = [decide(config, template.format(layer), "nvfp4") for layer in range(8)]
    assert types == ["nvfp4" if layer in dense else None for layer in range(8)]


def test_laguna_without_a_number_of_layers_promotes_no_expert() -> None:
    config = {"architectures": ["LagunaForCausalLM"]}
    assert decide(config, f"{LAYERS}.0.mlp.shared_expert.down_proj.weight", "nvfp4") == "nvfp4"
    assert decide(config, f"{LAYERS}.0.mlp.experts.down_proj.weight", "mxfp8") == "mxfp8"


@pytest.mark.parametrize("to", ["int4", "int8"])
def test_laguna_has_the_generic_rules_with_integer_types(to: str) -> None:
    assert decide(LAGUNA, "model.embed_tokens.weight", to) is None
    assert decide(LAGUNA, "lm_head.weight", to) == "int8"
    assert decide(LAGUNA, f"{LAYERS}.20.self_attn.v_proj.weight", to) == "int8"
    assert decide(LAGUNA, f"{LAYERS}.20.mlp.up_proj.weight", to) == to
    assert decide(LAGUNA, f"{LAYERS}.0.mlp.down_proj.weight", to) == "int8"
    assert decide(LAGUNA, f"{LAYERS}.20.mlp.experts.down_proj.weight", to) == "int8"
    assert decide(LAGUNA, f"{LAYERS}.20.mlp.shared_expert.down_proj.weight", to) == "int8"


def test_laguna_gives_its_reasons() -> None:
    for part, reason in [
        ("mlp.gate.weight", "router"),
        ("mlp.up_proj.weight", "not quantized in this architecture"),
        ("mlp.experts.up_proj.weight", "expert"),
        ("self_attn.q_proj.weight", "attention"),
    ]:
        assert decision(LAGUNA, f"{LAYERS}.20.{part}", "nvfp4").reason == reason


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**GEMMA4, "num_hidden_layers": "16"}, "num_hidden_layers"),
        ({**GEMMA4, "num_hidden_layers": 16.0}, "num_hidden_layers"),
        ({**GEMMA4, "num_hidden_layers": True}, "num_hidden_layers"),
        ({**GEMMA4, "num_hidden_layers": -1}, "num_hidden_layers"),
        ({**GEMMA4, "num_hidden_layers": [16]}, "num_hidden_layers"),
        ({**GEMMA4, "num_experts": "8"}, "num_experts"),
        ({**GEMMA4, "text_config": []}, "text_config"),
        ({**GEMMA4, "text_config": {"num_hidden_layers": {}}}, "text_config.num_hidden_layers"),
        ({**GEMMA4, "text_config": {"num_experts": "8"}}, "text_config.num_experts"),
        ({**COHERE, "num_hidden_layers": "16"}, "num_hidden_layers"),
        ({**GLIMMER, "text_config": {"num_hidden_layers": ""}}, "text_config.num_hidden_layers"),
        ({**NEMOTRON, "llm_config": 1}, "llm_config"),
        ({**NEMOTRON, "llm_config": {"num_hidden_layers": "1"}}, "llm_config.num_hidden_layers"),
        ({**LAGUNA, "num_hidden_layers": "40"}, "num_hidden_layers"),
        ({**LAGUNA, "mlp_only_layers": 0}, "mlp_only_layers"),
        ({**LAGUNA, "mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ({**LAGUNA, "mlp_only_layers": [True]}, "mlp_only_layers"),
        ({**LAGUNA, "mlp_layer_types": "dense"}, "mlp_layer_types"),
        ({**LAGUNA, "mlp_layer_types": [0]}, "mlp_layer_types"),
    ],
)
def test_rejects_config_fields_of_wrong_types(config: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedSource, match=f"^config.json: {key} must be .*, not '"):
        Policy(FORMATS["int4"], config=config)


def test_reads_only_the_fields_that_the_rules_need() -> None:
    config = {"num_hidden_layers": "many", "text_config": 1, "mlp_only_layers": 1}
    for name in ("Qwen3NextForCausalLM", "LlamaForCausalLM"):
        assert decide({**config, "architectures": [name]}, f"{FIRST}.mlp.up_proj.weight") == "int4"


@pytest.mark.parametrize("nothing", [None, 0])
def test_null_and_zero_mean_a_missing_number(nothing: object) -> None:
    config = {
        **GEMMA4,
        "num_hidden_layers": nothing,
        "text_config": {"num_hidden_layers": 16, "num_experts": nothing},
    }
    template = f"{LAYERS}.{{}}.mlp.down_proj.weight"
    assert scheduled(config, template, 16, "int4", "int8") == SIXTEEN
    config["text_config"] = nothing if nothing is None else {}
    assert scheduled(config, template, 16, "int4", "int8") == list(range(16))


def test_a_name_may_begin_with_its_layer() -> None:
    assert decide(GEMMA4, "layers.2.mlp.down_proj.weight") == "int4"
    assert decide(GEMMA4, "layers.4.mlp.down_proj.weight") == "int8"


def test_too_many_or_non_ascii_digits_are_not_a_layer() -> None:
    assert (
        decide(NEMOTRON, f"backbone.layers.{'2' * 5000}.mixer.out_proj.weight", "nvfp4") == "mxfp8"
    )
    assert decide(GEMMA4, "model.layers.²2.mlp.down_proj.weight") == "int4"

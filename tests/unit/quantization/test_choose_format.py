from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UnsupportedSource, UsageError
from blobstore.quantization.choose_format import (
    POLICIES,
    Decision,
    Policy,
    PolicyName,
    parse_override,
)
from blobstore.quantization.formats import FORMATS, QuantFormat
from blobstore.sources.open import open_source

DATA = Path(__file__).parents[2] / "data" / "ollama"
TARGETS = [name for name, item in FORMATS.items() if item.is_target]
EXPERT = "model.layers.1.mlp.experts"
SHARED = "model.layers.1.mlp.shared_experts"
SENSITIVE = [
    f"model.layers.0.{part}.weight"
    for part in ("self_attn.v_proj", "self_attn.k_proj", "mlp.down_proj")
]

Shape = tuple[int, ...]


def decide(
    name: str,
    shape: Shape = (64, 128),
    /,
    *,
    to: str = "int4",
    dtype: DType = DType.BF16,
    **options: Any,
) -> Decision:
    return Policy(FORMATS[to], **options).decide(TensorSpec(name, dtype, shape))


def kind(decision: Decision) -> tuple[str, int] | None:
    return None if decision.item is None else (decision.item.name, decision.group_size)


def test_a_plain_weight_gets_the_requested_type() -> None:
    decision = decide("model.layers.0.mlp.up_proj.weight")
    assert decision == Decision(FORMATS["int4"], 32, "requested type")


@pytest.mark.parametrize("to", TARGETS)
def test_the_requested_type_has_its_default_group_size(to: str) -> None:
    assert kind(decide("w.weight", to=to)) == (to, FORMATS[to].group_size)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.word_embeddings.weight", "embedding"),
        ("model.norm.weight", "norm"),
        ("model.layers.0.input_layernorm.weight", "norm"),
        ("transformer.ln_f.weight", "norm"),
        ("audio_tower.layers.0.fc1.weight", "audio"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("backbone.layers.0.mixer.gate.weight", "router"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "router"),
        ("model.layers.0.router.proj.weight", "router"),
        ("model.layers.0.block_sparse_moe.gate.weight", "router"),
        ("model.layers.0.feed_forward.gate.weight", "router"),
        ("model.layers.0.mlp.router.weight", "router"),
        ("model.layers.0.block_sparse_moe.router.layer.weight", "router"),
        ("model.layers.0.mlp.gate.wg.weight", "router"),
        ("model.layers.0.mlp.gate.gate.weight", "router"),
        ("model.layers.0.mlp.router.gate.weight", "router"),
        ("model.layers.0.mlp.router.classifier.weight", "router"),
        ("model.layers.0.moe.gate.weight", "router"),
        ("model.layers.0.ffn.gate.weight", "router"),
        ("model.layers.0.mlp.moe_statics.weight", "router"),
        ("transformer.wte.weight", "embedding"),
        ("transformer.wpe.weight", "embedding"),
        ("model.tok_emb.weight", "embedding"),
        ("shared.weight", "embedding"),
        ("model.shared.weight", "embedding"),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "embedding"),
        ("model.layers.0.self_attn.kv_b_proj.weight", "latent attention"),
        ("layers.0.attn.wkv_b.weight", "latent attention"),
        ("vision_tower.blocks.0.fc1.weight", "vision"),
        ("model.visual.blocks.0.attn.v_proj.weight", "vision"),
        ("vpm.encoder.layers.0.mlp.fc1.weight", "vision"),
        ("model.siglip.encoder.layers.0.mlp.fc1.weight", "vision"),
        ("vit.layers.0.mlp.fc1.weight", "vision"),
        ("model.vit.layers.0.mlp.fc1.weight", "vision"),
        ("image_tower.layers.0.fc1.weight", "vision"),
        ("audio_encoder.layers.0.fc1.weight", "audio"),
        ("speech_encoder.layers.0.fc1.weight", "audio"),
        ("sound_encoder.layers.0.fc1.weight", "audio"),
        ("multi_modal_projector.linear_1.weight", "projector"),
        ("model.mm_projector.0.weight", "projector"),
        ("mlp1.1.weight", "projector"),
        ("model.aligner.fc1.weight", "projector"),
        ("model.connector.modality_projection.proj.weight", "projector"),
        ("resampler.attn.out_proj.weight", "projector"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_keeps_by_name(name: str, reason: str, policy: PolicyName) -> None:
    assert decide(name, name=policy) == Decision(None, 0, reason)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate.up.weight",
        "model.Embed.weight",
        "gate.weight",
    ],
)
def test_similar_names_are_not_kept(name: str) -> None:
    assert kind(decide(name)) == ("int4", 32)


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("a.b", (64, 128), "name does not end in .weight"),
        ("a.bias", (64, 128), "name does not end in .weight"),
        ("a.weight", (8192,), "1 dimension"),
        ("a.weight", (), "0 dimensions"),
        ("a.weight", (2, 64, 128), "3 dimensions"),
        ("a.weight", (2, 2, 64, 128), "4 dimensions"),
        ("a.weight", (31, 32), "fewer than 1024 elements"),
        ("a.weight", (0, 64), "fewer than 1024 elements"),
        ("a.weight", (64, 100), "last dimension 100 is not a multiple of 32"),
        (SENSITIVE[0], (64, 100), "last dimension 100 is not a multiple of 32"),
        ("a.norm.weight", (8192,), "norm"),
        ("model.layers.0.mlp.gate.weight", (4, 64), "router"),
        (f"{EXPERT}.up_proj.weight", (2, 2, 64, 128), "4 dimensions"),
        (f"{EXPERT}.gate_up_proj_bias", (64, 128), "name does not end in .weight"),
        (f"{EXPERT}.3.up_proj.bias", (64, 128), "name does not end in .weight"),
        (f"{EXPERT}.3.up_proj.scale", (64, 128), "name does not end in .weight"),
        (f"{EXPERT}.3.up_proj.qbias", (64, 128), "name does not end in .weight"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_keeps_tensors_of_unsuitable_name_or_shape(
    name: str, shape: Shape, reason: str, policy: PolicyName
) -> None:
    assert decide(name, shape, name=policy) == Decision(None, 0, reason)


def test_quantizes_the_smallest_allowed_tensor() -> None:
    assert kind(decide("a.weight", (32, 32))) == ("int4", 32)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("policy", POLICIES)
def test_quantizes_only_16_and_32_bit_floats(dtype: DType, policy: PolicyName) -> None:
    decision = decide("a.weight", dtype=dtype, name=policy)
    if dtype in {DType.F16, DType.BF16, DType.F32}:
        assert kind(decision) == ("int4", 32)
    else:
        reason = f"{dtype.value} elements; only F32, F16 and BF16 are quantized"
        assert decision == Decision(None, 0, reason)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{EXPERT}.gate_up_proj", (8, 64, 128)),
        (f"{EXPERT}.gate_proj.weight", (8, 64, 128)),
        (f"{EXPERT}.7.gate_proj.weight", (64, 128)),
        (f"{SHARED}.gate_proj", (64, 128)),
        ("model.layers.0.mlp.switch_mlp.up_proj.weight", (8, 64, 128)),
        ("backbone.layers.0.mixer.shared_experts.up_proj", (64, 128)),
        ("model.layers.0.experts.gate_up_proj", (8, 64, 128)),
        ("model.layers.0.block_sparse_moe.experts.7.w1.weight", (64, 128)),
        # Other words in the name do not matter.
        ("embed.layers.0.mlp.experts.7.up_proj.weight", (64, 128)),
        ("norm.layers.0.mlp.experts.7.up_proj.weight", (64, 128)),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_quantizes_experts(name: str, shape: Shape, policy: PolicyName) -> None:
    assert kind(decide(name, shape, name=policy)) == ("int4", 32)


HEAD_TYPES = {
    "int4": ("int8", 64),
    "int8": ("int8", 64),
    "nvfp4": ("mxfp8", 32),
    "mxfp4": ("mxfp8", 32),
    "mxfp8": ("mxfp8", 32),
}


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "language_model.lm_head.weight",
        "model.layers.61.shared_head.head.weight",
        "transformer.output_layer.weight",
        "output.weight",
        "head.weight",
        "score.weight",
    ],
)
def test_the_output_head_gets_8_bits_of_the_family(name: str, to: str) -> None:
    decision = decide(name, to=to)
    assert kind(decision) == HEAD_TYPES[to]
    assert decision.reason == "output head, 8 bits"


@pytest.mark.parametrize(("to", "columns", "group"), [("int4", 96, 64), ("nvfp4", 48, 32)])
def test_the_output_head_is_kept_if_8_bits_do_not_fit(to: str, columns: int, group: int) -> None:
    reason = f"last dimension {columns} is not a multiple of {group}"
    assert decide("lm_head.weight", (64, columns), to=to) == Decision(None, 0, reason)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", SENSITIVE)
def test_sensitive_projections_get_8_bits_of_the_family(name: str, to: str) -> None:
    decision = decide(name, to=to)
    assert kind(decision) == HEAD_TYPES[to]
    is_promoted = FORMATS[to].bits == 4
    assert decision.reason == ("sensitive projection, 8 bits" if is_promoted else "requested type")


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{EXPERT}.down_proj.weight", (8, 64, 128)),
        (f"{EXPERT}.3.down_proj.weight", (64, 128)),
        (f"{SHARED}.down_proj.weight", (64, 128)),
    ],
)
def test_experts_get_8_bits_only_with_int4(name: str, shape: Shape, to: str) -> None:
    expected = ("int8", 64) if to == "int4" else (to, FORMATS[to].group_size)
    assert kind(decide(name, shape, to=to)) == expected


@pytest.mark.parametrize(("to", "columns", "group"), [("int4", 96, 64), ("nvfp4", 48, 32)])
def test_a_sensitive_projection_gets_the_requested_type_if_8_bits_do_not_fit(
    to: str, columns: int, group: int
) -> None:
    decision = decide(SENSITIVE[0], (64, columns), to=to)
    assert kind(decision) == (to, FORMATS[to].group_size)
    assert decision.reason == (
        f"sensitive projection, but last dimension {columns} is not a multiple of {group}"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Each pair of neighbouring rules meets in one name; the earlier one decides.
        ("embed.lm_head.weight", "embedding"),
        ("vision.lm_head.weight", "vision"),
        ("vision.v_proj.weight", "vision"),
        ("a.v_proj.mlp.gate.weight", "router"),
        ("vision.mlp.gate.weight", "vision"),
        ("vision.embed.weight", "vision"),
        ("audio_tower.layers.0.mlp.experts.7.up_proj.weight", "audio"),
        ("a.norm.mlp.gate.weight", "norm"),
        ("a.experts.norm.vision.weight", "vision"),
    ],
)
def test_the_first_rule_decides(name: str, expected: str) -> None:
    assert decide(name).reason == expected


@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_group_size_is_that_of_the_requested_type(size: int) -> None:
    assert kind(decide("w.weight", group_size=size)) == ("int4", size)
    assert kind(decide("w.weight", to="int8", group_size=size)) == ("int8", size)
    for name in ("lm_head.weight", SENSITIVE[0]):
        assert kind(decide(name, group_size=size)) == ("int8", 64)
        assert kind(decide(name, to="int8", group_size=size)) == ("int8", size)


def test_rows_must_be_a_multiple_of_the_group_size_in_use() -> None:
    shape = (64, 192)
    assert kind(decide("w.weight", shape, group_size=64)) == ("int4", 64)
    misfit = decide("w.weight", shape, group_size=128)
    assert misfit.reason == "last dimension 192 is not a multiple of 128"
    assert kind(decide(SENSITIVE[0], shape, group_size=128)) == ("int8", 64)


@pytest.mark.parametrize(("to", "size"), [("int4", 16), ("int4", 0), ("int4", -1), ("nvfp4", 32)])
def test_rejects_an_unsupported_group_size(to: str, size: int) -> None:
    with pytest.raises(UsageError, match=f"{to} cannot have groups of {size}"):
        Policy(FORMATS[to], group_size=size)


def test_rejects_an_unknown_policy() -> None:
    with pytest.raises(UsageError, match="unknown policy 'best'; expected one of recommended, uni"):
        Policy(FORMATS["int4"], name="best")  # type: ignore[arg-type]


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", ["lm_head.weight", *SENSITIVE, f"{EXPERT}.3.down_proj.weight"])
def test_uniform_promotes_nothing(name: str, to: str) -> None:
    assert kind(decide(name, to=to, name="uniform")) == (to, FORMATS[to].group_size)


def test_uniform_ignores_the_architecture() -> None:
    config = {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": "many"}
    decision = decide("model.embed_tokens.weight", name="uniform", config=config)
    assert decision == Decision(None, 0, "embedding")


def override(glob: str, to: str | None) -> tuple[str, QuantFormat | None]:
    return glob, None if to is None else FORMATS[to]


def test_an_override_precedes_every_rule() -> None:
    overrides = [override("*", "mxfp8")]
    for name, shape in [
        ("model.embed_tokens.weight", (64, 128)),
        ("model.layers.0.mlp.gate.weight", (4, 32)),
        ("model.visual.proj", (64, 128)),
        ("conv1d.weight", (4, 1, 32)),
        ("lm_head.weight", (64, 128)),
    ]:
        decision = decide(name, shape, overrides=overrides)
        assert decision == Decision(FORMATS["mxfp8"], 32, "override '*'")


def test_an_override_can_keep_a_tensor() -> None:
    decision = decide("w.weight", overrides=[override("w.*", None)])
    assert decision == Decision(None, 0, "override 'w.*'")
    assert kind(decide("v.weight", overrides=[override("w.*", None)])) == ("int4", 32)


def test_the_last_override_that_matches_decides() -> None:
    overrides = [override("*", None), override("a.*", "int8"), override("b.*", "mxfp8")]
    assert kind(decide("a.weight", overrides=overrides)) == ("int8", 64)
    assert kind(decide("b.weight", overrides=overrides)) == ("mxfp8", 32)
    assert kind(decide("c.weight", overrides=overrides)) is None
    assert kind(decide("a.weight", overrides=overrides[::-1])) is None


def test_overrides_distinguish_case_and_match_whole_names() -> None:
    for glob in ("W.*", "w", "eight", "*.weigh"):
        assert kind(decide("w.weight", overrides=[override(glob, None)])) == ("int4", 32)
    for glob in ("w.weight", "?.weight", "[vw].weight", "*"):
        assert kind(decide("w.weight", overrides=[override(glob, None)])) is None


def test_an_override_to_the_requested_type_has_the_requested_group_size() -> None:
    overrides = [override("*embed*", "int4"), override("*head*", "int8")]
    assert kind(decide("embed.weight", overrides=overrides, group_size=128)) == ("int4", 128)
    assert kind(decide("head.weight", overrides=overrides, group_size=128)) == ("int8", 64)


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((64, 128), DType.I64, "I64 elements; only F32, F16 and BF16 are quantized"),
        ((64, 128), DType.F64, "F64 elements; only"),
        ((64, 128), DType.F8_E4M3, "F8_E4M3 elements; only"),
        (
            (8192,),
            DType.F32,
            r"only matrices and stacks of them are quantized, it has shape \[8192\]",
        ),
        ((), DType.F32, r"it has shape \[\]"),
        ((2, 2, 32, 32), DType.F32, r"it has shape \[2, 2, 32, 32\]"),
        ((0, 64), DType.F32, "it has no elements"),
        ((64, 0), DType.F32, "it has no elements"),
        ((64, 96), DType.F32, "last dimension 96 is not a multiple of 64"),
    ],
)
def test_rejects_an_override_to_an_impossible_type(shape: Shape, dtype: DType, why: str) -> None:
    with pytest.raises(UsageError, match=rf"override 'w\*': 'w.weight' cannot be int8: .*{why}"):
        decide("w.weight", shape, dtype=dtype, overrides=[override("w*", "int8")])
    assert kind(decide("w.weight", shape, dtype=dtype, overrides=[override("w*", None)])) is None


def test_reports_the_overrides_that_matched_nothing() -> None:
    overrides = [override("a*", None), override("b*", "int8"), override("a.weight", "int8")]
    policy = Policy(FORMATS["int4"], overrides=overrides)
    assert policy.unused_overrides() == ("a*", "b*", "a.weight")
    policy.decide(TensorSpec("a.weight", DType.F32, (64, 64)))
    # The first override matched too, although a later one decided.
    assert policy.unused_overrides() == ("b*",)
    policy.decide(TensorSpec("b.weight", DType.F32, (64, 64)))
    assert policy.unused_overrides() == ()


@pytest.mark.parametrize(
    ("text", "glob", "to"),
    [
        ("*.v_proj.weight=int8", "*.v_proj.weight", "int8"),
        ("*=q4", "*", "int4"),
        ("*= MXFP8 ", "*", "mxfp8"),
        ("*=none", "*", None),
        ("*=None", "*", None),
        ("a=b=int8", "a=b", "int8"),
    ],
)
def test_reads_an_override(text: str, glob: str, to: str | None) -> None:
    assert parse_override(text) == override(glob, to)


@pytest.mark.parametrize("text", ["", "int8", "=int8", "*.weight"])
def test_rejects_an_override_without_glob_or_type(text: str) -> None:
    with pytest.raises(
        UsageError, match=rf"^override '{text}' is not GLOB=TYPE".replace("*", r"\*")
    ):
        parse_override(text)


@pytest.mark.parametrize(
    ("name", "why"), [("int3", "expected one of int4"), ("fp8", "int8"), ("", "")]
)
def test_rejects_an_override_to_an_unknown_type(name: str, why: str) -> None:
    with pytest.raises(
        UsageError, match=rf"^override 'w={name}': cannot quantize to '{name}': .*{why}"
    ):
        parse_override(f"w={name}")


def test_escapes_hostile_overrides() -> None:
    with pytest.raises(UsageError, match=r"override 'a\\x1b\[2J' is not") as caught:
        parse_override("a\x1b[2J")
    assert "\x1b" not in str(caught.value)


@pytest.mark.slow
@given(
    name=st.lists(
        st.sampled_from(["model", "layers", "0", "mlp", "experts", "down_proj", "weight", "norm"])
    ).map(".".join),
    shape=st.lists(st.sampled_from([0, 1, 16, 48, 64, 100, 128]), max_size=4).map(tuple),
    dtype=st.sampled_from(DType),
    to=st.sampled_from(TARGETS),
    policy=st.sampled_from(POLICIES),
)
def test_decisions_are_always_possible(
    name: str, shape: Shape, dtype: DType, to: str, policy: PolicyName
) -> None:
    decision = decide(name, shape, to=to, dtype=dtype, name=policy)
    assert decision.reason
    if decision.item is None:
        assert decision.group_size == 0
    else:
        assert decision.group_size in decision.item.group_sizes
        assert shape[-1] % decision.group_size == 0
        assert len(shape) in {2, 3}
        assert dtype in {DType.F16, DType.BF16, DType.F32}


def stacked_specs(folder: Path) -> list[TensorSpec]:
    """Return the tensors of a folder, the experts of a projection as one."""
    source = open_source(folder)
    experts: dict[str, list[TensorSpec]] = {}
    for name, spec in source.specs.items():
        experts.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(spec)
    source.close()
    return [
        specs[0]
        if specs[0].name == name
        else TensorSpec(name, specs[0].dtype, (len(specs), *specs[0].shape))
        for name, specs in experts.items()
    ]


@pytest.mark.parametrize(
    ("model", "to", "group_size"),
    [("dense", "int4", 64), ("dense", "nvfp4", None), ("moe", "int4", 64)],
)
def test_decides_as_ollama_does(model: str, to: str, group_size: int | None) -> None:
    config = json.loads((DATA / "hf" / model / "config.json").read_bytes())
    policy = Policy(FORMATS[to], group_size=group_size, config=config)
    decided = {
        spec.name: (kind(policy.decide(spec)) or spec.dtype.value, list(spec.shape))
        for spec in stacked_specs(DATA / "hf" / model)
    }
    # Ollama's list of tensors leaves out real biases, and it never quantizes them.
    biases = {name: decided.pop(name)[0] for name in [*decided] if name.endswith(".bias")}
    assert set(biases.values()) <= {"BF16"}
    golden = json.loads((DATA / "golden" / "ollama-0.33" / f"{model}-{to}.json").read_bytes())
    assert decided == {
        row["name"]: (
            (row["type"], row["group_size"]) if "group_size" in row else row["type"],
            row["shape"],
        )
        for row in golden["show"]
    }


def test_an_unknown_architecture_has_the_generic_rules() -> None:
    assert kind(decide(SENSITIVE[0], config={})) == ("int8", 64)
    for names in (None, [], ["X"]):
        assert kind(decide(SENSITIVE[0], config={"architectures": names})) == ("int8", 64)


def test_only_the_first_architecture_counts() -> None:
    names = ["MuseGlimmerForConditionalGeneration", "Gemma4ForCausalLM"]
    name = "model.layers.0.self_attn.q_proj.weight"
    assert kind(decide(name, config={"architectures": names})) == ("int8", 64)
    assert kind(decide(name, config={"architectures": names[::-1]})) == ("int4", 32)


@pytest.mark.parametrize("value", ["Gemma4ForCausalLM", [1], [None], {}, 0])
def test_rejects_architectures_that_are_not_names(value: object) -> None:
    with pytest.raises(UnsupportedSource, match="config.json: architectures must be a list of"):
        Policy(FORMATS["int4"], config={"architectures": value})

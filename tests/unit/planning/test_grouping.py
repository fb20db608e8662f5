from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import InvalidHeader, UnsupportedSource, UsageError
from blobstore.planning.grouping import BlobPlan, ExpertForm, plan_blobs, stacked_sources
from blobstore.quantization.choose_format import Policy
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.recipes import Copied, Decoded, Prequantized, Quantized, Recipe, copies

EXPERTS = "model.layers.0.mlp.experts"
SHARED = "model.layers.0.mlp.shared_experts"


def specs(
    *names: str, dtype: DType = DType.F32, shape: tuple[int, ...] = (2, 3)
) -> dict[str, Copied]:
    return copies({name: TensorSpec(name, dtype, shape) for name in names})


def blobs(plans: tuple[BlobPlan, ...]) -> dict[str, list[str]]:
    return {blob.name: [tensor.spec.name for tensor in blob.tensors] for blob in plans}


def test_a_plain_tensor_has_its_own_blob() -> None:
    (blob,) = plan_blobs(specs("a"))
    assert blob.name == "a"
    assert blob.tensors[0].spec == TensorSpec("a", DType.F32, (2, 3))
    assert blob.tensors[0].sources == ("a",)
    assert blob.metadata == {}


def test_no_tensors_give_no_blobs() -> None:
    assert plan_blobs({}) == ()


def test_plain_tensors_come_first_and_groups_last_sorted_by_name() -> None:
    names = [f"{EXPERTS}.0.w.weight", "z", "a", "Z", f"{SHARED}.w.weight", "é", "a.b"]
    assert list(blobs(plan_blobs(specs(*names)))) == ["Z", "a", "a.b", "z", "é", EXPERTS, SHARED]


def test_packs_experts_by_name_and_stacks_them_by_number() -> None:
    names = [
        f"{EXPERTS}.{number}.{part}.weight"
        for number in range(10, -1, -1)
        for part in ("up", "down")
    ]
    plans = plan_blobs(specs(*names))
    assert blobs(plans) == {EXPERTS: sorted(names)}
    assert stacked_sources(plans) == {}
    plans = plan_blobs(specs(*names), experts="stacked")
    assert blobs(plans) == {EXPERTS: [f"{EXPERTS}.down.weight", f"{EXPERTS}.up.weight"]}
    assert plans[0].tensors[0].spec == TensorSpec(f"{EXPERTS}.down.weight", DType.F32, (11, 2, 3))
    assert stacked_sources(plans) == {
        f"{EXPERTS}.{part}.weight": tuple(f"{EXPERTS}.{n}.{part}.weight" for n in range(11))
        for part in ("down", "up")
    }


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_a_thousand_experts_of_a_layer_are_one_blob(experts: ExpertForm) -> None:
    names = [f"{EXPERTS}.{number}.{part}.weight" for number in range(1000) for part in "ab"]
    (plan,) = plan_blobs(specs(*names), experts=experts)
    assert len(plan.tensors) == (2000 if experts == "packed" else 2)


def test_stacks_a_single_expert() -> None:
    plans = plan_blobs(specs(f"{EXPERTS}.0.up.weight"), experts="stacked")
    assert plans[0].tensors[0].spec.shape == (1, 2, 3)
    assert plans[0].tensors[0].spec.name in stacked_sources(plans)


@pytest.mark.parametrize(
    ("prefix", "parts"),
    [(SHARED, ("up", "down")), ("model.layers.0.block_sparse_moe.experts", ("0.w1",))],
    ids=["shared experts", "Mixtral"],
)
def test_some_experts_are_grouped_only_in_packed_form(prefix: str, parts: tuple[str, ...]) -> None:
    names = [f"{prefix}.{part}.weight" for part in parts]
    assert blobs(plan_blobs(specs(*names))) == {prefix: sorted(names)}
    assert blobs(plan_blobs(specs(*names), experts="stacked")) == {
        name: [name] for name in sorted(names)
    }


@pytest.mark.parametrize(
    "prefix",
    [
        *("layers.7", "model.layers.0", "language_model.layers.61"),
        *("language_model.model.layers.0", "model.language_model.layers.0", "backbone.layers.0"),
        *("model.backbone.layers.0", "language_model.backbone.layers.0"),
        *("model.language_model.backbone.layers.0", "mtp.layers.0"),
    ],
)
@pytest.mark.parametrize("block", ["mlp", "moe", "mixer"])
@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_recognizes_the_prefixes_of_experts(prefix: str, block: str, experts: ExpertForm) -> None:
    name = f"{prefix}.{block}.experts.0.up_proj.weight"
    (blob,) = plan_blobs(specs(name), experts=experts)
    assert blob.name == f"{prefix}.{block}.experts"


@pytest.mark.parametrize(
    "name",
    [
        *(f"{EXPERTS}.0.up.bias", f"{EXPERTS}.0.up.weight.scale", f"{EXPERTS}.weight"),
        *(f"{EXPERTS}.0.weight", f"{EXPERTS}.00.up.weight", f"{EXPERTS}.-1.up.weight"),
        *(f"{EXPERTS}.\u0661.up.weight", f"{EXPERTS}.x.up.weight", f"{EXPERTS}.up.weight"),
        *(f"x.{EXPERTS}.0.up.weight", f"{EXPERTS}.0.up.weight\n", f"\n{EXPERTS}.0.up.weight"),
        *("model.layers.x.mlp.experts.0.up.weight", "model.layers.0.mlp.switch_mlp.up.weight"),
        *("model.layers.0.experts.0.up.weight", "model.layers.0.mlp.shared_expert.up.weight"),
        *(f"{SHARED}.weight", f"{SHARED}.up.bias", "model.layers.0.moe.shared_experts.up.weight"),
    ],
)
@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_does_not_group_names_that_only_resemble_experts(name: str, experts: ExpertForm) -> None:
    assert blobs(plan_blobs(specs(name), experts=experts)) == {name: [name]}


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_the_plan_does_not_depend_on_the_order_of_the_source(experts: ExpertForm) -> None:
    names = [f"{EXPERTS}.{number}.{part}.weight" for number in range(12) for part in "ab"]
    names += ["x", "y", f"{SHARED}.a.weight"]
    expected = plan_blobs(specs(*names), experts=experts)
    for seed in range(5):
        random.Random(seed).shuffle(names)
        assert plan_blobs(specs(*names), experts=experts) == expected


@pytest.mark.parametrize("other", [{"shape": (3, 2)}, {"dtype": DType.I32}])
def test_rejects_stacking_experts_that_differ(other: dict[str, Any]) -> None:
    first, second = f"{EXPERTS}.0.up.weight", f"{EXPERTS}.1.up.weight"
    unequal = specs(first) | specs(second, **other)
    with pytest.raises(
        UnsupportedSource, match=f"'{first}' and '{second}' differ in dtype or shape"
    ):
        plan_blobs(unequal, experts="stacked")
    assert set(blobs(plan_blobs(unequal))) == {EXPERTS}


def test_projections_may_differ_from_each_other() -> None:
    mixed = specs(f"{EXPERTS}.0.up.weight") | specs(f"{EXPERTS}.0.down.weight", shape=(5,))
    (blob,) = plan_blobs(mixed, experts="stacked")
    assert [tensor.spec.shape for tensor in blob.tensors] == [(1, 5), (1, 2, 3)]


@pytest.mark.parametrize("numbers", [("0", "2", "3"), ("1", "2"), ("0", "1", "9" * 5000)])
def test_experts_with_gaps_are_not_stacked(numbers: tuple[str, ...]) -> None:
    names = [f"{EXPERTS}.{number}.up.weight" for number in numbers]
    assert list(blobs(plan_blobs(specs(*names)))) == [EXPERTS]
    with pytest.raises(UnsupportedSource, match=r"there is no expert \d of .*use --experts packed"):
        plan_blobs(specs(*names), experts="stacked")


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_rejects_a_tensor_with_the_name_of_a_group(experts: ExpertForm) -> None:
    with pytest.raises(UnsupportedSource, match=f"both be stored as '{EXPERTS}'"):
        plan_blobs(specs(EXPERTS, f"{EXPERTS}.0.up.weight"), experts=experts)


def test_rejects_a_tensor_with_the_name_of_a_stacked_one() -> None:
    names = [f"{EXPERTS}.up.weight", f"{EXPERTS}.0.up.weight"]
    assert len(plan_blobs(specs(*names))) == 2
    with pytest.raises(UnsupportedSource, match=f"both be stored as '{EXPERTS}.up.weight'"):
        plan_blobs(specs(*names), experts="stacked")


def test_rejects_an_unknown_form() -> None:
    with pytest.raises(UsageError, match="unknown form of experts 'pack'; expected packed or"):
        plan_blobs({}, experts="pack")  # type: ignore[arg-type]


def test_plans_hostile_names_quickly() -> None:
    names = [
        "model." * 10_000 + "layers.0.mlp.experts.0.up.weight",
        EXPERTS + ".0" * 30_000 + ".weigh",
        "model.layers." + "0" * 70_000 + ".mlp.experts.0.x.weight",
        "x" * 70_000,
        "../../etc/passwd",
        "",
    ]
    for experts in ("packed", "stacked"):
        assert len(plan_blobs(specs(*names), experts=experts)) == len(names)  # type: ignore[arg-type]


@pytest.mark.slow
@given(st.data(), st.sampled_from(["packed", "stacked"]))
def test_the_plan_depends_on_the_set_of_names_alone(
    data: st.DataObject, experts: ExpertForm
) -> None:
    part = st.sampled_from(["up.weight", "down.weight", "up.bias", "x.up.weight"])
    experts_of = st.builds(
        lambda count, name: [f"{EXPERTS}.{number}.{name}" for number in range(count)],
        st.integers(0, 30),
        part,
    )
    shared = st.builds(lambda name: f"{SHARED}.{name}", part)
    names = data.draw(st.lists(shared | st.text(max_size=3)))
    names = sorted({*names, *chain.from_iterable(data.draw(st.lists(experts_of)))})
    expected = plan_blobs(specs(*names), experts=experts)
    assert plan_blobs(specs(*data.draw(st.permutations(names))), experts=experts) == expected
    tensors = [tensor for blob in expected for tensor in blob.tensors]
    assert sorted(name for tensor in tensors for name in tensor.sources) == sorted(names)
    for tensor in tensors:
        leading = () if tensor.sources == (tensor.spec.name,) else (len(tensor.sources),)
        assert tensor.spec.shape == (*leading, 2, 3)


# Quantized tensors


def quantized_specs() -> dict[str, Copied]:
    """Return two experts of a layer, a shared one and a norm; ``down`` is promoted to 8 bits."""
    names = [
        *(f"{EXPERTS}.{number}.{part}.weight" for number in (1, 0) for part in ("up", "down_proj")),
        f"{SHARED}.up.weight",
    ]
    return specs(*names, dtype=DType.BF16, shape=(64, 128)) | specs("norm.weight", shape=(128,))


def described(blob: BlobPlan) -> dict[str, tuple[DType, tuple[int, ...]]]:
    return {spec.name: (spec.dtype, spec.shape) for spec in blob.stored}


def test_qparams_follow_a_quantized_tensor() -> None:
    (blob,) = plan_blobs(
        specs("a.weight", dtype=DType.F16, shape=(64, 128)), policy=Policy(FORMATS["int4"])
    )
    assert described(blob) == {
        "a.weight": (DType.U32, (64, 16)),
        "a.weight.scale": (DType.F16, (64, 4)),
        "a.weight.bias": (DType.F16, (64, 4)),
    }
    assert blob.metadata == {"quant_type": "int4", "group_size": "32"}
    assert blob.tensors[0].sources == ("a.weight",)


@pytest.mark.parametrize(
    ("name", "words", "groups"), [("nvfp4", 16, 8), ("mxfp4", 16, 4), ("mxfp8", 32, 4)]
)
def test_floating_point_types_have_no_biases(name: str, words: int, groups: int) -> None:
    (blob,) = plan_blobs(specs("a.weight", shape=(64, 128)), policy=Policy(FORMATS[name]))
    assert described(blob) == {
        "a.weight": (DType.U32, (64, words)),
        "a.weight.scale": (DType.U8, (64, groups)),
    }


def test_the_metadata_of_packed_experts_with_mixed_types_lists_each_tensor() -> None:
    norm, group, shared = plan_blobs(quantized_specs(), policy=Policy(FORMATS["int4"]))
    assert norm.metadata == {}
    assert group.metadata == {
        f"{EXPERTS}.{number}.{part}.weight.{key}": value
        for number in (0, 1)
        for part, quant_type, group_size in (("down_proj", "int8", "64"), ("up", "int4", "32"))
        for key, value in (("quant_type", quant_type), ("group_size", group_size))
    }
    assert [spec.name.removeprefix(f"{EXPERTS}.0.") for spec in group.stored[:6]] == [
        *("down_proj.weight", "down_proj.weight.scale", "down_proj.weight.bias"),
        *("up.weight", "up.weight.scale", "up.weight.bias"),
    ]
    assert shared.metadata == {"quant_type": "int4", "group_size": "32"}


def test_stacked_experts_with_mixed_types_have_one_blob_per_projection() -> None:
    plans = plan_blobs(quantized_specs(), experts="stacked", policy=Policy(FORMATS["int4"]))
    down, up = f"{EXPERTS}.down_proj.weight", f"{EXPERTS}.up.weight"
    assert [blob.name for blob in plans] == [f"{SHARED}.up.weight", "norm.weight", down, up]
    assert plans[2].metadata == {"quant_type": "int8", "group_size": "64"}
    assert described(plans[2])[down] == (DType.U32, (2, 64, 32))
    assert stacked_sources(plans)[down] == (
        f"{EXPERTS}.0.down_proj.weight",
        f"{EXPERTS}.1.down_proj.weight",
    )


def test_stacked_experts_of_one_type_share_a_blob() -> None:
    policy = Policy(FORMATS["int4"], name="uniform")
    *_, group = plan_blobs(quantized_specs(), experts="stacked", policy=policy)
    assert group.name == EXPERTS
    assert group.metadata == {"quant_type": "int4", "group_size": "32"}
    assert len(group.stored) == 6


def test_rejects_a_tensor_with_the_name_of_a_qparam() -> None:
    both = specs("a.weight", shape=(64, 128)) | specs("a.weight.scale")
    assert len(plan_blobs(both)) == 2
    with pytest.raises(UnsupportedSource, match=r"both be stored as 'a\.weight\.scale'"):
        plan_blobs(both, policy=Policy(FORMATS["int4"]))


@pytest.mark.parametrize("end", [".bias", ".global_scale", "_scale", "_qbias"])
@pytest.mark.parametrize("quant_type", ["int4", "nvfp4"])
def test_rejects_a_tensor_that_could_be_mistaken_for_a_qparam(quant_type: str, end: str) -> None:
    both = specs("a.weight", shape=(64, 128)) | specs(f"a.weight{end}")
    assert len(plan_blobs(both)) == 2
    with pytest.raises(UnsupportedSource, match=rf"'a\.weight{end}'"):
        plan_blobs(both, policy=Policy(FORMATS[quant_type]))
    kept = Policy(FORMATS[quant_type], overrides=[("a.weight", None)])
    assert len(plan_blobs(both, policy=kept)) == 2


def prequantized(name: str) -> Prequantized:
    weight = Copied(TensorSpec(name, DType.U32, (64, 16)), (name,))
    scale = Copied(TensorSpec(f"{name}.scale", DType.U8, (64, 8)), (f"{name}s",))
    return Prequantized((weight, scale), FORMATS["nvfp4"], None)


def test_packs_prequantized_experts_but_never_stacks_them() -> None:
    names = [f"{EXPERTS}.{number}.up.weight" for number in (0, 1)]
    recipes = {name: prequantized(name) for name in names}
    (group,) = plan_blobs(recipes)
    assert (group.name, group.metadata) == (EXPERTS, {"quant_type": "nvfp4"})
    plans = plan_blobs(recipes, experts="stacked")
    assert [blob.name for blob in plans] == names
    assert stacked_sources(plans) == {}


def decoded(name: str, *, block: tuple[int, int] = (128, 128)) -> Decoded:
    return Decoded(
        spec=TensorSpec(name, DType.BF16, (256, 128)),
        sources=(name,),
        scales=(f"{name}_scale_inv",),
        weight=TensorSpec(name, DType.F8_E4M3, (256, 128)),
        scale=TensorSpec(f"{name}_scale_inv", DType.F32, (2, 1)),
        block=block,
    )


def test_stacks_decoded_experts_with_their_scales_and_quantizes_them() -> None:
    names = [f"{EXPERTS}.{number}.up.weight" for number in (1, 0)]
    policy = Policy(FORMATS["mxfp8"])
    (group,) = plan_blobs({name: decoded(name) for name in names}, experts="stacked", policy=policy)
    (recipe,) = group.tensors
    assert isinstance(recipe, Quantized)
    assert isinstance(recipe.dense, Decoded)
    assert recipe.spec.shape == (2, 256, 128)
    assert recipe.sources == tuple(sorted(names))
    assert recipe.dense.scales == tuple(f"{name}_scale_inv" for name in sorted(names))


def test_rejects_stacking_decoded_experts_with_different_blocks() -> None:
    first, second = (f"{EXPERTS}.{number}.up.weight" for number in (0, 1))
    recipes = {first: decoded(first), second: decoded(second, block=(64, 128))}
    with pytest.raises(UnsupportedSource, match="cannot be stacked"):
        plan_blobs(recipes, experts="stacked")


SOURCES = {name: bytes([number] * 6) for number, name in enumerate("abc")}


def planned(name: str, *sources: str) -> Copied:
    return Copied(TensorSpec(name, DType.U8, (len(sources), 6)), sources)


def test_a_blob_is_its_header_and_the_bytes_of_its_sources_in_order() -> None:
    blob = BlobPlan("g", (planned("z", "b", "a"), planned("m", "c")), metadata={"k": "v"})
    data = b"".join(blob.buffers(lambda recipe: [SOURCES[name] for name in recipe.sources]))
    assert data == blob.header + SOURCES["b"] + SOURCES["a"] + SOURCES["c"]
    assert len(data) == blob.size
    theirs = {name: bytes(value["data"]) for name, value in safetensors.deserialize(data)}
    assert theirs == {"z": SOURCES["b"] + SOURCES["a"], "m": SOURCES["c"]}


def test_a_buffer_may_be_reused_for_the_next_one() -> None:
    buffer = bytearray(6)

    def convert(recipe: Recipe) -> Iterator[bytearray]:
        for name in recipe.sources:
            buffer[:] = SOURCES[name]
            yield buffer

    blob = BlobPlan("g", (planned("x", "a", "b", "c"),))
    data = b"".join(bytes(np.frombuffer(part, np.uint8)) for part in blob.buffers(convert))  # type: ignore[call-overload]
    assert data.endswith(SOURCES["a"] + SOURCES["b"] + SOURCES["c"])


def test_reads_tensors_only_when_requested() -> None:
    requested: list[str] = []

    def convert(recipe: Recipe) -> Iterator[bytes]:
        for name in recipe.sources:
            requested.append(name)
            yield SOURCES[name]

    buffers = BlobPlan("g", (planned("x", "a", "b"),)).buffers(convert)
    next(buffers)
    assert requested == []
    next(buffers)
    assert requested == ["a"]


def test_rejects_a_name_that_a_header_cannot_hold() -> None:
    blob = BlobPlan("__metadata__", (planned("__metadata__", "a"),))
    with pytest.raises(InvalidHeader, match="reserved"):
        _ = blob.size


@pytest.mark.parametrize(
    "prefix", ["layers.0.ffn.experts", "a.experts", "model.layers.3.mlp.experts"]
)
def test_groups_every_part_of_experts_that_are_published(prefix: str) -> None:
    parts = [f"{prefix}.{n}.up.{end}" for n in range(2) for end in ("qweight", "scales", "g_idx")]
    others = ["x.qweight", "experts.0.up.qweight", f"{prefix}.bias"]
    recipes = specs(*parts, *others)
    assert blobs(plan_blobs(recipes, is_published=True)) == {
        **{name: [name] for name in sorted(others)},
        prefix: sorted(parts),
    }
    single = plan_blobs(recipes, experts="stacked", is_published=True)
    assert blobs(single) == {name: [name] for name in sorted((*parts, *others))}

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core.tensor import DTYPES, DType, TensorSpec
from blobstore.errors import UnsupportedSource
from blobstore.quantization.detect import Recognised, detect_quantization
from blobstore.quantization.recipes import Copied, Decoded, Prequantized, copies

DATA = Path(__file__).parents[2] / "data" / "ollama" / "hf"
MLX = {"quantization": {"group_size": 64, "bits": 4}}
FP8_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}

Tensors = dict[str, tuple[Any, ...]]


def specs(tensors: Tensors) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, DTYPES[code], tuple(shape))
        for name, (code, *shape) in tensors.items()
    } | {"norm.weight": TensorSpec("norm.weight", DType.BF16, (8,))}


def recognised(tensors: Tensors, config: dict[str, Any] | None = None) -> Recognised:
    return detect_quantization(specs(tensors), config or {})


def prequantized(found: Recognised, name: str) -> Prequantized:
    recipe = found.recipes[name]
    assert isinstance(recipe, Prequantized)
    return recipe


def decoded(found: Recognised, name: str) -> Decoded:
    recipe = found.recipes[name]
    assert isinstance(recipe, Decoded)
    return recipe


def folder(name: str) -> tuple[dict[str, TensorSpec], dict[str, Any]]:
    data = (DATA / name / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found = {
        key: TensorSpec(key, DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for key, entry in header.items()
        if key != "__metadata__"
    }
    return found, json.loads((DATA / name / "config.json").read_bytes())


# Plain sources.


def test_keeps_the_tensors_of_a_plain_source() -> None:
    plain = specs({"a.weight": ("BF16", 8, 8), "a.bias": ("F32", 8), "ids": ("I64", 2, 2)})
    assert detect_quantization(plain, {}) == (copies(plain), (), "")
    assert list(detect_quantization(plain, {}).recipes) == list(plain)


@pytest.mark.parametrize("name", ["dense", "odd"])
def test_keeps_the_tensors_of_folders(name: str) -> None:
    found, config = folder(name)
    assert detect_quantization(found, config) == (copies(found), (), "")


@pytest.mark.parametrize(
    "tensors",
    [
        {"router.scale": ("F32", 8)},
        {"f8.x": ("F8_E4M3", 4)},
        {"m.weight": ("BF16", 8, 8), "m.scales": ("BF16", 8, 2), "m.biases": ("BF16", 8, 2)},
        {"m.scales": ("BF16", 8, 2)},
        {"m.weight": ("BF16", 8, 8), "m.weight_scale": ("F32",), "m.input_scale": ("F32",)},
        {"m.weight_scale_inv": ("F32", 1, 1)},
        {"m.weight": ("U32", 8, 8)},
        {"mask_blocks": ("U8", 8, 8, 16)},
        {"mask_blocks": ("U8", 8, 8, 16), "mask_scales": ("F32", 8, 8)},
        {"mask": ("U8", 8, 8), "mask_scale": ("F32",)},
        {"codes": ("I8", 8), "codes_scale": ("F32",)},
        {"ids": ("I32", 8, 8)},
        {"k_proj.k_scale": ("F32",), "v_proj.v_scale": ("F32",)},
    ],
)
def test_keeps_tensors_that_only_look_quantized(tensors: Tensors) -> None:
    assert recognised(tensors) == (copies(specs(tensors)), (), "")


# MLX.

PACKED: Tensors = {
    "m.weight": ("U32", 8, 16),
    "m.scales": ("BF16", 8, 2),
    "m.biases": ("BF16", 8, 2),
}


def test_recognises_a_folder_of_mlx() -> None:
    found = detect_quantization(*folder("mlx-mode"))
    weight = "model.layers.0.self_attn.q_proj.weight"
    recipe = prequantized(found, weight)
    assert (recipe.item.name, recipe.group_size) == ("int4", 64)
    assert [spec.name for spec in recipe.stored] == [weight, f"{weight}.scale", f"{weight}.bias"]
    assert [type(recipe).__name__ for recipe in found.recipes.values()] == [
        "Prequantized",
        "Prequantized",
        "Copied",
    ]
    assert found[1:] == ((), "int4")


def test_a_config_without_mode_is_affine() -> None:
    found = recognised(PACKED, MLX)
    assert set(found.recipes) == {"m.weight", "norm.weight"}
    recipe = prequantized(found, "m.weight")
    assert (recipe.item.name, recipe.group_size) == ("int4", 64)


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_keeps_unusual_bits_under_their_own_types(bits: int) -> None:
    tensors = {**PACKED, "m.weight": ("U32", 8, 128 * bits // 32)}
    found = recognised(tensors, {"quantization": {"bits": bits, "group_size": 64}})
    assert prequantized(found, "m.weight").item.name == f"int{bits}"
    assert found.quant_type == f"int{bits}"


def test_modules_have_their_own_types() -> None:
    tensors = PACKED | {
        "layers.0.down_proj.weight": ("U32", 8, 32),
        "layers.0.down_proj.scales": ("BF16", 8, 2),
        "layers.0.down_proj.biases": ("BF16", 8, 2),
        "head.weight": ("BF16", 8, 128),
    }
    own = {"layers.0.down_proj": {"bits": 8, "group_size": 64}, "head": False}
    found = recognised(tensors, {"quantization": {**MLX["quantization"], **own}})
    assert prequantized(found, "layers.0.down_proj.weight").item.name == "int8"
    assert prequantized(found, "m.weight").item.name == "int4"
    assert isinstance(found.recipes["head.weight"], Copied)
    with pytest.raises(UnsupportedSource, match="'layers.0.down_proj.weight' is int4 .* by config"):
        recognised(tensors, MLX)


def test_tells_of_modules_that_are_not_there() -> None:
    own = {"head": {"bits": 8, "group_size": 64}}
    found = recognised(PACKED, {"quantization": {**MLX["quantization"], **own}})
    (notice,) = found.notices
    assert notice == (
        "config.json gives a type to 1 module that the source does not have, such as 'head'"
    )


def test_takes_a_packed_weight_that_is_not_called_weight() -> None:
    tensors = {"experts.up": ("U32", 2, 8, 16), "experts.up.scales": ("U8", 2, 8, 4)}
    recipe = prequantized(recognised(tensors), "experts.up")
    assert [spec.name for spec in recipe.stored] == ["experts.up", "experts.up.scale"]
    assert recipe.item.name == "mxfp4"


def test_scales_belong_to_one_weight() -> None:
    tensors = {**PACKED, "m.weight": ("U32", 8, 32), "m": ("U32", 8)}
    found = recognised(tensors, {"quantization": {"bits": 8}})
    assert isinstance(found.recipes["m"], Copied)
    assert prequantized(found, "m.weight").item.name == "int8"


def test_refuses_packed_words_without_scales() -> None:
    with pytest.raises(UnsupportedSource, match="'m.weight' is packed by config.json, and its sc"):
        recognised({"m.weight": ("U32", 8, 16)}, MLX)
    with pytest.raises(UnsupportedSource, match="'m.weight' lacks its scales, 'm.scales'"):
        recognised({"m.weight": ("U32", 8, 16), "m.biases": ("BF16", 8, 2)})


def test_refuses_types_that_cannot_be_told() -> None:
    with pytest.raises(UnsupportedSource, match="'m.weight' .*int4 in groups of 64 or int8"):
        recognised(PACKED)


def test_refuses_a_global_scale_of_mlx() -> None:
    tensors: Tensors = {
        "m.weight": ("U32", 8, 16),
        "m.scales": ("U8", 8, 8),
        "m.global_scale": ("F32",),
    }
    with pytest.raises(UnsupportedSource, match="'m.weight' \\(U32\\) has a global scale in MLX"):
        recognised(tensors)


# Packed 4-bit floats of others.

COMPRESSED: Tensors = {
    "m.weight_packed": ("U8", 8, 32),
    "m.weight_scale": ("F8_E4M3", 8, 4),
    "m.weight_global_scale": ("F32", 1),
    "m.input_global_scale": ("F32", 1),
}
MODELOPT: Tensors = {
    "m.weight": ("U8", 8, 32),
    "m.weight_scale": ("F8_E4M3", 8, 4),
    "m.weight_scale_2": ("F32",),
    "m.input_scale": ("F32",),
    "m.k_scale": ("F32",),
}


def test_recognises_a_folder_of_compressed_tensors() -> None:
    found = detect_quantization(*folder("ct-nvfp4"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert set(found.recipes) == {name, "model.norm.weight"}
    recipe = prequantized(found, name)
    assert recipe.stored == (
        TensorSpec(name, DType.U32, (32, 8)),
        TensorSpec(f"{name}.scale", DType.U8, (32, 4)),
        TensorSpec(f"{name}.global_scale", DType.F32, (1,)),
    )
    assert (recipe.item.name, recipe.group_size) == ("nvfp4", 16)
    assert recipe.parts[2].is_reciprocal
    assert found[1:] == (("1 input scale (of activations) left out",), "nvfp4")


def test_recognises_modelopt() -> None:
    found = recognised(MODELOPT)
    assert set(found.recipes) == {"m.weight", "m.k_scale", "norm.weight"}
    recipe = prequantized(found, "m.weight")
    assert (recipe.item.name, recipe.group_size) == ("nvfp4", None)
    assert not recipe.parts[2].is_reciprocal
    assert found[1:] == (("1 input scale (of activations) left out",), "nvfp4")


@pytest.mark.parametrize("tensors", [COMPRESSED, MODELOPT])
def test_leaves_out_the_scales_of_activations_alone(tensors: Tensors) -> None:
    lone: Tensors = {"other.input_scale": ("F32",), "other.input_global_scale": ("F32", 1)}
    found = recognised(tensors | lone)
    assert set(lone) <= set(found.recipes)
    kept = {source for recipe in found.recipes.values() for source in recipe.sources}
    assert set(specs(tensors | lone)) - kept <= {"m.input_scale", "m.input_global_scale"}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"m.weight_packed": ("U8", 8, 32)},
            "'m.weight_packed' lacks its scales, 'm.weight_scale'",
        ),
        (
            {"m.weight_packed": ("I32", 8, 8), "m.weight_scale": ("BF16", 8, 2)},
            r"'m.weight_packed' \(I32\) is of packed integers",
        ),
        (
            {"m.weight": ("U8", 8, 32), "m.weight_scale": ("BF16", 1)},
            r"'m.weight' \(U8\) has packed bytes with scales of type BF16",
        ),
        (
            {"m.weight": ("U8", 8, 32), "m.weight_scale_inv": ("F32", 1, 1)},
            "'m.weight' lacks its scales",
        ),
        ({**COMPRESSED, "m.weight": ("BF16", 8, 64)}, "'m.weight' is .* both plain and quantized"),
        (
            {**COMPRESSED, "m.weight": ("U8", 8, 32), "m.weight_scale_2": ("F32",)},
            "are both the weight 'm.weight'",
        ),
        (
            {**COMPRESSED, "m.weight_zero_point": ("I8", 8, 4)},
            r"'m.weight_zero_point' \(I8\) is of zero points",
        ),
    ],
)
def test_refuses_incomplete_and_other_packed_weights(tensors: Tensors, message: str) -> None:
    with pytest.raises(UnsupportedSource, match=message):
        recognised(tensors)


def test_refuses_group_sizes_that_contradict_the_config() -> None:
    weights = {"num_bits": 4, "type": "float", "group_size": 32}
    config = {"quantization_config": {"config_groups": {"group_0": {"weights": weights}}}}
    with pytest.raises(UnsupportedSource, match="is nvfp4 in groups of 16 .* 32 by config.json"):
        recognised(COMPRESSED, config)


def test_recognises_blocks_of_experts() -> None:
    tensors: Tensors = {
        "experts.gate_up_proj_blocks": ("U8", 4, 64, 2, 16),
        "experts.gate_up_proj_scales": ("U8", 4, 64, 2),
        "experts.gate_up_proj_bias": ("BF16", 4, 64),
    }
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    found = recognised(tensors, config)
    recipe = prequantized(found, "experts.gate_up_proj")
    assert recipe.stored == (
        TensorSpec("experts.gate_up_proj", DType.U32, (4, 64, 8)),
        TensorSpec("experts.gate_up_proj.scale", DType.U8, (4, 64, 2)),
    )
    assert isinstance(found.recipes["experts.gate_up_proj_bias"], Copied)
    assert found[1:] == ((), "mxfp4")
    del tensors["experts.gate_up_proj_scales"]
    with pytest.raises(
        UnsupportedSource, match="gate_up_proj_blocks' .*packed in a way of 'mxfp4'"
    ):
        recognised(tensors, config)


# 8-bit floats.


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("code", ["F8_E4M3", "F8_E5M2"])
def test_decodes_blocks_of_8_bit_floats(suffix: str, code: str) -> None:
    scales = f"m.weight{suffix}"
    found = recognised({"m.weight": (code, 300, 256), scales: ("F32", 3, 2)}, FP8_BLOCKS)
    assert found.recipes["m.weight"] == Decoded(
        TensorSpec("m.weight", DType.BF16, (300, 256)),
        ("m.weight",),
        (scales,),
        TensorSpec("m.weight", DTYPES[code], (300, 256)),
        TensorSpec(scales, DType.F32, (3, 2)),
        (128, 128),
    )
    assert set(found.recipes) == {"m.weight", "norm.weight"}
    assert found[1:] == (("1 weight of 8-bit floats decoded to BF16",), "fp8")


@pytest.mark.parametrize(
    ("weight", "scale", "block"),
    [
        ((300, 200), (), (300, 200)),
        ((300, 200), (1,), (300, 200)),
        ((300, 200), (1, 1), (300, 200)),
        ((300, 200), (300,), (1, 200)),
        ((300, 200), (300, 1), (1, 200)),
        ((300, 200), (3, 2), (128, 128)),
        ((4, 256, 128), (), (1024, 128)),
        ((4, 300, 200), (4,), (300, 200)),
        ((4, 300, 200), (4, 1), (300, 200)),
        ((4, 300, 200), (4, 1, 1), (300, 200)),
        ((4, 300, 200), (4, 300), (1, 200)),
        ((4, 300, 200), (4, 300, 1), (1, 200)),
        ((4, 256, 200), (4, 2, 2), (128, 128)),
        ((4, 64, 200), (4, 1, 2), (64, 128)),
    ],
)
@pytest.mark.parametrize("code", ["F32", "BF16", "F16"])
def test_the_shape_of_the_scales_says_what_shares_one(
    weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int], code: str
) -> None:
    tensors = {"m.weight": ("F8_E4M3", *weight), "m.weight_scale": (code, *scale)}
    recipe = decoded(recognised(tensors), "m.weight")
    assert recipe.block == block
    assert recipe.spec.shape == weight
    rows, columns = recipe.weight.shape
    assert (rows, columns) == (recipe.spec.elements // weight[-1], weight[-1])
    assert -(-rows // block[0]) * -(-columns // block[1]) == recipe.scale.elements


def sharing(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    return {"quantization_config": {"config_groups": {"group_0": {"weights": weights}}}}


@pytest.mark.parametrize(
    ("config", "scale", "block"),
    [
        ({"quantization_config": {"weight_block_size": [64, 32]}}, (4, 8), (64, 32)),
        (sharing("tensor"), (1,), (256, 256)),
        (sharing("channel"), (256, 1), (1, 256)),
        (sharing("block", block_structure=[128, 64]), (2, 4), (128, 64)),
        (sharing("group", group_size=64), (256, 4), (1, 64)),
    ],
)
def test_follows_the_config(config: Any, scale: tuple[int, ...], block: tuple[int, int]) -> None:
    tensors = {"m.weight": ("F8_E4M3", 256, 256), "m.weight_scale": ("F32", *scale)}
    assert decoded(recognised(tensors, config), "m.weight").block == block


@pytest.mark.parametrize(
    ("weight", "scale", "config", "message"),
    [
        ((300, 200), (2, 2), {}, "nothing it has one for each tensor or channel or block of 128"),
        ((300, 200), (200,), {}, r"of shape \[300, 200\] has scales of shape \[200\]"),
        ((300, 200), (1, 200), {}, "has scales of shape"),
        ((300, 200), (3, 2, 1), {}, "has scales of shape"),
        ((300, 200), (0,), {}, "has scales of shape"),
        ((4, 300, 200), (4, 3, 2), {}, "has scales of shape"),
        ((4, 300, 200), (3,), {}, "has scales of shape"),
        ((300, 200), (1,), FP8_BLOCKS, "by config.json it has one for each block of 128 x 128"),
        ((300, 200), (300, 1), FP8_BLOCKS, "block of 128 x 128"),
        ((300, 200), (300, 1), sharing("tensor"), "one for each tensor"),
        ((300, 200), (3, 2), sharing("channel"), "one for each channel"),
        ((300,), (300,), {}, "expected 2 or 3 dimensions"),
        ((1, 1, 1, 1), (1,), {}, "expected 2 or 3 dimensions"),
        ((), (), {}, "expected 2 or 3 dimensions"),
        ((0, 200), (1,), {}, r"of shape \[0, 200\]"),
        ((300, 0), (1,), {}, r"of shape \[300, 0\]"),
        ((2**62, 2**62), (2, 2), {}, "has scales of shape"),
    ],
)
def test_refuses_scales_that_contradict_weight_or_config(
    weight: tuple[int, ...], scale: tuple[int, ...], config: Any, message: str
) -> None:
    tensors = {"m.weight": ("F8_E4M3", *weight), "m.weight_scale": ("F32", *scale)}
    with pytest.raises(UnsupportedSource, match=f"tensor 'm.weight' .*{message}"):
        recognised(tensors, config)


@pytest.mark.parametrize("code", ["U8", "F8_E8M0"])
def test_exponents_for_32_of_a_row_are_mxfp8(code: str) -> None:
    tensors = {"m.weight": ("F8_E4M3", 8, 64), "m.weight_scale": (code, 8, 2)}
    found = recognised(tensors)
    assert prequantized(found, "m.weight").item.name == "mxfp8"
    assert found[1:] == ((), "mxfp8")


def test_exponents_for_blocks_are_decoded() -> None:
    tensors = {"m.weight": ("F8_E4M3", 256, 256), "m.weight_scale_inv": ("F8_E8M0", 2, 2)}
    assert decoded(recognised(tensors, FP8_BLOCKS), "m.weight").block == (128, 128)
    tensors["m.weight_scale_inv"] = ("U8", 2, 2)
    with pytest.raises(UnsupportedSource, match="'m.weight' .* has scales of type U8"):
        recognised(tensors, FP8_BLOCKS)


def test_leaves_out_the_scales_of_activations_of_8_bit_floats() -> None:
    tensors: Tensors = {
        "m.weight": ("F8_E4M3", 8, 8),
        "m.weight_scale": ("F32",),
        "m.input_scale": ("F32",),
        "m.input_scale_ub": ("F32",),
        "m.output_scale": ("F32",),
        "m.v_scale": ("F32",),
        "experts.up": ("F8_E4M3", 2, 8, 8),
        "experts.up_scale_inv": ("F32", 2, 1, 1),
        "experts.up_activation_scale": ("F32", 2),
    }
    found = recognised(tensors)
    left = {"m.output_scale", "m.v_scale", "norm.weight"}
    assert set(found.recipes) == {"m.weight", "experts.up", *left}
    assert found.notices == (
        "3 input scales (of activations) left out",
        "2 weights of 8-bit floats decoded to BF16",
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"m.weight": ("F8_E4M3", 8, 8)}, r"\(F8_E4M3\) is of 8-bit floats without scales"),
        ({"m.weight": ("F8_E5M2", 8)}, r"\(F8_E5M2\) is of 8-bit floats without scales"),
        (
            {"m.weight": ("F8_E4M3FNUZ", 8, 8), "m.weight_scale": ("F32",)},
            r"\(F8_E4M3FNUZ\) is of 8-bit floats without a form that is decoded",
        ),
        (
            {
                "m.weight": ("F8_E4M3", 8, 8),
                "m.weight_scale": ("F32",),
                "m.weight_scale_inv": ("F32",),
            },
            "has two tensors of scales",
        ),
        (
            {"m.weight": ("I8", 8, 8), "m.weight_scale": ("F32", 8, 1)},
            r"\(I8\) is of 8-bit integers with scales",
        ),
    ],
)
def test_refuses_other_8_bit_weights(tensors: Tensors, message: str) -> None:
    with pytest.raises(UnsupportedSource, match=f"tensor 'm.weight' {message}"):
        recognised(tensors)


# Schemes that are not kept.


@pytest.mark.parametrize(
    ("name", "code", "scheme"),
    [
        ("m.qweight", "I32", "GPTQ, AWQ or a scheme like them"),
        ("m.SCB", "F32", "bitsandbytes"),
        ("m.weight.absmax", "U8", "bitsandbytes"),
        ("m.weight.quant_map", "F32", "bitsandbytes"),
        ("m.weight.quant_state.bitsandbytes__nf4", "U8", "bitsandbytes"),
        ("m.weight.quant_state.bitsandbytes__fp4", "U8", "bitsandbytes"),
        ("m.W_q", "U8", "HQQ"),
        ("m.q_weight", "I32", "EXL2"),
        ("m.trellis", "I16", "EXL3"),
        ("m.weight._data", "I8", "quanto"),
        ("m._weight_qdata", "I8", "torchao"),
    ],
)
def test_refuses_other_schemes_by_name(name: str, code: str, scheme: str) -> None:
    message = rf"'{name}' \({code}\) belongs to a model quantized by {scheme}, .*; create from the"
    with pytest.raises(UnsupportedSource, match=message):
        recognised({"m.scales": ("F16", 8, 2), name: (code, 8, 8)})


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("aqlm", "I16"),
        ("aqlm", "I32"),
        ("bitnet", "U8"),
        ("modelopt", "U8"),
        ("compressed-tensors", "F8_E4M3"),
        ("fp8", "I8"),
    ],
)
def test_refuses_packed_matrices_of_unknown_forms(method: str, code: str) -> None:
    config = {"quantization_config": {"quant_method": method}}
    with pytest.raises(UnsupportedSource, match=f"'m.codes' .*packed in a way of '{method}'"):
        recognised({"m.codes": (code, 8, 8)}, config)


@pytest.mark.parametrize(
    ("method", "tensor"),
    [
        ("aqlm", ("I64", 8, 8)),
        ("aqlm", ("I16", 8)),
        ("awq", ("BF16", 8, 8)),
        ("fp8", ("I32", 8, 8)),
    ],
)
def test_keeps_other_tensors_of_quantized_models(method: str, tensor: tuple[Any, ...]) -> None:
    config = {"quantization_config": {"quant_method": method}}
    assert recognised({"m.table": tensor}, config).recipes == copies(specs({"m.table": tensor}))


# Whatever comes.


@pytest.mark.parametrize(("first", "rows"), [("int4", (64, 2)), ("int8", (2, 64))])
def test_the_main_type_is_that_of_most_numbers(first: str, rows: tuple[int, int]) -> None:
    tensors: Tensors = {
        "a.weight": ("U32", rows[0], 16),
        "a.scales": ("BF16", rows[0], 2),
        "a.biases": ("BF16", rows[0], 2),
        "b.weight": ("U32", rows[1], 32),
        "b.scales": ("BF16", rows[1], 2),
        "b.biases": ("BF16", rows[1], 2),
    }
    section = {**MLX["quantization"], "b": {"bits": 8}}
    assert recognised(tensors, {"quantization": section}).quant_type == first


@pytest.mark.parametrize(("main", "rows"), [("fp8", 128), ("nvfp4", 1)])
def test_decoded_weights_count_for_the_main_type(main: str, rows: int) -> None:
    tensors = {**COMPRESSED, "f.weight": ("F8_E4M3", rows, 64), "f.weight_scale": ("F32",)}
    assert recognised(tensors).quant_type == main


PIECES = [
    "m.weight",
    "m.scales",
    "m.biases",
    "m.weight_scale",
    "m.weight_scale_inv",
    "m.weight_scale_2",
    "m.weight_packed",
    "m.weight_global_scale",
    "m.input_scale",
    "m_blocks",
    "m_scales",
    "m",
]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 8, 16, 32, 64, 128, 2**40]), max_size=4).map(tuple)
VALUES = st.sampled_from(
    [None, True, False, 0, 4, 8, 32, 64, -1, 4.5, "4", "affine", "nvfp4", [128, 128]]
)
SECTIONS = st.dictionaries(
    st.sampled_from(["bits", "group_size", "mode", "quant_method", "weight_block_size", "m"]),
    VALUES | st.dictionaries(st.sampled_from(["bits", "group_size", "mode"]), VALUES, max_size=3),
)


@settings(max_examples=200, deadline=None)
@given(
    tensors=st.dictionaries(
        st.sampled_from(PIECES), st.tuples(st.sampled_from(list(DType)), SHAPES), min_size=1
    ),
    config=st.dictionaries(
        st.sampled_from(["quantization", "quantization_config", "text_config"]), SECTIONS | VALUES
    ),
)
def test_every_tensor_is_accounted_for_or_the_source_refused(
    tensors: dict[str, tuple[DType, tuple[int, ...]]], config: dict[str, Any]
) -> None:
    source = {name: TensorSpec(name, *known) for name, known in tensors.items()}
    try:
        found = detect_quantization(source, config)
    except UnsupportedSource as error:
        assert "\n" not in str(error)
        return
    used: list[str] = []
    for name, recipe in found.recipes.items():
        assert recipe.spec.name == name
        used += recipe.sources
        if isinstance(recipe, Decoded):
            used += recipe.scales
        else:
            stored = sum(spec.nbytes for spec in recipe.stored)
            assert stored == sum(source[name].nbytes for name in recipe.sources)
    assert len(used) == len(set(used))
    assert set(source) - set(used) <= {"m.input_scale"}


def test_the_order_of_the_tensors_makes_no_difference() -> None:
    tensors = specs(PACKED | {f"x{name}": known for name, known in COMPRESSED.items()})
    backwards = dict(reversed(tensors.items()))
    assert detect_quantization(tensors, MLX) == detect_quantization(backwards, MLX)


def test_refuses_packed_weights_of_a_blob_whose_type_would_be_lost() -> None:
    words: Tensors = {"a.weight": ("U32", 64, 8)}
    assert isinstance(recognised(words).recipes["a.weight"], Copied)
    with pytest.raises(UnsupportedSource, match=r"'a\.weight' is packed as in a blob of a store"):
        recognised(words | {"a.weight.scale": ("U8", 64, 2)})

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core.tensor import DTYPES, DType, TensorSpec
from blobstore.errors import UnsupportedSource
from blobstore.quantization.detect import DetectedQuantization, detect_quantization, is_marker
from blobstore.quantization.metadata import stated
from blobstore.quantization.recipes import Copied, Decoded, Prequantized, copies
from tests.support.pack_quantized import packed_config, packed_weight
from tests.support.samples import samples

DATA = Path(__file__).parents[2] / "data" / "ollama" / "hf"
MLX = {"quantization": {"group_size": 64, "bits": 4}}
FP8_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
U8, U32, F32, BF16 = DType.U8, DType.U32, DType.F32, DType.BF16
E4M3, E8M0 = DType.F8_E4M3, DType.F8_E8M0
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
random = np.random.default_rng(0)

Tensors = dict[str, tuple[Any, ...]]


def specs(tensors: Tensors) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(name, DTYPES[code], tuple(shape))
        for name, (code, *shape) in tensors.items()
    } | {"norm.weight": TensorSpec("norm.weight", DType.BF16, (8,))}


def detect(
    tensors: Tensors, config: dict[str, Any] | None = None, *, decode: bool = False
) -> DetectedQuantization:
    return detect_quantization(specs(tensors), config or {}, decode=decode)


def assert_kept(tensors: Tensors, config: Any, message: str, scheme: str = "") -> None:
    """Check that all tensors stay plain, with a note that says why."""
    for decode in (False, True):
        found = detect(tensors, config, decode=decode)
        assert found.recipes == copies(specs(tensors))
        assert re.search(message, found.reason)
        assert found.scheme
        assert scheme in ("", found.scheme)
        assert found.notices == (f"{found.scheme}, kept as published: {found.reason}",)
        assert not found.quant_type


def prequantized(found: DetectedQuantization, name: str) -> Prequantized:
    recipe = found.recipes[name]
    assert isinstance(recipe, Prequantized)
    return recipe


def decoded(found: DetectedQuantization, name: str) -> Decoded:
    recipe = found.recipes[name]
    assert isinstance(recipe, Decoded)
    return recipe


def sharing(strategy: str | None = None, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    return {"quantization_config": {"config_groups": {"group_0": {"weights": weights}}}}


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
    assert detect_quantization(plain, {}) == (copies(plain), (), "", "", "")
    assert list(detect_quantization(plain, {}).recipes) == list(plain)


@pytest.mark.parametrize("name", ["dense", "odd"])
def test_keeps_the_tensors_of_plain_folders(name: str) -> None:
    found, config = folder(name)
    assert detect_quantization(found, config) == (copies(found), (), "", "", "")


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
    assert detect(tensors) == (copies(specs(tensors)), (), "", "", "")


# MLX.


def packed(module: str, rows: int, words: int) -> Tensors:
    groups = ("BF16", rows, 2)
    return {
        f"{module}.weight": ("U32", rows, words),
        f"{module}.scales": groups,
        f"{module}.biases": groups,
    }


PACKED = packed("m", 8, 16)


def test_detects_a_folder_of_mlx() -> None:
    found = detect_quantization(*folder("mlx-mode"))
    weight = "model.layers.0.self_attn.q_proj.weight"
    recipe = prequantized(found, weight)
    assert (recipe.item.name, recipe.group_size) == ("int4", 64)
    assert [spec.name for spec in recipe.stored] == [weight, f"{weight}.scale", f"{weight}.bias"]
    types = [type(recipe) for recipe in found.recipes.values()]
    assert types == [Prequantized, Prequantized, Copied]
    assert found[1:3] == ((), "int4")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
def test_a_config_without_mode_is_affine(bits: int) -> None:
    tensors = {**PACKED, "m.weight": ("U32", 8, 128 * bits // 32)}
    found = detect(tensors, {"quantization": {"bits": bits, "group_size": 64}})
    assert set(found.recipes) == {"m.weight", "norm.weight"}
    recipe = prequantized(found, "m.weight")
    assert (recipe.item.name, recipe.group_size) == (f"int{bits}", 64)
    assert found.quant_type == f"int{bits}"


def test_modules_may_have_their_own_types() -> None:
    tensors = PACKED | packed("layers.0.down_proj", 8, 32) | {"head.weight": ("BF16", 8, 128)}
    own = {"layers.0.down_proj": {"bits": 8, "group_size": 64}, "head": False}
    found = detect(tensors, {"quantization": {**MLX["quantization"], **own}})
    assert prequantized(found, "layers.0.down_proj.weight").item.name == "int8"
    assert prequantized(found, "m.weight").item.name == "int4"
    assert isinstance(found.recipes["head.weight"], Copied)
    with pytest.raises(UnsupportedSource, match="'layers.0.down_proj.weight' is int4 .* by config"):
        detect(tensors, MLX)


def test_reports_modules_of_the_config_that_do_not_exist() -> None:
    own = {"head": {"bits": 8, "group_size": 64}}
    found = detect(PACKED, {"quantization": {**MLX["quantization"], **own}})
    assert found.notices == (
        "config.json gives a type to 1 module that the source does not have, such as 'head'",
    )


def test_the_name_of_a_packed_weight_need_not_end_in_weight() -> None:
    tensors = {"experts.up": ("U32", 2, 8, 16), "experts.up.scales": ("U8", 2, 8, 4)}
    recipe = prequantized(detect(tensors), "experts.up")
    assert [spec.name for spec in recipe.stored] == ["experts.up", "experts.up.scale"]
    assert recipe.item.name == "mxfp4"


def test_scales_belong_to_one_weight() -> None:
    tensors = {**PACKED, "m.weight": ("U32", 8, 32), "m": ("U32", 8)}
    found = detect(tensors, {"quantization": {"bits": 8}})
    assert isinstance(found.recipes["m"], Copied)
    assert prequantized(found, "m.weight").item.name == "int8"


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


def test_detects_a_folder_of_compressed_tensors() -> None:
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
    assert found[1:3] == (("1 input scale (of activations) left out",), "nvfp4")


def test_detects_modelopt() -> None:
    found = detect(MODELOPT)
    assert set(found.recipes) == {"m.weight", "m.k_scale", "norm.weight"}
    recipe = prequantized(found, "m.weight")
    assert (recipe.item.name, recipe.group_size) == ("nvfp4", None)
    assert not recipe.parts[2].is_reciprocal
    assert found[1:3] == (("1 input scale (of activations) left out",), "nvfp4")


@pytest.mark.parametrize("tensors", [COMPRESSED, MODELOPT])
def test_leaves_out_only_the_activation_scales_of_quantized_weights(tensors: Tensors) -> None:
    lone: Tensors = {"other.input_scale": ("F32",), "other.input_global_scale": ("F32", 1)}
    found = detect(tensors | lone)
    assert set(lone) <= set(found.recipes)
    kept = {source for recipe in found.recipes.values() for source in recipe.sources}
    assert set(specs(tensors | lone)) - kept <= {"m.input_scale", "m.input_global_scale"}


SCALED: Tensors = {"m.weight": ("F8_E4M3", 256, 256), "m.weight_scale": ("F32", 1)}
CAST: Tensors = {"m.weight": ("F8_E4M3", 256, 256)}
PLAIN: Tensors = {"m.weight": ("BF16", 8, 8)}
WORDS: Tensors = {"m.weight": ("U32", 8, 16)}
GLOBAL: Tensors = WORDS | {"m.scales": ("U8", 8, 8), "m.global_scale": ("F32",)}
FOUR_BITS: Tensors = {"m.weight_packed": ("U8", 8, 32)}
INTEGERS: Tensors = {"m.weight_packed": ("I32", 8, 8), "m.weight_scale": ("BF16", 8, 2)}
BYTES: Tensors = {"m.weight": ("U8", 8, 32)}
BF16_SCALES: Tensors = {"m.weight_scale": ("BF16", 1)}
FACTOR_2: Tensors = {"m.weight_scale_2": ("F32",)}
ZEROS: Tensors = {"m.weight_zero_point": ("I8", 8, 4)}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (WORDS, MLX, "'m.weight' is packed by config.json, and its scales are missing"),
        (WORDS | {"m.biases": ("BF16", 8, 2)}, {}, "'m.weight' lacks its scales, 'm.scales'"),
        (PACKED, {}, "'m.weight' .*int4 in groups of 64 or int8"),
        (
            COMPRESSED,
            sharing(num_bits=4, group_size=32),
            "is nvfp4 in groups of 16 .* 32 by config.json",
        ),
        (FOUR_BITS, {}, "'m.weight_packed' lacks its scales, 'm.weight_scale'"),
        (BYTES | {"m.weight_scale_inv": ("F32", 1, 1)}, {}, "'m.weight' lacks its scales"),
        (
            COMPRESSED | {"m.weight": ("BF16", 8, 64)},
            {},
            "'m.weight' is .* both plain and quantized",
        ),
        (COMPRESSED | BYTES | FACTOR_2, {}, "are both the weight 'm.weight'"),
    ],
)
def test_rejects_incomplete_and_contradictory_packed_weights(
    tensors: Tensors, config: Any, message: str
) -> None:
    with pytest.raises(UnsupportedSource, match=f"{message}.*; store .* --as-is$"):
        detect(tensors, config)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (GLOBAL, r"'m.weight' \(U32\) has a global scale in MLX"),
        (INTEGERS, r"'m.weight_packed' \(I32\) is of packed integers without .* shape"),
        (BYTES | BF16_SCALES, r"'m.weight' \(U8\) has packed bytes with scales of type BF16"),
        (COMPRESSED | ZEROS, r"'m.weight_zero_point' \(I8\) has zero points"),
    ],
)
def test_keeps_other_packed_weights_as_published(tensors: Tensors, message: str) -> None:
    assert_kept(tensors, {}, message)


def test_detects_the_blocks_of_gpt_oss() -> None:
    tensors: Tensors = {
        "experts.gate_up_proj_blocks": ("U8", 4, 64, 2, 16),
        "experts.gate_up_proj_scales": ("U8", 4, 64, 2),
        "experts.gate_up_proj_bias": ("BF16", 4, 64),
    }
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    found = detect(tensors, config)
    recipe = prequantized(found, "experts.gate_up_proj")
    assert recipe.stored == (
        TensorSpec("experts.gate_up_proj", DType.U32, (4, 64, 8)),
        TensorSpec("experts.gate_up_proj.scale", DType.U8, (4, 64, 2)),
    )
    assert isinstance(found.recipes["experts.gate_up_proj_bias"], Copied)
    assert found[1:3] == ((), "mxfp4")
    del tensors["experts.gate_up_proj_scales"]
    message = "gate_up_proj_blocks' .*packed in an unknown way of 'mxfp4'"
    assert_kept(tensors, config, message, "mxfp4")


# 8-bit floats.


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("code", ["F8_E4M3", "F8_E5M2"])
def test_keeps_8_bit_floats_with_their_scales(suffix: str, code: str) -> None:
    scales = f"m.weight{suffix}"
    found = detect({"m.weight": (code, 300, 256), scales: ("F32", 3, 2)}, FP8_BLOCKS)
    weight = TensorSpec("m.weight", DTYPES[code], (300, 256))
    recipe = prequantized(found, "m.weight")
    assert recipe.parts == (
        Copied(weight, ("m.weight",)),
        Copied(TensorSpec(scales, DType.F32, (3, 2)), (scales,)),
    )
    assert stated(recipe.item, recipe.group_size) == ("fp8", None, "128x128")
    assert recipe.item.float8 is not None
    assert set(found.recipes) == {"m.weight", "norm.weight"}
    assert found[1:3] == ((), "fp8")


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("code", ["F8_E4M3", "F8_E5M2"])
def test_decodes_blocks_of_8_bit_floats_on_request(suffix: str, code: str) -> None:
    scales = f"m.weight{suffix}"
    found = detect({"m.weight": (code, 300, 256), scales: ("F32", 3, 2)}, FP8_BLOCKS, decode=True)
    assert found.recipes["m.weight"] == Decoded(
        TensorSpec("m.weight", DType.BF16, (300, 256)),
        ("m.weight",),
        (scales,),
        TensorSpec("m.weight", DTYPES[code], (300, 256)),
        TensorSpec(scales, DType.F32, (3, 2)),
        (128, 128),
    )
    assert set(found.recipes) == {"m.weight", "norm.weight"}
    assert found[1:3] == (("1 weight of 8-bit floats decoded to BF16",), "")


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
def test_derives_the_block_from_the_shape_of_the_scales(
    weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int], code: str
) -> None:
    tensors = {"m.weight": ("F8_E4M3", *weight), "m.weight_scale": (code, *scale)}
    layout = prequantized(detect(tensors), "m.weight").item.float8
    assert layout is not None
    recipe = decoded(detect(tensors, decode=True), "m.weight")
    assert recipe.block == layout.block == block
    assert recipe.spec.shape == weight
    rows, columns = recipe.weight.shape
    assert (rows, columns) == (recipe.spec.elements // weight[-1], weight[-1])
    assert -(-rows // block[0]) * -(-columns // block[1]) == recipe.scale.elements


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
def test_the_config_states_the_block(
    config: Any, scale: tuple[int, ...], block: tuple[int, int]
) -> None:
    tensors = {"m.weight": ("F8_E4M3", 256, 256), "m.weight_scale": ("F32", *scale)}
    assert decoded(detect(tensors, config, decode=True), "m.weight").block == block


@pytest.mark.parametrize(
    ("weight", "scale", "config", "message"),
    [
        (
            (300, 200),
            (2, 2),
            {},
            "known in config.json, it has one for each tensor or channel or block of 128",
        ),
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
        ((300,), (300,), {}, "not of 2 or 3 dimensions"),
        ((1, 1, 1, 1), (1,), {}, "not of 2 or 3 dimensions"),
        ((), (), {}, "not of 2 or 3 dimensions"),
        ((0, 200), (1,), {}, r"of shape \[0, 200\]"),
        ((300, 0), (1,), {}, r"of shape \[300, 0\]"),
        ((2**62, 2**62), (2, 2), {}, "has scales of shape"),
    ],
)
def test_keeps_weights_as_published_if_scales_contradict_weight_or_config(
    weight: tuple[int, ...], scale: tuple[int, ...], config: Any, message: str
) -> None:
    tensors = {"m.weight": ("F8_E4M3", *weight), "m.weight_scale": ("F32", *scale)}
    assert_kept(tensors, config, f"tensor 'm.weight' .*{message}")


@pytest.mark.parametrize("code", ["U8", "F8_E8M0"])
def test_one_exponent_per_32_columns_is_mxfp8(code: str) -> None:
    tensors = {"m.weight": ("F8_E4M3", 8, 64), "m.weight_scale": (code, 8, 2)}
    found = detect(tensors)
    assert prequantized(found, "m.weight").item.name == "mxfp8"
    assert found[1:3] == ((), "mxfp8")


def test_scales_of_blocks_may_be_exponents() -> None:
    tensors = {"m.weight": ("F8_E4M3", 256, 256), "m.weight_scale_inv": ("F8_E8M0", 2, 2)}
    assert decoded(detect(tensors, FP8_BLOCKS, decode=True), "m.weight").block == (128, 128)
    assert prequantized(detect(tensors, FP8_BLOCKS), "m.weight").item.name == "fp8"
    tensors["m.weight_scale_inv"] = ("U8", 2, 2)
    assert_kept(tensors, FP8_BLOCKS, "'m.weight' .* has scales of type U8", "fp8")


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
    left = {"m.output_scale", "m.v_scale", "norm.weight"}
    for decode in (False, True):
        found = detect(tensors, decode=decode)
        assert set(found.recipes) == {"m.weight", "experts.up", *left}
        notices = ["3 input scales (of activations) left out"]
        notices += ["2 weights of 8-bit floats decoded to BF16"] if decode else []
        assert list(found.notices) == notices


@pytest.mark.parametrize("code", ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_8_bit_floats_without_scales_are_plain_unless_the_config_says_quantized(code: str) -> None:
    tensors: Tensors = {"a.weight": (code, 8, 8), "b.weight": (code, 8), "c": (code, 4)}
    configs: list[dict[str, Any]] = [{}, {"quantization_config": {}}, {"torch_dtype": "float8"}]
    for config in configs:
        found = detect(tensors, config)
        assert found.recipes == copies(specs(tensors))
        notice = "2 weights of 8-bit floats without scales kept as plain tensors"
        assert found[1:3] == ((notice,), "")
    method = {"quantization_config": {"quant_method": "fp8"}}
    assert_kept(tensors, method, "'a.weight' .* is of 8-bit floats without", "fp8")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
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
def test_keeps_other_8_bit_weights_as_published(tensors: Tensors, message: str) -> None:
    assert_kept(tensors, {}, f"tensor 'm.weight' .*{message}", "unknown")


@pytest.mark.parametrize("tensor", [("F8_E4M3", 8, 8), ("F8_E5M2", 8)])
def test_keeps_8_bit_weights_that_lack_the_scales_of_the_config(tensor: Any) -> None:
    message = rf"'m.weight' \({tensor[0]}\) is of 8-bit floats without scales"
    for config in (FP8_BLOCKS, sharing("channel")):
        assert_kept({"m.weight": tensor}, config, message)


def test_scales_that_only_some_8_bit_weights_have_are_missing() -> None:
    tensors: Tensors = {
        "m.weight": ("F8_E4M3", 8, 8),
        "m.weight_scale_inv": ("F32", 1, 1),
        "n.weight": ("F8_E4M3", 8, 8),
        "n.bias": ("F32", 8),
    }
    for decode in (False, True):
        with pytest.raises(UnsupportedSource, match=r"'n\.weight' lacks its scales, .* --as-is"):
            detect(tensors, FP8_BLOCKS, decode=decode)
    assert detect_quantization(specs(tensors), FP8_BLOCKS, as_is=True).scheme == "fp8"
    assert not detect(tensors).scheme
    unknown = tensors | {"n.qscale_weight": ("F32",)}
    assert_kept(unknown, FP8_BLOCKS, "'n.weight' .*without scales that are known")
    vector = tensors | {"n.weight": ("F8_E4M3", 8)}
    assert_kept(vector, FP8_BLOCKS, "'n.weight' .*without scales that are known")


@pytest.mark.parametrize("scale", [("F32",), ("F32", 1), ("BF16", 256, 1)])
def test_scales_of_8_bit_floats_may_be_named_after_the_module(scale: Any) -> None:
    tensors: Tensors = {
        "m.weight": ("F8_E4M3", 256, 256),
        "m.scale_weight": scale,
        "m.scale_input": ("F32",),
        "scaled_fp8": ("F8_E4M3", 0),
    }
    found = detect(tensors)
    recipe = prequantized(found, "m.weight")
    assert [part.sources for part in recipe.parts] == [("m.weight",), ("m.scale_weight",)]
    assert recipe.stored[1].name == "m.weight_scale"
    assert recipe.item.name == "fp8"
    assert found[1:] == (("1 input scale (of activations) left out",), "fp8", "", "")
    assert decoded(detect(tensors, decode=True), "m.weight").scales == ("m.scale_weight",)
    assert_kept(
        tensors | {"m.weight_scale": ("F32",)}, {}, "'m.weight' .*has two tensors of scales"
    )
    assert_kept(tensors | {"m.scale_weight": ("F32", 2, 3)}, {}, "has scales of shape")


V4: dict[str, Any] = {"expert_dtype": "fp4", **FP8_BLOCKS}
V4_TENSORS: Tensors = {
    "wq.weight": ("F8_E4M3", 256, 128),
    "wq.scale": ("F8_E8M0", 2, 1),
    "experts.0.w1.weight": ("I8", 64, 64),
    "experts.0.w1.scale": ("F8_E8M0", 64, 4),
}


def test_detects_deepseek_v4() -> None:
    found = detect(V4_TENSORS, V4)
    assert set(found.recipes) == {"wq.weight", "experts.0.w1.weight", "norm.weight"}
    attention = prequantized(found, "wq.weight")
    assert [spec.name for spec in attention.stored] == ["wq.weight", "wq.weight_scale"]
    assert stated(attention.item, attention.group_size) == ("fp8", None, "128x128")
    expert = prequantized(found, "experts.0.w1.weight")
    assert expert.item.name == "mxfp4"
    assert expert.stored == (
        TensorSpec("experts.0.w1.weight", DType.U32, (64, 16)),
        TensorSpec("experts.0.w1.weight.scale", DType.U8, (64, 4)),
    )
    assert not found.notices
    recipe = decoded(detect(V4_TENSORS, V4, decode=True), "wq.weight")
    assert (recipe.scales, recipe.block) == (("wq.scale",), (128, 128))


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({}, FP8_BLOCKS, r"w1.weight' \(I8\) is of 8-bit integers with scales"),
        ({"experts.0.w1.scale": ("F8_E8M0", 64, 2)}, V4, "which is not mxfp4"),
        ({"experts.0.w1.scale": ("F32", 64, 4)}, V4, "w1.weight' .*is packed in an unknown way"),
        ({"wq.scale": ("F32", 2, 1)}, V4, "'wq.weight' .*without scales that are known"),
        ({"wq.weight": ("U8", 256, 128)}, V4, "'wq.weight' .*is packed in an unknown way of 'fp8'"),
    ],
)
def test_keeps_what_only_resembles_deepseek_v4(changes: Tensors, config: Any, message: str) -> None:
    assert_kept(V4_TENSORS | changes, config, message, "fp8")


# Unsupported schemes.


@pytest.mark.parametrize(
    ("name", "code", "scheme"),
    [
        ("m.qweight", "I32", "gptq or awq"),
        ("m.SCB", "F32", "bitsandbytes"),
        ("m.weight.absmax", "U8", "bitsandbytes"),
        ("m.weight.quant_map", "F32", "bitsandbytes"),
        ("m.weight.quant_state.bitsandbytes__nf4", "U8", "bitsandbytes"),
        ("m.weight.quant_state.bitsandbytes__fp4", "U8", "bitsandbytes"),
        ("m.W_q", "U8", "hqq"),
        ("m.q_weight", "I32", "exl2"),
        ("m.trellis", "I16", "exl3"),
        ("m.weight._data", "I8", "quanto"),
        ("m._weight_qdata", "I8", "torchao"),
        ("m.weight:qdata", "I8", "torchao"),
    ],
)
def test_knows_other_schemes_by_tensor_name(name: str, code: str, scheme: str) -> None:
    message = rf"'{name}' \({code}\) is quantized by {scheme}"
    tensors: Tensors = {"m.weight": ("I8", 8, 8), name: (code, 8, 8), "m.scales": ("F16", 8, 2)}
    assert_kept(tensors, {}, message, scheme)


@pytest.mark.parametrize("name", ["m.W_q", "m.q_weight", "m.trellis", "m.SCB"])
def test_plain_weights_may_have_the_names_of_other_schemes(name: str) -> None:
    tensors: Tensors = {"m.weight": ("BF16", 8, 8), name: ("F32", 8, 8)}
    assert detect(tensors) == detect_quantization(specs(tensors), {}, as_is=True)
    assert not detect(tensors).scheme


@pytest.mark.parametrize(
    ("method", "scheme"),
    [("AWQ", "awq"), ("compressed-tensors", "compressed-tensors"), ("a\nb", "unknown"), ("", "")],
)
def test_the_config_names_the_scheme(method: str, scheme: str) -> None:
    config = {"quantization_config": {"quant_method": method, "bits": 4}}
    tensors: Tensors = {"m.qweight": ("I32", 8, 8), "m.scales": ("F16", 1, 8)}
    assert_kept(tensors, config, "'m.qweight'", scheme or "gptq or awq")


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
def test_keeps_packed_matrices_of_an_unknown_form_as_published(method: str, code: str) -> None:
    config = {"quantization_config": {"quant_method": method}}
    message = f"'m.codes' .*packed in an unknown way of '{method}'"
    assert_kept({"m.codes": (code, 8, 8)}, config, message, method)


# Neighbours.


@pytest.mark.parametrize(
    "neighbour",
    [
        "m.weight_zero_point",
        "m.weight_shape",
        "m.weight_g_idx",
        "m.pre_quant_scale",
        "m.comfy_quant",
        "m.rotation.weight",
        "m.smooth_factor",
        "m.scale",
        "m.weight.absmax",
        "m.weight:zero_point",
        "m.weight.quant_state.whatever__nf4",
    ],
)
@pytest.mark.parametrize("weights", ["COMPRESSED", "MODELOPT", "PACKED", "SCALED", "CAST"])
def test_a_neighbour_that_no_reading_claims_keeps_the_source_as_published(
    weights: str, neighbour: str
) -> None:
    tensors: Tensors = {**globals()[weights], neighbour: ("F32", 1)}
    config = MLX if weights == "PACKED" else {}
    assert not detect(globals()[weights], config).scheme
    assert_kept(tensors, config, f"'{neighbour}'")


def test_transforms_keep_a_source_as_published() -> None:
    rotated = {"R4": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}
    for transforms in ({}, {"config_groups": rotated}):
        section = {"quant_method": "compressed-tensors", "transform_config": transforms}
        config = {"quantization_config": section}
        if transforms:
            assert_kept(SCALED, config, "'transform_config'", "compressed-tensors")
        else:
            assert not detect(SCALED, config).scheme


@pytest.mark.parametrize("end", ["scale_of_groups", "zeros", "activation_scale_of_experts"])
def test_neighbours_of_weights_with_other_names(end: str) -> None:
    experts: Tensors = {"e.up": ("F8_E4M3", 2, 8, 8), "e.up_scale_inv": ("F32", 2, 1, 1)}
    assert not detect(experts).scheme
    assert_kept(experts | {f"e.up_{end}": ("F32", 2)}, {}, f"'e.up_{end}' may change .*'e.up'")


@pytest.mark.parametrize(
    "neighbour",
    [
        ("m.bias", "F32", 8),
        ("m.e_score_correction_bias", "F32", 8),
        ("m.k_scale", "F32"),
        ("m.output_scale", "F32"),
        ("m.table", "I32", 1024, 1024),
        ("other.weight_shape", "I64", 2),
        ("weight_shape", "I64", 2),
    ],
)
def test_biases_cache_scales_and_other_modules_change_no_weight(neighbour: Any) -> None:
    name, *tensor = neighbour
    found = detect({**SCALED, name: tuple(tensor)})
    assert prequantized(found, "m.weight").item.name == "fp8"
    assert isinstance(found.recipes[name], Copied)


def test_a_key_of_a_header_keeps_weights_as_published() -> None:
    keys = [("format", "pt"), ("_quantization_metadata", "{}")]
    for tensors in (SCALED, CAST, COMPRESSED):
        found = detect_quantization(specs(tensors), {}, metadata=keys)
        assert found.recipes == copies(specs(tensors))
        assert "'_quantization_metadata'" in found.reason
    described = [("modelspec.quantization", "x"), ("ss_scale_weight_norms", "None")]
    assert not detect_quantization(specs(CAST), {}, metadata=described).scheme
    for tensors, config in (({"m.weight": ("BF16", 8, 8)}, {}), (PACKED, MLX)):
        assert not detect_quantization(specs(tensors), config, metadata=keys).scheme
    assert not detect_quantization(specs(SCALED), {}, metadata=keys[:1]).scheme


FLOAT8 = b'{"format": "float8_e4m3fn"}'


@pytest.mark.parametrize(
    ("text", "is_known"),
    [
        (FLOAT8, True),
        (b'{"format": "float8_e4m3fn", "full_precision_matrix_mult": true}', True),
        (b'{"format": "float8_e5m2"}', False),
        (b'{"format": "nvfp4"}', False),
        (b'{"format": "float8_e4m3fn", "convrot": true}', False),
        (b'{"format": 7}', False),
        (b"{}", False),
        (b"[]", False),
        (b"\xff\0", False),
    ],
)
def test_a_marker_of_comfyui_must_say_what_the_tensors_say(text: bytes, is_known: bool) -> None:
    tensors = {**SCALED, "m.comfy_quant": ("U8", len(text))}
    source = specs(tensors)
    layers = f'{{"format_version": "1.0", "layers": {{"m": {text.decode("latin-1")}}}}}'
    metadata = [("_quantization_metadata", layers)]
    for found in (
        detect_quantization(source, {}, markers={"m.comfy_quant": text}),
        detect_quantization(specs(SCALED), {}, metadata=metadata),
    ):
        assert found.quant_type == ("fp8" if is_known else "")
        assert bool(found.scheme) != is_known
    assert is_marker(source["m.comfy_quant"])
    assert not is_marker(TensorSpec("m.comfy_quant", DType.U8, (2**40,)))
    assert detect(tensors).scheme == "comfyui"


def test_markers_that_no_longer_hold_are_left_out() -> None:
    named: Tensors = {"m.comfy_quant": ("U8", len(FLOAT8)), "scaled_fp8": ("F8_E4M3", 2)}
    source = specs(SCALED | named)
    markers = {"m.comfy_quant": FLOAT8}
    kept = detect_quantization(source, {}, markers=markers)
    assert all(isinstance(kept.recipes[name], Copied) for name in named)
    found = detect_quantization(source, {}, markers=markers, decode=True)
    assert set(found.recipes) == {"m.weight", "norm.weight"}
    assert found.notices[0] == "2 markers of 8-bit floats left out, since weights are decoded"
    unknown = detect_quantization(source, {}, markers={"m.comfy_quant": b"{}"}, decode=True)
    assert unknown.scheme == "comfyui"
    cast = specs(CAST | named)
    assert set(detect_quantization(cast, {}, markers=markers, decode=True).recipes) == set(cast)


def test_long_names_are_searched_at_their_end_only() -> None:
    experts: Tensors = {"e.up": ("F8_E4M3", 2, 8, 8), "e.up_scale_inv": ("F32", 2, 1, 1)}
    assert not detect({**experts, f"e.up{'_x' * 100_000}": ("F32", 1)}).scheme


@pytest.mark.parametrize(
    ("tensors", "config", "scheme"),
    [
        ("PACKED", MLX, "mlx"),
        ("COMPRESSED", sharing(num_bits=4), "unknown"),
        ("SCALED", FP8_BLOCKS, "fp8"),
        ("PLAIN", {}, ""),
    ],
)
def test_keeps_any_source_as_published_on_request(tensors: str, config: Any, scheme: str) -> None:
    source = specs(globals()[tensors])
    found = detect_quantization(source, config, as_is=True)
    notices = (f"{scheme}, kept as published",) if scheme else ()
    assert found == (copies(source), notices, "", scheme, "")


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
    assert detect({"m.table": tensor}, config).recipes == copies(specs({"m.table": tensor}))


# Properties of all results.


@pytest.mark.parametrize(("first", "rows"), [("int4", (64, 2)), ("int8", (2, 64))])
def test_the_main_type_is_that_of_most_elements(first: str, rows: tuple[int, int]) -> None:
    tensors = packed("a", rows[0], 16) | packed("b", rows[1], 32)
    section = {**MLX["quantization"], "b": {"bits": 8}}
    assert detect(tensors, {"quantization": section}).quant_type == first


@pytest.mark.parametrize(("main", "rows"), [("fp8", 128), ("nvfp4", 1)])
def test_decoded_weights_count_for_the_main_type(main: str, rows: int) -> None:
    tensors = {**COMPRESSED, "f.weight": ("F8_E4M3", rows, 64), "f.weight_scale": ("F32",)}
    assert detect(tensors).quant_type == main
    assert detect(tensors, decode=True).quant_type == main.removeprefix("fp8")


PIECES = ["m", "m_blocks", "m_scales", "m.weight", "m.scales", "m.biases", "m.input_scale"]
PIECES += [f"m.weight_{end}" for end in ("scale", "scale_inv", "scale_2", "packed", "global_scale")]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 8, 16, 32, 64, 128, 2**40]), max_size=4).map(tuple)
VALUES = st.sampled_from(
    [None, True, False, 0, 4, 8, 32, 64, -1, 4.5, "4", "affine", "nvfp4", [128, 128]]
)
SECTIONS = st.dictionaries(
    st.sampled_from(["bits", "group_size", "mode", "quant_method", "weight_block_size", "m"]),
    VALUES | st.dictionaries(st.sampled_from(["bits", "group_size", "mode"]), VALUES, max_size=3),
)


@pytest.mark.slow
@settings(max_examples=samples(200), deadline=None)
@given(
    tensors=st.dictionaries(
        st.sampled_from(PIECES), st.tuples(st.sampled_from(list(DType)), SHAPES), min_size=1
    ),
    config=st.dictionaries(
        st.sampled_from(["quantization", "quantization_config", "text_config"]), SECTIONS | VALUES
    ),
)
def test_every_tensor_is_used_or_the_source_is_rejected(
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


def test_the_order_of_the_tensors_does_not_matter() -> None:
    tensors = specs(PACKED | {f"x{name}": known for name, known in COMPRESSED.items()})
    backwards = dict(reversed(tensors.items()))
    assert detect_quantization(tensors, MLX) == detect_quantization(backwards, MLX)


def test_rejects_packed_weights_copied_from_a_blob() -> None:
    words: Tensors = {"a.weight": ("U32", 64, 8)}
    assert isinstance(detect(words).recipes["a.weight"], Copied)
    with pytest.raises(UnsupportedSource, match=r"'a\.weight' is packed as in a blob of a store"):
        detect(words | {"a.weight.scale": ("U8", 64, 2)})


# Symmetric integers of compressed-tensors.

EXPERT = "model.layers.0.mlp.experts.0.up_proj"


def symmetric(config: Any = None, **changes: Any) -> DetectedQuantization:
    """Return what is found in a source of two packed weights; None as a change leaves a tensor out."""
    tensors = {**packed_weight("m").tensors, **packed_weight(EXPERT, shape_type="I32").tensors}
    tensors = {name: own for name, own in (tensors | changes).items() if own is not None}
    found = specs({name: (code, *shape) for name, (code, shape, _) in tensors.items()})
    markers = {name: tensors[name][2] for name, spec in found.items() if is_marker(spec)}
    assert set(markers) == {name for name in tensors if name.endswith("_shape")}
    known = packed_config() if config is None else config
    return detect_quantization(found, known, markers=markers)


def test_reads_symmetric_integers() -> None:
    found = symmetric()
    assert (found.quant_type, found.scheme, found.notices) == ("int4-sym", "", ())
    assert set(found.recipes) == {"m.weight", f"{EXPERT}.weight", "norm.weight"}
    for module in ("m", EXPERT):
        recipe = prequantized(found, f"{module}.weight")
        assert (recipe.item.name, recipe.group_size) == ("int4-sym", 32)
        assert recipe.sources == (f"{module}.weight_packed", f"{module}.weight_scale")


def test_leaves_out_the_scales_of_activations_of_symmetric_integers() -> None:
    scale = {"m.input_scale": ("F32", [1], b"")}
    assert symmetric(**scale).notices == ("1 input scale (of activations) left out",)


_SHAPE = ("I64", [2], bytes(16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m.weight_zero_point": ("I32", [1, 2], b"")}, "has zero points"),
        ({"m.weight_g_idx": ("I32", [64], b"")}, "'m.weight_g_idx' may change what 'm.weight'"),
        ({"m.weight_shape": None}, "'m.weight_packed' .*without scales and shape"),
        ({"m.weight_scale": None}, "'m.weight_packed' .*without scales and shape"),
        ({"m.weight_shape": _SHAPE}, r"with the shape \[0, 0\], which is neither int4 nor int8"),
        ({"m.weight_scale": ("BF16", [1], b"")}, r"does not fit scales BF16 of shape \[1\]"),
        ({"m.weight_packed": ("I32", [6, 9], b"")}, "neither int4 nor int8"),
        ({"m.weight_global_scale": ("F32", [1], b"")}, "'m.weight_global_scale' may change"),
    ],
)
def test_keeps_other_packed_integers_as_published(changes: Any, message: str) -> None:
    found = symmetric(**changes)
    assert re.search(message, found.reason)
    assert found.scheme == "compressed-tensors"
    assert all(isinstance(recipe, Copied) for recipe in found.recipes.values())


@pytest.mark.parametrize(
    "shape", [("I16", [2], bytes(4)), ("I64", [3], bytes(24)), ("I64", [], b"")]
)
def test_a_shape_of_another_form_is_not_read(shape: Any) -> None:
    code, sizes, _ = shape
    assert not is_marker(TensorSpec("m.weight_shape", DTYPES[code], tuple(sizes)))


@pytest.mark.parametrize(
    "config",
    [
        {},
        packed_config({"group_size": 64}),
        packed_config({"num_bits": 8}),
        packed_config({"symmetric": False}),
        packed_config({}, {"actorder": "group"}),
        packed_config(format="marlin-24"),
        packed_config(transform_config={"config_groups": {}}),
    ],
)
def test_keeps_integers_that_the_config_describes_otherwise(config: Any) -> None:
    assert symmetric(config).scheme


def test_a_weight_cannot_be_plain_and_packed() -> None:
    with pytest.raises(UnsupportedSource, match="'m.weight' is .* both plain and quantized"):
        symmetric(**{"m.weight": ("BF16", [6, 64], b"")})

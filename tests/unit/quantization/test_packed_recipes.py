from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import UnsupportedSource
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.packed_recipes import (
    NotUnderstood,
    fp4_blocks,
    fp4_weight,
    mlx_weight,
    mxfp8_weight,
    symmetric_weight,
)

U8, U32, F32, BF16 = DType.U8, DType.U32, DType.F32, DType.BF16
E4M3, E8M0 = DType.F8_E4M3, DType.F8_E8M0
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
random = np.random.default_rng(0)


def spec(name: str, dtype: DType, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def mlx_specs(
    item: Any, group_size: int, *rows: int, columns: int = 384
) -> tuple[TensorSpec, TensorSpec, TensorSpec | None]:
    scale = spec("m.scales", item.scale_dtype(BF16), *rows, columns // group_size)
    bias = scale._replace(name="m.biases") if item.has_bias else None
    return spec("m.weight", U32, *rows, item.words(columns)), scale, bias


def unpacked(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return 4-bit floats, the lower half of a byte first."""
    return FP4[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*codes.shape[:-1], -1)


def by_mlx(codes: Any, scales: Any, mode: str) -> np.ndarray[Any, Any]:
    mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    with mx.stream(mx.cpu):
        words = mx.array(np.ascontiguousarray(codes).view("<u4"))
        numbers = mx.dequantize(words, mx.array(scales), mode=mode, dtype=mx.float32)
        return np.array(numbers)


# Packed by MLX.


@pytest.mark.parametrize("item", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("rows", [(8,), (3, 8)])
def test_keeps_weights_packed_by_mlx(item: Any, rows: tuple[int, ...]) -> None:
    for group_size in item.group_sizes:
        weight, scale, bias = mlx_specs(item, group_size, *rows)
        recipe = mlx_weight(weight, scale, bias, (item, group_size))
        assert (recipe.item, recipe.group_size) == (item, group_size)
        names = ["m.weight", "m.weight.scale", "m.weight.bias"][: 2 + item.has_bias]
        assert [part.name for part in recipe.stored] == names
        assert recipe.sources == ("m.weight", "m.scales", "m.biases")[: 2 + item.has_bias]
        assert recipe.stored[0] == weight
        assert recipe.stored[1][1:] == scale[1:]
        assert not any(part.is_reciprocal for part in recipe.parts)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_derives_types_without_biases_from_the_shapes(name: str) -> None:
    item = FORMATS[name]
    weight, scale, _ = mlx_specs(item, item.group_size, 8)
    recipe = mlx_weight(weight, scale, None, None)
    assert (recipe.item, recipe.group_size) == (item, item.group_size)


@pytest.mark.parametrize(
    ("words", "groups", "types"),
    [
        (12, 6, ["int2 in groups of 32"]),
        (96, 3, ["int8 in groups of 128"]),
        (36, 12, ["int3 in groups of 32"]),
        (72, 3, ["int6 in groups of 128"]),
        (30, 6, ["int5 in groups of 32"]),
        (24, 6, ["int4 in groups of 32", "int2 in groups of 64"]),
        (48, 6, ["int4 in groups of 64", "int8 in groups of 32", "int2 in groups of 128"]),
        (48, 5, []),
        (48, 48, []),
    ],
)
def test_derives_an_affine_type_from_the_shapes_if_only_one_fits(
    words: int, groups: int, types: list[str]
) -> None:
    weight, scale = spec("m.weight", U32, 8, words), spec("m.scales", BF16, 8, groups)
    if len(types) == 1:
        recipe = mlx_weight(weight, scale, scale, None)
        assert f"{recipe.item.name} in groups of {recipe.group_size}" == types[0]
        return
    with pytest.raises(UnsupportedSource, match="'m.weight'.*config.json must say bits") as caught:
        mlx_weight(weight, scale, scale, None)
    for text in types or ["no known type"]:
        assert text in str(caught.value)


@pytest.mark.parametrize("dtype", [BF16, DType.F16, F32])
def test_affine_scales_have_the_type_of_the_weight(dtype: DType) -> None:
    weight, scale = spec("m.weight", U32, 8, 16), spec("m.scales", dtype, 8, 2)
    assert mlx_weight(weight, scale, scale, (FORMATS["int4"], 64)).stored[1].dtype is dtype


@pytest.mark.parametrize(
    ("weight", "scale", "bias", "message"),
    [
        ((8, 16), (BF16, 8, 4), (BF16, 8, 4), "int4 in groups of 64 by config.json.*scales BF16"),
        ((8, 32), (BF16, 8, 2), (BF16, 8, 2), "int4 in groups of 64 by config.json"),
        ((8, 17), (BF16, 8, 2), (BF16, 8, 2), r"U32 of shape \[8, 17\]"),
        ((8, 16), (BF16, 4, 2), (BF16, 4, 2), r"scales BF16 of shape \[4, 2\]"),
        ((8, 16), (BF16, 16), (BF16, 16), r"scales BF16 of shape \[16\]"),
        ((8, 16), (BF16, 8, 2), None, "no biases in the file"),
        ((8, 16), (U8, 8, 2), (U8, 8, 2), "is int4, whose scales cannot be U8"),
        ((8, 16), (BF16, 8, 2), (F32, 8, 2), "has biases, F32 .* unlike its scales, BF16"),
        ((8, 16), (BF16, 8, 2), (BF16, 2, 8), r"has biases, BF16 of shape \[2, 8\]"),
        ((16,), (BF16, 2), (BF16, 2), r"of shape \[16\], not of 2 or 3 dimensions"),
        ((2, 2, 8, 16), (BF16, 2, 2, 8, 2), (BF16, 2, 2, 8, 2), "not of 2 or 3 dimensions"),
        ((), (BF16,), (BF16,), "not of 2 or 3 dimensions"),
        ((0, 16), (BF16, 0, 2), (BF16, 0, 2), "of shape"),
        ((8, 0), (BF16, 8, 0), (BF16, 8, 0), "of shape"),
        ((8, 2**60), (BF16, 8, 2), (BF16, 8, 2), "by config.json"),
    ],
)
def test_rejects_weights_that_contradict_qparams_or_config(
    weight: tuple[int, ...], scale: tuple[Any, ...], bias: tuple[Any, ...] | None, message: str
) -> None:
    scales = spec("m.scales", *scale)
    biases = None if bias is None else spec("m.biases", *bias)
    with pytest.raises(UnsupportedSource, match=f"tensor 'm.weight' .*{message}"):
        mlx_weight(spec("m.weight", U32, *weight), scales, biases, (FORMATS["int4"], 64))


def test_rejects_biases_or_float_scales_of_nvfp4() -> None:
    weight, scale = spec("m.weight", U32, 8, 16), spec("m.scales", U8, 8, 8)
    with pytest.raises(UnsupportedSource, match="is nvfp4 in groups of 16 by config.json"):
        mlx_weight(weight, scale, scale, (FORMATS["nvfp4"], 16))
    with pytest.raises(UnsupportedSource, match="is nvfp4, whose scales cannot be BF16"):
        mlx_weight(weight, scale._replace(dtype=BF16), None, (FORMATS["nvfp4"], 16))


def test_the_config_decides_if_several_types_fit_the_shapes() -> None:
    weight, scale = spec("m.weight", U32, 8, 48), spec("m.scales", BF16, 8, 6)
    for name, size in (("int4", 64), ("int8", 32), ("int2", 128)):
        recipe = mlx_weight(weight, scale, scale, (FORMATS[name], size))
        assert (recipe.item.name, recipe.group_size) == (name, size)


# Packed by other tools.

WEIGHT, SCALE = spec("m.weight_packed", U8, 8, 32), spec("m.weight_scale", E4M3, 8, 4)
FACTOR = spec("m.weight_global_scale", F32, 1)


@pytest.mark.parametrize(
    ("factor", "is_reciprocal", "group_size"),
    [(FACTOR, True, 16), (spec("m.weight_scale_2", F32), False, None)],
)
def test_nvfp4_keeps_its_bits(
    factor: TensorSpec, is_reciprocal: bool, group_size: int | None
) -> None:
    recipe = fp4_weight("m.weight", WEIGHT, SCALE, factor, (), is_reciprocal=is_reciprocal)
    assert recipe.stored == (
        spec("m.weight", U32, 8, 8),
        spec("m.weight.scale", U8, 8, 4),
        factor._replace(name="m.weight.global_scale"),
    )
    assert recipe.sources == ("m.weight_packed", "m.weight_scale", factor.name)
    assert [part.is_reciprocal for part in recipe.parts] == [False, False, is_reciprocal]
    assert (recipe.item.name, recipe.group_size) == ("nvfp4", group_size)


@pytest.mark.parametrize("dtype", [U8, E8M0])
def test_mxfp4_keeps_its_bits(dtype: DType) -> None:
    scale = spec("m.weight_scale", dtype, 8, 2)
    recipe = fp4_weight("m.weight", WEIGHT, scale, None, (), is_reciprocal=True)
    assert recipe.stored == (spec("m.weight", U32, 8, 8), spec("m.weight.scale", U8, 8, 2))
    assert (recipe.item.name, recipe.group_size) == ("mxfp4", 32)


@pytest.mark.parametrize(
    ("weight", "scale", "factor", "message"),
    [
        (WEIGHT, SCALE, None, "'m.weight_packed' .*lacks its global scale"),
        (
            WEIGHT,
            SCALE,
            spec("g", F32, 2),
            r"'g' .*must be one F32 number, and is F32 of shape \[2",
        ),
        (WEIGHT, SCALE, spec("g", F32, 0), "'g' .*must be one F32 number"),
        (WEIGHT, SCALE, spec("g", BF16), "'g' .*must be one F32 number, and is BF16"),
        (WEIGHT, SCALE._replace(dtype=BF16), FACTOR, "scales of type BF16"),
        (WEIGHT, SCALE._replace(shape=(8, 2)), FACTOR, "which is not nvfp4 in groups of 16"),
        (WEIGHT, SCALE._replace(dtype=U8), None, "which is not mxfp4 in groups of 32"),
        (WEIGHT, spec("s", U8, 8, 2), FACTOR, "is mxfp4 by its scales.*and has a global scale"),
        (WEIGHT._replace(shape=(8, 30)), SCALE, FACTOR, "which is not nvfp4"),
        (WEIGHT._replace(shape=(32,)), SCALE._replace(shape=(4,)), FACTOR, "2 or 3 dimensions"),
        (WEIGHT._replace(shape=(0, 32)), SCALE._replace(shape=(0, 4)), FACTOR, "of shape"),
        (WEIGHT._replace(shape=(8, 0)), SCALE._replace(shape=(8, 0)), FACTOR, "of shape"),
    ],
)
def test_rejects_4_bit_floats_with_wrong_qparams(
    weight: TensorSpec, scale: TensorSpec, factor: TensorSpec | None, message: str
) -> None:
    with pytest.raises(UnsupportedSource, match=message):
        fp4_weight("m.weight", weight, scale, factor, (), is_reciprocal=True)


def test_rejects_groups_that_contradict_the_config() -> None:
    assert fp4_weight("m.weight", WEIGHT, SCALE, FACTOR, {16, 32}, is_reciprocal=True)
    with pytest.raises(UnsupportedSource, match="is nvfp4 in groups of 16.* of 32 by config.json"):
        fp4_weight("m.weight", WEIGHT, SCALE, FACTOR, {32}, is_reciprocal=True)


@pytest.mark.parametrize("rows", [(8,), (3, 8)])
def test_blocks_keep_their_bits(rows: tuple[int, ...]) -> None:
    weight, scale = spec("m_blocks", U8, *rows, 6, 16), spec("m_scales", U8, *rows, 6)
    recipe = fp4_blocks("m", weight, scale)
    assert recipe.stored == (spec("m", U32, *rows, 24), spec("m.scale", U8, *rows, 6))
    assert recipe.sources == ("m_blocks", "m_scales")
    assert (recipe.item.name, recipe.group_size) == ("mxfp4", 32)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        ((8, 6, 8), (8, 6)),
        ((8, 6, 16), (8, 5)),
        ((8, 96), (8, 6)),
        ((16,), ()),
        ((6, 16), (6,)),
        ((2, 2, 8, 6, 16), (2, 2, 8, 6)),
        ((), ()),
        ((0, 6, 16), (0, 6)),
    ],
)
def test_rejects_blocks_of_wrong_shapes(weight: tuple[int, ...], scale: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedSource, match="tensor 'm_blocks' "):
        fp4_blocks("m", spec("m_blocks", U8, *weight), spec("m_scales", U8, *scale))


@pytest.mark.parametrize("dtype", [U8, E8M0])
@pytest.mark.parametrize("rows", [(8,), (3, 8)])
def test_mxfp8_keeps_its_bits(dtype: DType, rows: tuple[int, ...]) -> None:
    weight, scale = spec("m.weight", E4M3, *rows, 64), spec("m.weight_scale", dtype, *rows, 2)
    recipe = mxfp8_weight(weight, scale)
    assert recipe is not None
    assert recipe.stored == (spec("m.weight", U32, *rows, 16), spec("m.weight.scale", U8, *rows, 2))
    assert (recipe.item.name, recipe.group_size) == ("mxfp8", 32)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (spec("w", E4M3, 8, 64), spec("s", F32, 8, 2)),
        (spec("w", E4M3, 8, 64), spec("s", E8M0, 1, 1)),
        (spec("w", DType.F8_E5M2, 8, 64), spec("s", U8, 8, 2)),
    ],
)
def test_other_8_bit_floats_are_not_mxfp8(weight: TensorSpec, scale: TensorSpec) -> None:
    assert mxfp8_weight(weight, scale) is None


def test_rejects_mxfp8_with_incomplete_groups() -> None:
    with pytest.raises(UnsupportedSource, match="which is not mxfp8 in groups of 32"):
        mxfp8_weight(spec("w", E4M3, 8, 72), spec("s", U8, 8, 3))


# Relabelled bytes have the same values.


def test_relabelled_nvfp4_has_the_same_values() -> None:
    codes = random.integers(0, 256, (8, 32), np.uint8)
    scales = random.uniform(0.1, 400, (8, 4)).astype(ml_dtypes.float8_e4m3fn)
    plain = unpacked(codes) * np.repeat(scales.astype(np.float32), 16, axis=1)
    assert np.array_equal(by_mlx(codes, scales.view(np.uint8), "nvfp4"), plain)


def test_relabelled_mxfp4_has_the_same_values() -> None:
    codes = random.integers(0, 256, (8, 32), np.uint8)
    scales = random.integers(100, 150, (8, 2), np.uint8)
    plain = unpacked(codes) * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=1)
    assert np.array_equal(by_mlx(codes, scales, "mxfp4"), plain)


def test_relabelled_mxfp8_has_the_same_values() -> None:
    weight = random.uniform(-400, 400, (8, 64)).astype(ml_dtypes.float8_e4m3fn)
    scales = random.integers(100, 150, (8, 2), np.uint8)
    factors = np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=1)
    numbers = by_mlx(weight.view(np.uint8), scales, "mxfp8")
    assert np.array_equal(numbers, weight.astype(np.float32) * factors)


def test_relabelled_blocks_have_the_values_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = random.integers(0, 256, (2, 8, 3, 16), np.uint8)
    scales = random.integers(120, 134, (2, 8, 3), np.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    ours = by_mlx(blocks.reshape(2, 8, 48), scales, "mxfp4")
    # Theirs are transposed.
    assert np.array_equal(ours, theirs.transpose(1, 2).numpy())


WORDS, SCALES = spec("m.weight_packed", DType.I32, 8, 16), spec("m.weight_scale", BF16, 8, 4)


@pytest.mark.parametrize(
    ("columns", "groups", "declared", "name"),
    [
        (128, 4, (4, 32), "int4-sym"),
        (128, 1, (4, None), "int4-sym"),
        (128, 1, (4, 128), "int4-sym"),
        (128, 16, (4, 8), "int4-sym"),
        (64, 2, (8, 32), "int8-sym"),
        (64, 1, (8, None), "int8-sym"),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, DType.F16, F32])
def test_symmetric_integers_keep_their_bits(
    columns: int, groups: int, declared: Any, name: str, dtype: DType
) -> None:
    scale = SCALES._replace(dtype=dtype, shape=(8, groups))
    recipe = symmetric_weight("m.weight", WORDS, scale, [8, columns], {declared, (8, 4)})
    assert (recipe.item, recipe.group_size) == (FORMATS[name], columns // groups)
    assert recipe.sources == ("m.weight_packed", "m.weight_scale")
    label = spec("m.weight.scale", dtype, 8, groups)
    assert recipe.stored == (spec("m.weight", U32, 8, 16), label)


@pytest.mark.parametrize(
    ("weight", "scale", "shape", "declared", "message"),
    [
        (WORDS, SCALES, [8, 127], (4, 32), r"with the shape \[8, 127\].* neither int4 nor int8"),
        (WORDS, SCALES, [8, 121], (4, 32), "neither int4 nor int8"),
        (WORDS, SCALES, [9, 128], (4, 32), "neither int4 nor int8"),
        (WORDS, SCALES, [8, -128], (4, 32), "neither int4 nor int8"),
        (WORDS, SCALES, [8, 256], (4, 32), "neither int4 nor int8"),
        (WORDS, SCALES, [8, 160], (4, 32), "neither int4 nor int8"),
        (WORDS, SCALES, [], (4, 32), "neither int4 nor int8"),
        (WORDS, SCALES, [8, 128], (4, 64), "is int4-sym in groups of 32 by its shapes"),
        (WORDS, SCALES, [8, 128], (8, 32), "is int4-sym in groups of 32 by its shapes"),
        (WORDS, SCALES, [8, 128], (4, None), "is int4-sym in groups of 32 by its shapes"),
        (WORDS, SCALES, [8, 64], (8, 32), "is int8-sym in groups of 16 by its shapes"),
        (WORDS, SCALES._replace(shape=(8, 3)), [8, 128], (4, 32), "does not fit scales"),
        (WORDS, SCALES._replace(shape=(8, 0)), [8, 128], (4, 32), "does not fit scales"),
        (WORDS, SCALES._replace(shape=(4, 4)), [8, 128], (4, 32), "does not fit scales"),
        (WORDS, SCALES._replace(shape=(8,)), [8, 128], (4, None), "does not fit scales"),
        (WORDS, SCALES._replace(shape=(1,)), [8, 128], (4, None), "does not fit scales"),
        (WORDS, SCALES._replace(shape=()), [8, 128], (4, None), "does not fit scales"),
        (WORDS, SCALES._replace(shape=(8, 32)), [8, 128], (4, 4), "does not fit scales"),
        (WORDS, SCALES._replace(dtype=U8), [8, 128], (4, 32), "does not fit scales U8"),
        (WORDS._replace(shape=(16,)), SCALES, [8, 128], (4, 32), "not of 2 dimensions"),
        (WORDS._replace(shape=(2, 4, 16)), SCALES, [8, 128], (4, 32), "not of 2 dimensions"),
        (WORDS._replace(shape=(8, 0)), SCALES, [8, 0], (4, 32), "not of 2 dimensions"),
        (
            WORDS._replace(shape=(1, 2**18)),
            SCALES._replace(shape=(1, 1)),
            [1, 2**21],
            (4, None),
            "in groups of 2097152",
        ),
    ],
)
def test_symmetric_integers_that_do_not_fit_are_not_understood(
    weight: TensorSpec, scale: TensorSpec, shape: list[int], declared: Any, message: str
) -> None:
    with pytest.raises(NotUnderstood, match=rf"'m.weight_packed' \(I32\) .*{message}"):
        symmetric_weight("m.weight", weight, scale, shape, {declared})

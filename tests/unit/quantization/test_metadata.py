from __future__ import annotations

from typing import Any

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobDamaged
from blobstore.quantization.formats import FORMATS, QuantFormat
from blobstore.quantization.metadata import (
    parse_quant_metadata,
    qparam_names,
    quant_metadata,
    stated,
)


def spec(dtype: DType, *shape: int, name: str = "w") -> TensorSpec:
    return TensorSpec(name, dtype, shape)


WEIGHT = spec(DType.U32, 4, 16)  # 128 columns of 4 bits
AFFINE = {".scale": spec(DType.BF16, 4, 4), ".bias": spec(DType.BF16, 4, 4)}
FLOAT = {".scale": spec(DType.U8, 4, 8)}
INT4 = {"quant_type": "int4", "group_size": "32"}


def test_a_common_type_is_written_once() -> None:
    assert quant_metadata({"a": ("int4", 32), "b": None, "c": ("int4", 32)}) == INT4
    assert quant_metadata({"a": None}) == {}


def test_different_types_are_written_per_tensor() -> None:
    assert quant_metadata({"a": ("int4", 32), "b": ("int8", 64)}) == {
        "a.quant_type": "int4",
        "a.group_size": "32",
        "b.quant_type": "int8",
        "b.group_size": "64",
    }


def test_the_only_group_size_of_a_type_may_be_omitted() -> None:
    assert quant_metadata({"a": ("nvfp4", None)}) == {"quant_type": "nvfp4"}
    assert parse_quant_metadata(WEIGHT, FLOAT, {"quant_type": "nvfp4"}) == (FORMATS["nvfp4"], 16)


def test_written_metadata_can_be_read() -> None:
    types = {"w": ("int4", 32), "v": ("int8", 64)}
    assert parse_quant_metadata(WEIGHT, AFFINE, quant_metadata(types)) == (FORMATS["int4"], 32)
    found = parse_quant_metadata(
        WEIGHT._replace(name="v"), affine(shape=(4, 1)), quant_metadata(types)
    )
    assert found == (FORMATS["int8"], 64)


def test_entries_of_a_tensor_precede_those_of_the_blob() -> None:
    metadata = {f"w.{key}": value for key, value in INT4.items()}
    metadata |= {"quant_type": "int8", "group_size": "64"}
    assert parse_quant_metadata(WEIGHT, AFFINE, metadata) == (FORMATS["int4"], 32)


def test_metadata_without_a_type_gives_none() -> None:
    assert parse_quant_metadata(WEIGHT, AFFINE, {}) is None
    assert parse_quant_metadata(WEIGHT, AFFINE, {"group_size": "32"}) is None


def test_derives_a_missing_group_size_from_the_shapes() -> None:
    assert parse_quant_metadata(WEIGHT, AFFINE, {"quant_type": "int4"}) == (FORMATS["int4"], 32)


def test_elements_may_cross_word_boundaries() -> None:
    three = affine(shape=(4, 2))
    weight = spec(DType.U32, 4, 12)
    metadata = {"quant_type": "int3", "group_size": "64"}
    assert parse_quant_metadata(weight, three, metadata) == (FORMATS["int3"], 64)


def affine(**changes: Any) -> dict[str, TensorSpec]:
    return {suffix: item._replace(**changes) for suffix, item in AFFINE.items()}


@pytest.mark.parametrize("scalar", [spec(DType.F32), spec(DType.F32, 1)])
def test_accepts_a_global_scale_of_one_value(scalar: TensorSpec) -> None:
    assert parse_quant_metadata(WEIGHT, FLOAT | {".global_scale": scalar}, {"quant_type": "nvfp4"})


@pytest.mark.parametrize("quant_type", ["int9", "INT4", "q4_k", "\x1b[31m", "FP8"])
def test_rejects_an_unknown_type(quant_type: str) -> None:
    message = r"^tensor 'w': quant_type '.*' is unknown; known: int4, "
    with pytest.raises(BlobDamaged, match=message):
        parse_quant_metadata(WEIGHT, AFFINE, {"quant_type": quant_type})


@pytest.mark.parametrize(
    "text", ["0", "-1", "1e9", "1000000000", "16", "031", " 32", "\uff13\uff12", "", "9" * 5000]
)
def test_rejects_a_group_size_that_the_type_does_not_support(text: str) -> None:
    with pytest.raises(BlobDamaged, match=r"^tensor 'w': int4 cannot have a group_size of "):
        parse_quant_metadata(WEIGHT, AFFINE, {"quant_type": "int4", "group_size": text})


@pytest.mark.parametrize("groups", [0, 3])
def test_rejects_scales_from_which_no_group_size_follows(groups: int) -> None:
    with pytest.raises(BlobDamaged, match="int4 cannot have a group_size of '"):
        parse_quant_metadata(WEIGHT, affine(shape=(4, groups)), {"quant_type": "int4"})


@pytest.mark.parametrize(("shape", "quant_type"), [((), "int4"), ((4, 16), "int3")])
def test_rejects_words_that_do_not_make_rows(shape: tuple[int, ...], quant_type: str) -> None:
    message = rf"\[{', '.join(map(str, shape))}\] packed words do not make rows of {quant_type}"
    metadata = {"quant_type": quant_type, "group_size": "64"}
    with pytest.raises(BlobDamaged, match=message):
        parse_quant_metadata(spec(DType.U32, *shape), AFFINE, metadata)


@pytest.mark.parametrize("scale", [(4, 2), (4,), (), (3, 4), (4, 4, 1), (1, 4, 4), (0, 4)], ids=str)
def test_rejects_scales_that_do_not_fit_the_weight(scale: tuple[int, ...]) -> None:
    with pytest.raises(BlobDamaged, match=r"^tensor 'w': scales of shape .* do not fit int4 of"):
        parse_quant_metadata(WEIGHT, affine(shape=scale), INT4)


NO_BIAS = "int4 needs biases of the type and shape of the scales"
NO_SCALAR = "a global scale must be one F32 number"


@pytest.mark.parametrize(
    ("qparams", "quant_type", "message"),
    [
        (affine(dtype=DType.U8), "int4", "scales of int4 cannot be U8"),
        (affine(dtype=DType.F64), "int4", "scales of int4 cannot be F64"),
        (affine(dtype=DType.U32), "int4", "scales of int4 cannot be U32"),
        ({".scale": AFFINE[".scale"]}, "int4", NO_BIAS),
        (AFFINE | {".bias": spec(DType.BF16, 4, 2)}, "int4", NO_BIAS),
        (AFFINE | {".bias": spec(DType.F32, 4, 4)}, "int4", NO_BIAS),
        ({".scale": spec(DType.BF16, 4, 8)}, "nvfp4", "scales of nvfp4 cannot be BF16"),
        (FLOAT | {".bias": FLOAT[".scale"]}, "nvfp4", "nvfp4 has no biases"),
        (FLOAT | {".global_scale": spec(DType.F32, 2)}, "nvfp4", NO_SCALAR),
        (FLOAT | {".global_scale": spec(DType.BF16)}, "nvfp4", NO_SCALAR),
        (FLOAT | {".global_scale": spec(DType.F32, 0)}, "nvfp4", NO_SCALAR),
    ],
)
def test_rejects_qparams_that_do_not_fit_the_type(
    qparams: dict[str, TensorSpec], quant_type: str, message: str
) -> None:
    with pytest.raises(BlobDamaged, match=message):
        parse_quant_metadata(WEIGHT, qparams, {"quant_type": quant_type})


# 8-bit floats.

FP8 = {"quant_type": "fp8", "block_size": "128x128"}
E4M3, E5M2 = DType.F8_E4M3, DType.F8_E5M2


def parse(
    weight: TensorSpec, scale: TensorSpec, metadata: dict[str, str], end: str = "_scale_inv"
) -> tuple[QuantFormat, int] | None:
    scale = scale._replace(name=weight.name + end)
    return parse_quant_metadata(weight, {".scale": scale}, metadata)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("factor", [DType.F32, DType.BF16, DType.F16, DType.F8_E8M0])
@pytest.mark.parametrize(
    ("shape", "scale", "block_size", "group_size", "block"),
    [
        ((300, 200), (3, 2), "128x128", 128, (128, 128)),
        ((300, 200), (1, 1), "999999x999999", 999_999, (999_999, 999_999)),
        ((300, 200), (300, 4), "1x64", 64, (1, 64)),
        ((300, 200), (300, 1), "channel", 0, (1, 200)),
        ((300, 200), (), "tensor", 0, (300, 200)),
        ((4, 256, 200), (4, 2, 2), "128x128", 128, (128, 128)),
        ((4, 64, 200), (4, 1, 2), "128x128", 128, (64, 128)),
        ((4, 64, 200), (4, 64), "channel", 0, (1, 200)),
        ((4, 64, 200), (4,), "tensor", 0, (64, 200)),
        ((4, 64, 200), (1,), "tensor", 0, (256, 200)),
    ],
)
def test_reads_what_it_writes_of_8_bit_floats(
    shape: tuple[int, ...],
    scale: tuple[int, ...],
    block_size: str,
    group_size: int,
    block: tuple[int, int],
    dtype: DType,
    factor: DType,
) -> None:
    metadata = FP8 | {"block_size": block_size}
    known = parse(spec(dtype, *shape), spec(factor, *scale), metadata)
    assert known is not None
    item, size = known
    assert (item.name, size, item.float8 and item.float8.block) == ("fp8", group_size, block)
    assert quant_metadata({"w": stated(item, None)}) == metadata
    other = quant_metadata({"w": stated(item, None), "v": ("int4", 32)})
    assert other == {f"w.{key}": value for key, value in metadata.items()} | {
        "v.quant_type": "int4",
        "v.group_size": "32",
    }


@pytest.mark.parametrize(
    "block_size",
    [
        *("", "128", "row", "Tensor", "0x128", "128x0", "-1x128", "128x128x1", "128 x 128"),
        *("128X128", "1000000x1", "9" * 5000 + "x1", "0128x128", "\uff11x1", "128x128\n"),
    ],
)
def test_block_sizes_that_are_not_two_numbers_are_damage(block_size: str) -> None:
    with pytest.raises(BlobDamaged, match=r"^tensor 'w': block_size '.*' is not tensor, channel"):
        parse(spec(E4M3, 300, 200), spec(DType.F32, 3, 2), FP8 | {"block_size": block_size})


@pytest.mark.parametrize(
    ("weight", "scale", "changes"),
    [
        (spec(E4M3, 300, 200), spec(DType.U8, 3, 2), {}),
        (spec(E4M3, 300, 200), spec(DType.F64, 3, 2), {}),
        (spec(E4M3, 300, 200), spec(DType.F32, 2, 3), {}),
        (spec(E4M3, 300, 200), spec(DType.F32, 3, 2), {"block_size": "64x64"}),
        (spec(E4M3, 300, 200), spec(DType.F32, 3, 2), {"block_size": "tensor"}),
        (spec(E4M3, 300, 200), spec(DType.F32, 3, 2), {"block_size": "channel"}),
        (spec(E4M3, 4, 300, 200), spec(DType.F32, 4, 3, 2), {}),
        (spec(E4M3, 200), spec(DType.F32), {"block_size": "tensor"}),
        (spec(E4M3), spec(DType.F32), {"block_size": "tensor"}),
        (spec(E4M3, 2, 2, 2, 2), spec(DType.F32), {"block_size": "tensor"}),
        (spec(E4M3, 0, 200), spec(DType.F32), {"block_size": "tensor"}),
        (spec(E4M3, 300, 0), spec(DType.F32, 3, 0), {}),
        (spec(DType.U32, 300, 200), spec(DType.F32, 3, 2), {}),
        (spec(DType.F8_E4M3FNUZ, 300, 200), spec(DType.F32, 3, 2), {}),
        (spec(E4M3, 2**62, 2**62), spec(DType.F32, 2, 2), {}),
    ],
)
def test_8_bit_floats_that_contradict_their_metadata_are_damage(
    weight: TensorSpec, scale: TensorSpec, changes: dict[str, str]
) -> None:
    with pytest.raises(BlobDamaged, match=r"^tensor 'w': .* is not fp8$"):
        parse(weight, scale, FP8 | changes)


@pytest.mark.parametrize("suffix", [".bias", ".global_scale"])
def test_other_qparams_of_8_bit_floats_are_damage(suffix: str) -> None:
    qparams = {".scale": spec(DType.F32, 3, 2), suffix: spec(DType.F32)}
    with pytest.raises(BlobDamaged, match="'w': fp8 has no quantization parameters but scales"):
        parse_quant_metadata(spec(E4M3, 300, 200), qparams, FP8)


def test_8_bit_floats_have_qparams_only_if_the_metadata_says_fp8() -> None:
    weight, plain = spec(E4M3, 300, 200), spec(DType.U8, 4, 4)
    scales = [(".scale", "w_scale"), (".scale", "w_scale_inv")]
    for metadata in (FP8, {"w.quant_type": "fp8", "quant_type": "int4"}):
        assert list(qparam_names(weight, metadata)) == scales
    others = [{}, {"quant_type": "int4"}, {"w.quant_type": "nvfp4"}, {"v.quant_type": "fp8"}]
    assert not any(list(qparam_names(weight, metadata)) for metadata in others)
    assert not list(qparam_names(plain, FP8))
    packed = [(end, f"w{end}") for end in (".scale", ".bias", ".global_scale")]
    assert list(qparam_names(WEIGHT, {})) == list(qparam_names(WEIGHT, FP8)) == packed


SYMMETRIC = {".scale": spec(DType.BF16, 4, 2)}


@pytest.mark.parametrize(
    ("name", "columns", "groups"),
    [("int4-sym", 128, 2), ("int4-sym", 128, 16), ("int8-sym", 64, 1), ("int8-sym", 64, 16)],
)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
@pytest.mark.parametrize("is_stated", [True, False])
def test_symmetric_integers_have_groups_of_whole_words(
    name: str, columns: int, groups: int, dtype: DType, is_stated: bool
) -> None:
    size = columns // groups
    metadata = {"quant_type": name} | ({"group_size": str(size)} if is_stated else {})
    scale = {".scale": spec(dtype, 4, groups)}
    assert parse_quant_metadata(WEIGHT, scale, metadata) == (FORMATS[name], size)


@pytest.mark.parametrize(
    ("qparams", "changes", "message"),
    [
        (SYMMETRIC, {"group_size": "32"}, "scales of shape .* do not fit int4-sym"),
        (SYMMETRIC, {"group_size": "0"}, "cannot have a group_size of '0'"),
        ({".scale": spec(DType.BF16, 4, 32)}, {"group_size": "4"}, "group_size of '4'"),
        ({".scale": spec(DType.BF16, 4, 128)}, {"group_size": "1"}, "group_size of '1'"),
        ({".scale": spec(DType.BF16, 1)}, {"group_size": "128"}, "do not fit int4-sym"),
        ({".scale": spec(DType.BF16, 4)}, {"group_size": "128"}, "do not fit int4-sym"),
        ({".scale": spec(DType.U8, 4, 2)}, {}, "scales of int4-sym cannot be U8"),
        (SYMMETRIC | {".bias": spec(DType.BF16, 4, 2)}, {}, "int4-sym has no biases"),
        (SYMMETRIC | {".global_scale": spec(DType.F32)}, {}, "int4-sym has no global scale"),
        (SYMMETRIC, {"quant_type": "int8-sym"}, "do not fit int8-sym"),
        (SYMMETRIC, {"quant_type": "int4"}, "int4 needs biases"),
    ],
)
def test_rejects_symmetric_integers_that_do_not_fit(
    qparams: dict[str, TensorSpec], changes: dict[str, str], message: str
) -> None:
    metadata = {"quant_type": "int4-sym", "group_size": "64", **changes}
    with pytest.raises(BlobDamaged, match=f"^tensor 'w': .*{message}"):
        parse_quant_metadata(WEIGHT, qparams, metadata)

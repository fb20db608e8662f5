from __future__ import annotations

from typing import Any

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobDamaged
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.metadata import parse_quant_metadata, quant_metadata


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


@pytest.mark.parametrize("quant_type", ["int9", "INT4", "q4_k", "\x1b[31m", "fp8"])
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
    ("companions", "quant_type", "message"),
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
def test_rejects_companions_that_do_not_fit_the_type(
    companions: dict[str, TensorSpec], quant_type: str, message: str
) -> None:
    with pytest.raises(BlobDamaged, match=message):
        parse_quant_metadata(WEIGHT, companions, {"quant_type": quant_type})

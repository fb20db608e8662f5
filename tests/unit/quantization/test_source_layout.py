from __future__ import annotations

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.quantization.formats import FORMATS, QuantFormat, float8_format
from blobstore.quantization.source_layout import SourceNaming, is_renamed_to, packed_shape

WEIGHT = TensorSpec("m.weight", DType.F8_E4M3, (64, 64))
SCALE = TensorSpec("m.weight_scale", DType.F32, (1,))
FP8_BLOB = {"m.weight", "m.weight_scale"}


def fp8() -> QuantFormat:
    item = float8_format(WEIGHT, SCALE, "tensor")
    assert item is not None
    return item


@pytest.mark.parametrize("name", ["m.scale_weight", "m.scale"])
def test_scales_of_fp8_weights_may_be_named_after_their_modules(name: str) -> None:
    source = SCALE._replace(name=name)
    assert is_renamed_to(source, SCALE, FP8_BLOB)
    assert not is_renamed_to(source, SCALE, {"m.weight_scale"})
    assert not is_renamed_to(source._replace(dtype=DType.BF16), SCALE, FP8_BLOB)
    assert not is_renamed_to(source._replace(shape=()), SCALE, FP8_BLOB)
    assert not is_renamed_to(source._replace(name=f"other.{name}"), SCALE, FP8_BLOB)


def test_fp4_weights_may_be_integers_in_the_source() -> None:
    stored = TensorSpec("m.weight", DType.U32, (64, 8))
    blob = {"m.weight", "m.weight.scale"}
    source = TensorSpec("m.weight", DType.I8, (64, 32))
    assert is_renamed_to(source, stored, blob)
    assert not is_renamed_to(source._replace(dtype=DType.I16), stored, blob)
    scale = TensorSpec("m.weight.scale", DType.U8, (64, 2))
    assert is_renamed_to(TensorSpec("m.scale", DType.F8_E8M0, (64, 2)), scale, blob)
    naming = SourceNaming({}, {"m.weight": source})
    assert naming.spec("m.weight", "", stored, FORMATS["mxfp4"]) == source


def test_the_names_of_the_source_are_used_unless_imports_rename_otherwise() -> None:
    source = SCALE._replace(name="m.scale")
    for published, name in (({"m.weight_scale": source}, "m.scale"), ({}, "m.weight_scale")):
        naming = SourceNaming({}, published)
        assert naming.spec("m.weight", ".scale", SCALE, fp8()).name == name
    forged = SourceNaming({}, {"m.weight_scale": SCALE._replace(name="x.scale")})
    assert forged.spec("m.weight", ".scale", SCALE, fp8()) == SCALE


def test_symmetric_integers_have_the_names_of_compressed_tensors() -> None:
    stored = TensorSpec("m.weight", DType.U32, (64, 8))
    scale = TensorSpec("m.weight.scale", DType.BF16, (64, 2))
    words = TensorSpec("m.weight_packed", DType.I32, (64, 8))
    blob = {"m.weight", "m.weight.scale"}
    naming, item = SourceNaming({}), FORMATS["int4-sym"]
    assert naming.spec("m.weight", "", stored, item) == words
    assert naming.spec("m.weight", ".scale", scale, item) == scale._replace(name="m.weight_scale")
    assert is_renamed_to(words, stored, blob)
    assert is_renamed_to(scale._replace(name="m.weight_scale"), scale, blob)
    for other in (
        words._replace(shape=(8, 64)),
        words._replace(name="m.weight"),
        words._replace(dtype=DType.U16),
        words._replace(name="k.weight_packed"),
    ):
        assert not is_renamed_to(other, stored, blob)


def test_a_shape_has_the_type_that_it_fits() -> None:
    spec, data = packed_shape("m.weight", (6, 2**31 - 1), DType.I32)
    assert spec == TensorSpec("m.weight_shape", DType.I32, (2,))
    assert data == b"\6\0\0\0\xff\xff\xff\x7f"
    for dtype, shape in ((DType.I64, (6, 64)), (DType.I32, (6, 2**31)), (DType.BF16, (6, 64))):
        spec, data = packed_shape("m.weight", shape, dtype)
        assert spec.dtype is DType.I64
        assert [int.from_bytes(data[at : at + 8], "little") for at in (0, 8)] == [*shape]

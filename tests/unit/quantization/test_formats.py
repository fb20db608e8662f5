from __future__ import annotations

import pytest

from blobstore.core.tensor import DType
from blobstore.errors import UsageError
from blobstore.quantization.formats import FORMATS, check_group_size, parse_format


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_table_agrees_with_mlx(name: str, dtype: str) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    known = FORMATS[name]
    codes = {"bfloat16": DType.BF16, "float16": DType.F16, "float32": DType.F32}
    types = {DType.U8: mx.uint8} | {code: getattr(mx, text) for text, code in codes.items()}
    for group_size in known.group_sizes:
        with mx.stream(mx.cpu):
            packed, scales, *biases = mx.quantize(
                mx.ones((4, 256), dtype=getattr(mx, dtype)),
                group_size=group_size,
                bits=known.bits,
                mode=known.mode,
            )
        assert packed.dtype == mx.uint32
        assert packed.shape == (4, known.words(256))
        assert known.columns(packed.shape[-1]) == 256
        assert scales.shape == (4, 256 // group_size)
        assert scales.dtype == types[known.scale_dtype(codes[dtype])]
        assert len(biases) == known.has_bias


@pytest.mark.parametrize("item", [item for item in FORMATS.values() if item.group_sizes])
def test_the_default_group_size_is_supported(item: object) -> None:
    known = FORMATS[getattr(item, "name", "")]
    check_group_size(known, known.group_size)


@pytest.mark.parametrize(
    ("text", "name"),
    [("int4", "int4"), (" Q4 ", "int4"), ("q8", "int8"), ("NVFP4", "nvfp4"), ("mxfp8", "mxfp8")],
)
def test_a_type_is_found_by_name_or_alias_in_any_case(text: str, name: str) -> None:
    assert parse_format(text).name == name


@pytest.mark.parametrize("text", ["fp8", "FP8", "fp4"])
def test_rejects_misleading_aliases_of_ollama_with_a_reason(text: str) -> None:
    with pytest.raises(
        UsageError, match="in Ollama it means int[48], which is not a floating-point"
    ):
        parse_format(text)


@pytest.mark.parametrize("text", ["", "int3", "int5", "int6", "q5_k", "bf16"])
def test_rejects_types_that_we_do_not_quantize_to(text: str) -> None:
    with pytest.raises(UsageError, match="expected one of int4, int8, nvfp4, mxfp8, mxfp4$"):
        parse_format(text)


@pytest.mark.parametrize(("name", "group_size"), [("int4", 16), ("nvfp4", 32), ("mxfp8", 0)])
def test_rejects_group_sizes_that_mlx_does_not_support(name: str, group_size: int) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot have groups of {group_size}; possible: "):
        check_group_size(FORMATS[name], group_size)


@pytest.mark.parametrize(
    ("name", "size", "is_known"),
    [
        ("int4", 32, True),
        ("int4", 8, False),
        ("int4-sym", 8, True),
        ("int4-sym", 4, False),
        ("int4-sym", 7168, True),
        ("int8-sym", 4, True),
        ("int8-sym", 2, False),
        ("int8-sym", 0, False),
        ("int8-sym", -4, False),
    ],
)
def test_groups_are_of_listed_sizes_or_of_whole_words(
    name: str, size: int, *, is_known: bool
) -> None:
    assert FORMATS[name].has_group_size(size) is is_known


def test_the_logical_shape_has_the_columns_of_the_words() -> None:
    assert FORMATS["int4"].logical_shape((2, 3, 4)) == (2, 3, 32)
    assert FORMATS["int8-sym"].logical_shape((4,)) == (16,)
    assert FORMATS["int8-sym"].logical_shape(()) == ()

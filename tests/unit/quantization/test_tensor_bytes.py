from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import DamagedSource
from blobstore.quantization import quantize_numpy as reference
from blobstore.quantization import tensor_bytes
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.fp8 import decode
from blobstore.quantization.recipes import Copied, Decoded, Prequantized, Quantized, Recipe
from blobstore.quantization.tensor_bytes import Converter

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
RANDOM = np.random.default_rng(5)
NUMBERS = RANDOM.normal(size=(64, 256)).astype(ml_dtypes.bfloat16)


def reader(arrays: Arrays, step: int = 10**9) -> Callable[[str, memoryview], Iterator[memoryview]]:
    """Return a function that reads arrays in pieces of at most ``step`` bytes."""

    def read(name: str, buffer: memoryview) -> Iterator[memoryview]:
        data = arrays[name].tobytes()
        start = 0
        while start < len(data):
            count = min(step, len(buffer), len(data) - start)
            buffer[:count] = data[start : start + count]
            yield buffer[:count]
            start += count

    return read


def converted(recipe: Recipe, arrays: Arrays, step: int = 10**9) -> bytes:
    return b"".join(map(bytes, Converter(reader(arrays, step)).convert(recipe)))  # type: ignore[arg-type]


def packed_bytes(array: Array, name: str, group_size: int) -> bytes:
    packed = reference.quantize(array, FORMATS[name], group_size)
    return b"".join(part.tobytes() for part in packed if part is not None)


def quantized(array: Array, name: str, group_size: int, *sources: str) -> Quantized:
    spec = TensorSpec("w", DType.BF16, array.shape)
    return Quantized(Copied(spec, sources or ("w",)), FORMATS[name], group_size)


def test_copies_sources_one_after_another() -> None:
    recipe = Copied(TensorSpec("w", DType.U8, (2, 3)), ("b", "a"))
    arrays = {"a": np.arange(3, dtype=np.uint8), "b": np.arange(3, 6, dtype=np.uint8)}
    assert converted(recipe, arrays, step=2) == bytes([3, 4, 5, 0, 1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("step", [10**9, 1000, 33])
@pytest.mark.parametrize(("name", "group_size"), [("int4", 32), ("int8", 128), ("nvfp4", 16)])
def test_quantizes_pieces_of_any_size(name: str, group_size: int, step: int) -> None:
    recipe = quantized(NUMBERS, name, group_size)
    assert converted(recipe, {"w": NUMBERS}, step) == packed_bytes(NUMBERS, name, group_size)


def test_quantizes_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_bytes, "_PIECE_SIZE", 1000)
    recipe = quantized(NUMBERS, "mxfp8", 32)
    assert converted(recipe, {"w": NUMBERS}) == packed_bytes(NUMBERS, "mxfp8", 32)


def test_quantizes_stacked_experts_as_one_tensor() -> None:
    stack = NUMBERS.reshape(2, 32, 256)
    recipe = quantized(stack, "int4", 64, "a", "b")
    assert converted(recipe, {"a": stack[0], "b": stack[1]}) == packed_bytes(stack, "int4", 64)


def test_the_bytes_have_the_size_of_the_stored_specs() -> None:
    for name, item in FORMATS.items():
        if item.is_target:
            recipe = quantized(NUMBERS, name, item.group_size)
            size = sum(spec.nbytes for spec in recipe.stored)
            assert len(converted(recipe, {"w": NUMBERS})) == size


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_rejects_a_non_finite_value_and_reports_its_index(value: float) -> None:
    array = np.zeros((2, 32, 256), ml_dtypes.bfloat16)
    array[1, 3, 5] = value
    recipe = quantized(array, "int4", 32)
    with pytest.raises(
        DamagedSource, match=r"^tensor 'w': element \[1, 3, 5\] is -?(inf|nan), which"
    ):
        converted(recipe, {"w": array}, step=4096)


def test_copies_prequantized_weights_part_by_part() -> None:
    weight = Copied(TensorSpec("w", DType.U32, (1, 2)), ("w_packed",))
    scale = Copied(TensorSpec("w.scale", DType.U8, (1, 1)), ("w_scale",))
    recipe = Prequantized((weight, scale), FORMATS["nvfp4"], 16)
    arrays = {"w_packed": np.arange(8, dtype=np.uint8), "w_scale": np.array([56], np.uint8)}
    assert converted(recipe, arrays) == bytes([*range(8), 56])


def reciprocal(value: float) -> bytes:
    spec = TensorSpec("w.global_scale", DType.F32, (1,))
    return converted(Copied(spec, ("g",), is_reciprocal=True), {"g": np.array([value], np.float32)})


def test_rounds_a_reciprocal_once() -> None:
    assert reciprocal(3) == (np.float32(1) / np.float32(3)).tobytes()


@pytest.mark.parametrize("value", [1e-45, 2.9e-39, -1e-39, 0.0, np.inf, np.nan])
def test_rejects_a_global_scale_without_a_reciprocal(value: float) -> None:
    with pytest.raises(
        DamagedSource, match=f"a global scale of {np.float32(value)} has no reciprocal"
    ):
        reciprocal(value)


def float8(rows: int, columns: int, block: tuple[int, int]) -> tuple[Decoded, Arrays, Array]:
    """Return a recipe, its sources, and the decoded values."""
    codes = RANDOM.normal(size=(rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    scales = RANDOM.uniform(0.5, 2, shape).astype(np.float32)
    recipe = Decoded(
        spec=TensorSpec("w", DType.BF16, (rows, columns)),
        sources=("w",),
        scales=("s",),
        weight=TensorSpec("w", DType.F8_E4M3, (rows, columns)),
        scale=TensorSpec("s", DType.F32, shape),
        block=block,
    )
    wide = np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)[:rows, :columns]
    expected = (codes.astype(np.float32) * wide).astype(ml_dtypes.bfloat16)
    return recipe, {"w": codes, "s": scales}, expected


@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [(256, 384, (128, 128)), (300, 200, (128, 128)), (70, 64, (70, 64)), (70, 64, (1, 64))],
)
@pytest.mark.parametrize("piece", [1 << 22, 1000])
def test_decodes_blocks_from_pieces_of_any_size(
    rows: int, columns: int, block: tuple[int, int], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_bytes, "_PIECE_SIZE", piece)
    recipe, arrays, expected = float8(rows, columns, block)
    assert converted(recipe, arrays, step=999) == expected.tobytes()
    np.testing.assert_array_equal(decode(arrays["w"], arrays["s"], block), expected)


def test_quantizes_decoded_values() -> None:
    recipe, arrays, expected = float8(256, 128, (128, 128))
    found = converted(Quantized(recipe, FORMATS["mxfp8"], 32), arrays)
    assert found == packed_bytes(expected, "mxfp8", 32)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("value", [1e-38, 1e-40, 1e36, 3e38])
def test_rejects_values_whose_exponent_does_not_fit_a_byte(name: str, value: float) -> None:
    array = np.zeros((4, 64), np.float32)
    array[2, 5] = value
    dense = Copied(TensorSpec("w", DType.F32, array.shape), ("w",))
    recipe = Quantized(dense, FORMATS[name], 32)
    with pytest.raises(DamagedSource, match=f"^tensor 'w': .* too small, .* for {name}; keep"):
        converted(recipe, {"w": array})


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize(
    ("dtype", "numbers", "limit"),
    [
        (DType.F16, np.float16, 65504),
        (DType.BF16, ml_dtypes.bfloat16, 3.38e38),
        (DType.F32, np.float32, 3.4e38),
    ],
)
def test_rejects_groups_whose_range_the_source_type_cannot_hold(
    name: str, dtype: DType, numbers: Any, limit: float
) -> None:
    array = np.zeros((4, 64), numbers)
    recipe = Quantized(Copied(TensorSpec("w", dtype, array.shape), ("w",)), FORMATS[name], 64)
    array[2, 5:7] = limit, -limit
    with pytest.raises(DamagedSource, match=f"^tensor 'w': .* too far apart for {name}; keep"):
        converted(recipe, {"w": array})
    array[2, 5:7] = limit / 4, -limit / 4
    assert converted(recipe, {"w": array}) == packed_bytes(array, name, 64)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e28])
def test_quantizes_values_of_any_reasonable_size(name: str, value: float) -> None:
    array = np.full((4, 64), value, ml_dtypes.bfloat16)
    assert converted(quantized(array, name, 32), {"w": array}) == packed_bytes(array, name, 32)

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobDamaged, UsageError
from blobstore.models.frameworks import FloatName, dequantizer
from blobstore.quantization.fp8 import decode
from blobstore.quantization.metadata import parse_quant_metadata
from blobstore.safetensors.numpy import as_array
from tests.support.samples import samples

Array = np.ndarray[Any, Any]

TYPES = {DType.F8_E4M3: ml_dtypes.float8_e4m3fn, DType.F8_E5M2: ml_dtypes.float8_e5m2}
NAN = 0x7FC0
OTHER = "a type that is not an 8-bit float"


def every_code(rows: int, columns: int) -> Array:
    return np.resize(np.arange(256, dtype=np.uint8), (rows, columns))


def bits(numbers: Array) -> Array:
    return numbers.view(np.uint16)


def expected(codes: Array, scales: Array, block: tuple[int, int], dtype: DType) -> Array:
    """Decode element by element; all NaNs become the same NaN."""
    values = codes.view(TYPES[dtype]).astype(np.float32)
    for row, column in np.ndindex(*values.shape):
        scale = scales[row // block[0], column // block[1]].astype(np.float32)
        with np.errstate(all="ignore"):
            values[row, column] *= scale
    plain = bits(values.astype(ml_dtypes.bfloat16)).copy()
    plain[np.isnan(values)] = NAN
    return plain


@pytest.mark.parametrize("dtype", TYPES)
def test_decodes_every_code(dtype: DType) -> None:
    codes = every_code(1, 256)
    decoded = decode(codes, np.ones((1, 1), np.float32), (1, 256), dtype)
    assert decoded.dtype == ml_dtypes.bfloat16
    assert np.array_equal(bits(decoded), expected(codes, np.ones((1, 1)), (1, 256), dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_typed_weights_need_no_type_argument(dtype: DType) -> None:
    codes, scales = every_code(2, 256), np.full((2, 1), 0.3, np.float32)
    typed = decode(codes.view(TYPES[dtype]), scales, (1, 256))
    assert np.array_equal(bits(typed), bits(decode(codes, scales, (1, 256), dtype)))


@settings(max_examples=samples(100), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 300)),
    block=st.tuples(st.integers(1, 10), st.integers(1, 310)),
    dtype=st.sampled_from(list(TYPES)),
    scale=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu]),
    seed=st.integers(0, 2**32 - 1),
)
def test_multiplies_by_the_scale_of_the_block(
    shape: tuple[int, int], block: tuple[int, int], dtype: DType, scale: type, seed: int
) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, shape, np.uint8)
    parts = [-(-size // part) for size, part in zip(shape, block, strict=True)]
    scales: Array = np.exp2(random.uniform(-12, 12, parts)).astype(scale)
    decoded = bits(decode(codes, scales, block, dtype))
    assert np.array_equal(decoded, expected(codes, scales, block, dtype))


@settings(max_examples=samples(100), deadline=None)
@given(word=st.integers(0, 2**32 - 1))
def test_rounds_every_product_to_nearest_even(word: int) -> None:
    codes = every_code(1, 256)
    scales = np.array([[word]], np.uint32).view(np.float32)
    decoded = bits(decode(codes, scales, (1, 256)))
    assert np.array_equal(decoded, expected(codes, scales, (1, 256), DType.F8_E4M3))


@pytest.mark.parametrize(
    ("word", "rounded"),
    [
        (0x3F808000, 0x3F80),  # half way, and the lower is even
        (0x3F818000, 0x3F82),  # half way, and the upper is even
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),  # over the largest bfloat16
        (0x00000001, 0x0000),
        (0x80000000, 0x8000),
        (0x7FFFFFFF, NAN),  # rounding its bits would make it zero
        (0xFFFFFFFF, NAN),
    ],
)
def test_rounds_once(word: int, rounded: int) -> None:
    one = np.array([[0x38]], np.uint8)
    scales = np.array([[word]], np.uint32).view(np.float32)
    assert bits(decode(one, scales, (1, 1)))[0, 0] == rounded


@pytest.mark.parametrize(
    ("codes", "dtype", "scale", "expected"),
    [
        ([0x7F, 0xFF, 0x38, 0, 0x80], DType.F8_E4M3, 2, [NAN, NAN, 0x4000, 0, 0x8000]),
        ([0x7C, 0xFC], DType.F8_E5M2, 0, [NAN, NAN]),  # infinity times zero
    ],
)
def test_all_nans_are_the_same(
    codes: list[int], dtype: DType, scale: float, expected: list[int]
) -> None:
    row, scales = np.array([codes], np.uint8), np.full((1, 1), scale, np.float32)
    assert bits(decode(row, scales, (1, len(codes)), dtype)).tolist() == [expected]


def test_large_weights_are_decoded_in_pieces() -> None:
    codes, scales = every_code(700, 513), np.exp2(np.arange(30.0)).reshape(6, 5)
    decoded = bits(decode(codes, scales.astype(np.float32), (128, 128)))
    factors = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:700, :513]
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    plain = bits((values * factors.astype(np.float32)).astype(ml_dtypes.bfloat16)).copy()
    plain[np.isnan(values)] = NAN
    assert np.array_equal(decoded, plain)


def test_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    codes = np.where(every_code(256, 384) % 128 == 127, 0, every_code(256, 384))
    scales = np.random.default_rng(0).uniform(1e-5, 1e-3, (2, 3)).astype(np.float32)
    weight = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().reshape(2, 128, 3, 128)
    plain = (weight * torch.from_numpy(scales)[:, None, :, None]).reshape(256, 384).bfloat16()
    decoded = bits(decode(codes, scales, (128, 128)))
    assert np.array_equal(decoded, plain.view(torch.uint16).numpy())


def test_ignores_scales_of_further_rows() -> None:
    codes, scales = every_code(3, 8), np.arange(1, 9, dtype=np.float32).reshape(8, 1)
    decoded = decode(codes, scales, (2, 8))
    assert np.array_equal(bits(decoded), bits(decode(codes, scales[:2], (2, 8))))


def test_decodes_weights_that_are_not_contiguous() -> None:
    codes, scales = every_code(16, 16), np.ones((1, 1), np.float32)
    decoded = decode(codes[::2, ::2], scales, (8, 8))
    assert np.array_equal(bits(decoded), bits(decode(codes, scales, (16, 16)))[::2, ::2])


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_decodes_an_empty_weight(shape: tuple[int, int]) -> None:
    scales = np.ones((min(shape[0], 1), min(shape[1], 1)), np.float32)
    assert decode(np.zeros(shape, np.uint8), scales, (4, 4)).shape == shape


@pytest.mark.parametrize(
    ("shape", "scales", "block"),
    [
        ((4, 4), (1, 1), (2, 4)),
        ((4, 4), (2, 1), (2, 2)),
        ((4, 4), (2, 3), (2, 2)),
        ((4, 4), (4,), (1, 4)),
        ((16,), (1, 1), (1, 16)),
        ((2, 4, 4), (1, 1), (4, 4)),
        ((4, 4), (1, 1), (0, 4)),
        ((4, 4), (1, 1), (4, -1)),
    ],
)
def test_rejects_scales_that_do_not_fit(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int]
) -> None:
    with pytest.raises(UsageError, match="do not fit"):
        decode(np.zeros(shape, np.uint8), np.ones(scales, np.float32), block)


@pytest.mark.parametrize("first_row", [0, 1, 2, 127, 128, 300])
@pytest.mark.parametrize("height", [1, 2, 128, 1000])
def test_begins_within_a_block(first_row: int, height: int) -> None:
    codes, scales = every_code(700, 64), np.exp2(np.arange(1400.0) % 9).reshape(-1, 2)
    scales = scales[: -(-700 // height)].astype(np.float32)
    expected = bits(decode(codes, scales, (height, 32)))[first_row : first_row + 200]
    found = decode(
        codes[first_row : first_row + 200],
        scales[first_row // height :],
        (height, 32),
        first_row=first_row % height,
    )
    assert np.array_equal(bits(found), expected)


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_rounds_products_to_other_types(name: str) -> None:
    codes, scales = every_code(8, 256), np.full((8, 1), 0.3, np.float32)
    found = decode(codes, scales, (1, 256), result_dtype=name)
    with np.errstate(all="ignore"):
        products = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.3)
    products[np.isnan(products)] = np.nan
    assert found.tobytes() == products.astype(name).tobytes()


FORMS = [
    ("128x128", (300, 200), (3, 2)),
    ("64x32", (256, 256), (4, 8)),
    ("channel", (300, 200), (300, 1)),
    ("channel", (300, 200), (300,)),
    ("tensor", (300, 200), ()),
    ("tensor", (300, 200), (1,)),
    ("128x128", (4, 256, 200), (4, 2, 2)),
    ("128x128", (4, 64, 200), (4, 1, 2)),
    ("channel", (4, 64, 200), (4, 64, 1)),
    ("tensor", (4, 64, 200), (4, 1)),
    ("tensor", (4, 64, 200), (1,)),
]
SCALES = {DType.F32: np.float32, DType.BF16: ml_dtypes.bfloat16, DType.F16: np.float16}
SCALES[DType.F8_E8M0] = ml_dtypes.float8_e8m0fnu


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize("weight_dtype", TYPES)
@pytest.mark.parametrize(("block_size", "shape", "scale_shape"), FORMS)
def test_all_frameworks_give_the_same_bits(
    block_size: str,
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    weight_dtype: DType,
    scale_dtype: DType,
    dtype: FloatName,
) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, shape, np.uint8)
    scales: Array = np.exp2(random.uniform(-9, 9, scale_shape)).astype(SCALES[scale_dtype])
    weight = TensorSpec("w", weight_dtype, shape)
    scale = TensorSpec("w_scale", scale_dtype, scale_shape)
    metadata = {"quant_type": "fp8", "block_size": block_size}
    known = parse_quant_metadata(weight, {".scale": scale}, metadata)
    assert known is not None
    item = known[0]
    assert item.float8 is not None
    block = item.float8.block
    flat_scales = np.atleast_1d(scales).reshape(-1, -(-shape[-1] // block[1]))
    flat = decode(
        codes.reshape(-1, shape[-1]), flat_scales, block, weight_dtype, result_dtype=dtype
    )
    memory = bytearray(codes.tobytes()), bytearray(scales.tobytes())
    for framework, convert in converters():
        values = convert(memoryview(memory[0]), 0, weight)
        factors = convert(memoryview(memory[1]), 0, scale)
        found = dequantizer(framework)(values, factors, None, item, 0, dtype, None)
        assert tuple(found.shape) == shape
        assert as_numpy(framework, found, dtype).tobytes() == flat.tobytes()
        if framework == "torch":  # as on other devices than the CPU
            from blobstore.quantization.dequantize_torch import decode as decode_on_device

            found = decode_on_device(values, factors, item.float8, found.dtype)
            assert as_numpy(framework, found, dtype).tobytes() == flat.tobytes()


def converters() -> Iterator[tuple[str, Any]]:
    yield "numpy", as_array
    if importlib.util.find_spec("torch"):
        from blobstore.safetensors.torch import as_tensor

        yield "torch", as_tensor
    if importlib.util.find_spec("mlx"):
        from blobstore.safetensors.mlx import as_mlx

        yield "mlx", as_mlx


def as_numpy(framework: str, found: Any, dtype: str) -> Array:
    kind = np.dtype(f"u{np.dtype(dtype).itemsize}")
    if framework == "torch":
        import torch

        return np.asarray(found.view(getattr(torch, kind.name)).numpy())
    if framework == "mlx":
        import mlx.core as mx

        return np.array(found.view(getattr(mx, kind.name)))
    return np.asarray(found)


SIDES = st.integers(0, 9)


@pytest.mark.slow
@settings(max_examples=samples(300), deadline=None)
@given(
    shape=st.lists(SIDES, max_size=4).map(tuple),
    scale_shape=st.lists(SIDES, max_size=4).map(tuple),
    block_size=st.sampled_from(["tensor", "channel"])
    | st.builds("{}x{}".format, st.integers(1, 12), st.integers(1, 12)),
    dtypes=st.tuples(st.sampled_from(DType), st.sampled_from(DType)),
)
def test_whatever_metadata_accepts_can_be_decoded(
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...],
    block_size: str,
    dtypes: tuple[DType, DType],
) -> None:
    weight, scale = TensorSpec("w", dtypes[0], shape), TensorSpec("w_scale", dtypes[1], scale_shape)
    metadata = {"quant_type": "fp8", "block_size": block_size}
    try:
        known = parse_quant_metadata(weight, {".scale": scale}, metadata)
    except BlobDamaged:
        return
    assert known is not None
    arrays = [as_array(memoryview(bytes(one.nbytes)), 0, one) for one in (weight, scale)]
    found = dequantizer("numpy")(arrays[0], arrays[1], None, *known, "bfloat16", None)
    assert found.shape == shape


@pytest.mark.parametrize(
    ("code", "shown"),
    [("int8", OTHER), ("float32", OTHER), ("uint8", "F8_E4M3FNUZ")],
)
def test_rejects_other_element_types(code: str, shown: str) -> None:
    with pytest.raises(UsageError, match=f"cannot decode {shown}"):
        decode(np.zeros((1, 4), code), np.ones((1, 1)), (1, 4), DType.F8_E4M3FNUZ)

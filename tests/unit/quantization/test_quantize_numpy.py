"""The reference compared with MLX, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.quantization import quantize_numpy as reference
from blobstore.quantization.formats import FORMATS, QuantFormat
from blobstore.safetensors.numpy import BF16, as_array
from tests.support.pack_quantized import packed_weight

mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")

Array = np.ndarray[Any, Any]
FLOATS = {name: np.dtype(name) for name in ("float32", "float16", "bfloat16")}
WORDS: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (4, 2, 1)}
FORMS = [(item, size) for item in FORMATS.values() for size in item.group_sizes]
every_form = pytest.mark.parametrize(
    ("item", "group_size"), FORMS, ids=[f"{item.name}-{size}" for item, size in FORMS]
)
every_float = pytest.mark.parametrize("dtype", FLOATS)


def bits_of(array: Array) -> Array:
    return np.ascontiguousarray(array).view(WORDS[array.dtype.itemsize])


def to_mlx(array: Array) -> Any:
    if array.dtype == BF16:
        return mx.array(bits_of(array)).view(mx.bfloat16)
    return mx.array(array)


def to_numpy(array: Any) -> Array:
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(BF16)
    return np.array(array)


def assert_same(ours: Array, theirs: Array) -> None:
    """Compare bit for bit, except for the bits of NaNs."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    with np.errstate(invalid="ignore"):
        is_nan = np.isnan(ours.astype(np.float64))
        np.testing.assert_array_equal(is_nan, np.isnan(theirs.astype(np.float64)))
    np.testing.assert_array_equal(bits_of(ours)[~is_nan], bits_of(theirs)[~is_nan])


def compare_quantized(array: Array, item: QuantFormat, group_size: int) -> None:
    with mx.stream(mx.cpu):
        results = mx.quantize(to_mlx(array), group_size=group_size, bits=item.bits, mode=item.mode)
        mx.eval(*results)
    ours = reference.quantize(array, item, group_size)
    assert (ours.bias is None) == (len(results) == 2)
    for mine, theirs in zip(ours, results, strict=False):
        assert mine is not None
        assert_same(mine, to_numpy(theirs))


def finite(bits: Array, dtype: str) -> Array:
    """Return raw bits as numbers, with zero for non-finite ones."""
    array = bits.view(FLOATS[dtype])
    with np.errstate(invalid="ignore"):
        array[~np.isfinite(array.astype(np.float32))] = 0
    return array


def patterns(dtype: str) -> dict[str, Array]:
    """Return rows that are hard to quantize."""
    random = np.random.default_rng(7)
    known = FLOATS[dtype]
    normal = random.normal(size=(8, 256))
    outliers = np.where(random.random((8, 256)) < 0.01, 1000, normal * 0.01)
    top = float(ml_dtypes.finfo(known).max)
    ramp = np.linspace(-6, 6, 2048).reshape(8, 256)
    values: dict[str, Any] = {
        "normal": normal * 0.02,
        "zeros": np.zeros((8, 256)),
        "negative zeros": -np.zeros((8, 256)),
        "constant": np.full((8, 256), 0.3),
        "negative constant": np.full((8, 256), -0.3),
        "denormal": normal * float(ml_dtypes.finfo(known).smallest_subnormal) * 40,
        "small": normal * 1e-7,
        "outliers": outliers,
        "largest": np.where(normal > 0, top, -top),
        "constant largest": np.full((8, 256), top),
        "one largest": np.where(np.arange(256) % 64 == 3, top, normal),
        "halves": np.round(ramp * 4) / 4,
        "one sign": np.abs(normal),
    }
    with np.errstate(over="ignore"):
        return {name: value.astype(known) for name, value in values.items()}


@every_form
@every_float
def test_quantizes_as_mlx_does(dtype: str, item: QuantFormat, group_size: int) -> None:
    compare_quantized(np.concatenate([*patterns(dtype).values()]), item, group_size)


@every_form
@every_float
def test_quantizes_any_finite_bits_as_mlx_does(
    dtype: str, item: QuantFormat, group_size: int
) -> None:
    word = WORDS[FLOATS[dtype].itemsize]
    random = np.random.default_rng(item.bits + group_size)
    bits = random.integers(0, np.iinfo(word).max, (64, 512), dtype=word, endpoint=True)
    compare_quantized(finite(bits, dtype), item, group_size)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_the_scales_of_all_16_bit_values_are_those_of_mlx(name: str, dtype: str) -> None:
    last = 0x7C00 if dtype == "float16" else 0x7F80
    largest = np.arange(last, dtype=np.uint16).view(FLOATS[dtype])
    rows = np.zeros((last, 32), FLOATS[dtype])
    rows[:, 0], rows[:, 1], rows[:, 16] = largest, -largest, largest
    compare_quantized(rows, FORMATS[name], FORMATS[name].group_size)


def test_scales_next_to_powers_of_two_are_those_of_mlx() -> None:
    powers = np.exp2(np.arange(-140, 119.0))
    factors = [limit * (1 + step * 2.0**-23) for limit in (6, 448) for step in (-1, 0, 1, 2)]
    rows = np.zeros((len(powers) * len(factors), 32), np.float32)
    rows[:, 0] = np.outer(powers, factors).reshape(-1)
    for name in ("mxfp4", "mxfp8"):
        compare_quantized(rows, FORMATS[name], 32)


@pytest.mark.slow
@given(
    npst.arrays(np.uint32, (2, 128), elements=st.integers(0, 2**32 - 1)),
    st.sampled_from(FORMS),
    st.sampled_from(list(FLOATS)),
)
def test_quantizes_and_dequantizes_like_mlx(
    bits: Array, form: tuple[QuantFormat, int], dtype: str
) -> None:
    item, group_size = form
    array = finite(bits.copy().view(WORDS[FLOATS[dtype].itemsize]), dtype)
    compare_quantized(array, item, group_size)
    compare_dequantized(reference.quantize(array, item, group_size), item, group_size)


def compare_dequantized(packed: reference.Quantized, item: QuantFormat, group_size: int) -> None:
    arrays = [to_mlx(array) for array in packed if array is not None]
    for name in FLOATS:
        ours = reference.dequantize(*packed, item, group_size, name)
        options = {"group_size": group_size, "bits": item.bits, "mode": item.mode}
        with mx.stream(mx.cpu):
            theirs = mx.dequantize(*arrays, **options, dtype=getattr(mx, name))
            mx.eval(theirs)
        assert_same(ours, to_numpy(theirs))


def any_packed(item: QuantFormat, group_size: int, dtype: str) -> reference.Quantized:
    """Return a weight of random words and random finite scales."""
    random = np.random.default_rng(group_size)
    words = random.integers(0, 2**32, (16, item.words(512)), np.uint32)
    shape = (16, 512 // group_size)
    if not item.has_float_scales:
        return reference.Quantized(words, random.integers(0, 256, shape, np.uint8), None)
    word = WORDS[FLOATS[dtype].itemsize]
    scale, bias = (random.integers(0, np.iinfo(word).max, shape, dtype=word) for _ in range(2))
    biases = finite(bias, dtype) if item.has_bias else None
    return reference.Quantized(words, finite(scale, dtype), biases)


@every_form
@every_float
def test_dequantizes_any_words_as_mlx_does(dtype: str, item: QuantFormat, group_size: int) -> None:
    compare_dequantized(any_packed(item, group_size, dtype), item, group_size)


@pytest.mark.parametrize("name", FLOATS)
def test_a_global_scale_multiplies_the_scales(name: str) -> None:
    item = FORMATS["nvfp4"]
    words, scale, _ = any_packed(item, 16, name)
    ours = reference.dequantize(words, scale, None, item, 16, name, global_scale=0.37)
    plain = reference.dequantize(words, np.full_like(scale, 56), None, item, 16, "float32")
    factors = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.37)
    assert_same(ours, (plain * np.repeat(factors, 16, axis=1)).astype(FLOATS[name]))


@every_form
def test_stacks_are_quantized_like_their_rows(item: QuantFormat, group_size: int) -> None:
    rows = patterns("bfloat16")["normal"]
    stack = reference.quantize(rows.reshape(2, 4, 256), item, group_size)
    plain = reference.quantize(rows, item, group_size)
    assert stack.weight.shape == (2, 4, item.words(256))
    assert stack.scale.shape == (2, 4, 256 // group_size)
    for one, other in zip(stack, plain, strict=True):
        if one is not None and other is not None:
            assert_same(one.reshape(other.shape), other)
    again = reference.dequantize(*stack, item, group_size, "bfloat16")
    assert again.shape == (2, 4, 256)


@every_form
def test_quantizes_an_empty_array(item: QuantFormat, group_size: int) -> None:
    packed = reference.quantize(np.empty((0, 128), np.float32), item, group_size)
    assert packed.weight.shape == (0, item.words(128))
    assert reference.dequantize(*packed, item, group_size, "float32").shape == (0, 128)


def test_reads_unaligned_and_read_only_arrays() -> None:
    item = FORMATS["int4"]
    packed = reference.quantize(patterns("float32")["normal"], item, 32)
    shifted = [
        np.frombuffer(b"x" + array.tobytes(), array.dtype, array.size, 1).reshape(array.shape)
        for array in packed
        if array is not None
    ]
    assert not any(array.flags.aligned or array.flags.writeable for array in shifted)
    ours = reference.dequantize(shifted[0], shifted[1], shifted[2], item, 32, "float32")
    assert_same(ours, reference.dequantize(*packed, item, 32, "float32"))


@every_float
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_finds_the_first_non_finite_value(value: float, dtype: str) -> None:
    array = np.zeros((3, 64), FLOATS[dtype])
    assert reference.first_nonfinite(array) is None
    array[:] = ml_dtypes.finfo(FLOATS[dtype]).max
    assert reference.first_nonfinite(array) is None
    array[1, 5] = array[2, 0] = value
    assert reference.first_nonfinite(array) == 69


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [8, 32, 64])
@pytest.mark.parametrize("scale", ["BF16", "F16", "F32"])
def test_symmetric_integers_have_the_values_of_each_element(
    bits: int, group_size: int, scale: str
) -> None:
    packed = packed_weight("m", bits=bits, group=group_size, scale=scale)
    code, shape, data = packed.tensors["m.weight_scale"]
    words = np.frombuffer(packed.tensors["m.weight_packed"][2], "<u4").reshape(6, -1)
    scales = as_array(memoryview(data), 0, TensorSpec("", DTYPES[code], tuple(shape)))
    item = FORMATS[f"int{bits}-sym"]
    for name, kind in FLOATS.items():
        found = reference.dequantize(words, scales, None, item, group_size, name)
        assert_same(found, packed.values.astype(kind))


SYMMETRIC = pytest.mark.parametrize(
    ("item", "group_size"),
    [(FORMATS[name], size) for name in ("int4-sym", "int8-sym") for size in (8, 32, 512)],
    ids=lambda value: value if isinstance(value, int) else value.name,
)

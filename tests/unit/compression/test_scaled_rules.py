from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from blobstore.compression.base import BaseBlob, Prediction
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.quant_rule import MAX_CODED, Rule
from blobstore.compression.scaled_rules import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    BIASES,
    CODES,
    MAX_SCALES,
    SCALES,
    AffineRule,
    Float8Rule,
    rule_of,
)
from blobstore.compression.spans import Span
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.quantize_numpy import quantize
from tests.readers.scaled import read_affine, read_float8
from tests.support.cold import cold, decoded, weights
from tests.support.ladders import Array, source
from tests.support.processor import where_subnormal_numbers_are_flushed
from tests.support.scaled import block_scales, float8_codes, typed

SOURCES = (DType.F32, DType.F16, DType.BF16)
ROWS, COLUMNS = 24, 512
BLOCKS = [(0, 0), (1, 0), (0, 1), (5, 0), (4, 32), (7, 30), (128, 128)]


def with_extremes(dtype: DType, count: int = ROWS * COLUMNS) -> bytes:
    """Return weights with groups of subnormal, of large and of infinite numbers, of NaN, and of zeros."""
    data = bytearray(weights(dtype, count))
    width = dtype.bits // 8
    ones = (1 << dtype.bits) - 1
    for place, bits in enumerate((0, 1, *(ones >> shift & ~15 for shift in range(10)), ones)):
        at = (count // 24 * place + 3) * width
        data[at : at + width] = bits.to_bytes(width, "little")
    data[len(data) // 2 : len(data) * 3 // 4] = bytes(len(data) // 4)
    negative = slice(len(data) * 5 // 8 + width - 1, len(data) * 3 // 4, 3 * width)
    data[negative] = b"\x80" * len(data[negative])
    return bytes(data)


def scaled(rule: Float8Rule, size: int, seed: int = 0) -> Float8Rule:
    """Return a rule with scales, some of them unusual."""
    scales = np.random.default_rng(seed).uniform(1e-4, 2e-4, rule.scales_size(size) // 4)
    scales = scales.astype(np.float32)
    if len(scales) > 9:
        scales[:9] = 0, -0.0, 1e-40, -1e-35, np.inf, -np.inf, np.nan, -1e-4, 1e-8
    return rule.with_scales(scales.tobytes(), size)


def predicted(rule: Rule, data: bytes, offset: int, size: int, begin: int = 8) -> bytes:
    prediction = Prediction(BaseBlob.hot(bytes(begin) + data), begin, None, DType.U8, rule)
    return prediction.read(offset, size).tobytes()


def size_of(rule: Rule) -> int:
    return ROWS * COLUMNS // rule.kind.weights * rule.kind.size


@pytest.mark.parametrize("dtype", SOURCES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("tensor", [CODES, SCALES, BIASES])
@pytest.mark.parametrize(
    ("cast", "bits", "group_size"),
    [(DType.F32, 4, 64), (DType.F16, 8, 32), (DType.BF16, 3, 128)],
)
def test_a_second_reader_computes_the_same_tensors_of_mlx(
    dtype: DType, cast: DType, tensor: int, bits: int, group_size: int
) -> None:
    rule = AffineRule(dtype, cast, tensor, bits, group_size)
    data = with_extremes(dtype)
    expected = read_affine(rule.pack(), data, size_of(rule))
    assert predicted(rule, data, 0, size_of(rule)) == expected


@pytest.mark.parametrize(
    ("dtype", "quotient"),
    [(DType.F32, DType.F32), (DType.F16, DType.BF16), (DType.BF16, DType.F16)],
)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_second_reader_computes_the_same_8_bit_floats(
    dtype: DType, quotient: DType, block: tuple[int, int]
) -> None:
    size = 12 * 100
    data = with_extremes(dtype, size)
    rule = scaled(Float8Rule(dtype, 100, block, quotient), size)
    assert rule.scales is not None
    expected = read_float8(rule.pack(), rule.scales.tobytes(), data, size)
    assert predicted(rule, data, 0, size) == expected


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("group_size", AFFINE_GROUPS)
@pytest.mark.parametrize("dtype", SOURCES, ids=lambda dtype: dtype.value)
def test_originalof_mlx_follow_from_their_weights(bits: int, group_size: int, dtype: DType) -> None:
    """The quantization of blobs has the bits of MLX."""
    matrix = source(1, dtype)
    found = quantize(typed(matrix, dtype), FORMATS[f"int{bits}"], group_size)
    assert found.bias is not None
    for tensor, item in enumerate((found.weight, found.scale, found.bias)):
        rule = AffineRule(dtype, dtype, tensor, bits, group_size)
        assert predicted(rule, matrix.tobytes(), 0, item.nbytes) == item.tobytes()


@pytest.mark.parametrize("quotient", SOURCES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("block", [(1, COLUMNS), (16, 128), (96, COLUMNS), (10, 100)])
def test_8_bit_floats_follow_from_their_originaland_scales(
    quotient: DType, block: tuple[int, int]
) -> None:
    matrix = source(1)
    scales = block_scales(matrix, block)
    rule = Float8Rule(DType.BF16, COLUMNS, block, quotient).with_scales(
        scales.tobytes(), matrix.size
    )
    codes = float8_codes(matrix, scales, block, quotient)
    assert predicted(rule, matrix.tobytes(), 0, codes.size) == codes.tobytes()


RULES: list[Rule] = [
    AffineRule(DType.BF16, DType.F16, CODES, 3, 32),
    AffineRule(DType.F32, DType.F32, BIASES, 4, 64),
    *(scaled(Float8Rule(DType.F16, COLUMNS, block), ROWS * COLUMNS) for block in BLOCKS),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind.name}-{rule.pack().hex()}")
def test_any_range_of_a_part_is_predicted(rule: Rule) -> None:
    data = weights(rule.dtype, ROWS * COLUMNS)
    whole = predicted(rule, data, 0, size_of(rule))
    unit = rule.kind.size
    for first, last in ((0, 1), (5, 17), (150, 180), (3, len(whole) // unit)):
        begin, end = first * unit, min(last * unit, len(whole))
        assert predicted(rule, data, begin, end - begin) == whole[begin:end]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind.name}-{rule.pack().hex()}")
def test_rules_come_back_from_their_records(rule: Rule) -> None:
    assert rule_of(rule.pack()) == rule


@pytest.mark.parametrize(
    "fields",
    [
        (3, 3, 0, 0, 64, 4),
        (0, 3, 2, 0, 64, 4),
        (0, 3, 0, 8, 64, 4),
        (0, 3, 0, 0, 63, 4),
        (0, 3, 0, 0, 64, 7),
        (1, 4, 0, 0, 512, 0),
        (0, 4, 2, 0, 512, 0),
        (0, 4, 0, 3, 512, 0),
        (0, 5, 0, 0, 64, 4),
    ],
)
def test_unknown_rules_are_refused(fields: tuple[int, ...]) -> None:
    with pytest.raises(ColdDamaged, match="newer program may know"):
        rule_of(struct.pack("<BBBBII", *fields))


def test_the_base_is_read_once_for_codes_scales_and_biases() -> None:
    known: dict[tuple[object, ...], tuple[Array, Array]] = {}
    data, reads = with_extremes(DType.BF16), []

    def read(at: int, size: int) -> Array:
        reads.append(at)
        return np.frombuffer(data[at : at + size], np.uint8)

    for bits in (4, 8):
        for tensor in (CODES, SCALES, BIASES):
            rule = AffineRule(DType.BF16, DType.F16, tensor, bits, 64, known=known)
            for first, last in ((0, 30), (30, ROWS * COLUMNS // 64)):
                unit = rule.kind.size
                found = rule.predict(read, first * unit, (last - first) * unit).tobytes()
                assert found == predicted(rule, data, first * unit, len(found))
    assert reads == 2 * [0, 30 * 128]


def test_nothing_is_kept_of_a_base_that_was_damaged() -> None:
    original = bytearray(weights(DType.BF16, ROWS * COLUMNS))
    rules = [AffineRule(DType.BF16, DType.BF16, tensor, 4, 64) for tensor in (CODES, SCALES)]
    parts = [predicted(rule, bytes(original), 0, size_of(rule)) for rule in rules]
    spans = [
        Span(len(part), DType.U8, base_begin=0, rule=rule)
        for part, rule in zip(parts, rules, strict=True)
    ]
    blob = ColdBlobDecoder(cold(b"".join(parts), spans=spans, base=BaseBlob.hot(bytes(original))))
    blob.give_base(BaseBlob.hot(original))
    original[1] ^= 0x7F  # an exponent
    with pytest.raises(ColdDamaged):
        decoded(blob)
    original[1] ^= 0x7F
    scales = bytearray(len(parts[1]))
    blob.read_into(scales, len(parts[0]))
    assert scales == parts[1]


def test_only_whole_groups_and_rows_are_possible() -> None:
    rule = AffineRule(DType.F32, DType.F16, SCALES, 4, 64)
    assert rule.is_possible(6, MAX_CODED // 64 * 2)
    assert not rule.is_possible(5)
    assert not rule.is_possible(6, MAX_CODED // 64 * 2 + 2)
    floats = Float8Rule(DType.F32, 100, (1, 1))
    assert floats.is_possible(1000)
    assert not floats.is_possible(1001)
    assert not floats.is_possible(100 * (MAX_SCALES // 100 + 1))
    assert not replace(floats, columns=0).is_possible(1000)


def test_8_bit_floats_need_their_scales() -> None:
    with pytest.raises(ColdDamaged, match="without their scales"):
        predicted(Float8Rule(DType.F32, 128, (0, 0)), bytes(512), 0, 128)


def subnormal_weights() -> Array:
    rows = np.frombuffer(weights(DType.F32, ROWS * COLUMNS), "<f4").reshape(ROWS, COLUMNS).copy()
    signs = np.copysign(np.float32(1), rows)
    rows[:4] = np.float32(1e-40) * signs[:4]
    rows[4:8] = np.abs(rows[4:8])
    rows[4:10, ::3] = np.float32(1e-40) * signs[4:10, ::3]
    return rows


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind.name}-{rule.pack().hex()}")
def test_blobs_are_the_same_where_subnormal_numbers_are_flushed(
    rule: AffineRule | Float8Rule,
) -> None:
    rule = replace(rule, dtype=DType.F32)
    base = subnormal_weights().tobytes()
    data = predicted(rule, base, 0, size_of(rule))
    span = Span(len(data), DType.U8, base_begin=0, rule=rule)

    def encoded() -> bytes:
        return cold(data, spans=[span], base=BaseBlob.hot(base))

    def read() -> bytes:
        blob = ColdBlobDecoder(stored)
        blob.give_base(BaseBlob.hot(base))
        return decoded(blob)

    stored = where_subnormal_numbers_are_flushed(encoded)
    kept = rule.scales_size(len(data)) if isinstance(rule, Float8Rule) else 0
    assert len(stored) < 400 + kept
    assert stored == encoded()
    assert read() == data
    assert where_subnormal_numbers_are_flushed(read) == data

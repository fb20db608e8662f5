from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blobstore.compression.base import BaseBlob, Prediction
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.quant_rule import MAX_HEAD, QuantRule
from blobstore.compression.scaled_rules import rule_of
from blobstore.compression.spans import Span
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged
from blobstore.gguf.fill_codes import CODED, fill_codes
from blobstore.gguf.quantize import QUANTIZED, quantize
from tests.readers.quantized import block_weights, read_blocks
from tests.support.cold import cold, decoded, noise, weights
from tests.support.ladders import coded_blocks
from tests.support.processor import where_subnormal_numbers_are_flushed

Array = np.ndarray[Any, Any]
SOURCES = {DType.F32: "<f4", DType.F16: "<f2", DType.BF16: "<u2"}
NAMES = sorted(QUANTIZED)
HEADS, HEAD, COLUMNS = 3, 6, 512
COUNT = HEADS * HEAD * COLUMNS


def predicted(rule: QuantRule, data: bytes, begin: int, offset: int, size: int) -> bytes:
    prediction = Prediction(BaseBlob.hot(bytes(begin) + data), begin, None, DType.U8, rule)
    return prediction.read(offset, size).tobytes()


def size_of(rule: QuantRule) -> int:
    return COUNT // rule.kind.weights * rule.kind.size


@pytest.mark.parametrize("dtype", SOURCES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("name", NAMES)
def test_any_blocks_of_a_part_are_predicted(name: str, dtype: DType) -> None:
    rule, data = QuantRule(name, dtype), weights(dtype, COUNT)
    whole = quantize(name, np.frombuffer(data, SOURCES[dtype])).tobytes()
    assert predicted(rule, data, 24, 0, size_of(rule)) == whole
    block = rule.kind.size
    for first, last in ((0, 1), (5, 17), (11, 36)):
        part = predicted(rule, data, 24, first * block, (last - first) * block)
        assert part == whole[first * block : last * block]


@pytest.mark.parametrize("name", ["Q4_0", "TQ1_0"])
def test_rows_of_heads_are_interleaved(name: str) -> None:
    rule, data = QuantRule(name, DType.F32, COLUMNS, HEAD), weights(DType.F32, COUNT)
    rows = np.frombuffer(data, "<f4").reshape(HEADS, 2, HEAD // 2, COLUMNS)
    whole = quantize(name, np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)).tobytes()
    assert predicted(rule, data, 8, 0, len(whole)) == whole
    block = rule.kind.size
    for first in range(0, len(whole) // block, 7):
        part = whole[first * block : (first + 9) * block]
        assert predicted(rule, data, 8, first * block, len(part)) == part


@pytest.mark.parametrize("dtype", SOURCES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("head", [0, HEAD])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_reader_computes_the_same_blocks(name: str, head: int, dtype: DType) -> None:
    rule = QuantRule(name, dtype, COLUMNS if head else 0, head)
    data = bytearray(weights(dtype, COUNT))
    width = dtype.bits // 8
    ones = (1 << dtype.bits) - 1
    # In one block each: the least number, the largest ones, infinities and NaN; in half of them, zeros.
    for place, bits in enumerate((0, 1, *(ones >> shift & ~15 for shift in range(10)), ones)):
        data[1024 * place : 1024 * place + width] = bits.to_bytes(width, "little")
    data[len(data) // 2 :] = bytes(len(data) // 2)
    negative = slice(len(data) * 3 // 4 + width - 1, None, 3 * width)
    data[negative] = b"\x80" * len(data[negative])
    expected = read_blocks(rule.pack(), bytes(data), size_of(rule))
    assert predicted(rule, bytes(data), 0, 0, size_of(rule)) == expected


@pytest.mark.parametrize(
    "rule", [QuantRule("Q4_0", DType.F16), QuantRule("MXFP4", DType.BF16, 64, 8)]
)
def test_rules_come_back_from_their_records(rule: QuantRule) -> None:
    assert rule_of(rule.pack()) == rule


@pytest.mark.parametrize(
    "fields",
    [
        (12, 1, 0, 0),  # has scales that must be kept
        (250, 1, 0, 0),
        (8, 2, 0, 0),
        (12, 2, 2, 0),
        (12, 2, 0, 2),
        (2, 1, 0, 1),
        (2, 1, 0, 8),
        (2, 0, 0, 0),
        (2, 1, 2, 0),
        (2, 1, 30, 1),
        (2, 5, 0, 0),
    ],
)
def test_unknown_rules_are_refused(fields: tuple[int, ...]) -> None:
    with pytest.raises(ColdDamaged, match="a newer program may know it"):
        rule_of(struct.pack("<BBBBII", *fields, 0, 0))


def test_only_whole_blocks_and_heads_are_possible() -> None:
    rule = QuantRule("Q4_0", DType.BF16)
    assert rule.is_possible(36)
    assert not rule.is_possible(35)
    assert not replace(rule, columns=32).is_possible(36)
    heads = replace(rule, columns=32, head=4)
    assert heads.is_possible(4 * 18)
    for size, columns, head in (
        (6 * 18, 32, 4),
        (3 * 18, 32, 3),
        (4 * 18, 0, 4),
        (18 * (MAX_HEAD // 16), MAX_HEAD // 2, 4),
    ):
        assert not replace(rule, columns=columns, head=head).is_possible(size)
    long = replace(rule, columns=1 << 11, head=1 << 11)
    size = 18 << 17
    assert long.is_possible(size, 18 << 13)
    assert not long.is_possible(size, (18 << 13) - 18)


def with_subnormal_weights() -> Array:
    """Return rows of which some are dead, and some are not below 0 but for subnormal numbers."""
    rows = np.frombuffer(weights(DType.F32, 64 * 256), "<f4").reshape(64, 256).copy()
    signs = np.copysign(np.float32(1), rows)
    rows[:10] = np.float32(1e-40) * signs[:10]
    rows[10:14] = np.float32(-1e-40)
    rows[14:40] = np.abs(rows[14:40])
    rows[20:30, ::3] = np.float32(1e-40) * signs[20:30, ::3]
    rows[25:30, ::5] = 0 * signs[25:30, ::5]
    return rows


def parts_with_subnormal_weights(rule: QuantRule, rows: Array) -> bytes:
    """Return the blocks of :func:`with_subnormal_weights`. Scales that are kept are also 0, and any bytes."""
    if not rule.keeps_scales:
        return quantize(rule.type_name, rows).tobytes()
    blocks = coded_blocks(rule.type_name, rows)
    any_bytes = np.frombuffer(noise(blocks.size), np.uint8).reshape(blocks.shape)
    blocks[5:10], blocks[27:50] = any_bytes[5:10], any_bytes[27:50]
    fill_codes(rule.type_name, rows, blocks.reshape(-1, rule.kind.size))
    return blocks.tobytes()


RULES = [QuantRule(name, DType.F32) for name in NAMES]
RULES += [QuantRule(name, DType.F32, keeps_scales=True) for name in sorted(CODED)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.type_name}-{rule.keeps_scales}")
def test_blobs_are_the_same_where_subnormal_numbers_are_flushed(rule: QuantRule) -> None:
    rows = with_subnormal_weights()
    base, data = rows.tobytes(), parts_with_subnormal_weights(rule, rows)
    spans = [Span(len(data), DType.U8, base_begin=0, rule=rule, blocks=rule.kind)]

    def encoded() -> bytes:
        return cold(data, spans=spans, base=BaseBlob.hot(base))

    def read() -> bytes:
        blob = ColdBlobDecoder(stored)
        blob.give_base(BaseBlob.hot(base))
        return decoded(blob)

    stored = where_subnormal_numbers_are_flushed(encoded)
    assert ColdBlobDecoder(stored).table.base is not None
    assert stored == encoded()
    assert read() == data
    assert where_subnormal_numbers_are_flushed(read) == data


def same_bits(found: Array, expected: list[float]) -> bool:
    """Return whether float32 are equal; all NaN are."""
    wanted = np.array(expected, np.float32)
    return np.array_equal(found.astype(np.float32), wanted, equal_nan=True)


@pytest.mark.parametrize("cast", [DType.F32, DType.F16, DType.U8], ids=lambda item: item.value)
@pytest.mark.parametrize("dtype", [DType.F32, DType.U8], ids=lambda item: item.value)
def test_weights_may_be_blocks_of_q8_0_or_have_been_such(dtype: DType, cast: DType) -> None:
    rule = QuantRule("Q6_K", dtype, keeps_scales=True, cast=cast)
    data = noise(rule.source_size(size_of(rule)))  # with scales that are infinite, and NaN
    if dtype is DType.F32:
        data = weights(DType.F32, COUNT)
    found = rule.predict(lambda at, count: np.frombuffer(data[at : at + count], np.uint8), 0, 840)
    with np.errstate(over="ignore"):
        assert same_bits(found, block_weights(rule.pack(), data, 1024))
    assert rule_of(rule.pack()) == rule
    assert not replace(rule, columns=256, head=4).is_possible(840) or dtype is DType.F32


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_q8_0_are_quantized_as_a_second_reader_does(name: str) -> None:
    rule = QuantRule(name, DType.U8)
    data = quantize("Q8_0", np.frombuffer(weights(DType.F32, COUNT), "<f4")).tobytes()
    expected = read_blocks(rule.pack(), data, size_of(rule))
    assert predicted(rule, data, 34, 0, size_of(rule)) == expected
    block = rule.kind.size
    assert predicted(rule, data, 34, 5 * block, 7 * block) == expected[5 * block : 12 * block]

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from blobstore.compression.delta.codec import (
    FAST,
    SMALL,
    DeltaSettings,
    as_elements,
    decode_chunk,
    encode_chunk,
)
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged
from tests.readers.deltas import read_differences

Array = np.ndarray[Any, Any]
_VECTORS = Path(__file__).parents[3] / "vectors" / "deltas.json"
_FLOATS = [DType.BF16, DType.F16, DType.F32, DType.F8_E4M3, DType.F8_E5M2]
_FLOATS += [DType.F8_E4M3FNUZ, DType.F8_E5M2FNUZ]
_OTHERS = [DType.U8, DType.I8, DType.BOOL, DType.I16, DType.U32, DType.F64, DType.I64, DType.C64]


def elements_of(dtype: DType, count: int, seed: int = 0) -> Array:
    """Return elements of every pattern of bits."""
    width = dtype.bits // 8
    return as_elements(np.random.default_rng(seed).bytes(count * width), dtype)


def fine_tuned(count: int, update: float, seed: int = 0) -> tuple[Array, Array]:
    """Return bf16 weights, and what an update of one size makes of them."""
    random = np.random.default_rng(seed)
    base = random.standard_normal(count, np.float32) * np.float32(0.05)
    tensor = base + random.standard_normal(count, np.float32) * np.float32(update)
    return bf16(base), bf16(tensor)


def bf16(values: Array) -> Array:
    wide = values.view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


def round_trip(tensor: Array, base: Array, dtype: DType, settings: DeltaSettings = FAST) -> bytes:
    stored = encode_chunk(tensor, base, dtype, settings)
    out = np.empty_like(base)
    decode_chunk(memoryview(stored), base, dtype, out)
    assert out.tobytes() == tensor.tobytes()
    return stored


@pytest.mark.slow
@pytest.mark.parametrize("settings", [FAST, SMALL], ids=["fast", "small"])
@pytest.mark.parametrize("dtype", [*_FLOATS, *_OTHERS])
def test_any_bits_survive_a_round_trip_with_any_base(dtype: DType, settings: DeltaSettings) -> None:
    for count in (0, 1, 2, 3, 255, 2047, 2048, 2049, 5000, 70_001):
        round_trip(elements_of(dtype, count, 1), elements_of(dtype, count, 2), dtype, settings)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_gives_back_every_16_bit_float_from_every_exponent(dtype: DType) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    for seed in range(3):
        shuffled = np.random.default_rng(seed).permutation(every)
        round_trip(every, shuffled, dtype)
        round_trip(shuffled, every, dtype)


@pytest.mark.parametrize("dtype", [DType.F8_E4M3, DType.F8_E5M2])
def test_gives_back_every_8_bit_float_from_every_other(dtype: DType) -> None:
    base, tensor = (side.ravel() for side in np.indices((256, 256), np.uint8))
    round_trip(tensor, base, dtype)


def test_non_finite_values_survive_a_round_trip() -> None:
    odd = np.array(
        [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 1, 0x80000001],
        np.uint32,
    )
    base, tensor = (side.ravel() for side in np.meshgrid(np.tile(odd, 40), np.tile(odd, 40)))
    round_trip(tensor, base, DType.F32)


@pytest.mark.slow
@given(st.data())
def test_gives_back_steps_of_any_size(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(_FLOATS + _OTHERS))
    count = data.draw(st.integers(0, 6000))
    seed = data.draw(st.integers(0, 99))
    base = elements_of(dtype, count, seed)
    spread = data.draw(st.sampled_from([0, 1, 2, 8, 100, 200, 40_000]))
    steps = np.random.default_rng(seed).integers(-spread, spread + 1, count).astype(base.dtype)
    round_trip(base + steps, base, dtype, data.draw(st.sampled_from([FAST, SMALL])))


def test_may_decode_where_the_base_is() -> None:
    base, tensor = fine_tuned(9999, 1e-3)
    stored = encode_chunk(tensor, base, DType.BF16, FAST)
    decode_chunk(memoryview(stored), base, DType.BF16, base)
    assert np.array_equal(base, tensor)


def test_what_is_encoded_stays_when_the_thread_encodes_again() -> None:
    base, tensor = fine_tuned(9999, 1e-3)
    first = encode_chunk(tensor, base, DType.BF16, FAST)
    again = bytes(bytearray(first))
    encode_chunk(base, tensor, DType.BF16, FAST)
    assert first == again


def test_equal_chunks_take_a_few_bytes() -> None:
    base, _ = fine_tuned(100_000, 0)
    assert len(round_trip(base, base, DType.BF16)) < 16


@pytest.mark.parametrize(("update", "part"), [(2e-5, 0.66), (2e-4, 0.72), (1e-3, 0.82)])
def test_is_much_smaller_than_the_exclusive_or(update: float, part: float) -> None:
    base, tensor = fine_tuned(1 << 17, update)
    mixed = base ^ tensor
    compressor = zstandard.ZstdCompressor(level=3)
    planes = ((mixed >> 7) & 0xFF, (mixed & 0x7F) | (mixed >> 8 & 0x80))
    theirs = sum(len(compressor.compress(plane.astype(np.uint8).tobytes())) for plane in planes)
    assert len(round_trip(tensor, base, DType.BF16, SMALL)) < part * theirs


def test_classes_are_used_only_if_they_save_enough() -> None:
    few, many = (
        [
            len(round_trip(*fine_tuned(1 << 16, update)[::-1], DType.BF16, settings))
            for settings in (FAST, SMALL)
        ]
        for update in (1e-4, 1e-2)
    )
    assert few[0] < 1.1 * few[1]
    assert many[0] > 1.1 * many[1]


@pytest.mark.parametrize("count", [1 << 16, (1 << 16) + 63, 2048, 4095])
def test_unchanged_rows_take_no_space(count: int) -> None:
    base, tensor = fine_tuned(count, 1e-3)
    touched = np.zeros(count, bool)
    touched[: count // 10] = True
    whole = len(round_trip(tensor, base, DType.BF16, SMALL))
    few = len(round_trip(np.where(touched, tensor, base), base, DType.BF16, SMALL))
    assert few < whole / 9 + 100


@pytest.mark.slow
def test_scattered_equal_blocks_are_left_out() -> None:
    base, tensor = fine_tuned(1 << 16, 1e-3)
    touched = np.repeat(np.random.default_rng(0).random(1 << 10) < 0.3, 64)
    mixed = np.where(touched, tensor, base)
    stored = round_trip(mixed, base, DType.BF16)
    for size in range(0, len(stored), 7):
        with pytest.raises(ColdDamaged):
            decode_chunk(memoryview(stored)[:size], base, DType.BF16, base.copy())
    decode_chunk(memoryview(stored), base, DType.BF16, base)
    assert np.array_equal(base, mixed)


def sparse(
    count: int, share: float, dtype: DType = DType.BF16, seed: int = 0
) -> tuple[Array, Array]:
    """Return elements, and the same after steps of a few units of a share of them."""
    random = np.random.default_rng(seed)
    base = fine_tuned(count, 0, seed)[0] if dtype is DType.BF16 else elements_of(dtype, count, seed)
    steps = random.geometric(0.8, count) * random.choice([-1, 1], count)
    return base, np.where(random.random(count) < share, base + steps.astype(base.dtype), base)


def bound(base: Array, tensor: Array) -> float:
    """Return the bytes that it takes to say which elements differ, and how."""
    moved = (tensor - base)[tensor != base]
    counts = [np.array([len(moved), len(base) - len(moved)]), np.unique_counts(moved).counts]
    return sum(float((count * np.log2(count.sum() / count)).sum()) for count in counts) / 8


@pytest.mark.parametrize("settings", [FAST, SMALL], ids=["fast", "small"])
@pytest.mark.parametrize("share", [0.001, 0.005, 0.02, 0.05, 0.12])
def test_sparse_steps_take_little_more_than_their_entropy(
    share: float, settings: DeltaSettings
) -> None:
    base, tensor = sparse(1 << 18, share)
    stored = round_trip(tensor, base, DType.BF16, settings)
    assert len(stored) < 1.1 * bound(base, tensor) + 100


def test_sparse_steps_of_small_weights_take_less_in_classes() -> None:
    base, tensor = fine_tuned(1 << 18, 1.5e-6)
    assert 0.001 < np.count_nonzero(base != tensor) / len(base) < 0.05
    fast, small = (
        len(round_trip(tensor, base, DType.BF16, settings)) for settings in (FAST, SMALL)
    )
    assert small < 0.9 * fast


@pytest.mark.slow
@pytest.mark.parametrize("settings", [FAST, SMALL], ids=["fast", "small"])
@pytest.mark.parametrize("dtype", [*_FLOATS, *_OTHERS])
def test_sparse_steps_of_any_type_survive_a_round_trip(
    dtype: DType, settings: DeltaSettings
) -> None:
    for count in (1, 7, 63, 64, 1000, 1023, 5001, 70_001):
        for share in (0.001, 0.05, 0.19):
            base, tensor = sparse(count, share, dtype, count)
            round_trip(tensor, base, dtype, settings)
            other = elements_of(dtype, count, 7)
            round_trip(np.where(tensor == base, base, other), base, dtype, settings)


@pytest.mark.slow
@given(st.data())
def test_another_reader_decodes_any_sparse_steps(data: st.DataObject) -> None:
    dtype, layout = data.draw(
        st.sampled_from([(DType.U8, 32), (DType.BF16, 37), (DType.F32, 39), (DType.U64, 40)])
    )
    count = data.draw(st.integers(1, 3000))
    share = data.draw(st.sampled_from([0.001, 0.01, 0.1, 0.2]))
    base, tensor = sparse(count, share, dtype, data.draw(st.integers(0, 99)))
    if data.draw(st.booleans()):
        tensor = np.where(tensor == base, base, tensor * 77)
    stored = round_trip(tensor, base, dtype, data.draw(st.sampled_from([FAST, SMALL])))
    assert read_differences(stored, base.tobytes(), layout) == tensor.tobytes()


@pytest.mark.parametrize("place", [0, 1, 62, 63, 64, 2499, 4998, 4999])
@pytest.mark.parametrize("settings", [FAST, SMALL], ids=["fast", "small"])
def test_one_changed_element_takes_a_few_bytes(place: int, settings: DeltaSettings) -> None:
    base, _ = fine_tuned(5000, 0)
    tensor = base.copy()
    tensor[place] ^= 0x7FFF
    assert len(round_trip(tensor, base, DType.BF16, settings)) < 50


@pytest.mark.slow
@pytest.mark.parametrize("settings", [FAST, SMALL], ids=["fast", "small"])
def test_flipped_bits_of_listed_differences_raise_no_other_error(settings: DeltaSettings) -> None:
    base, tensor = sparse(3001, 0.05)
    tensor[7] ^= 0x7FFF
    stored = bytearray(encode_chunk(tensor, base, DType.BF16, settings))
    refused = 0
    for place in range(len(stored) * 8):
        stored[place >> 3] ^= 1 << (place & 7)
        try:
            decode_chunk(memoryview(stored), base, DType.BF16, np.empty_like(base))
        except ColdDamaged:
            refused += 1
        stored[place >> 3] ^= 1 << (place & 7)
    assert refused > len(stored)
    for size in range(len(stored)):
        with pytest.raises(ColdDamaged):
            decode_chunk(memoryview(stored)[:size], base, DType.BF16, np.empty_like(base))


def test_changed_rows_are_not_listed() -> None:
    base, tensor = fine_tuned(1 << 16, 1e-3)
    rows = np.where(np.arange(1 << 16) % 4096 < 400, tensor, base)
    stored = round_trip(rows, base, DType.BF16)
    assert stored[1] == 0  # blocks left out


def test_a_few_large_steps_cost_little() -> None:
    base, tensor = fine_tuned(1 << 16, 2e-4)
    plain = len(round_trip(tensor, base, DType.BF16, SMALL))
    tensor[::5000] ^= 0x7FFF
    assert len(round_trip(tensor, base, DType.BF16, SMALL)) < plain + 200


def test_32_bit_floats_gain_by_their_exponents() -> None:
    random = np.random.default_rng(0)
    base = random.standard_normal(1 << 15, np.float32)
    tensor = base + random.standard_normal(1 << 15, np.float32) * np.float32(1e-4)
    stored = round_trip(tensor.view(np.uint32), base.view(np.uint32), DType.F32, SMALL)
    as_integers = round_trip(tensor.view(np.uint32), base.view(np.uint32), DType.U32)
    assert len(stored) < 0.97 * len(as_integers)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32, DType.F8_E4M3])
def test_every_shorter_chunk_is_refused(dtype: DType) -> None:
    base = elements_of(dtype, 3000)
    steps = np.random.default_rng(1).integers(0, 3, 3000).astype(base.dtype)
    stored = encode_chunk(base + steps, base, dtype, FAST)
    for size in range(len(stored)):
        with pytest.raises(ColdDamaged):
            decode_chunk(memoryview(stored)[:size], base, dtype, np.empty_like(base))
    with pytest.raises(ColdDamaged, match="too many"):
        decode_chunk(memoryview(stored + b"\0"), base, dtype, np.empty_like(base))


@pytest.mark.slow
def test_flipped_bits_raise_no_other_error() -> None:
    base, tensor = fine_tuned(2500, 3e-3)
    tensor[7] ^= 0x7FFF
    stored = bytearray(encode_chunk(tensor, base, DType.BF16, FAST))
    refused = 0
    for place in range(min(len(stored), 400) * 8):
        stored[place >> 3] ^= 1 << (place & 7)
        out = np.empty_like(base)
        try:
            decode_chunk(memoryview(stored), base, DType.BF16, out)
        except ColdDamaged:
            refused += 1
        stored[place >> 3] ^= 1 << (place & 7)
    assert refused > 200


def head(first: int, classes: int, *segments: tuple[int, int, int]) -> bytes:
    packed = b"".join(struct.pack("<BBI", *segment) for segment in segments)
    return struct.pack("<BBB", first, classes, len(segments)) + packed


def listed(method: int, *planes: bytes) -> bytes:
    """Return planes behind their table; ``method`` is that of the first one."""
    table = [
        struct.pack("<BI", 0 if number else method, len(plane))
        for number, plane in enumerate(planes)
    ]
    return b"".join([*table, *planes])


def places(count: int) -> bytes:
    """Return the places of the first elements of a single class."""
    return (count << 3).to_bytes(3, "little") + struct.pack("<BI", 0, count) + bytes(count)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (head(0, 0), "truncated"),
        (head(0, 0) + struct.pack("<BI", 0, 3) + bytes(3), "raw plane has 3 bytes, expected 4"),
        (head(0, 0) + struct.pack("<BI", 0, 4) + bytes(4) + head(0, 0), "0 classes"),
        (head(0, 17, (17, 0, 0)), "17 classes"),
        (head(250, 7, (7, 0, 0)), "cannot have 7 classes from 250"),
        (head(0, 1, (1, 0, 0), (0, 0, 0)), "do not have 1 classes"),
        (head(0, 2, (1, 0, 0)), "do not have 2 classes"),
        (head(0, 1), "do not have 1 classes"),
        (head(0, 1, (1, 12, 0)), "unknown form 12"),
        (head(0, 1, (1, 16, 0)), "unknown form 16"),
        (head(0, 1, (1, 28, 0)), "unknown form 28"),
        (head(0, 1, (1, 19, 0)) + listed(1, b"", b""), "method 1"),
        (head(0, 1, (1, 19, 0)) + listed(0, b"", b""), "truncated"),
        (head(0, 1, (1, 19, 0)) + listed(0, places(1), b"\1\1"), "raw plane has 2 bytes"),
        (head(0, 1, (1, 19, 2)) + listed(0, places(1), b"\1", b"\1\1\1\1"), "2 escaped"),
        (head(0, 1, (1, 19, 1)) + listed(0, places(1), b"\1", b"\1\1"), "0 escape codes for 1"),
        (head(0, 1, (1, 20, 1)) + listed(0, places(1), b"\1", b"\1\1"), "without escapes"),
        (head(0, 1, (1, 22, 0)) + listed(0, places(1), *[b"\1"] * 3), "3 planes"),
        (head(0, 1, (1, 0, 0xFFFFFFFF)), "truncated"),
        (head(0, 1, (1, 0, 1)) + b"ab", "1 escaped differences in a form without escapes"),
        (head(0, 1, (1, 3, 0)) + struct.pack("<BI", 1, 0xFFFFFFFF), "truncated"),
        (head(0, 1, (1, 3, 0)) + struct.pack("<BI", 9, 1) + b"a", "unknown method 9"),
        (head(0, 1, (1, 3, 0)) + struct.pack("<BI", 0, 1) + b"a", "raw plane has 1 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rejects_invalid_heads(stored: bytes, message: str) -> None:
    base = np.zeros(2100, np.uint16)
    with pytest.raises(ColdDamaged, match=message):
        decode_chunk(memoryview(stored), base, DType.BF16, base)


ESCAPES = struct.pack("<BI", 0, 16) + bytes([0x80, 0x80, *bytes(14)]) + b"\1\2"
THREE_PLANES = struct.pack("<BI", 0, 64) * 3 + bytes(192)


@pytest.mark.parametrize(
    ("count", "dtype", "stored", "message"),
    [
        (16, DType.BF16, head(0, 1, (1, 3, 1)) + ESCAPES, "2 escape codes for 1 differences"),
        (4096, DType.U16, head(0, 2, (2, 0, 0)), "U16"),
        (64, DType.BF16, head(0, 1, (1, 6, 0)) + THREE_PLANES, "3 planes"),
    ],
    ids=["other number of escapes", "classes without exponents", "wider than the elements"],
)
def test_rejects_differences_that_the_elements_cannot_have(
    count: int, dtype: DType, stored: bytes, message: str
) -> None:
    base = np.zeros(count, np.uint16)
    with pytest.raises(ColdDamaged, match=message):
        decode_chunk(memoryview(stored), base, dtype, base)


@pytest.mark.parametrize("vector", json.loads(_VECTORS.read_text()), ids=lambda item: item["name"])
def test_decodes_what_is_on_record(vector: dict[str, Any]) -> None:
    dtype = DType[vector["dtype"]]
    base = as_elements(bytes.fromhex(vector["base"]) * vector["repeat"], dtype)
    out = np.empty_like(base)
    decode_chunk(memoryview(bytes.fromhex(vector["stored"])), base, dtype, out)
    assert out.tobytes() == bytes.fromhex(vector["tensor"]) * vector["repeat"]


@pytest.mark.parametrize("vector", json.loads(_VECTORS.read_text()), ids=lambda item: item["name"])
def test_another_reader_decodes_what_is_on_record(vector: dict[str, Any]) -> None:
    start = bytes.fromhex(vector["base"]) * vector["repeat"]
    found = read_differences(bytes.fromhex(vector["stored"]), start, vector["layout"])
    assert found == bytes.fromhex(vector["tensor"]) * vector["repeat"]


@pytest.mark.parametrize("settings", [FAST, SMALL], ids=["fast", "small"])
@pytest.mark.parametrize("update", [2e-5, 1e-3, 2e-2])
def test_another_reader_decodes_what_is_encoded(update: float, settings: DeltaSettings) -> None:
    base, tensor = fine_tuned(5001, update)
    tensor[3000:4500] = base[3000:4500]
    tensor[::777] ^= 0x7FFF
    stored = encode_chunk(tensor, base, DType.BF16, settings)
    assert read_differences(stored, base.tobytes(), 37) == tensor.tobytes()

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.encoder import encode
from blobstore.compression.level import Level
from blobstore.compression.quant_rule import QuantRule
from blobstore.compression.spans import Span
from blobstore.compression.table import MAX_CHUNK
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.errors import UsageError
from blobstore.gguf.quantize import QUANTIZED, quantize
from tests.support.cold import (
    TYPES,
    cold,
    cold_with_table,
    decoded,
    noise,
    safetensors,
    spans_of,
    text,
    weights,
)

BLOB = safetensors(
    {
        "a": (DType.BF16, weights(DType.BF16, 400_000)),
        "b": (DType.F32, weights(DType.F32, 1000)),
        "c": (DType.U8, noise(77)),
    }
)


def back(stored: bytes) -> bytes:
    return decoded(ColdBlobDecoder(stored))


@pytest.mark.slow
@pytest.mark.parametrize("level", get_args(Level))
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.value)
def test_every_type_survives_a_round_trip_and_never_grows_much(dtype: DType, level: Level) -> None:
    blob = safetensors({"a": (dtype, weights(dtype, 40_000)), "b": (dtype, noise(24_000))})
    stored = cold(blob, level=level)
    assert back(stored) == blob
    assert len(stored) < len(blob) + 300


@pytest.mark.slow
@given(st.binary(max_size=5000), st.lists(st.integers(0, 5000), max_size=6))
def test_the_division_into_pieces_does_not_change_the_result(blob: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(blob)) for cut in cuts), len(blob)]
    pieces = [blob[begin:end] for begin, end in itertools.pairwise(places)]
    assert back(cold(blob, pieces=pieces)) == blob
    assert cold(blob, pieces=pieces) == cold(blob)


@pytest.mark.slow
def test_small_is_no_larger_than_fast() -> None:
    words = text(300)
    assert len(cold(words, level="small")) < len(cold(words))


def test_uses_a_known_digest() -> None:
    known = Digest.of(b"not at all")
    assert cold_with_table(BLOB, digest=known)[1].digest == known
    assert cold_with_table(BLOB)[1].digest == Digest.of(BLOB)


@pytest.mark.parametrize(
    "size", [1, 1000, 262_144, 300_000, 700_000, 1_000_001, 1_900_001, 5_000_000]
)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F64, DType.U8])
def test_chunks_are_of_about_one_size(dtype: DType, size: int) -> None:
    size -= size % (dtype.bits // 8) - (0 if size > 8 else dtype.bits // 8)
    part = cold_with_table(bytes(size), spans=[Span(size, dtype)])[1].parts[0]
    last = size - (part.chunks - 1) * part.chunk_size
    assert part.chunk_size <= MAX_CHUNK
    assert last > part.chunk_size // 2 or part.chunks > 3
    if part.chunks > 1:
        assert part.chunk_size >= 170_000
        assert part.chunk_size % 4096 == 0  # so that planes are aligned


def test_writes_before_all_pieces_are_read() -> None:
    written: list[int] = []

    def pieces() -> Iterator[bytes]:
        for number in range(8):
            yield noise(1 << 20, number)
            if number > 4:
                assert sum(written) > 1 << 21

    size = 8 << 20
    encode(pieces(), [Span(size)], lambda data: written.append(memoryview(data).nbytes))

    assert sum(written) > size


@pytest.mark.slow
def test_memory_is_bounded_by_chunks() -> None:
    size = 48 << 20
    piece = weights(DType.BF16, 1 << 19)
    tracemalloc.start()

    encode(
        (piece for _ in range(size // len(piece))),
        [Span(size, DType.BF16)],
        lambda _: None,
        digest=Digest.of(b""),
    )

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


def test_unaligned_tensors_survive_a_round_trip() -> None:
    blob = b"x" + weights(DType.F32, 200_000)
    spans = [Span(1), Span(len(blob) - 1, DType.F32)]
    assert back(cold(blob, spans=spans)) == blob


@pytest.mark.parametrize(
    ("pieces", "what"), [([BLOB, b"x"], "more"), ([BLOB[:-1]], "fewer"), ([], "fewer")]
)
def test_rejects_pieces_that_do_not_have_the_size_of_the_spans(
    pieces: list[bytes], what: str
) -> None:
    with pytest.raises(UsageError, match=f"the pieces have {what} bytes"):
        cold(BLOB, pieces=pieces)


@pytest.mark.parametrize("span", [Span(0), Span(3, DType.BF16)])
def test_rejects_a_span_with_an_incomplete_element(span: Span) -> None:
    with pytest.raises(UsageError, match="does not hold elements of"):
        cold(bytes(3), spans=[span])


def test_rejects_spans_with_a_base_if_none_is_given() -> None:
    with pytest.raises(UsageError, match="need a base"):
        cold(BLOB, spans=[Span(len(BLOB), base_begin=0)])


def test_an_error_of_the_writer_is_raised() -> None:
    def fail(_: object) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        encode([BLOB], spans_of(BLOB, len(BLOB)), fail)


def test_ignores_a_base_that_saves_nothing() -> None:
    data = weights(DType.BF16, 200_000)
    base = BaseBlob.hot(noise(len(data)))
    stored, table = cold_with_table(
        data, spans=[Span(len(data), DType.BF16, base_begin=0)], base=base
    )
    assert len(stored) <= len(cold(data, spans=[Span(len(data), DType.BF16)])) + 300
    assert {chunk.transform for chunk in table.chunks} == {5}
    assert (table.base, table.parts[0].base_begin) == (None, None)


def test_a_repetition_of_a_span_with_a_base_shares_its_chunks() -> None:
    data = weights(DType.BF16, 1 << 20)
    base = BaseBlob.hot(data[:-2] + b"xy")
    spans = [Span(len(data), DType.BF16, base_begin=0), Span(len(data), DType.BF16, same_as=0)]
    stored = ColdBlobDecoder(cold(data * 2, spans=spans, base=base))
    stored.give_base(base)
    assert decoded(stored) == data * 2


@pytest.mark.parametrize("dtype", [None, DType.U16])
def test_rejects_factors_for_types_that_are_not_floats(dtype: DType | None) -> None:
    data = noise(800)
    span = Span(len(data), dtype, base_begin=0, factors=b"any")
    with pytest.raises(UsageError, match="these factors cannot predict"):
        cold(data, spans=[span], base=BaseBlob.hot(data))


def test_compresses_a_chunk_that_differs_from_the_sample() -> None:
    numbers = np.frombuffer(weights(DType.F32, 1 << 20), np.uint32).copy()
    numbers[1 << 19 :] &= 0xFFFFF0F0
    _, table = cold_with_table(numbers.tobytes(), spans=[Span(numbers.nbytes, DType.F32)])
    first, last = table.chunks[0], table.chunks[-1]
    assert first.transform == last.transform
    assert sum(plane.size for plane in last.planes) < 0.9 * sum(
        plane.size for plane in first.planes
    )


@pytest.mark.slow
@pytest.mark.parametrize("level", get_args(Level))
def test_chunks_unlike_the_first_get_another_layout(level: Level) -> None:
    data = weights(DType.BF16, 4 << 20)
    expected = len(cold(data, spans=[Span(len(data), DType.BF16)], level=level))
    changed = bytes(len(data)) + data
    stored = cold(changed, spans=[Span(len(changed), DType.BF16)], level=level)
    assert back(stored) == changed
    assert len(stored) < 1.01 * expected


@pytest.mark.slow
def test_chunks_unlike_the_base_are_compressed_alone() -> None:
    base, other = weights(DType.BF16, 4 << 20), weights(DType.BF16, 4 << 20, seed=1)
    data = base[: 1 << 20] + other[1 << 20 :]
    span = Span(len(data), DType.BF16)
    stored = len(cold(data, spans=[span._replace(base_begin=0)], base=BaseBlob.hot(base)))
    assert stored < 0.88 * len(cold(data, spans=[span]))


@st.composite
def tensors_with_bases(draw: st.DrawFn) -> tuple[DType, bytes, bytes]:
    """Return a tensor of up to 600 bytes, and one that some or all of its bits differ from."""
    dtype = draw(st.sampled_from([*TYPES, DType.BF16, DType.F32]))
    count = 4 * draw(st.integers(1, 1200 // dtype.bits))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    base = weights(dtype, count, seed=draw(st.integers(0, 1 << 16)))
    data = np.frombuffer(base, np.uint8).copy()
    places = random.random(len(data)) < draw(st.floats(0, 1))
    data[places] ^= random.integers(0, 1 << draw(st.integers(1, 8)), len(data), np.uint8)[places]
    return dtype, data.tobytes(), base


@pytest.mark.slow
@given(st.lists(tensors_with_bases(), min_size=1, max_size=8), st.sampled_from(get_args(Level)))
def test_whatever_is_encoded_with_a_base_decodes(
    tensors: list[tuple[DType, bytes, bytes]], level: Level
) -> None:
    data = b"".join(data for _, data, _ in tensors)
    base = BaseBlob.hot(b"".join(base for *_, base in tensors))
    begins = itertools.accumulate((len(data) for _, data, _ in tensors), initial=0)
    spans = [
        Span(len(data), dtype, base_begin=begin)
        for (dtype, data, _), begin in zip(tensors, begins, strict=False)
    ]
    decoder = ColdBlobDecoder(cold(data, spans=spans, base=base, level=level))
    if decoder.table.base is not None:
        decoder.give_base(base)
    assert decoded(decoder) == data


def quantized(name: str, source: bytes) -> bytes:
    return quantize(name, np.frombuffer(source, "<u2")).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_blocks_that_a_base_is_quantized_to_take_next_to_nothing(name: str) -> None:
    source = weights(DType.BF16, 3 << 20)
    data = b"start" + quantized(name, source)
    rule = QuantRule(name, DType.BF16)
    spans = [Span(5), Span(len(data) - 5, DType.U8, base_begin=7, rule=rule)]
    base = BaseBlob.hot(bytes(7) + source)
    stored = cold(data, spans=spans, base=base)
    assert len(stored) < 500
    decoder = ColdBlobDecoder(stored)
    decoder.give_base(base)
    assert decoded(decoder) == data
    part = bytearray(999)
    decoder.read_into(part, len(data) // 2)
    assert part == data[len(data) // 2 :][:999]


def test_a_few_blocks_that_were_quantized_otherwise_take_little() -> None:
    source = weights(DType.BF16, 1 << 16)
    data = bytearray(quantized("Q4_0", source))
    data[5000::3000] = bytes(byte ^ 1 for byte in data[5000::3000])
    rule = QuantRule("Q4_0", DType.BF16)
    base = BaseBlob.hot(source)
    stored = cold(
        bytes(data), spans=[Span(len(data), DType.U8, base_begin=0, rule=rule)], base=base
    )
    assert len(stored) < 400
    decoder = ColdBlobDecoder(stored)
    decoder.give_base(base)
    assert decoded(decoder) == data


def test_blocks_of_other_weights_are_compressed_alone() -> None:
    data = quantized("Q4_0", weights(DType.BF16, 1 << 16, seed=1))
    rule = QuantRule("Q4_0", DType.BF16)
    base = BaseBlob.hot(weights(DType.BF16, 1 << 16))
    span = Span(len(data), DType.U8, base_begin=0, rule=rule)
    stored = cold(data, spans=[span], base=base)
    assert ColdBlobDecoder(stored).table.base is None
    assert back(stored) == data


def test_a_repetition_of_quantized_blocks_shares_their_chunks() -> None:
    source = weights(DType.BF16, 1 << 16)
    data = quantized("Q8_0", source)
    span = Span(len(data), DType.U8, base_begin=0, rule=QuantRule("Q8_0", DType.BF16))
    base = BaseBlob.hot(source)
    stored = cold(2 * data, spans=[span, Span(len(data), DType.U8, same_as=0)], base=base)
    decoder = ColdBlobDecoder(stored)
    decoder.give_base(base)
    assert [part.same_as for part in decoder.table.parts] == [None, 0]
    assert decoded(decoder) == 2 * data


def test_rejects_a_span_that_is_not_whole_blocks() -> None:
    span = Span(35, DType.U8, base_begin=0, rule=QuantRule("Q4_0", DType.BF16))
    with pytest.raises(UsageError, match="a span of 35 bytes cannot be quantized"):
        cold(bytes(35), spans=[span], base=BaseBlob.hot(bytes(4096)))

from __future__ import annotations

import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.encoder import encode
from blobstore.compression.spans import Span, spans_of
from blobstore.compression.table import MAX_CHUNK
from blobstore.compression.tuning import Level
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.errors import UsageError
from tests.support.cold import TYPES, cold, cold_with_table, noise, safetensors, text, weights

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOB = safetensors(
    {
        "a": (DType.BF16, weights(DType.BF16, 400_000)),
        "b": (DType.F32, weights(DType.F32, 1000)),
        "c": (DType.U8, noise(77)),
    }
)


def back(stored: bytes) -> bytes:
    blob = ColdBlobDecoder(stored)
    out = bytearray(blob.size)
    blob.decode_into(out)
    return bytes(out)


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.value)
def test_every_type_comes_back_and_is_never_much_larger(dtype: DType, level: Level) -> None:
    blob = safetensors({"a": (dtype, weights(dtype, 40_000)), "b": (dtype, noise(24_000))})

    stored = cold(blob, level=level)

    assert back(stored) == blob
    assert len(stored) < len(blob) + 300


@given(st.binary(max_size=5000), st.lists(st.integers(0, 5000), max_size=6))
def test_any_bytes_come_back_however_they_are_cut(blob: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(blob)) for cut in cuts), len(blob)]
    pieces = [blob[begin:end] for begin, end in itertools.pairwise(places)]

    assert back(cold(blob, pieces=pieces)) == blob
    assert cold(blob, pieces=pieces) == cold(blob)


def test_threads_write_the_same_bytes() -> None:
    with ThreadPoolExecutor(3) as pool:
        assert cold(BLOB, executor=pool) == cold(BLOB)
        big = weights(DType.BF16, 4_000_000)
        runs = [Span(len(big), DType.BF16)]
        assert cold(big, runs=runs, executor=pool) == cold(big, runs=runs)


def test_small_is_no_larger_than_fast() -> None:
    words = text(300)

    assert len(cold(words, level=Level.SMALL)) < len(cold(words))


def test_a_digest_that_is_known_is_taken() -> None:
    known = Digest.of(b"not at all")

    assert cold_with_table(BLOB, digest=known)[1].digest == known
    assert cold_with_table(BLOB)[1].digest == Digest.of(BLOB)


@pytest.mark.parametrize("size", [1, 1000, 262_144, 300_000, 400_000, 700_000, 5_000_000])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F64, DType.U8])
def test_chunks_are_of_about_one_size(dtype: DType, size: int) -> None:
    size -= size % (dtype.bits // 8) - (0 if size > 8 else dtype.bits // 8)
    part = cold_with_table(bytes(size), runs=[Span(size, dtype)])[1].parts[0]
    last = size - (part.chunks - 1) * part.chunk_size

    assert part.chunk_size <= MAX_CHUNK
    assert last > part.chunk_size // 2 or part.chunks > 3
    if part.chunks > 1:
        assert part.chunk_size >= 170_000


def test_writes_before_all_is_read() -> None:
    written: list[int] = []

    def pieces() -> Iterator[bytes]:
        for number in range(8):
            yield noise(1 << 20, number)
            if number > 4:
                assert sum(written) > 1 << 21

    size = 8 << 20
    encode(pieces(), [Span(size)], lambda data: written.append(memoryview(data).nbytes))

    assert sum(written) > size


@pytest.mark.parametrize("threads", [0, 2])
def test_memory_is_bounded_by_chunks(threads: int) -> None:
    size = 48 << 20
    piece = weights(DType.BF16, 1 << 19)
    pool = ThreadPoolExecutor(threads) if threads else None
    tracemalloc.start()

    encode(
        (piece for _ in range(size // len(piece))),
        [Span(size, DType.BF16)],
        lambda _: None,
        digest=Digest.of(b""),
        executor=pool,
    )

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if pool:
        pool.shutdown()
    assert peak < 16 << 20


def test_tensors_that_do_not_lie_aligned_come_back() -> None:
    blob = b"x" + weights(DType.F32, 200_000)
    runs = [Span(1), Span(len(blob) - 1, DType.F32)]

    assert back(cold(blob, runs=runs)) == blob


@pytest.mark.parametrize(
    ("pieces", "what"), [([BLOB, b"x"], "more"), ([BLOB[:-1]], "fewer"), ([], "fewer")]
)
def test_rejects_pieces_that_are_not_what_the_runs_describe(pieces: list[bytes], what: str) -> None:
    with pytest.raises(UsageError, match=f"the pieces have {what} bytes"):
        cold(BLOB, pieces=pieces)


@pytest.mark.parametrize("run", [Span(0), Span(3, DType.BF16)])
def test_rejects_a_run_without_whole_elements(run: Span) -> None:
    with pytest.raises(UsageError, match="has no whole elements"):
        cold(bytes(3), runs=[run])


def test_rejects_runs_with_a_base_that_is_not_given() -> None:
    with pytest.raises(UsageError, match="need one"):
        cold(BLOB, runs=[Span(len(BLOB), base_begin=0)])


def test_an_error_of_the_writer_ends_the_work() -> None:
    def fail(_: object) -> None:
        raise OSError("full")

    with ThreadPoolExecutor(2) as pool, pytest.raises(OSError, match="full"):
        encode([BLOB], spans_of(BLOB, len(BLOB)), fail, executor=pool)


def test_a_base_that_does_not_help_is_not_used() -> None:
    data = weights(DType.BF16, 200_000)
    base = BaseBlob.hot(noise(len(data)))
    stored, table = cold_with_table(
        data, runs=[Span(len(data), DType.BF16, base_begin=0)], base=base
    )

    assert len(stored) <= len(cold(data, runs=[Span(len(data), DType.BF16)])) + 300
    assert {chunk.layout for chunk in table.chunks} == {5}


def test_what_equals_a_run_with_a_base_has_its_chunks() -> None:
    data = weights(DType.BF16, 1 << 20)
    base = BaseBlob.hot(data[:-2] + b"xy")
    runs = [
        Span(len(data), DType.BF16, base_begin=0),
        Span(len(data), DType.BF16, same_as=0),
    ]

    stored = ColdBlobDecoder(cold(data * 2, runs=runs, base=base))

    stored.give_base(base)
    out = bytearray(stored.size)
    stored.decode_into(out)
    assert out == data * 2


@pytest.mark.parametrize("dtype", [None, DType.U16])
def test_rejects_factors_for_what_are_no_numbers(dtype: DType | None) -> None:
    data = noise(800)
    run = Span(len(data), dtype, base_begin=0, factors=b"any")

    with pytest.raises(UsageError, match="such factors cannot predict"):
        cold(data, runs=[run], base=BaseBlob.hot(data))


def test_a_chunk_that_differs_from_the_sample_is_coded_too() -> None:
    numbers = np.frombuffer(weights(DType.F32, 1 << 20), np.uint32).copy()
    numbers[1 << 19 :] &= 0xFFFF0F00
    _, table = cold_with_table(numbers.tobytes(), runs=[Span(numbers.nbytes, DType.F32)])

    first, last = table.chunks[0], table.chunks[-1]

    assert first.layout == last.layout
    assert sum(plane.size for plane in last.planes) < 0.9 * sum(
        plane.size for plane in first.planes
    )

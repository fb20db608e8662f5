from __future__ import annotations

import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.delta.low_rank import pack
from blobstore.compression.delta.low_rank_fit import fit
from blobstore.compression.file_view import FileView, Window
from blobstore.compression.spans import Span, spans_of, with_equals
from blobstore.compression.table import encode_table
from blobstore.core.digest import BlobId, Digest
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged, UsageError
from tests.support.cold import cold, cold_with_table, noise, safetensors, weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor

COUNT = 300_001
TENSORS = {
    "a": (DType.BF16, weights(DType.BF16, COUNT)),
    "b": (DType.F8_E4M3, weights(DType.F8_E4M3, COUNT)),
    "c": (DType.U8, noise(300_000)),
    "d": (DType.F32, weights(DType.F32, COUNT)),
}
BLOB = safetensors(TENSORS)
COLD = cold(BLOB)
FINE = BLOB[:-2] + b"xy"
"""As after a very short training."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(3) as executor:
        yield executor


def delta() -> bytes:
    runs = spans_of(BLOB, len(BLOB))
    begins = [sum(run.size for run in runs[:number]) for number in range(len(runs))]
    marked = [run._replace(base_begin=begin) for run, begin in zip(runs, begins, strict=True)]
    return cold(FINE, runs=marked, base=BaseBlob.hot(BLOB))


def test_is_smaller_and_comes_back(pool: Executor) -> None:
    assert len(COLD) < 0.85 * len(BLOB)
    for executor in (None, pool):
        out = bytearray(len(BLOB))
        ColdBlobDecoder(COLD).decode_into(out, executor=executor)
        assert out == BLOB


def test_tells_what_it_stands_for() -> None:
    blob = ColdBlobDecoder(COLD)

    assert blob.size == len(BLOB)
    assert blob.table.digest == Digest.of(BLOB)
    assert blob.table.base is None


@pytest.mark.parametrize("threads", [0, 3])
def test_gives_the_blob_out_in_pieces(threads: int, pool: Executor) -> None:
    big = BLOB * 5
    blob = ColdBlobDecoder(cold(big, runs=[Span(len(big))]))

    pieces = [bytes(piece) for piece in blob.pieces(executor=pool if threads else None)]

    assert len(pieces) > 1
    assert b"".join(pieces) == big


def test_an_empty_blob_comes_back() -> None:
    blob = ColdBlobDecoder(cold(b"", runs=[]))

    blob.decode_into(bytearray())
    assert list(blob.pieces()) == []


@given(st.integers(0, len(BLOB)), st.integers(0, 700_000), st.booleans())
def test_any_range_can_be_read_alone(begin: int, size: int, is_odd: bool) -> None:
    expected = BLOB[begin : begin + size]
    memory = bytearray(len(expected) + is_odd)

    ColdBlobDecoder(COLD).read_into(memoryview(memory)[is_odd:], begin)

    assert memory[is_odd:] == expected


def test_a_range_costs_the_chunks_that_it_touches() -> None:
    _, table = cold_with_table(BLOB)
    damaged = bytearray(COLD)
    first = sum(plane.size for plane in table.chunks[0].planes)
    damaged[8 + first + 1000] ^= 1  # in the first chunk of the first tensor

    blob = ColdBlobDecoder(damaged)

    header = table.parts[0].size
    out = bytearray(1000)
    blob.read_into(out, header + table.parts[1].chunk_size)
    assert out == BLOB[header + table.parts[1].chunk_size :][:1000]
    with pytest.raises(ColdDamaged, match="check sum"):
        blob.read_into(out, header)


@pytest.mark.parametrize(("begin", "size"), [(-1, 1), (0, len(BLOB) + 1), (len(BLOB), 1)])
def test_rejects_a_range_that_the_blob_does_not_have(begin: int, size: int) -> None:
    with pytest.raises(UsageError, match=f"are wanted of a blob of {len(BLOB)}"):
        ColdBlobDecoder(COLD).read_into(bytearray(size), begin)


@pytest.mark.parametrize("size", [0, len(BLOB) - 1, len(BLOB) + 1])
def test_rejects_memory_of_another_size_for_the_whole(size: int) -> None:
    with pytest.raises(UsageError, match="does not fit in"):
        ColdBlobDecoder(COLD).decode_into(bytearray(size))


def test_rejects_a_blob_of_another_digest(pool: Executor) -> None:
    _, table = cold_with_table(BLOB)
    planes = COLD[: len(COLD) - len(encode_table(table))]
    forged = ColdBlobDecoder(planes + encode_table(table._replace(digest=Digest.of(b"another"))))

    for executor in (None, pool):
        with pytest.raises(ColdDamaged, match=f"decodes to {Digest.of(BLOB)}, and says"):
            forged.decode_into(bytearray(len(BLOB)), executor=executor)
        with pytest.raises(ColdDamaged, match="decodes to"):
            list(forged.pieces(executor=executor))


def test_stops_at_the_first_damage_with_threads_too(pool: Executor) -> None:
    damaged = bytearray(COLD)
    damaged[len(COLD) // 2] ^= 16

    with pytest.raises(ColdDamaged):
        ColdBlobDecoder(damaged).decode_into(bytearray(len(BLOB)), executor=pool)


def test_equal_tensors_are_stored_once() -> None:
    tensor = weights(DType.BF16, 200_000)
    blob = safetensors({"a": (DType.BF16, tensor), "b": (DType.BF16, tensor)})
    runs = with_equals(spans_of(blob, len(blob)), blob)
    stored = cold(blob, runs=runs)

    assert len(stored) < 0.36 * len(blob)
    out = bytearray(len(blob))
    ColdBlobDecoder(stored).decode_into(out)
    assert out == blob
    begin = len(blob) - 399_000
    ColdBlobDecoder(stored).read_into(memoryview(out)[:1000], begin)
    assert out[:1000] == blob[begin : begin + 1000]


@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize("threads", [0, 3])
def test_a_delta_comes_back_with_its_base(is_cold: bool, threads: int, pool: Executor) -> None:
    blob = ColdBlobDecoder(delta())
    blob.give_base(ColdBlobDecoder(COLD).as_base() if is_cold else BaseBlob.hot(BLOB))
    out = bytearray(len(FINE))

    blob.decode_into(out, executor=pool if threads else None)

    assert out == FINE
    assert blob.table.base == BlobId(Digest.of(BLOB), len(BLOB))
    blob.read_into(memoryview(out)[:777], 400_001)
    assert out[:777] == FINE[400_001:400_778]


def test_a_delta_is_much_smaller() -> None:
    assert len(delta()) < len(COLD) // 20


def test_rejects_a_delta_without_its_base() -> None:
    with pytest.raises(ColdDamaged, match=f"without its base {Digest.of(BLOB)}"):
        ColdBlobDecoder(delta()).decode_into(bytearray(len(FINE)))


@pytest.mark.parametrize("base", [FINE, BLOB[:-1], b""])
def test_rejects_another_base(base: bytes) -> None:
    with pytest.raises(ColdDamaged, match=f"what is needed is {Digest.of(BLOB)}"):
        ColdBlobDecoder(delta()).give_base(BaseBlob.hot(base))


def test_rejects_a_base_where_none_is_needed() -> None:
    with pytest.raises(ColdDamaged, match="what is needed is none"):
        ColdBlobDecoder(COLD).give_base(BaseBlob.hot(BLOB))


def test_finds_a_base_that_was_altered_since() -> None:
    altered = bytearray(BLOB)
    altered[300_000] ^= 1
    blob = ColdBlobDecoder(delta())
    blob.give_base(BaseBlob.hot(altered, Digest.of(BLOB)))

    with pytest.raises(ColdDamaged, match="the file or the base is altered"):
        blob.decode_into(bytearray(len(FINE)))


def test_memory_is_bounded_by_chunks() -> None:
    blob = ColdBlobDecoder(COLD)
    out = bytearray(len(BLOB))
    blob.read_into(out)  # what a thread keeps is there now
    tracemalloc.start()
    blob.read_into(out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1 << 18


def test_threads_share_one_cold_blob(pool: Executor) -> None:
    blob = ColdBlobDecoder(COLD)
    ranges = [random.Random(seed).randrange(len(BLOB) - 50_000) for seed in range(40)]

    def read(begin: int) -> bytes:
        out = bytearray(50_000)
        blob.read_into(out, begin)
        return bytes(out)

    assert list(pool.map(read, ranges)) == [BLOB[begin : begin + 50_000] for begin in ranges]


def merged_adapter() -> tuple[bytes, BaseBlob, Span]:
    """Return a tensor to which a product of rank 2 was added, what it was, and how to code it."""
    rows, columns, rank = 700, 300, 2
    numbers = np.random.default_rng(0)
    base = np.frombuffer(weights(DType.BF16, rows * columns), np.uint16)
    left, right = numbers.standard_normal((rows, rank)), numbers.standard_normal((rank, columns))
    wide = (base.astype(np.uint32) << 16).view(np.float32).reshape(rows, columns)
    added = (wide + (left @ right * 0.002).astype(np.float32)).astype(ml_dtypes.bfloat16)
    tensor = added.view(np.uint16).ravel()
    found = fit(tensor, base, DType.BF16, columns)
    assert found is not None
    run = Span(tensor.nbytes, DType.BF16, base_begin=3, factors=pack(found))
    return tensor.tobytes(), BaseBlob.hot(b"abc" + base.tobytes()), run


def test_a_merged_adapter_is_predicted_from_its_base(pool: Executor) -> None:
    blob, base, run = merged_adapter()
    plain = cold(blob, runs=[run._replace(factors=None)], base=base)

    stored = cold(blob, runs=[run], base=base)

    assert len(stored) < 0.7 * len(plain)
    for executor in (None, pool):
        back = ColdBlobDecoder(stored)
        back.give_base(base)
        out = bytearray(len(blob))
        back.decode_into(out, executor=executor)
        assert out == blob
        back.read_into(memoryview(out)[:1001], 99_999)
        assert out[:1001] == blob[99_999:101_000]


def test_rejects_factors_that_were_altered() -> None:
    blob, base, run = merged_adapter()
    assert run.factors is not None
    stored = bytearray(cold(blob, runs=[run], base=base))
    stored[stored.index(run.factors) + len(run.factors) // 2] ^= 1
    back = ColdBlobDecoder(stored)
    back.give_base(base)

    with pytest.raises(ColdDamaged, match="factors of a part are not what"):
        back.decode_into(bytearray(len(blob)))


@pytest.mark.parametrize(
    ("limit", "stored_limit"), [(1, 1), (1 << 20, 1 << 19), (1 << 40, 1 << 40)]
)
def test_cuts_are_whole_chunks_that_make_up_the_blob(limit: int, stored_limit: int) -> None:
    blob = ColdBlobDecoder(COLD)
    cuts = list(blob.cuts(limit, stored_limit))
    assert [cut.begin for cut in cuts] == [0, *(cut.end for cut in cuts[:-1])]
    assert cuts[-1].end == len(BLOB)
    assert len(cuts) == {1: len(blob.table.chunks), 1 << 40: 1}.get(limit, len(cuts))
    out = bytearray(len(BLOB))
    for begin, end, stored_begin, stored_end in cuts:
        assert limit == 1 or (end - begin <= limit and stored_end - stored_begin <= stored_limit)
        window = Window(stored_begin, memoryview(COLD)[stored_begin:stored_end])
        rest = bytearray(len(COLD))  # nothing else is looked at
        blob.read_into(memoryview(out)[begin:end], begin, source=FileView(memoryview(rest), window))
    assert out == BLOB


def test_cuts_do_not_tell_of_planes_that_a_part_has_from_another() -> None:
    data = weights(DType.BF16, 600_000)
    runs = with_equals([Span(len(data), DType.BF16), Span(len(data), DType.BF16)], data * 2)
    blob = ColdBlobDecoder(cold(data * 2, runs=runs))
    assert blob.table.parts[1].same_as == 0
    cuts = list(blob.cuts(len(data), 1 << 40))
    assert [cut.stored_end - cut.stored_begin for cut in cuts if cut.begin >= len(data)] == [0]
    assert sum(cut.stored_end - cut.stored_begin for cut in cuts) == sum(
        plane.size for chunk in blob.table.chunks for plane in chunk.planes
    )


def test_an_empty_blob_has_no_cuts() -> None:
    assert list(ColdBlobDecoder(cold(b"", runs=[])).cuts(1, 1)) == []


def test_the_table_is_read_from_other_memory() -> None:
    nothing = bytearray(len(COLD))
    source = FileView(memoryview(nothing), Window(0, memoryview(COLD)))
    assert ColdBlobDecoder(nothing, source).table == ColdBlobDecoder(COLD).table
    with pytest.raises(ColdDamaged):
        ColdBlobDecoder(COLD, FileView(memoryview(nothing)))

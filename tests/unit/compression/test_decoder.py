from __future__ import annotations

import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

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
from blobstore.compression.spans import Span, mark_duplicates
from blobstore.compression.table import encode_table
from blobstore.core.digest import BlobId, Digest
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged, UsageError
from tests.support.cold import cold, cold_with_table, decoded, noise, safetensors, spans_of, weights

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
"""The blob after a very short training."""


def delta() -> bytes:
    spans = spans_of(BLOB, len(BLOB))
    begins = [sum(span.size for span in spans[:number]) for number in range(len(spans))]
    marked = [span._replace(base_begin=begin) for span, begin in zip(spans, begins, strict=True)]
    return cold(FINE, spans=marked, base=BaseBlob.hot(BLOB))


def test_a_cold_blob_is_smaller_and_decodes_to_the_original() -> None:
    assert len(COLD) < 0.85 * len(BLOB)
    assert decoded(ColdBlobDecoder(COLD)) == BLOB


def test_the_decoder_knows_size_and_digest_of_the_blob() -> None:
    blob = ColdBlobDecoder(COLD)
    assert blob.size == len(BLOB)
    assert blob.table.digest == Digest.of(BLOB)
    assert blob.table.base is None


def test_yields_the_blob_in_pieces() -> None:
    big = BLOB * 5
    blob = ColdBlobDecoder(cold(big, spans=[Span(len(big))]))
    pieces = [bytes(piece) for piece in blob.pieces()]
    assert len(pieces) > 1
    assert b"".join(pieces) == big


def test_an_empty_blob_has_no_pieces() -> None:
    blob = ColdBlobDecoder(cold(b"", spans=[]))
    blob.read_into(bytearray())
    assert list(blob.pieces()) == []


@pytest.mark.slow
@given(st.integers(0, len(BLOB)), st.integers(0, 700_000), st.booleans())
def test_reads_any_range(begin: int, size: int, is_odd: bool) -> None:
    expected = BLOB[begin : begin + size]
    memory = bytearray(len(expected) + is_odd)
    ColdBlobDecoder(COLD).read_into(memoryview(memory)[is_odd:], begin)
    assert memory[is_odd:] == expected


def test_a_range_needs_only_the_chunks_that_it_overlaps() -> None:
    _, table = cold_with_table(BLOB)
    damaged = bytearray(COLD)
    first = sum(plane.size for plane in table.chunks[0].planes)
    damaged[8 + first + 1000] ^= 1  # in the first chunk of the first tensor

    blob = ColdBlobDecoder(damaged)

    header = table.parts[0].size
    out = bytearray(1000)
    blob.read_into(out, header + table.parts[1].chunk_size)
    assert out == BLOB[header + table.parts[1].chunk_size :][:1000]
    with pytest.raises(ColdDamaged, match="checksum"):
        blob.read_into(out, header)


@pytest.mark.parametrize(("begin", "size"), [(-1, 1), (0, len(BLOB) + 1), (len(BLOB), 1)])
def test_rejects_a_range_outside_the_blob(begin: int, size: int) -> None:
    with pytest.raises(UsageError, match=f"are out of range for a blob of {len(BLOB)}"):
        ColdBlobDecoder(COLD).read_into(bytearray(size), begin)


def test_rejects_a_blob_with_another_digest() -> None:
    _, table = cold_with_table(BLOB)
    planes = COLD[: len(COLD) - len(encode_table(table))]
    forged = ColdBlobDecoder(planes + encode_table(table._replace(digest=Digest.of(b"another"))))
    with pytest.raises(ColdDamaged, match=f"decodes to {Digest.of(BLOB)}, expected"):
        decoded(forged)


def test_finds_a_damaged_plane() -> None:
    damaged = bytearray(COLD)
    damaged[len(COLD) // 2] ^= 16
    with pytest.raises(ColdDamaged):
        decoded(ColdBlobDecoder(damaged))


def test_equal_tensors_are_stored_once() -> None:
    tensor = weights(DType.BF16, 200_000)
    blob = safetensors({"a": (DType.BF16, tensor), "b": (DType.BF16, tensor)})
    spans = mark_duplicates(spans_of(blob, len(blob)), blob)
    stored = cold(blob, spans=spans)

    assert len(stored) < 0.36 * len(blob)
    assert decoded(ColdBlobDecoder(stored)) == blob
    begin = len(blob) - 399_000
    out = bytearray(1000)
    ColdBlobDecoder(stored).read_into(out, begin)
    assert out == blob[begin : begin + 1000]


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_delta_decodes_with_its_base(is_cold: bool) -> None:
    blob = ColdBlobDecoder(delta())
    blob.give_base(ColdBlobDecoder(COLD).as_base() if is_cold else BaseBlob.hot(BLOB))
    assert decoded(blob) == FINE
    assert blob.table.base == BlobId(Digest.of(BLOB), len(BLOB))
    out = bytearray(777)
    blob.read_into(out, 400_001)
    assert out == FINE[400_001:400_778]


def test_a_delta_is_much_smaller() -> None:
    assert len(delta()) < len(COLD) // 20


def test_rejects_a_delta_without_its_base() -> None:
    with pytest.raises(ColdDamaged, match=f"without its base {Digest.of(BLOB)}"):
        decoded(ColdBlobDecoder(delta()))


@pytest.mark.parametrize("base", [FINE, BLOB[:-1], b""])
def test_rejects_another_base(base: bytes) -> None:
    with pytest.raises(ColdDamaged, match=f"expected {Digest.of(BLOB)}"):
        ColdBlobDecoder(delta()).give_base(BaseBlob.hot(base))


def test_rejects_a_base_for_a_blob_without_one() -> None:
    with pytest.raises(ColdDamaged, match="expected none"):
        ColdBlobDecoder(COLD).give_base(BaseBlob.hot(BLOB))


def test_detects_an_altered_base() -> None:
    altered = bytearray(BLOB)
    altered[300_000] ^= 1
    blob = ColdBlobDecoder(delta())
    blob.give_base(BaseBlob.hot(altered, Digest.of(BLOB)))
    with pytest.raises(ColdDamaged, match="the file or the base is altered"):
        decoded(blob)


def test_memory_is_bounded_by_chunks() -> None:
    blob = ColdBlobDecoder(COLD)
    out = bytearray(len(BLOB))
    blob.read_into(out)  # allocates this thread's scratch memory
    tracemalloc.start()
    blob.read_into(out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 18


def test_threads_may_share_a_decoder() -> None:
    blob = ColdBlobDecoder(COLD)
    ranges = [random.Random(seed).randrange(len(BLOB) - 50_000) for seed in range(40)]

    def read(begin: int) -> bytes:
        out = bytearray(50_000)
        blob.read_into(out, begin)
        return bytes(out)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(read, ranges))
    assert found == [BLOB[begin : begin + 50_000] for begin in ranges]


def merged_adapter() -> tuple[bytes, BaseBlob, Span]:
    """Return a tensor to which a product of rank 2 was added, its base, and its span."""
    rows, columns, rank = 700, 300, 2
    numbers = np.random.default_rng(0)
    base = np.frombuffer(weights(DType.BF16, rows * columns), np.uint16)
    left, right = numbers.standard_normal((rows, rank)), numbers.standard_normal((rank, columns))
    wide = (base.astype(np.uint32) << 16).view(np.float32).reshape(rows, columns)
    added = (wide + (left @ right * 0.002).astype(np.float32)).astype(ml_dtypes.bfloat16)
    tensor = added.view(np.uint16).ravel()
    fitted = fit(tensor, lambda begin, end: base[begin:end], DType.BF16, columns, "small")
    assert fitted is not None
    found = fitted.factors
    span = Span(tensor.nbytes, DType.BF16, base_begin=3, factors=pack(found))
    return tensor.tobytes(), BaseBlob.hot(b"abc" + base.tobytes()), span


def test_a_merged_adapter_is_predicted_from_its_base() -> None:
    blob, base, span = merged_adapter()
    plain = cold(blob, spans=[span._replace(factors=None)], base=base)

    stored = cold(blob, spans=[span], base=base)

    assert len(stored) < 0.7 * len(plain)
    back = ColdBlobDecoder(stored)
    back.give_base(base)
    assert decoded(back) == blob
    out = bytearray(1001)
    back.read_into(out, 99_999)
    assert out == blob[99_999:101_000]


def test_rejects_altered_factors() -> None:
    blob, base, span = merged_adapter()
    assert span.factors is not None
    stored = bytearray(cold(blob, spans=[span], base=base))
    stored[stored.index(span.factors) + len(span.factors) // 2] ^= 1
    back = ColdBlobDecoder(stored)
    back.give_base(base)
    with pytest.raises(
        ColdDamaged, match="factors or scales of a part do not match their checksum"
    ):
        decoded(back)


@pytest.mark.parametrize(
    ("limit", "stored_limit"), [(1, 1), (1 << 20, 1 << 19), (1 << 40, 1 << 40)]
)
def test_chunk_ranges_make_up_the_blob(limit: int, stored_limit: int) -> None:
    blob = ColdBlobDecoder(COLD)
    ranges = list(blob.chunk_ranges(limit, stored_limit))
    assert [one.begin for one in ranges] == [0, *(one.end for one in ranges[:-1])]
    assert ranges[-1].end == len(BLOB)
    assert len(ranges) == {1: len(blob.table.chunks), 1 << 40: 1}.get(limit, len(ranges))
    out = bytearray(len(BLOB))
    for begin, end, stored_begin, stored_end in ranges:
        assert limit == 1 or (end - begin <= limit and stored_end - stored_begin <= stored_limit)
        window = Window(stored_begin, memoryview(COLD)[stored_begin:stored_end])
        rest = bytearray(len(COLD))  # other bytes are not read
        blob.read_into(memoryview(out)[begin:end], begin, source=FileView(memoryview(rest), window))
    assert out == BLOB


def test_chunk_ranges_of_repeated_parts_have_no_planes() -> None:
    data = weights(DType.BF16, 600_000)
    spans = mark_duplicates([Span(len(data), DType.BF16), Span(len(data), DType.BF16)], data * 2)
    blob = ColdBlobDecoder(cold(data * 2, spans=spans))
    assert blob.table.parts[1].same_as == 0
    ranges = list(blob.chunk_ranges(len(data), 1 << 40))
    assert [one.stored_end - one.stored_begin for one in ranges if one.begin >= len(data)] == [0]
    assert sum(one.stored_end - one.stored_begin for one in ranges) == sum(
        plane.size for chunk in blob.table.chunks for plane in chunk.planes
    )


def test_an_empty_blob_has_no_chunk_ranges() -> None:
    assert list(ColdBlobDecoder(cold(b"", spans=[])).chunk_ranges(1, 1)) == []


def test_reads_the_table_from_another_source() -> None:
    nothing = bytearray(len(COLD))
    source = FileView(memoryview(nothing), Window(0, memoryview(COLD)))
    assert ColdBlobDecoder(nothing, source).table == ColdBlobDecoder(COLD).table
    with pytest.raises(ColdDamaged):
        ColdBlobDecoder(COLD, FileView(memoryview(nothing)))

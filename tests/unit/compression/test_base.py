from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.delta import MAX_CHAIN
from blobstore.compression.delta.low_rank import Factors, pack
from blobstore.compression.quant_rule import QuantRule
from blobstore.compression.spans import Span
from blobstore.compression.table import Part, Table
from blobstore.core.digest import BlobId, Digest
from blobstore.core.tensor import DType
from blobstore.errors import ColdDamaged
from tests.support.cold import cold, noise, weights

DATA = weights(DType.BF16, 300_000)


@pytest.mark.parametrize(
    "base", [BaseBlob.hot(DATA), ColdBlobDecoder(cold(DATA)).as_base()], ids=["hot", "cold"]
)
def test_gives_bytes_of_the_base(base: BaseBlob) -> None:
    assert base.identity == BlobId(Digest.of(DATA), len(DATA))
    assert base.read(123_457, 200_000).tobytes() == DATA[123_457:323_457]


def test_bytes_in_memory_are_not_copied_if_they_are_aligned() -> None:
    data = bytearray(DATA)
    base = BaseBlob.hot(data)
    aligned, other = base.read(8, 100), base.read(9, 100)
    data[8:12] = b"abcd"
    assert aligned.tobytes()[:4] == b"abcd"
    assert other.tobytes() == DATA[9:109]
    assert other.ctypes.data % 8 == 0


def test_rejects_a_range_past_the_end() -> None:
    with pytest.raises(ValueError, match="different structures"):
        BaseBlob.hot(DATA).read(len(DATA) - 10, 11)


def test_takes_a_caller_s_word_for_a_digest() -> None:
    digest = Digest.of(b"another")
    assert BaseBlob.hot(DATA, digest).identity.digest == digest


def test_rejects_a_base_that_is_a_delta() -> None:
    base = BaseBlob.hot(DATA)
    delta = cold(DATA[:-2] + b"xy", spans=[Span(len(DATA), DType.BF16, base_begin=0)], base=base)
    with pytest.raises(ColdDamaged, match="is itself a delta"):
        ColdBlobDecoder(delta).as_base()


def link(
    before: bytes, after: bytes, base: BaseBlob | None = None, spans: list[Span] | None = None
) -> BaseBlob:
    """Return a delta of one blob against another as a base."""
    spans = spans or [Span(len(after), DType.BF16, base_begin=0)]
    made = ColdBlobDecoder(cold(after, spans=spans, base=BaseBlob.hot(before)))
    made.give_base(base or BaseBlob.hot(before))
    return made.as_base()


def run(many: int, size: int = 3 << 20) -> list[bytes]:
    """Return the steps of a run, in each of which some other bytes change."""
    data = bytearray(weights(DType.BF16, size // 2))
    found = [bytes(data)]
    for number in range(1, many):
        for place in range(100 * number, size, 1 << 14):
            data[place] ^= 1
        found.append(bytes(data))
    return found


@pytest.mark.parametrize("first", ["hot", "cold"])
def test_reads_a_delta_against_a_delta(first: str) -> None:
    data = run(6)
    base = BaseBlob.hot(data[0]) if first == "hot" else ColdBlobDecoder(cold(data[0])).as_base()
    for before, after in pairwise(data):
        base = link(before, after, base)
    assert base.depth == 5
    begin, size = 1_000_001, 1_100_000
    assert base.read(begin, size).tobytes() == data[-1][begin : begin + size]


def test_rejects_a_chain_that_is_too_long() -> None:
    data = run(MAX_CHAIN + 2, 1 << 12)
    base = BaseBlob.hot(data[0])
    for before, after in pairwise(data[:-1]):
        base = link(before, after, base)
    with pytest.raises(ColdDamaged, match=f"more than {MAX_CHAIN} deltas"):
        link(data[-2], data[-1], base)


@pytest.mark.parametrize(
    "spans",
    [
        [Span(2), Span(len(DATA) - 2, DType.BF16, base_begin=2)],
        [
            Span(1000, DType.BF16, base_begin=0),
            Span(len(DATA) - 1000, DType.BF16, base_begin=1000),
        ],
    ],
    ids=["another begin", "more parts"],
)
def test_rejects_a_chain_whose_chunks_lie_at_other_places(spans: list[Span]) -> None:
    one, two = DATA[:-2] + b"xy", DATA[:-2] + b"ab"
    with pytest.raises(ColdDamaged, match="do not lie where those of its base lie"):
        link(one, two, link(DATA, one), spans)
    with pytest.raises(ColdDamaged, match="do not lie where those of its base lie"):
        link(one, two, link(DATA, one, spans=spans))


def test_parts_of_a_chain_may_be_whole_chunks_of_others() -> None:
    one, two = run(3, 4 << 20)[1:]
    base = link(run(1, 4 << 20)[0], one)
    spans = [Span(1 << 20, DType.BF16, base_begin=begin << 20) for begin in range(4)]
    assert link(one, two, base, spans).read(0, len(two)).tobytes() == two


def test_rejects_factors_in_a_chain() -> None:
    one, two = DATA[:-2] + b"xy", DATA[:-2] + b"ab"
    factors = pack(Factors((0,), np.zeros((1, 3), np.int8), np.zeros((1, 100_000), np.int8)))
    spans = [Span(len(DATA), DType.BF16, base_begin=0, factors=factors)]
    with pytest.raises(ColdDamaged, match="has factors"):
        link(one, two, link(DATA, one), spans)


def test_rejects_rules_in_a_chain() -> None:
    identity = BlobId(Digest.of(b""), 64)
    base = BaseBlob(identity, lambda *_: None, None, Table(*identity, identity, [Part(64)], []), 1)
    rule = Part(18, 1, 18, base_begin=0, rule=QuantRule("Q4_0", DType.BF16))
    with pytest.raises(ColdDamaged, match="has factors or rules"):
        base.check_chain([rule])


def test_a_cold_blob_without_parts_of_a_base_is_no_delta() -> None:
    alone = cold(noise(100), base=BaseBlob.hot(DATA))
    assert ColdBlobDecoder(alone).as_base().identity.size == 100

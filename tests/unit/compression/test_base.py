from __future__ import annotations

import pytest

from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.spans import Span
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


def test_a_cold_blob_without_parts_of_a_base_is_no_delta() -> None:
    alone = cold(noise(100), base=BaseBlob.hot(DATA))
    assert ColdBlobDecoder(alone).as_base().identity.size == 100

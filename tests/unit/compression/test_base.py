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

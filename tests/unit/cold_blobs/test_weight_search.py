from __future__ import annotations

import numpy as np

from blobstore.cold_blobs.quantized import weights_in
from blobstore.cold_blobs.weight_search import Match, WeightSearch, differing_of
from blobstore.compression.base import BaseBlob
from blobstore.compression.spans import header_of
from blobstore.safetensors.header import Header
from tests.support.ladders import Array, coded_blob, source
from tests.support.models import blob

ROWS = source(1, rows=16)


def header(data: bytes) -> Header:
    found = header_of(data, len(data))
    assert found is not None
    return found


def matches(data: bytes, *tensors: Array) -> list[Match]:
    """Return what a blob's weight follows from among some tensors."""
    items = [(f"w{at}", "BF16", item.shape, item.tobytes()) for at, item in enumerate(tensors)]
    base = blob(*items)

    def read(out: memoryview, begin: int) -> None:
        out[:] = data[begin : begin + len(out)]

    (weight,) = weights_in(header(data))
    return WeightSearch(read, BaseBlob.hot(base), header(base)).matches(weight)


def test_rows_are_divided_among_several_tensors() -> None:
    parts = [source(number, rows=32) for number in range(4)]
    found = matches(coded_blob("w", "Q4_K", np.concatenate(parts)), *parts[::-1])
    assert [match.weight.rows for match in found] == [32] * 4
    assert None not in [match.found for match in found]
    assert differing_of(found) == 0


def test_a_weight_is_not_put_together_of_very_many() -> None:
    found = matches(coded_blob("w", "Q4_K", np.concatenate([ROWS] * 1100)), ROWS)
    assert [match.found for match in found] == [None]
    assert differing_of(found) == 1

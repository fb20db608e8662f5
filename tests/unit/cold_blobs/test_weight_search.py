from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from blobstore.cold_blobs.quantized import weights_in
from blobstore.cold_blobs.weight_search import Match, WeightSearch, differing_of, sources_in
from blobstore.compression.base import BaseBlob
from blobstore.compression.spans import header_of
from blobstore.core.tensor import DType
from blobstore.safetensors.header import Header
from tests.support.ladders import Array, block_blob, coded_blob, source, weight_blob
from tests.support.models import blob
from tests.support.scaled import float8_blob, mlx_blob

MATRIX, ROWS = source(1), source(1, rows=16)


def header(data: bytes) -> Header:
    found = header_of(data, len(data))
    assert found is not None
    return found


def reader(data: bytes) -> Callable[[memoryview, int], object]:
    def read(out: memoryview, begin: int) -> None:
        out[:] = data[begin : begin + len(out)]

    return read


def matches(data: bytes, *tensors: Array) -> list[Match]:
    """Return what a blob's weight follows from among some tensors."""
    items = [(f"w{at}", "BF16", item.shape, item.tobytes()) for at, item in enumerate(tensors)]
    base = blob(*items)
    (weight,) = weights_in(header(data))
    return WeightSearch(reader(data), BaseBlob.hot(base), header(base)).matches(weight)


def cosine(data: bytes, weights: bytes) -> float:
    """Return the cosine of the angle between a weight and its parent, by their samples."""
    (weight,), (parent,) = weights_in(header(data)), sources_in(header(weights))
    theirs = parent.unit_vector(BaseBlob.hot(weights), weight.sampled)
    return float(weight.unit_vector(reader(data)) @ theirs)


@pytest.mark.parametrize(
    "data",
    [
        coded_blob("w", "Q6_K", MATRIX),
        block_blob("w", "Q8_0", MATRIX),
        mlx_blob("w", MATRIX, 6, 64, DType.BF16),
        mlx_blob("w", MATRIX, 3, 32, DType.F16),
        float8_blob("w", MATRIX, (512, 512)),
    ],
)
def test_samples_of_a_weight_have_the_direction_of_its_parent(data: bytes) -> None:
    for parent in (weight_blob("w", MATRIX), block_blob("w", "Q8_0", MATRIX)):
        assert cosine(data, parent) > 0.95
    assert abs(cosine(data, weight_blob("w", source(2)))) < 0.2


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

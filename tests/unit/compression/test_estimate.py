from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from blobstore.compression import estimate
from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.estimate import estimate_size, fit_low_rank
from blobstore.compression.level import Level
from blobstore.compression.spans import Span
from blobstore.core.tensor import DType
from blobstore.core.workers import Cancelled
from tests.support.adapted import COLUMNS, ROWS, matrix, merged
from tests.support.cold import cold, decoded, noise, weights

BASE = matrix(1)
MERGED = merged(BASE, 2)
SHAPE = (ROWS, COLUMNS)


def span_of(data: bytes, shape: tuple[int, ...], begin: int = 0) -> Span:
    return Span(len(data), DType.BF16, base_begin=begin, shape=shape)


def coded(data: bytes, span: Span, before: bytes, level: Level) -> tuple[int, int, list[Span]]:
    """Return the sizes without and with factors, verified by decoding, and the spans."""
    base = BaseBlob.hot(before)
    spans = list(fit_low_rank(memoryview(data), [span], base, level))
    stored = cold(data, spans=spans, base=base, level=level)
    opened = ColdBlobDecoder(stored)
    if opened.table.base is not None:
        opened.give_base(base)
    out = decoded(opened)
    assert out == data
    return len(cold(data, spans=[span], base=base, level=level)), len(stored), spans


@pytest.mark.parametrize("level", get_args(Level))
def test_a_merged_adapter_takes_little_space(level: Level) -> None:
    plain, size, _ = coded(MERGED, span_of(MERGED, SHAPE), BASE, level)
    assert size < 0.5 * plain
    assert coded(MERGED, span_of(MERGED, SHAPE), BASE, level)[1] == size


@pytest.mark.slow
@pytest.mark.parametrize("level", get_args(Level))
def test_estimates_what_factors_save(level: Level) -> None:
    span = span_of(MERGED, SHAPE)
    _, size, _ = coded(MERGED, span, BASE, level)
    about = estimate_size(memoryview(MERGED), [span], BaseBlob.hot(BASE), level)
    assert abs(about - size) < 0.15 * size


def test_the_first_and_the_last_rows_do_not_stand_for_all() -> None:
    """Embeddings of tokens that were never used are often alike."""
    data = bytearray(weights(DType.F32, 1 << 20))
    for rows in (slice(0, 1 << 17), slice(-(1 << 17), None)):
        data[rows] = bytes(1 << 17)
    span = Span(len(data), DType.F32, shape=(1 << 12, 1 << 8))
    stored = len(cold(bytes(data), spans=[span]))
    about = estimate_size(memoryview(data), [span], None, "fast")
    assert abs(about - stored) < 0.1 * stored


def test_samples_rows_of_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_SLICE", 16 << 10)
    span = span_of(MERGED, SHAPE)
    _, size, _ = coded(MERGED, span, BASE, "small")
    plain = len(cold(MERGED, spans=[span], base=BaseBlob.hot(BASE)))
    about = estimate_size(memoryview(MERGED), [span], BaseBlob.hot(BASE), "small")
    assert 0.75 * size < about < 0.75 * plain


@pytest.mark.slow
def test_each_matrix_of_a_stack_has_its_own_factors() -> None:
    before = b"head" + b"".join(matrix(seed) for seed in range(8))
    step = len(BASE)
    data = b"".join(
        merged(before[4 + number * step :][:step], number, rank=16) for number in range(8)
    )
    plain, size, spans = coded(data, span_of(data, (8, *SHAPE), 4), before, "small")
    assert [span.base_begin for span in spans] == [4 + number * step for number in range(8)]
    assert all(span.factors for span in spans)
    assert size < 0.5 * plain


@pytest.mark.parametrize("level", get_args(Level))
def test_a_stack_without_factors_is_not_split(level: Level) -> None:
    data = weights(DType.BF16, 4 * ROWS * COLUMNS)
    span = span_of(data, (4, *SHAPE))
    other = weights(DType.BF16, 4 * ROWS * COLUMNS, seed=1)
    assert coded(data, span, other, level)[2] == [span]


def test_convolution_kernels_are_matrices_of_the_first_dimension_by_all_others() -> None:
    shape = (ROWS, COLUMNS // 10, 2, 5)
    _, _, spans = coded(MERGED, span_of(MERGED, shape), BASE, "small")
    assert spans[0].factors is not None


@pytest.mark.parametrize(
    "span",
    [
        Span(len(MERGED), DType.BF16, shape=SHAPE),
        Span(len(MERGED), DType.U16, base_begin=0, shape=SHAPE),
        Span(len(MERGED), DType.BF16, base_begin=0, shape=(ROWS * COLUMNS,)),
        Span(len(MERGED), DType.BF16, base_begin=0, shape=(ROWS * COLUMNS // 4, 4)),
        Span(len(MERGED), base_begin=0),
    ],
    ids=["no base", "integers", "a vector", "too narrow", "bytes"],
)
def test_spans_without_factors_are_unchanged(span: Span) -> None:
    assert coded(MERGED, span, BASE, "small")[2] == [span]


@pytest.mark.parametrize("level", get_args(Level))
@pytest.mark.parametrize("share", [0, 0.05])
def test_no_factors_are_searched_where_few_elements_differ(
    level: Level, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "is_promising", None)
    monkeypatch.setattr(estimate, "fit", None)
    data = np.frombuffer(BASE, np.uint16).copy()
    data += np.random.default_rng(0).random(len(data)) < share
    span = span_of(BASE, SHAPE)
    assert coded(data.tobytes(), span, BASE, level)[2] == [span._replace(is_sparse=True)]


@pytest.mark.parametrize("share", [0.2, 1])
def test_many_differing_elements_are_not_sparse(share: float) -> None:
    data = np.frombuffer(BASE, np.uint16).copy()
    data += np.random.default_rng(0).random(len(data)) < share
    span = span_of(BASE, SHAPE)
    assert coded(data.tobytes(), span, BASE, "fast")[2] == [span]


@pytest.mark.parametrize(("elements", "is_sparse"), [(512, True), (513, False)])
def test_tiny_spans_are_sparse_even_if_all_elements_differ(elements: int, is_sparse: bool) -> None:
    before = np.arange(elements, dtype=np.uint16)
    after = before ^ 1
    base = BaseBlob.hot(before.data)
    span = Span(before.nbytes, DType.BF16, base_begin=0)
    found = fit_low_rank(after.data.cast("B"), [span], base, "fast")
    assert [one.is_sparse for one in found] == [is_sparse]


def test_a_sample_of_a_large_cold_base_reads_a_small_part_of_it() -> None:
    before = np.zeros(1 << 24, np.uint8)
    sizes: list[int] = []

    def read_into(out: memoryview, begin: int) -> None:
        sizes.append(out.nbytes)
        out[:] = before[begin : begin + len(out)].data

    base = BaseBlob(BaseBlob.hot(before.data).identity, read_into)  # type: ignore[arg-type]
    span = Span(len(before), DType.U8, base_begin=0)
    assert [one.is_sparse for one in fit_low_rank(before.data, [span], base, "fast")] == [True]
    assert 0 < len(sizes) <= 4


def test_reads_few_rows_of_a_base_without_low_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "MAX_CHUNK", 32 << 10)
    tuned = (np.frombuffer(BASE, np.uint16) ^ 1).tobytes()
    hot, sizes = BaseBlob.hot(BASE), [0]

    def read_into(out: memoryview, begin: int) -> None:
        sizes.append(out.nbytes)
        hot.read_into(out, begin)

    base = BaseBlob(hot.identity, read_into)  # type: ignore[arg-type]
    span = span_of(tuned, SHAPE)
    assert list(fit_low_rank(memoryview(tuned), [span], base, "fast")) == [span]
    assert 0 < sum(sizes) <= len(BASE) / 2


def test_the_search_for_factors_can_be_stopped() -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(len(looks))
        if len(looks) > 1:
            raise Cancelled("stopped")

    span = span_of(MERGED, SHAPE)
    with pytest.raises(Cancelled):
        list(fit_low_rank(memoryview(MERGED), [span], BaseBlob.hot(BASE), "small", look))


def test_reads_a_large_base_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    span = span_of(MERGED, SHAPE, 4)
    before = b"head" + BASE
    held = coded(MERGED, span, before, "small")[2]
    sizes: list[int] = []
    hot = BaseBlob.hot(before)

    def read_into(out: memoryview, begin: int) -> None:
        sizes.append(out.nbytes)
        hot.read_into(out, begin)

    for limit in ("_MAX_IN_MEMORY", "MAX_CHUNK"):
        monkeypatch.setattr(estimate, limit, 32 << 10)
    monkeypatch.setattr(estimate, "_SLICE", 16 << 10)
    monkeypatch.setattr("blobstore.compression.delta.low_rank_fit._BLOCK_ELEMENTS", 1 << 13)
    base = BaseBlob(hot.identity, read_into)  # type: ignore[arg-type]
    found = list(fit_low_rank(memoryview(MERGED), [span], base, "small"))
    assert [one.factors is not None for one in found] == [True]
    assert abs(len(found[0].factors or b"") - len(held[0].factors or b"")) < 1000
    assert max(sizes) < len(MERGED)


def test_non_finite_values_do_not_stop_a_fit() -> None:
    data = noise(len(BASE))
    span = span_of(data, SHAPE)
    assert coded(data, span, BASE, "small")[2] == [span]
    assert np.frombuffer(data, np.uint16).max() > 0xFF00  # there are NaNs

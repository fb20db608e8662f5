from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from blobstore.compression import estimate
from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.estimate import KnownFactors, estimate_size, fit_low_rank
from blobstore.compression.level import Level
from blobstore.compression.spans import Span
from blobstore.core.tensor import DType
from tests.support.adapted import COLUMNS, ROWS, matrix, merged
from tests.support.cold import cold, decoded, noise, weights

BASE = matrix(1)
MERGED = merged(BASE, 2)
SHAPE = (ROWS, COLUMNS)


def run_of(data: bytes, shape: tuple[int, ...], begin: int = 0) -> Span:
    return Span(len(data), DType.BF16, base_begin=begin, shape=shape)


def coded(data: bytes, run: Span, before: bytes, level: Level) -> tuple[int, int, list[Span]]:
    """Return the bytes without factors and with them, once they have been decoded, and the runs."""
    base = BaseBlob.hot(before)
    runs = list(fit_low_rank(memoryview(data), [run], base, level, {}))
    stored = cold(data, spans=runs, base=base, level=level)
    opened = ColdBlobDecoder(stored)
    if opened.table.base is not None:
        opened.give_base(base)
    out = decoded(opened)
    assert out == data
    return len(cold(data, spans=[run], base=base, level=level)), len(stored), runs


@pytest.mark.parametrize("level", get_args(Level))
def test_a_merged_adapter_takes_little(level: Level) -> None:
    plain, size, _ = coded(MERGED, run_of(MERGED, SHAPE), BASE, level)
    assert size < 0.5 * plain
    assert coded(MERGED, run_of(MERGED, SHAPE), BASE, level)[1] == size


@pytest.mark.parametrize("level", get_args(Level))
def test_an_estimate_knows_what_factors_save(level: Level) -> None:
    run = run_of(MERGED, SHAPE)
    _, size, runs = coded(MERGED, run, BASE, level)
    known: KnownFactors = {}
    about = estimate_size(memoryview(MERGED), [run], BaseBlob.hot(BASE), level, known)
    assert abs(about - size) < 0.15 * size
    assert known == {0: runs[0].factors}  # which need not be found twice
    runs = [run._replace(factors=b"other")]
    assert (
        list(fit_low_rank(memoryview(MERGED), [run], BaseBlob.hot(BASE), level, {0: b"other"}))
        == runs
    )


def test_an_estimate_of_a_large_tensor_is_from_some_of_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(estimate, "_SLICE", 16 << 10)
    run = run_of(MERGED, SHAPE)
    _, size, _ = coded(MERGED, run, BASE, "small")
    plain = len(cold(MERGED, spans=[run], base=BaseBlob.hot(BASE)))
    known: KnownFactors = {}
    about = estimate_size(memoryview(MERGED), [run], BaseBlob.hot(BASE), "small", known)
    assert known == {}
    assert 0.75 * size < about < 0.75 * plain


def test_every_matrix_of_a_stack_has_factors_of_its_own() -> None:
    before = b"head" + b"".join(matrix(seed) for seed in range(8))
    step = len(BASE)
    data = b"".join(
        merged(before[4 + number * step :][:step], number, rank=16) for number in range(8)
    )
    plain, size, runs = coded(data, run_of(data, (8, *SHAPE), 4), before, "small")
    assert [run.base_begin for run in runs] == [4 + number * step for number in range(8)]
    assert all(run.factors for run in runs)
    assert size < 0.5 * plain


@pytest.mark.parametrize("level", get_args(Level))
def test_a_stack_of_which_no_matrix_is_predicted_stays_whole(level: Level) -> None:
    data = weights(DType.BF16, 4 * ROWS * COLUMNS)
    run = run_of(data, (4, *SHAPE))
    other = weights(DType.BF16, 4 * ROWS * COLUMNS, seed=1)
    assert coded(data, run, other, level)[2] == [run]


def test_the_first_dimension_of_windows_is_against_all_others() -> None:
    shape = (ROWS, COLUMNS // 10, 2, 5)
    _, _, runs = coded(MERGED, run_of(MERGED, shape), BASE, "small")
    assert runs[0].factors is not None


@pytest.mark.parametrize(
    "run",
    [
        Span(len(MERGED), DType.BF16, shape=SHAPE),
        Span(len(MERGED), DType.U16, base_begin=0, shape=SHAPE),
        Span(len(MERGED), DType.BF16, base_begin=0, shape=(ROWS * COLUMNS,)),
        Span(len(MERGED), DType.BF16, base_begin=0, shape=(ROWS * COLUMNS // 4, 4)),
        Span(len(MERGED), base_begin=0),
    ],
    ids=["no base", "integers", "a vector", "too narrow", "bytes"],
)
def test_what_has_no_factors_stays_as_it_is(run: Span) -> None:
    assert coded(MERGED, run, BASE, "small")[2] == [run]


def test_equal_tensors_stay_as_they_are() -> None:
    run = run_of(BASE, SHAPE)
    assert coded(BASE, run, BASE, "small")[2] == [run]


def test_a_base_that_is_not_held_is_read_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(MERGED, SHAPE, 4)
    before = b"head" + BASE
    held = coded(MERGED, run, before, "small")[2]
    sizes: list[int] = []
    hot = BaseBlob.hot(before)

    def read_into(out: memoryview, begin: int) -> None:
        sizes.append(out.nbytes)
        hot.read_into(out, begin)

    monkeypatch.setattr(estimate, "_MAX_IN_MEMORY", 32 << 10)
    monkeypatch.setattr(estimate, "_SLICE", 16 << 10)
    monkeypatch.setattr("blobstore.compression.delta.low_rank_fit._BLOCK_ELEMENTS", 1 << 13)
    base = BaseBlob(hot.identity, read_into)  # type: ignore[arg-type]
    found = list(fit_low_rank(memoryview(MERGED), [run], base, "small", {}))
    assert [one.factors is not None for one in found] == [True]
    assert abs(len(found[0].factors or b"") - len(held[0].factors or b"")) < 1000
    assert max(sizes) < len(MERGED)


def test_numbers_that_nothing_reaches_stop_no_fit() -> None:
    data = noise(len(BASE))
    run = run_of(data, SHAPE)
    assert coded(data, run, BASE, "small")[2] == [run]
    assert np.frombuffer(data, np.uint16).max() > 0xFF00  # no numbers are among them

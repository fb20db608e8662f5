from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from blobstore.compression.delta.codec import SMALL, as_elements, encode_chunk
from blobstore.compression.delta.low_rank import LowRankPredictor, pack
from blobstore.compression.delta.low_rank_fit import (
    _EFFORTS,
    _found,
    _Pair,
    can_fit,
    fit,
    is_promising,
)
from blobstore.compression.level import Level
from blobstore.core.tensor import DType
from tests.unit.compression.delta.test_codec import bf16

Array = np.ndarray[Any, Any]
_ROWS, _COLUMNS = 256, 320


def merged(rank: int, size: float) -> tuple[Array, Array]:
    """Return weights, and what a merged adapter of ``rank`` makes of them."""
    random = np.random.default_rng(rank)
    base = bf16(random.standard_normal(_ROWS * _COLUMNS, np.float32) * np.float32(0.05))
    left = random.standard_normal((_ROWS, rank), np.float32)
    right = random.standard_normal((rank, _COLUMNS), np.float32)
    wide = (base.astype(np.uint32) << 16).view(np.float32)
    return base, bf16(wide + (left @ right).ravel() * np.float32(size))


def reading(base: Array) -> Callable[[int, int], Array]:
    return lambda begin, end: base[begin:end]


def stored(tensor: Array, base: Array, level: Level) -> tuple[int, int, int]:
    """Return the bytes without factors, with them, and the rank."""
    plain = len(encode_chunk(tensor, base, DType.BF16, SMALL))
    found = fit(tensor, reading(base), DType.BF16, _COLUMNS, level)
    if found is None:
        return plain, plain, 0
    factors = found.factors
    predicted = LowRankPredictor(factors, DType.BF16).predict(base, 0)
    size = len(encode_chunk(tensor, predicted, DType.BF16, SMALL)) + len(pack(factors))
    return plain, size, factors.rank


@pytest.mark.parametrize("level", get_args(Level))
@pytest.mark.parametrize("rank", [1, 8])
def test_a_merged_adapter_is_predicted(rank: int, level: Level) -> None:
    base, tensor = merged(rank, 1e-3)
    plain, size, found = stored(tensor, base, level)
    assert rank <= found <= 2 * rank
    assert size < plain / 2


def test_an_update_of_full_rank_is_not_predicted() -> None:
    base, _ = merged(1, 0)
    wide = (base.astype(np.uint32) << 16).view(np.float32)
    noise = np.random.default_rng(5).standard_normal(len(base), np.float32) * np.float32(1e-3)
    assert fit(bf16(wide + noise), reading(base), DType.BF16, _COLUMNS, "small") is None


@pytest.mark.slow
def test_an_adapter_of_a_high_rank_is_predicted_by_as_many_factors() -> None:
    random = np.random.default_rng(0)
    side = 1024
    base = random.standard_normal((side, side), np.float32) * np.float32(0.02)
    update = random.standard_normal((side, 64)) @ random.standard_normal((64, side)) * 1e-3
    before, after = (side.astype("<f4").view(np.uint32).ravel() for side in (base, base + update))
    found = fit(after, reading(before), DType.F32, side, "small")
    assert found is not None
    assert found.factors.rank == 64


@pytest.mark.parametrize(("rank", "has_more"), [(8, False), (64, True)])
def test_noise_is_not_taken_for_more_directions(rank: int, *, has_more: bool) -> None:
    random = np.random.default_rng(rank)
    left, right = (random.standard_normal(shape) for shape in ((512, rank), (rank, 512)))
    update = left @ right + random.standard_normal((512, 512))
    tensor = update.astype("<f4").view(np.uint32).ravel()
    pair = _Pair(tensor, lambda begin, end: np.zeros(end - begin, np.uint32), DType.F32, 512)
    found = _found(pair, 32, _EFFORTS["small"])
    assert found is not None
    assert found.has_more == has_more


@pytest.mark.parametrize("rank", [1, 8, 16])
def test_a_sample_shows_whether_a_fit_is_promising(rank: int) -> None:
    base, tensor = merged(rank, 1e-3)
    wide = (base.astype(np.uint32) << 16).view(np.float32)
    noise = np.random.default_rng(5).standard_normal(len(base), np.float32) * np.float32(1e-3)
    read = reading(base)
    assert is_promising(tensor, read, DType.BF16, _COLUMNS)
    assert not is_promising(bf16(wide + noise), read, DType.BF16, _COLUMNS)
    assert not is_promising(base, read, DType.BF16, _COLUMNS)
    assert not is_promising(tensor, read, DType.U16, _COLUMNS)


def test_a_base_may_be_read_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blobstore.compression.delta.low_rank_fit._BLOCK_ELEMENTS", 70 * _COLUMNS)
    base, tensor = merged(8, 1e-3)
    sizes: list[int] = []

    def read(begin: int, end: int) -> Array:
        sizes.append(end - begin)
        return base[begin:end].copy()

    found = fit(tensor, read, DType.BF16, _COLUMNS, "small")
    assert found is not None
    assert max(sizes) == 70 * _COLUMNS
    predicted = LowRankPredictor(found.factors, DType.BF16).predict(base, 0)
    assert len(encode_chunk(tensor, predicted, DType.BF16, SMALL)) < len(base) / 2


def test_only_matrices_can_be_fitted() -> None:
    assert can_fit(_ROWS * _COLUMNS, DType.BF16, _COLUMNS)
    assert not can_fit(_ROWS * _COLUMNS, DType.BF16, 0)
    assert not can_fit(_ROWS * _COLUMNS, DType.I16, _COLUMNS)
    assert not can_fit(_ROWS * 16, DType.BF16, 16)


def test_equal_tensors_need_no_factors() -> None:
    base, _ = merged(1, 0)
    assert fit(base, reading(base), DType.BF16, _COLUMNS, "small") is None


def test_vectors_and_integers_are_not_predicted() -> None:
    base, tensor = merged(1, 1e-3)
    read = reading(base)
    assert fit(tensor, read, DType.BF16, len(base), "small") is None
    assert fit(tensor, read, DType.U16, _COLUMNS, "small") is None
    assert fit(tensor[:0], read, DType.BF16, 0, "small") is None


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32])
def test_other_floats_are_predicted_too(dtype: DType) -> None:
    kind = f"<f{dtype.bits // 8}"
    random = np.random.default_rng(0)
    base = random.standard_normal((_ROWS, _COLUMNS)) * 0.05
    outer = np.outer(random.standard_normal(_ROWS), random.standard_normal(_COLUMNS))
    before, after = (
        as_elements(values.astype(kind).tobytes(), dtype) for values in (base, base + outer * 1e-2)
    )
    found = fit(after, reading(before), dtype, _COLUMNS, "small")
    assert found is not None
    assert found.ratio < 0.8


def test_infinities_and_nans_do_not_stop_a_fit() -> None:
    base, tensor = merged(1, 1e-3)
    base[5], tensor[77], tensor[78] = 0x7F80, 0x7FC0, 0xFF80
    assert stored(tensor, base, "small")[2] >= 1

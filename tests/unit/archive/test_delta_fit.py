from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blobstore.archive.delta import Effort, as_elements, encode_chunk
from blobstore.archive.delta_fit import fit
from blobstore.archive.delta_prediction import Prediction, pack
from blobstore.tensor import DType
from tests.unit.archive.test_delta import bf16

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


def stored(tensor: Array, base: Array) -> tuple[int, int, int]:
    """Return the bytes without factors, with them, and the rank."""
    plain = len(encode_chunk(tensor, base, DType.BF16, Effort.SMALL))
    factors = fit(tensor, base, DType.BF16, _COLUMNS)
    if factors is None:
        return plain, plain, 0
    predicted = Prediction(factors, DType.BF16).predict(base, 0)
    size = len(encode_chunk(tensor, predicted, DType.BF16, Effort.SMALL)) + len(pack(factors))
    return plain, size, factors.rank


@pytest.mark.parametrize("rank", [1, 8])
def test_a_merged_adapter_is_predicted(rank: int) -> None:
    base, tensor = merged(rank, 1e-3)
    plain, size, found = stored(tensor, base)
    assert rank <= found <= 2 * rank
    assert size < plain / 2


def test_an_update_of_full_rank_is_not_predicted() -> None:
    base, _ = merged(1, 0)
    wide = (base.astype(np.uint32) << 16).view(np.float32)
    noise = np.random.default_rng(5).standard_normal(len(base), np.float32) * np.float32(1e-3)
    assert fit(bf16(wide + noise), base, DType.BF16, _COLUMNS) is None


def test_equal_tensors_need_no_factors() -> None:
    base, _ = merged(1, 0)
    assert fit(base, base, DType.BF16, _COLUMNS) is None


def test_vectors_and_integers_are_not_predicted() -> None:
    base, tensor = merged(1, 1e-3)
    assert fit(tensor, base, DType.BF16, len(base)) is None
    assert fit(tensor, base, DType.U16, _COLUMNS) is None
    assert fit(tensor[:0], base[:0], DType.BF16, 0) is None


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32])
def test_other_floats_are_predicted_too(dtype: DType) -> None:
    kind = f"<f{dtype.bits // 8}"
    random = np.random.default_rng(0)
    base = random.standard_normal((_ROWS, _COLUMNS)) * 0.05
    outer = np.outer(random.standard_normal(_ROWS), random.standard_normal(_COLUMNS))
    before, after = (
        as_elements(values.astype(kind).tobytes(), dtype) for values in (base, base + outer * 1e-2)
    )
    assert fit(after, before, dtype, _COLUMNS) is not None


def test_infinities_and_what_is_no_number_do_not_stop_a_fit() -> None:
    base, tensor = merged(1, 1e-3)
    base[5], tensor[77], tensor[78] = 0x7F80, 0x7FC0, 0xFF80
    assert stored(tensor, base)[2] >= 1

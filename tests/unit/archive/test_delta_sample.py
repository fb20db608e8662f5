from __future__ import annotations

import numpy as np
import pytest

from blobstore.archive.delta import Effort, encode_chunk
from blobstore.archive.delta_sample import sampled_gain
from blobstore.core.tensor import DType
from tests.unit.archive.test_delta import elements_of, fine_tuned

_SOLO_BF16 = 0.66


@pytest.mark.parametrize("update", [2e-5, 2e-4, 2e-3])
def test_gain_is_near_what_coding_gains(update: float) -> None:
    base, tensor = fine_tuned(1 << 17, update)
    stored = len(encode_chunk(tensor, base, DType.BF16, Effort.SMALL))
    gained = _SOLO_BF16 * tensor.nbytes - stored
    assert sampled_gain(tensor, base, DType.BF16) == pytest.approx(gained, abs=0.02 * tensor.nbytes)


def test_a_nearer_base_gains_more() -> None:
    gains = [
        sampled_gain(*fine_tuned(1 << 16, size)[::-1], DType.BF16) for size in (1e-4, 4e-4, 2e-3)
    ]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 0


def test_a_stranger_gains_nothing() -> None:
    tensor, _ = fine_tuned(1 << 16, 0, seed=1)
    base, _ = fine_tuned(1 << 16, 0, seed=2)
    assert sampled_gain(tensor, base, DType.BF16) == 0


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32, DType.F8_E4M3, DType.U8, DType.I64])
@pytest.mark.parametrize("count", [1, 999, 100_000])
def test_equal_tensors_gain_nearly_all_that_they_take(dtype: DType, count: int) -> None:
    tensor = elements_of(dtype, count)
    gained = sampled_gain(tensor, tensor, dtype)
    assert gained <= tensor.nbytes
    assert gained >= 0.9 * tensor.nbytes or count < 1000


def test_an_empty_tensor_gains_nothing() -> None:
    empty = np.empty(0, np.uint16)
    assert sampled_gain(empty, empty, DType.BF16) == 0

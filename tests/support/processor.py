"""Work in threads whose processor takes subnormal numbers for 0, as after torch.set_flush_denormal(True)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest


def where_subnormal_numbers_are_flushed(work: Callable[[], bytes]) -> bytes:
    """Return what ``work`` does in a thread of its own, whose processor takes subnormal numbers for 0."""
    torch = pytest.importorskip("torch")

    def flushed() -> bytes:
        assert torch.set_flush_denormal(True)
        assert np.float32(1e-40) * np.float32(1) == 0
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(flushed).result()

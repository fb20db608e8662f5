"""Matrices, and what a merged adapter makes of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

KINDS: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
ROWS, COLUMNS = 256, 320


def matrix(seed: int, code: str = "BF16") -> bytes:
    """Return a matrix of weights."""
    numbers = np.random.default_rng(seed).standard_normal((ROWS, COLUMNS), dtype=np.float32)
    return (numbers * np.float32(0.02)).astype(KINDS[code]).tobytes()


def merged(data: bytes, seed: int, *, rank: int = 8, code: str = "BF16") -> bytes:
    """Return ``W + alpha / r * B @ A``, rounded, of a matrix ``W``."""
    random = np.random.default_rng(seed)
    down = random.standard_normal((rank, COLUMNS), dtype=np.float32)
    up = random.standard_normal((ROWS, rank), dtype=np.float32)
    numbers = np.frombuffer(data, KINDS[code]).astype(np.float32).reshape(ROWS, COLUMNS)
    return (numbers + np.float32(4e-3 / rank) * (up @ down)).astype(KINDS[code]).tobytes()

"""A model that is trained: each step changes a small share of its weights by one unit in the last place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.models import write_folder

SHARE = 0.005
Weights = dict[str, np.ndarray[Any, Any]]


def first_weights(layers: int = 4, size: int = 256) -> Weights:
    """Return matrices in bf16, and a small vector that no step changes."""
    random = np.random.default_rng(1)
    weights: Weights = {
        f"model.layers.{number}.mlp.up_proj.weight": random.normal(
            0, 0.02, (size, 4 * size)
        ).astype(ml_dtypes.bfloat16)
        for number in range(layers)
    }
    weights["model.norm.weight"] = np.ones(size, ml_dtypes.bfloat16)
    return weights


def steps(weights: Weights, count: int, share: float = SHARE) -> Iterator[Weights]:
    """Yield the weights after each of some steps."""
    random = np.random.default_rng(2)
    for _ in range(count):
        weights = dict(weights)
        for name, array in weights.items():
            if array.ndim > 1:
                bits = array.view(np.uint16).copy()
                at = np.asarray(random.random(array.shape) < share)
                bits[at] += random.choice(np.array([1, 0xFFFF], np.uint16), np.count_nonzero(at))
                weights[name] = bits.view(ml_dtypes.bfloat16)
        yield weights


def write_weights(folder: Path, weights: Weights) -> Path:
    """Write the folder of a model in two files, and return it."""
    return write_folder(folder, weights, shards=2, files={"tokenizer.json": b"{}"})

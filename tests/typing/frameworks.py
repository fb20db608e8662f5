"""A program that loads tensors, for mypy alone: it proves that each framework has its own type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import mlx.core as mx
import torch
from numpy.typing import NDArray

import blobstore


def load_with_torch() -> None:
    """Load tensors of torch."""
    with blobstore.open("llama", framework="torch", device="cuda", read="pread") as model:
        assert_type(model["a"], torch.Tensor)
        assert_type(model.get_tensor("a"), torch.Tensor)
        assert_type(model.get("a"), torch.Tensor | None)
        assert_type(model.state_dict(), dict[str, torch.Tensor])
        assert_type(model.iter_tensors(), Iterator[tuple[str, torch.Tensor]])
        assert_type(model.get_slice("a")[0, 1:2], torch.Tensor)
    assert_type(blobstore.open("llama", framework="pt").dequantized("a"), torch.Tensor)


def load_with_others() -> None:
    """Load tensors of numpy and MLX."""
    assert_type(blobstore.open("llama")["a"], NDArray[Any])
    assert_type(blobstore.open("llama", framework="np")["a"], NDArray[Any])
    assert_type(blobstore.open("llama", framework="mlx")["a"], mx.array)

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blobstore.errors import CheckpointUnsupported
from blobstore.manifests.plain_values import decode, encode
from blobstore.sources.pytorch.container import open_container
from blobstore.sources.pytorch.training_values import WRITERS, PlainParts
from tests.support.trainer_folders import assert_same


def plain(folder: Path, value: Any) -> Any:
    """Return what a checkpoint file with a value has."""
    torch.save(value, folder / "value.pt")
    descriptor = os.open(folder / "value.pt", os.O_RDONLY)
    try:
        content = open_container(descriptor, os.fstat(descriptor).st_size).result.value
    finally:
        os.close(descriptor)
    return PlainParts({}).of(content, ("value",))


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "text", b"bytes"], 7: (3, {}), "$sign": [[]]},
        {3: {"lr": 1e-3}, "nested": {0: {1: 2}}},
        [torch.float32, torch.bfloat16, torch.device("cuda", 1), torch.device("cpu")],
        np.arange(6, dtype="<u4").reshape(2, 3),
        np.zeros((0, 3), dtype=">f8"),
        [np.float32(1.5), np.int64(3), np.bool_(True)],
        float("inf"),
        -(2**80),
    ],
    ids=str,
)
def test_plain_values_come_back(tmp_path: Path, value: Any) -> None:
    found = encode(plain(tmp_path, value), "value", WRITERS)
    assert_same(decode(found), value)


@pytest.mark.parametrize(
    "value",
    [{1, 2}, {(1, 2): 3}, {1.5: 2}, np.array(["a"]), np.array([{}]), Path, os.getcwd, Path("a")],
    ids=repr,
)
def test_other_values_are_refused_by_their_place(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointUnsupported, match="value.a.0"):
        plain(tmp_path, {"a": [value]})


def deep() -> Any:
    value: list[Any] = []
    for _ in range(200):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [["x" * 2**20] * 100, [np.zeros(2**17)] * 100, deep()],
    ids=["texts", "arrays", "depth"],
)
def test_shared_values_are_limited(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointUnsupported, match="too many or too deep"):
        plain(tmp_path, value)

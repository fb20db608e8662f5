"""Folders as the Trainer of transformers writes them, from a short training of a tiny model."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


def train(steps: int) -> dict[str, Any]:
    """Return the state of a training after some steps, by the names of its files."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(steps):
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    numpy_state = np.random.RandomState(steps).get_state()
    return {
        "model.safetensors": model.state_dict(),
        "optimizer.pt": optimizer.state_dict(),
        "scheduler.pt": scheduler.state_dict(),
        "rng_state.pth": {
            "python": random.Random(steps).getstate(),
            "numpy": numpy_state,
            "cpu": torch.get_rng_state(),
            "cuda": [torch.get_rng_state(), torch.get_rng_state()],
        },
    }


def write_trainer_folder(folder: Path, steps: int = 3) -> Path:
    """Write a folder of the Trainer, and return it."""
    state = train(steps)
    folder.mkdir(parents=True)
    save_file(state.pop("model.safetensors"), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": steps}))
    torch.save(Fraction(1, 3), folder / "training_args.bin")  # an object that needs its own code
    for name, value in state.items():
        torch.save(value, folder / name)
    return folder


def assert_same(found: Any, expected: Any) -> None:
    """Check that two states are equal, with equal types."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert_same(value, expected[key])
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(found, torch.Tensor | np.ndarray):
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()
    else:
        assert found == expected

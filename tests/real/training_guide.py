"""Runs the programs of the guide about training on two ranks, and resumes on one and in one process.

A program of its own: ``python -m tests.real.training_guide FOLDER``. What is not as expected ends a rank with an
error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes

from tests.support.ports import free_port
from tests.support.transcripts import PYTHON_BLOCK, ROOT

GUIDE = (ROOT / "docs" / "guides" / "train.md").read_text(encoding="utf-8")
STEPS = 4


def programs(store: str, *words: str) -> dict[str, Any]:
    """Return what the blocks of the guide define that have one of some words."""
    names: dict[str, Any] = {}
    for block in PYTHON_BLOCK.findall(GUIDE):
        if any(word in block for word in words):
            exec(block.replace("/shared/store", store), names)
    return names


def model() -> nn.Sequential:
    """Return the model before the training."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _work(rank: int, world: int, port: int, folder: Path, name: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    guide = programs(str(folder / "store"), "StoreWriter", "fully_shard", "StoreReader")
    batches = torch.rand(STEPS, 4, 8, generator=torch.Generator().manual_seed(1))
    trained = model()
    guide["train"](trained, list(batches), name, every=1)
    whole = {key: one.full_tensor() for key, one in trained.state_dict().items()}
    if rank == 0:
        torch.save(whole, folder / f"trained-{world}")
    dist.destroy_process_group()


def _in_one_process(store: str) -> None:
    guide = programs(store, "blobstore.load")
    os.environ["BLOBSTORE_HOME"] = store

    def start() -> list[Any]:
        trained = model()
        optimizer = torch.optim.AdamW(trained.parameters())
        return [trained, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)]

    def step(trained: nn.Module, optimizer: Any, scheduler: Any) -> float:
        loss = trained(torch.rand(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return float(loss)

    first = start()
    guide["save_step"](*first, 1, step(*first))
    losses = [step(*first), step(*first)]
    guide["save_step"](*first, 3, losses[-1])  # waits for the one before
    second = start()
    assert guide["resume"](*second, "run:step-1") == 1
    assert [step(*second), step(*second)] == losses


def main() -> None:
    """Train, and resume from a step in the middle on another number of ranks."""
    folder = Path(sys.argv[1])
    for world, name in ((2, ""), (1, f"run:step-{STEPS // 2}")):
        arguments = (world, free_port(), folder, name)
        # Forked, so that torch is imported once.
        start_processes(_work, arguments, nprocs=world, start_method="fork")
    _in_one_process(str(folder / "single"))


if __name__ == "__main__":
    main()

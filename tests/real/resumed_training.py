"""A training on two ranks of which one is killed, and which goes on with four ranks and with one.

A program of its own: ``python -m tests.real.resumed_training FOLDER``. It writes the losses of each training.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from blobstore.integrations.torch_checkpoint import StoreReader, StoreWriter
from tests.support.ports import free_port

STEPS = 6
SAVED, KILLED = 3, 4
"""The step that the training goes on from, and the one before whose save a rank is killed."""


class Program:
    """A model that is trained with FSDP2."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.model = nn.Sequential(nn.Embedding(32, 16), encoder, nn.Linear(16, 32))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def state(self, step: int) -> dict[str, Any]:
        """Return all that a training needs to go on."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {
            "model": weights,
            "optimizer": moments,
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "step": step,
        }

    def resume(self, store: str) -> None:
        """Go on from the step that is saved."""
        state = self.state(0)
        load(state, checkpoint_id=f"run:{SAVED}", storage_reader=StoreReader(store))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        assert state["step"] == SAVED

    def step(self) -> float:
        """Train for a step; return the loss. All ranks see the same data, so their number changes nothing."""
        tokens = torch.randint(0, 32, (4, 8))
        loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()


def _work(rank: int, world: int, port: int, stores: list[str], killed: int, losses: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    program = Program()
    is_resumed = len(stores) == 1
    if is_resumed:
        program.resume(stores[0])
    writers = [StoreWriter(store, model="model") for store in stores]
    with losses.open("a") as file:
        for step in range(SAVED + 1 if is_resumed else 1, STEPS + 1):
            loss = program.step()
            if not rank:
                file.write(f"{step} {loss!r}\n")
            if step == killed and rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            for writer in writers:
                writer.metrics = {"loss": loss}
                save(program.state(step), checkpoint_id=f"run:{step}", storage_writer=writer)
    dist.destroy_process_group()


def main() -> None:
    """Train."""
    folder = Path(sys.argv[1])
    stores = [str(folder / "store"), f"file://{folder}/bucket"]
    (folder / "bucket").mkdir()

    def train(world: int, stores: list[str], name: str, killed: int = 0) -> None:
        arguments = (world, free_port(), stores, killed, folder / name)
        # Forked, so that torch is imported once.
        start_processes(_work, arguments, nprocs=world, start_method="fork")

    train(2, [], "undisturbed")
    with contextlib.suppress(ProcessExitedException):
        train(2, stores, "killed", KILLED)
    train(4, stores[:1], "from-store")
    train(1, stores[1:], "from-bucket")


if __name__ == "__main__":
    main()

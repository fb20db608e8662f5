"""Trains a small model with FSDP2 on some processes, and saves it in every way that torch has.

A program of its own: ``python -m tests.real.distributed_training FOLDER``. It writes one folder for each
number of processes, and what torch itself reads from them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from tests.real.test_checkpoints import flattened
from tests.support.ports import free_port

WORLDS = (2, 4)


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 7, bias=False), nn.LayerNorm(7))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.arange(10)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _layouts(world: int) -> dict[str, torch.Tensor]:
    """Return tensors in other placements than those of FSDP."""
    torch.manual_seed(1)
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2))
    matrix, cube = torch.randn(8, 12), torch.randn(3, 8, 5)
    return {
        "columns": distribute_tensor(matrix, line, [Shard(1)]),
        "middle": distribute_tensor(cube, line, [Shard(1)]),
        "both": distribute_tensor(matrix, square, [Shard(0), Shard(1)]),
        "copies": distribute_tensor(matrix, square, [Replicate(), Shard(0)]),
        "uneven": distribute_tensor(torch.randn(3), line, [Shard(0)]),
        "half": distribute_tensor(matrix.bfloat16(), line, [Shard(1)]),
        "float8": distribute_tensor(matrix, line, [Shard(0)]).to(torch.float8_e4m3fn),
        "plain": torch.randn(4, 3).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }


def _work(rank: int, world: int, port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    model, optimizer = _trained()
    weights, state = get_state_dict(model, optimizer)
    layouts = _layouts(world)
    everything: dict[str, Any] = {"model": weights, "optimizer": state, "step": 2}
    save(everything, checkpoint_id=folder / "step")
    save({"model": layouts}, checkpoint_id=folder / "layouts")
    # As accelerate and the Trainer of transformers do.
    save({"model": weights}, checkpoint_id=folder / "trainer" / "pytorch_model_fsdp_0")
    save({"optimizer": state}, checkpoint_id=folder / "trainer" / "optimizer_0")
    # As torchtitan does: the model's tensors next to the optimizer.
    save({**weights, "optimizer": state}, checkpoint_id=folder / "flat")
    writer = FileSystemWriter(folder / "threads", single_file_per_rank=False, thread_count=2)
    save({"model": weights}, storage_writer=writer)
    left_out = ("float8", "plain", "scalar", "empty")
    plain = {name: tensor for name, tensor in layouts.items() if name not in left_out}
    shards = HuggingFaceStorageWriter(str(folder / "shards"), save_distributed=True)
    save(plain, storage_writer=shards)
    dist.destroy_process_group()


def main() -> None:
    """Write the folders."""
    root = Path(sys.argv[1])
    for world in WORLDS:
        folder = root / str(world)
        (folder / "shards").mkdir(parents=True)
        # Forked, so that torch is imported once.
        start_processes(_work, (world, free_port(), folder), nprocs=world, start_method="fork")
        read = {
            name: flattened(_load_state_dict_from_keys(checkpoint_id=str(folder / name)))
            for name in ("step", "layouts")
        }
        torch.save(read, folder / "read.pt")


if __name__ == "__main__":
    main()

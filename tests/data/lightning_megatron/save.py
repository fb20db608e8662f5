"""Writes folders.zip and tensors.json next to this file. Run it with Lightning, Megatron-Core and torch on a CPU.

The folders are checkpoints that Lightning saves after two steps of FSDP2 with two processes, and that
``megatron.core.dist_checkpointing`` saves with two and with four. tensors.json has the complete tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

HERE = Path(__file__).parent
DATE = (2026, 1, 1, 0, 0, 0)
LAYERS = 3


def described(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Return type, shape and digest of tensors."""
    found = {}
    for name, tensor in tensors.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[name] = [dtype, [*tensor.shape], hashlib.sha256(data).hexdigest()]
    return found


def save_lightning(folder: Path) -> None:
    """Train with Lightning, which starts this program again for the other process."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(
                torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6)
            )
            self.is_cut = False
            self.save_hyperparameters({"lr": 1e-2})

        def configure_model(self) -> None:
            if not self.is_cut:
                self.is_cut = True
                assert self.device_mesh is not None
                mesh = self.device_mesh["data_parallel"]
                for part in (self.model[0], self.model[2], self.model):
                    fully_shard(part, mesh=mesh)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(16, 8))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        ),
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    trainer.save_checkpoint(folder / "lightning")
    complete = {name: tensor.full_tensor() for name, tensor in module.state_dict().items()}
    if trainer.global_rank == 0:
        (folder / "lightning.json").write_text(json.dumps(described(complete)))


def save_megatron(rank: int, world: int, folder: Path) -> None:
    """Save tensors with the cuts that tensor parallelism makes, and layers that are one tensor."""
    port = str(29800 + world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    # It asks for the device even if there is none.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    torch.manual_seed(0)
    layer = "decoder.layers.0"
    whole = {
        f"{layer}.self_attention.linear_qkv.weight": torch.randn(12, 6),
        f"{layer}.mlp.linear_fc2.weight": torch.randn(6, 12),
        "decoder.final_layernorm.weight": torch.randn(6),
        "embedding.word_embeddings.weight": torch.randn(20, 6).bfloat16(),
        "decoder.layers.mlp.linear_fc1.weight": torch.randn(LAYERS, 8, 4),
    }
    qkv, fc2, norm, embedding, fc1 = whole

    def cut(name: str, axis: int) -> Any:
        part = whole[name].chunk(world, axis)[rank].contiguous()
        return ShardedTensor.from_rank_offsets(name, part, (axis, rank, world))

    model = {
        qkv: cut(qkv, 0),
        fc2: cut(fc2, 1),
        norm: ShardedTensor.from_rank_offsets(norm, whole[norm], replica_id=rank),
        embedding: cut(embedding, 0),
        "extra": ShardedObject(
            f"{layer}.self_attention._extra_state", torch.zeros(3), (1,), (0,), replica_id=rank
        ),
    }
    for index in range(LAYERS):
        part = whole[fc1][index].chunk(world, 0)[rank].contiguous()
        model[f"{fc1}.{index}"] = ShardedTensor.from_rank_offsets(
            fc1, part, (0, index, LAYERS), (1, rank, world), prepend_axis_num=1
        )
    average = f"optimizer.state.exp_avg.{fc2}"
    part = whole[fc2].chunk(world, 1)[rank].contiguous()
    states = {
        "model": model,
        "optimizer": {"exp_avg": ShardedTensor.from_rank_offsets(average, part, (1, rank, world))},
        "iteration": 10,
        "checkpoint_version": 3.0,
    }
    name = f"megatron{world}"
    (folder / name).mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(states, str(folder / name))
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(described(whole)))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if "FOLDER" in os.environ:  # the other process of Lightning
        save_lightning(Path(os.environ["FOLDER"]))
        return
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        for world in (2, 4):
            start_processes(save_megatron, (world, folder), nprocs=world, start_method="spawn")
        os.environ["FOLDER"] = work
        save_lightning(folder)
        tensors = {
            path.stem: json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json"))
        }
        with zipfile.ZipFile(HERE / "folders.zip", "w") as archive:
            for path in sorted(folder.glob("*/*")):
                info = zipfile.ZipInfo(path.relative_to(folder).as_posix(), DATE)
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, path.read_bytes(), compresslevel=9)
    (HERE / "tensors.json").write_text(json.dumps(tensors, indent=1) + "\n")


if __name__ == "__main__":
    main()

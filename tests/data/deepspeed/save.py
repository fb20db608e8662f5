"""Writes folders.zip and tensors.json next to this file. Run it with DeepSpeed, torch and gloo on a CPU.

The folders are checkpoints of ZeRO stages 1 to 3 that DeepSpeed saves after two steps of training with two
or three processes. tensors.json has what the ``zero_to_fp32`` of DeepSpeed makes of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.spawn import start_processes


class Case(NamedTuple):
    stage: int
    processes: int
    dtype: str
    is_mixed: bool
    """Whether a parameter is frozen, and the others are in two groups."""


CASES = {
    "stage1": Case(1, 2, "fp32", is_mixed=False),
    "stage1-mixed": Case(1, 3, "bf16", is_mixed=True),
    "stage2": Case(2, 2, "bf16", is_mixed=False),
    "stage2-mixed": Case(2, 3, "bf16", is_mixed=True),
    "stage3": Case(3, 2, "fp32", is_mixed=False),
    "stage3-mixed": Case(3, 3, "bf16", is_mixed=True),
    "without-zero": Case(0, 2, "bf16", is_mixed=False),
}
HERE = Path(__file__).parent
DATE = (2026, 1, 1, 0, 0, 0)


class Net(torch.nn.Module):
    """Has tied weights, buffers, and sizes that no number of processes divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.a = torch.nn.Linear(5, 3)
        self.b = torch.nn.Linear(3, 11, bias=False)
        self.register_buffer("freq", torch.arange(11.0) / 3)
        self.register_buffer("ids", torch.arange(4))
        self.register_buffer("skip", torch.ones(2), persistent=False)
        self.c = torch.nn.Linear(11, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        wide = self.b(self.a(self.embed(ids)))
        logits: torch.Tensor = self.head(self.c(wide + self.freq.to(wide.dtype)) * self.scale)
        loss: torch.Tensor = logits.float().logsumexp(-1).mean()
        return loss


def train(rank: int, folder: str, case: Case, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(case.processes),
        LOCAL_SIZE=str(case.processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    net = Net()
    net.b.requires_grad_(not case.is_mixed)
    trained: list[Any] = [it for it in net.parameters() if it.requires_grad]
    if case.is_mixed:
        trained = [{"params": trained[::2]}, {"params": trained[1::2], "weight_decay": 0.0}]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": case.stage},
        "zero_allow_untested_optimizer": True,
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        engine.backward(engine(torch.randint(0, 7, (4,), generator=generator)))
        engine.step()
    engine.save_checkpoint(folder)
    torch.distributed.barrier()


def consolidated(folder: Path) -> dict[str, list[Any]]:
    """Return type, shape and digest of what DeepSpeed makes of a folder."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = {}
    for name, tensor in get_fp32_state_dict_from_zero_checkpoint(str(folder)).items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[name] = [dtype, [*tensor.shape], hashlib.sha256(data).hexdigest()]
    return found


def main() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    tensors = {}
    with (
        tempfile.TemporaryDirectory() as work,
        zipfile.ZipFile(
            HERE / "folders.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9
        ) as archive,
    ):
        for index, (name, case) in enumerate(CASES.items()):
            folder = Path(work, name)
            arguments = (str(folder), case, 29700 + index)
            start_processes(train, arguments, nprocs=case.processes, start_method="spawn")
            if case.stage:
                tensors[name] = consolidated(folder)
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.suffix != ".py":
                    info = zipfile.ZipInfo(path.relative_to(work).as_posix(), DATE)
                    info.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(info, path.read_bytes(), compresslevel=9)
    (HERE / "tensors.json").write_text(json.dumps(tensors, indent=1) + "\n")


if __name__ == "__main__":
    main()

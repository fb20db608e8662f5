"""Saves steps of one state on one, two and four ranks into stores, and loads each on all of these numbers.

A program of its own: ``python -m tests.real.training_steps FOLDER``. It starts four ranks once; smaller worlds are
groups of them. What is not as expected ends a rank with an error.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes

from blobstore.integrations.torch_checkpoint import StoreReader, StoreWriter
from blobstore.store.ingest import Ingest
from tests.support.ports import free_port

RANKS = 4
WORLDS = (1, 2, 4)
STEP = "run:step-1"
CONFIG = {"model_type": "toy"}
METRICS = {"loss": 1.25}
VALUES: dict[str, Any] = {
    "groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": ["rows", "columns"]}],
    "random": (3, tuple(range(10)), None),
    "steps": 7,
    "dtype": torch.bfloat16,
    "nothing": None,
}


def tensors(world: int, mesh: DeviceMesh | None) -> dict[str, torch.Tensor]:
    """Return one set of tensors in many placements on a number of ranks."""
    random = torch.Generator().manual_seed(0)
    matrix, cube = torch.randn(9, 12, generator=random), torch.randn(3, 8, 5, generator=random)

    def placed(tensor: torch.Tensor, *places: Shard | Replicate) -> torch.Tensor:
        if mesh is None:
            return tensor
        return distribute_tensor(tensor, mesh, places[-mesh.ndim :], src_data_rank=None)

    found = {
        "rows": placed(matrix, Shard(0)),
        "columns": placed(matrix + 1, Shard(1)),
        "middle": placed(cube, Shard(1)),
        "copies": placed(cube + 1, Replicate()),
        "uneven": placed(torch.randn(3, generator=random), Shard(0)),
        "half": placed((matrix + 2).bfloat16(), Shard(1)),
        "bytes": placed((matrix * 9).to(torch.int8), Shard(0)),
        "plain": torch.randn(4, 3, generator=random).t(),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        # Larger than a window of the exchange, and cut within its first dimension.
        "large": placed(torch.randn(3, 40, 50, generator=random), Shard(2)),
        "model.layers.0.mlp.experts.0.up.weight": placed(matrix + 3, Shard(0)),
        "model.layers.0.mlp.experts.1.up.weight": placed(matrix + 4, Shard(1)),
    }
    if world == RANKS:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        places = {"rows": (Shard(0), Shard(1)), "columns": (Replicate(), Shard(0))}
        for name, two in places.items():
            whole = found[name]
            assert isinstance(whole, DTensor)
            full = whole.full_tensor()
            found[name] = distribute_tensor(full, square, two, src_data_rank=None)
    return found


def state(world: int, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Return the state of a training program."""
    model = tensors(world, mesh)
    moments = {name: {"exp_avg": model[name] * 2} for name in ("rows", "columns")}
    return {"model": model, "optimizer": {"state": moments}, "other": dict(VALUES)}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and values of a state by their keys."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{path}.{key}")
    else:
        yield path, value


def emptied(value: Any) -> Any:
    """Return a state with the same tensors, all zero, and other values."""
    if isinstance(value, dict):
        return {key: emptied(one) for key, one in value.items()}
    if isinstance(value, list):  # torch takes lists of dicts apart
        return list(map(emptied, value))
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "another"


def local(value: Any) -> Any:
    """Return what this rank has of a value."""
    return value.to_local() if isinstance(value, DTensor) else value


def check_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a state was loaded."""
    pairs = zip(leaves(found), leaves(expected), strict=True)
    for key, one, other in ((key, local(one), local(other)) for (key, one), (_, other) in pairs):
        is_equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert is_equal, key
        assert type(one) is type(other), key


def save_and_load(folder: Path) -> None:
    """Save on each number of ranks, then load each of these steps on each number of ranks."""
    rank = dist.get_rank()
    groups = {world: dist.new_group(list(range(world)), backend="gloo") for world in WORLDS}
    meshes = {
        world: None if world == 1 else DeviceMesh("cpu", list(range(world))) for world in WORLDS
    }
    for world in WORLDS:
        if rank < world:
            writer = StoreWriter(
                folder / str(world),
                model="model",
                files={"config.json": CONFIG},
                metrics=METRICS,
                process_group=groups[world],
            )
            writer._window = 1 << 10  # many rounds
            mine = state(world, meshes[world])
            group = groups[world]
            save(mine, checkpoint_id=STEP, storage_writer=writer, process_group=group)
            # Nothing is stored again, and the program may change its tensors.
            for name in ("run:step-2", "run:step-3"):  # the second one uses the memory of the first
                mine = state(world, meshes[world])
                later = async_save(
                    mine, checkpoint_id=name, storage_writer=writer, process_group=group
                )
                for _, value in leaves(mine):
                    if isinstance(value, torch.Tensor):
                        local(value).zero_()
                assert isinstance(later, Future)
                later.result()
                assert writer._staging.is_free
        dist.barrier()
    for world in WORLDS:
        if rank < world:
            for saved in WORLDS:
                expected = state(world, meshes[world])
                for step in (STEP, "run:step-2", "run:step-3"):
                    found = emptied(expected)
                    reader = StoreReader(folder / str(saved))
                    group = groups[world]
                    load(found, checkpoint_id=step, storage_reader=reader, process_group=group)
                    check_equal(found, expected)
        dist.barrier()
    save(state(RANKS, meshes[RANKS]), checkpoint_id=folder / "dcp")
    bucket = f"file://{folder}/bucket"
    writer = StoreWriter(bucket, model="model", files={"config.json": CONFIG}, metrics=METRICS)
    expected = state(RANKS, meshes[RANKS])
    save(expected, checkpoint_id=STEP, storage_writer=writer)
    found = emptied(expected)
    load(found, checkpoint_id=STEP, storage_reader=StoreReader(bucket))
    check_equal(found, expected)


def fail_on_one_rank(folder: Path) -> None:
    """Save on ranks of which one cannot write files, or has a value that cannot be kept."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (RANKS,))
    writer = StoreWriter(folder / str(RANKS))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        save(state(RANKS, mesh), checkpoint_id="run:full", storage_writer=writer)
    except CheckpointException as error:
        assert list(error.failures) == [1], error
    else:
        raise AssertionError
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    try:
        save(
            {"w": torch.ones(2), "object": object()},
            checkpoint_id="run:object",
            storage_writer=writer,
        )
    except CheckpointException as error:
        assert "object" in str(error), error
    else:
        raise AssertionError
    # The next step is complete.
    save(state(RANKS, mesh), checkpoint_id="run:after", storage_writer=writer)


def _change_types(model: dict[str, Any], mesh: DeviceMesh, both: Callable[[str], int]) -> None:
    """Save a tensor, and then the same bytes of another type."""
    for dtype in (torch.float16, torch.bfloat16):
        model["zeros"] = distribute_tensor(torch.zeros(8, dtype=dtype), mesh, [Shard(0)])
        assert both(f"run:{dtype}") > 0
    del model["zeros"]


def change_on_some_ranks(folder: Path) -> None:
    """Save steps of which few parts change, with one writer and with new ones, into two stores."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (RANKS,))
    mine = {"model": {name: tensor for name, tensor in tensors(2, mesh).items() if name != "large"}}
    writer = StoreWriter(folder / "one", model="model")
    travelled: list[str] = []

    def noted(owner: Any, name: str) -> AbstractContextManager[Any]:
        function = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            travelled.append(name)
            return function(*arguments, **options)

        return patch.object(owner, name, call)

    def add(name: str, on: int) -> None:
        tensor = mine["model"][name]
        assert isinstance(tensor, DTensor)
        if rank == on:
            tensor.to_local().add_(1)

    def both(step: str) -> int:
        """Save into both stores; return in how many rounds and files parts travelled for the first one."""
        travelled.clear()
        with noted(dist, "all_to_all_single"), noted(Ingest, "write_parts"):
            save(mine, checkpoint_id=step, storage_writer=writer)
        count = len(travelled)
        save(mine, checkpoint_id=step, storage_writer=StoreWriter(folder / "new", model="model"))
        return count

    assert both("run:1") > 0
    assert both("run:2") == 0
    _change_types(mine["model"], mesh, both)
    add("rows", 2)
    assert both("run:3") > 0
    assert both("run:4") > 0  # what has changed once is gathered always
    # A step that fails does not count.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    add("columns", 2)
    if rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        save(mine, checkpoint_id="run:x", storage_writer=writer)
    except CheckpointException as error:
        assert 0 not in error.failures, error
    else:
        raise AssertionError
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    both("run:5")
    add("middle", 0)
    both("run:6")
    # A rank with another past has nothing to say.
    if rank == 2:
        writer = StoreWriter(folder / "one", model="model")
    assert both("run:7") > 0
    assert both("run:8") > 0


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 12, bias=False), nn.Linear(12, 8))


def train(folder: Path) -> None:
    """Save a model that is trained with FSDP2, and with tensor parallelism besides; resume each as the other."""
    trained: list[tuple[nn.Module, torch.optim.Optimizer]] = []
    for is_parallel in (False, True):
        model = _network()
        if is_parallel:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
            how = {"1": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], how)
            fully_shard(model, mesh=mesh["data"])
        else:
            fully_shard(model)
        trained.append((model, torch.optim.AdamW(model.parameters(), lr=0.1)))
    weights: Any
    for (model, optimizer), name in zip(trained, ("fsdp", "parallel"), strict=True):
        saved = name == "fsdp"
        if saved:
            model(torch.arange(10)).square().sum().backward()
            optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        found: dict[str, Any] = {"model": weights, "optimizer": moments}
        if not saved:
            load(found, checkpoint_id="fsdp:1", storage_reader=StoreReader(folder / "trained"))
            set_state_dict(
                model,
                optimizer,
                model_state_dict=found["model"],
                optim_state_dict=found["optimizer"],
            )
            weights, moments = get_state_dict(model, optimizer)
        writer = StoreWriter(folder / "trained", model="model")
        save(
            {"model": weights, "optimizer": moments},
            checkpoint_id=f"{name}:1",
            storage_writer=writer,
        )
        whole = {key: one.full_tensor().contiguous() for key, one in weights.items()}
        if dist.get_rank() == 0:
            (folder / name).mkdir()
            save_file(whole, folder / name / "model.safetensors", metadata={"format": "pt"})


def _work(rank: int, port: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    save_and_load(folder)
    fail_on_one_rank(folder)
    change_on_some_ranks(folder)
    train(folder)
    dist.destroy_process_group()


def main() -> None:
    """Write the stores."""
    folder = Path(sys.argv[1])
    # Forked, so that torch is imported once.
    start_processes(_work, (free_port(), folder), nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    main()

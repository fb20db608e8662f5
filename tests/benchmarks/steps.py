"""Saving steps of training on two ranks, compared with the writer of ``torch.distributed.checkpoint`` and others.

    python -m tests.benchmarks.steps [--folder DIR] [--scale X] [--rounds N] [--ranks N] [--grid]

The state is f32 weights and two moments of each weight that is trained, all of them shards of rows, as FSDP2 has
them. Every save is timed from one barrier to the next. DCP syncs its file per rank and its metadata, as it does by
default, so both sides are durable. ``--grid`` measures nothing, but saves and loads on 1, 2, 4 and 8 ranks, and counts
wrong values. Without ``moonclip`` its rows are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

import blobstore
from blobstore.integrations.torch_checkpoint import StoreWriter
from tests.benchmarks import common
from tests.real.step_grid import run as run_grid
from tests.support.ports import free_port

_LAYERS = 24
_SIDE = 1024
_DCP = "DCP FileSystemWriter"
_COPY = "copy in memory"
_TORCH = "torch.save"
_OWN = "**blobstore.save(background=True)**"

Tensors = dict[str, torch.Tensor]
Seconds = dict[str, list[float]]


class Training(NamedTuple):
    """A state, and what changes of it."""

    what: str
    trained: int
    """One layer in so many is trained and has moments."""
    frozen: int
    """Layers of the same size besides, for each layer that is trained: they have no moments."""

    def state(self, scale: float, place: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
        """Return the tensors; those that are trained begin with ``trained``."""
        random = torch.Generator().manual_seed(0)
        side = max(8, int(_SIDE * scale**0.5))

        def made() -> torch.Tensor:
            return place(torch.randn(side, side, generator=random))

        found = {}
        for index in range(0, _LAYERS, self.trained):
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                found[f"trained.{index}.{kind}"] = made()
        for index in range(len(found) * self.frozen // 3):
            found[f"frozen.{index}.weight"] = made()
        return found


_TRAININGS = (
    Training("all of the state changes", 1, 0),
    Training("three quarters of the bytes are frozen", 4, 9),
)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(state: Mapping[str, torch.Tensor]) -> int:
    """Change what is trained; return its bytes on this rank."""
    own = [local(tensor) for name, tensor in state.items() if name.startswith("trained")]
    for tensor in own:
        tensor.mul_(0.999).add_(1e-3)
    return sum(tensor.nbytes for tensor in own)


def nested(state: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    """Return a state as programs save it: ``async_save`` itself takes 50 µs for each key of the outermost dict."""
    found: dict[str, Tensors] = {}
    for name, tensor in state.items():
        part, _, key = name.partition(".")
        found.setdefault(part, {})[key] = tensor
    return found


def disk(folder: Path) -> int:
    """Return the bytes that the files below a folder take."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class Ranks:
    """The cases of one rank."""

    def __init__(self, folder: Path, training: Training, scale: float) -> None:
        self._folder = folder
        self._rank = dist.get_rank()
        self._world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (self._world,))
        self._state = training.state(
            scale, lambda one: distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None)
        )
        self._nested = nested(self._state)
        self._count = 0
        self._writer = StoreWriter(folder / "store", model="trained")
        self._changed: list[int] = []
        self._disk: list[int] = []
        self.first_tensor: list[float] = []

    def _prepare(self) -> None:
        """Train, and wait for the disk and the other ranks."""
        train(self._state)
        self._count += 1
        if not self._rank:
            shutil.rmtree(self._folder / "other", ignore_errors=True)
            (self._folder / "other").mkdir()
            os.sync()
            common.borrow_memory(
                3 * self._world * sum(local(one).nbytes for one in self._state.values())
            )
        dist.barrier()

    def _timed(self, work: Callable[[], object]) -> float:
        """Return the seconds until all ranks have done something."""
        self._prepare()
        started = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - started

    def dcp(self) -> float:
        """Save as DCP does."""
        writer = FileSystemWriter(self._folder / "other" / "dcp")
        return self._timed(lambda: save(self._nested, storage_writer=writer))

    def torch_save(self) -> float:
        """Save the shards of each rank in a file."""

        def write() -> None:
            own = {name: local(tensor) for name, tensor in self._state.items()}
            with (self._folder / "other" / f"{self._rank}.pt").open("wb") as file:
                torch.save(own, file)
                file.flush()
                os.fsync(file.fileno())

        return self._timed(write)

    def store(self) -> float:
        """Save into a store."""
        name = f"run:step-{self._count}"
        before = 0 if self._rank else disk(self._folder / "store")
        taken = self._timed(
            lambda: save(self._nested, checkpoint_id=name, storage_writer=self._writer)
        )
        if not self._rank:
            self._disk.append(disk(self._folder / "store") - before)
            self.first_tensor.append(common.timed(lambda: self._read_first(name)))
        return taken

    def _read_first(self, name: str) -> torch.Tensor:
        model = blobstore.open(name, store=self._folder / "store", framework="torch")
        return model[next(iter(model))].clone()

    def blocked(self, begin: Callable[[str], Any]) -> float:
        """Return the seconds until this rank can train again, and wait until the step is saved."""
        self._prepare()
        name = f"run:step-{self._count}"
        started = time.perf_counter()
        made = begin(name)
        blocked = time.perf_counter() - started
        assert isinstance(made, Future)
        made.result()  # the save uses the group: no barrier before
        return blocked

    def run(self, rounds: int) -> dict[str, Any]:
        """Return the results of all cases."""
        durable = {
            _DCP: self.dcp,
            "torch.save, a file per rank": self.torch_save,
            "**StoreWriter**": self.store,
        }
        seconds = common.rounds(durable, rounds)
        own = {name: torch.empty_like(local(tensor)) for name, tensor in self._state.items()}

        def copy() -> float:
            def work() -> None:
                for name, tensor in own.items():
                    tensor.copy_(local(self._state[name]))

            return self._timed(work)

        blocked = {
            _COPY: copy,
            _DCP: lambda: self.blocked(
                lambda _: async_save(
                    self._nested, storage_writer=FileSystemWriter(self._folder / "other" / "dcp")
                )
            ),
            "**StoreWriter**": lambda: self.blocked(
                lambda name: async_save(
                    self._nested, checkpoint_id=name, storage_writer=self._writer
                )
            ),
        }
        changed = train(self._state)
        total = torch.tensor([changed, sum(local(one).nbytes for one in self._state.values())])
        dist.all_reduce(total)
        return {
            "durable": seconds,
            "blocked": common.rounds(blocked, rounds),
            "first": self.first_tensor,
            "disk": self._disk[-rounds:],
            "changed": int(total[0]),
            "all": int(total[1]),
        }


def _work(rank: int, port: int, folder: Path, options: argparse.Namespace, index: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    results = Ranks(folder, _TRAININGS[index], options.scale).run(options.rounds)
    if not rank:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def compare_ranks(folder: Path, options: argparse.Namespace, index: int) -> None:
    """Print the tables of one training."""
    start_processes(
        _work, (free_port(), folder, options, index), nprocs=options.ranks, start_method="fork"
    )
    found = json.loads((folder / "results.json").read_text())
    changed, disk = found["changed"], statistics.median(found["disk"])
    print(f"{options.ranks} ranks, {found['all'] >> 20} MiB: {_TRAININGS[index].what}\n")
    print("Until the step is durable:\n")
    common.table(found["durable"], _DCP, found["all"])
    print("Until `async_save` returns:\n")
    common.table(found["blocked"], _COPY)
    print(
        f"Disk of a step: {disk / changed:.4f} of the {changed >> 20} MiB that changed. First tensor: "
        f"{statistics.median(found['first']) * 1000:.0f} ms after the save, "
        f"{max(found['first']) * 1000:.0f} ms at most.\n"
    )


class OneProcess:
    """The cases of a program without ranks."""

    def __init__(self, folder: Path, training: Training, scale: float) -> None:
        self._folder = folder
        self._state = training.state(scale, lambda tensor: tensor)
        self._copy = {name: tensor.clone() for name, tensor in self._state.items()}
        self._count = 0
        self.durable: Seconds = {}
        self.disk: dict[str, list[int]] = {}

    def _case(
        self, name: str, folder: str, begin: Callable[[int], object], end: Callable[[Any], object]
    ) -> Callable[[], float]:
        root = self._folder / folder

        def case() -> float:
            train(self._state)
            self._count += 1
            before = disk(root)
            os.sync()
            common.borrow_memory(3 * sum(tensor.nbytes for tensor in self._state.values()))
            started = time.perf_counter()
            made = begin(self._count)
            blocked = time.perf_counter() - started
            end(made)
            self.durable.setdefault(name, []).append(time.perf_counter() - started)
            self.disk.setdefault(name, []).append(disk(root) - before)
            return blocked

        return case

    def cases(self) -> dict[str, Callable[[], float]]:
        """Return the cases; each returns the seconds that the program is blocked."""

        def copy(_: int) -> None:
            for name, tensor in self._copy.items():
                tensor.copy_(self._state[name])

        def write(step: int) -> None:
            with (self._folder / "torch" / f"{step}.pt").open("wb") as file:
                torch.save(self._state, file)
                file.flush()
                os.fsync(file.fileno())

        def save_later(step: int) -> Future[Any]:
            name, store = f"run:step-{step}", self._folder / "own"
            return blobstore.save(self._state, name, store=store, background=True)

        (self._folder / "torch").mkdir()
        found = {
            _COPY: self._case(_COPY, "copy", copy, lambda _: None),
            _TORCH: self._case(_TORCH, "torch", write, lambda _: None),
            _OWN: self._case(_OWN, "own", save_later, lambda future: future.result()),
        }
        if importlib.util.find_spec("moonclip") is not None:
            from moonclip import MoonclipManager

            peer: Any = MoonclipManager(str(self._folder / "moonclip"))
            found["moonclip"] = self._case(
                "moonclip",
                "moonclip",
                lambda step: peer.save_tensors(step, self._state),
                lambda _: peer.flush(),
            )
        return found


def compare_one_process(folder: Path, options: argparse.Namespace, index: int) -> None:
    """Print the tables of a program without ranks."""
    torch.set_num_threads(1)
    one = OneProcess(folder, _TRAININGS[index], options.scale)
    blocked = common.rounds(one.cases(), options.rounds)
    print(f"One process: {_TRAININGS[index].what}\n\nUntil the program goes on:\n")
    common.table(blocked, _COPY)
    print("Until the step is durable:\n")
    durable = {name: seconds[1:] for name, seconds in one.durable.items() if name != _COPY}
    common.table(durable, _TORCH)
    sizes = {name: statistics.median(one.disk[name][1:]) for name in durable}
    print("; ".join(f"{name}: {size / 2**20:.0f} MiB a step" for name, size in sizes.items()), "\n")


def main() -> None:
    """Print the tables."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", type=int, default=2, help="processes that save together")
        parser.add_argument("--grid", action="store_true", help="save and load on 1 to 8 ranks")

    options = common.arguments(__doc__, add)
    warnings.simplefilter("ignore")
    if options.grid:
        with common.workspace(options.folder) as folder:
            print(run_grid(folder / "grid", (1, 2, 4, 8)))
        return
    for index in range(len(_TRAININGS)):
        with common.workspace(options.folder) as folder:
            compare_ranks(folder, options, index)
    for index in range(len(_TRAININGS)):
        with common.workspace(options.folder) as folder:
            compare_one_process(folder, options, index)


if __name__ == "__main__":
    main()

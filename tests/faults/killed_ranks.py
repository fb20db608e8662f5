"""Ranks of a training program that are killed while they save a step.

A program of its own: ``python -m tests.faults.killed_ranks FOLDER``. It starts two ranks for each point, of which one
kills itself there with SIGKILL, and then looks at the store. With ``--random 200`` it kills one of them at a random
moment instead, so many times. What is not as expected ends it with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

import blobstore
from blobstore.integrations.torch_checkpoint import StoreReader, StoreWriter
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.ingest import Ingest, WorkerIngest
from blobstore.store.local import LocalStore
from blobstore.store.names import Names
from tests.support.ports import free_port


class Point(NamedTuple):
    """Where a rank is killed: when it has called, or is about to call, a function so many times."""

    rank: int
    owner: Any
    function: str
    calls: int
    is_after: bool
    names: frozenset[str] = frozenset()
    """Names of the step that are complete then."""
    step: str = "run:step-2"


POINTS = {
    "rank within the exchange": Point(1, dist, "all_to_all_single", 2, is_after=False),
    "coordinator within the exchange": Point(0, dist, "all_to_all_single", 2, is_after=False),
    "rank that has written its part of a file": Point(1, Ingest, "write_parts", 2, is_after=True),
    "coordinator that hashes the file of all ranks": Point(
        0, Ingest, "add_parts", 1, is_after=False
    ),
    "rank that has written a blob": Point(1, WorkerIngest, "add", 1, is_after=True),
    "rank that has written all": Point(1, dist, "all_reduce", 3, is_after=True),
    "coordinator whose blobs have names": Point(0, Ingest, "publish", 1, is_after=True),
    "coordinator between the two names": Point(
        0, Names, "_give", 1, is_after=True, names=frozenset({"run:step-2.state"})
    ),
    "coordinator between the two names of a step that is replaced": Point(
        0, Names, "_give", 1, is_after=True, step="run:step-1"
    ),
}


def _state(step: int, *, is_sharded: bool) -> dict[str, Any]:
    def placed(value: float, dimension: int = 0) -> torch.Tensor:
        tensor = torch.full((64, 64), value)
        if not is_sharded:
            return tensor
        mesh = init_device_mesh("cpu", (2,))
        return distribute_tensor(tensor, mesh, [Shard(dimension)], src_data_rank=None)

    model = {f"w{index}": placed(index * step + 0.5, index % 2) for index in range(8)}
    return {"model": model, "optimizer": {"m": placed(-step)}, "step": step}


def _dying(function: Callable[..., Any], point: Point) -> Callable[..., Any]:
    count = 0

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == point.calls and not point.is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if count == point.calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


def _work(rank: int, port: int, store: Path, point: Point | None, ready: int = -1) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    limit = timedelta(minutes=4)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=limit)
    state = _state(2, is_sharded=True)
    writer = StoreWriter(store, model="model")
    writer._window = 1 << 13
    if point is not None and rank == point.rank:
        found = getattr(point.owner, point.function)
        setattr(point.owner, point.function, _dying(found, point))
    if point is None:
        dist.barrier()
        os.write(ready, b".")
    name = "run:step-2" if point is None else point.step
    save(state, checkpoint_id=name, storage_writer=writer)


def _kill_at(point: Point, folder: Path) -> None:
    with contextlib.suppress(ProcessExitedException, ProcessRaisedException):
        start_processes(_work, (free_port(), folder, point), nprocs=2, start_method="fork")
        raise AssertionError("no rank was killed")


def _kill_after(seconds: float, rank: int, folder: Path) -> float:
    """Kill a rank so long after both have begun to save; return when both had ended."""
    reading, ready = os.pipe()
    ranks = start_processes(
        _work, (free_port(), folder, None, ready), nprocs=2, join=False, start_method="fork"
    )
    for _ in range(2):
        os.read(reading, 1)
    started = time.monotonic()
    time.sleep(seconds)
    os.kill(ranks.pids()[rank], signal.SIGKILL)
    with contextlib.suppress(ProcessExitedException, ProcessRaisedException):
        while not ranks.join():
            pass
    os.close(reading)
    os.close(ready)
    return time.monotonic() - started


def _names(store: LocalStore) -> frozenset[str]:
    return frozenset(str(reference) for reference in store.references())


def _load(store: Path, name: int, step: int) -> None:
    expected, found = _state(step, is_sharded=False), _state(0, is_sharded=False)
    load(found, checkpoint_id=f"run:step-{name}", storage_reader=StoreReader(store))
    assert found["step"] == step
    assert torch.equal(found["optimizer"]["m"], expected["optimizer"]["m"])
    for key, tensor in expected["model"].items():
        assert torch.equal(found["model"][key], tensor), key


_FIRST = frozenset({"run:step-1", "run:step-1.state"})
_STATE, _BOTH = frozenset({"run:step-2.state"}), frozenset({"run:step-2", "run:step-2.state"})


def _check(
    folder: Path, expected: Collection[frozenset[str]], *, is_replaced: bool = False
) -> frozenset[str]:
    """Check what is left after a rank was killed; return the names that its step has.

    ``is_replaced`` is whether the second step was to replace the first one, whose state it has.
    """
    store = LocalStore(folder)
    names = _names(store)
    assert names >= _FIRST, names
    assert names - _FIRST in expected, names
    assert verify_models(store=store).faults == ()
    _load(folder, 1, 2 if is_replaced else 1)  # all of it is from one step
    with blobstore.open("run:step-1", store=store, framework="torch") as model:
        for name, tensor in _state(1, is_sharded=False)["model"].items():
            assert torch.equal(model[name], tensor), name
    if names > _FIRST:
        _load(folder, 2, 2)  # the name of all of its state is complete
    # Nobody holds what the dead have left.
    assert store.read_leases().held == {}
    collect_garbage(store=store, older_than=0)
    assert list(store.folder("temporary").iterdir()) == []
    save(
        _state(2, is_sharded=False),
        checkpoint_id="run:step-2",
        storage_writer=StoreWriter(folder, model="model"),
    )
    _load(folder, 2, 2)
    assert _names(store) == _FIRST | _BOTH
    return names - _FIRST


def _kill_often(root: Path, start: Path, count: int, seed: int) -> None:
    """Kill a rank at random moments, and print how far the step had come."""
    random = Random(seed)
    found: Counter[frozenset[str]] = Counter()
    longest = 1.0
    for index in range(count):
        folder = root / "random"
        shutil.copytree(start, folder)
        rank, seconds = random.randrange(2), random.uniform(0, longest)
        ended = _kill_after(seconds, rank, folder)
        sys.stderr.write(f"{index}: rank {rank} after {seconds:.3f} s\n")
        names = _check(folder, [frozenset(), _STATE, _BOTH])
        if names == _BOTH:  # it may have been killed afterwards
            longest = min(longest, 1.2 * ended)
        found[names] += 1
        shutil.rmtree(folder)
    sys.stdout.write(
        f"{count} kills: the step had no name after {found[frozenset()]}, that of its state after {found[_STATE]}, "
        f"and both after {found[_BOTH]}; nothing was lost, half or damaged\n"
    )


def main() -> None:
    """Kill a rank at each point."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--random", type=int, default=0, help="kills at random moments instead")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = options.folder
    start = root / "start"
    writer = StoreWriter(start, model="model")
    save(_state(1, is_sharded=False), checkpoint_id="run:step-1", storage_writer=writer)
    if options.random:
        _kill_often(root, start, options.random, options.seed)
        return
    for index, (name, point) in enumerate(POINTS.items()):
        sys.stderr.write(f"a {name} is killed\n")
        folder = root / str(index)
        shutil.copytree(start, folder)
        _kill_at(point, folder)
        _check(folder, [point.names], is_replaced=point.step == "run:step-1")
    assert blobstore.open("run:step-1", store=start)


if __name__ == "__main__":
    main()

"""Saves a step on some numbers of ranks in four placements, and loads each on all of these numbers and placements.

A program of its own: ``python -m tests.real.step_grid FOLDER RANKS…``. It prints how many cells there were, how many
values were wrong in them, and how many digests the tensors have.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from blobstore.integrations.torch_checkpoint import StoreReader, StoreWriter
from blobstore.manifests import media_types
from blobstore.store.local import LocalStore
from tests.support.ports import free_port

_PLACES: Mapping[str, Sequence[Placement]] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "squares": [Shard(0), Shard(1)],
    "copies": [Replicate()],
}
_SHAPES = ((16, 24), (9, 10), (3, 40, 5), (1, 17), (33, 2))
"""Some are divided evenly, some not, and some leave ranks without a part."""


class _Side(NamedTuple):
    """Ranks that save or load, and how their tensors are placed."""

    ranks: int
    places: str

    @property
    def name(self) -> str:
        return f"run:{self.places}-{self.ranks}"


def _tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    found = {}
    for shape, dtype in itertools.product(_SHAPES, (torch.float32, torch.bfloat16, torch.int8)):
        found[f"{dtype}.{shape}"] = (torch.randn(shape, generator=random) * 9).to(dtype)
    return found


class _Ranks:
    """One rank, as a member of each number of ranks."""

    def __init__(self, folder: Path, counts: Sequence[int]) -> None:
        self._folder = folder
        self._groups = {count: dist.new_group(list(range(count))) for count in counts}
        self._meshes = {
            (count, dimensions): DeviceMesh("cpu", torch.arange(count).view(sizes))
            for count in counts
            for dimensions, sizes in ((1, (-1,)), (2, (1 if count % 2 else 2, -1)))
        }
        self.cells = [_Side(*pair) for pair in itertools.product(counts, _PLACES)]

    def _placed(self, side: _Side, tensor: torch.Tensor) -> torch.Tensor:
        places = _PLACES[side.places]
        mesh = self._meshes[side.ranks, len(places)]
        return distribute_tensor(tensor, mesh, places, src_data_rank=None)

    def save(self, side: _Side) -> None:
        """Save a step."""
        state = {name: self._placed(side, tensor) for name, tensor in _tensors().items()}
        group = self._groups[side.ranks]
        writer = StoreWriter(self._folder, process_group=group)
        writer._window = 1 << 9  # many rounds
        save(state, checkpoint_id=side.name, storage_writer=writer, process_group=group)

    def wrong(self, saved: _Side, side: _Side) -> int:
        """Load a step; return how many values of this rank are wrong."""
        expected = {name: self._placed(side, tensor) for name, tensor in _tensors().items()}
        found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        reader = StoreReader(self._folder)
        group = self._groups[side.ranks]
        load(found, checkpoint_id=saved.name, storage_reader=reader, process_group=group)
        pairs = ((_local(found[name]), _local(expected[name])) for name in found)
        return sum(int((one != other).sum()) for one, other in pairs)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _work(rank: int, port: int, folder: Path, counts: Sequence[int]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=max(counts))
    ranks = _Ranks(folder, counts)
    for side in ranks.cells:
        if rank < side.ranks:
            ranks.save(side)
        dist.barrier()
    wrong = torch.zeros(1, dtype=torch.int64)
    for saved, side in itertools.product(ranks.cells, repeat=2):
        if rank < side.ranks:
            wrong += ranks.wrong(saved, side)
        dist.barrier()
    dist.all_reduce(wrong)
    if not rank:
        (folder / "wrong").write_text(str(int(wrong)))
    dist.destroy_process_group()


def run(folder: Path, counts: Sequence[int]) -> str:
    """Save and load all cells; return the line that says what came of it."""
    folder.mkdir()
    start_processes(_work, (free_port(), folder, counts), nprocs=max(counts), start_method="fork")
    store = LocalStore(folder)
    steps = list(store.references())
    digests = {
        (layer.name, layer.digest)
        for step in steps
        for layer in store.resolve(step).layers_of(media_types.TENSOR)
    }
    return (
        f"{len(steps) ** 2} cells of {len(steps)} steps, {(folder / 'wrong').read_text()} wrong values, "
        f"{len(digests)} digests of {len(_tensors())} tensors"
    )


if __name__ == "__main__":
    sys.stdout.write(f"{run(Path(sys.argv[1]), list(map(int, sys.argv[2:])))}\n")

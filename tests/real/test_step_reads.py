"""What a rank reads of object storage when it loads its shards of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from blobstore.integrations.torch_checkpoint import StoreReader, StoreWriter
from blobstore.objects.address import StoreAddress
from blobstore.objects.client import ObjectClient

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
RANKS, RANK = 4, 1
STATE = {f"w{index}": torch.randn(2048, 512) for index in range(4)}
NBYTES = sum(tensor.nbytes for tensor in STATE.values())


@pytest.fixture
def rank() -> Iterator[None]:
    """Be one of four ranks that load for themselves."""
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def load_shards(store: Any, dimension: int) -> None:
    """Load what this rank has of the state, and check it."""
    mesh = init_device_mesh("cpu", (RANKS,))
    shards = {name: tensor.chunk(RANKS, dimension)[RANK] for name, tensor in STATE.items()}
    found = {
        name: DTensor.from_local(torch.zeros_like(shard), mesh, [Shard(dimension)])
        for name, shard in shards.items()
    }
    load(found, checkpoint_id="run:1", storage_reader=StoreReader(store), no_dist=True)
    for name, shard in shards.items():
        assert torch.equal(found[name].to_local(), shard)


# Columns are in many short ranges, so their blobs are read completely.
@pytest.mark.parametrize(("dimension", "limit"), [(0, 1.05 / RANKS), (1, 1.01)])
def test_a_rank_requests_its_rows_of_a_bucket_and_little_else(
    object_address: StoreAddress,
    rank: None,
    monkeypatch: pytest.MonkeyPatch,
    dimension: int,
    limit: float,
) -> None:
    address = str(object_address)
    save(STATE, checkpoint_id="run:1", storage_writer=StoreWriter(address), no_dist=True)
    received = 0

    def counted(name: str) -> None:
        read = getattr(ObjectClient, name)

        def run(*arguments: Any) -> Any:
            nonlocal received
            found = read(*arguments)
            received += len(found.data) if found else 0
            return found

        monkeypatch.setattr(ObjectClient, name, run)

    counted("get")
    counted("read")
    load_shards(address, dimension)
    assert NBYTES / RANKS <= received <= limit * NBYTES

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import InvalidReference
from blobstore.integrations.torch_checkpoint import StoreReader, StoreWriter
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.objects.address import StoreAddress
from blobstore.objects.store import ObjectStore, blob_key
from blobstore.operations.create import places
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore

pytest.importorskip("obstore")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {"model": {"w": torch.arange(6.0), "v": torch.ones(2)}, "optimizer": {"m": torch.zeros(3)}}


@pytest.fixture
def address(tmp_path: Path) -> str:
    (tmp_path / "bucket").mkdir()
    return f"file://{tmp_path}/bucket"


def saved(address: str, value: Any, name: str = "run:1") -> None:
    save(value, checkpoint_id=name, storage_writer=StoreWriter(address, model="model"))


def objects(address: str) -> ObjectStore:
    return ObjectStore(StoreAddress.parse(address))


def tensors(address: str, name: str) -> list[Digest]:
    manifest = Manifest.from_bytes(objects(address).read_manifest(name))
    return [layer.digest for layer in manifest.layers_of(media_types.TENSOR)]


def files(address: str) -> dict[str, float]:
    folder = Path(address.removeprefix("file://"))
    blobs = (folder / "blobs").iterdir() if (folder / "blobs").is_dir() else ()
    return {path.name: path.stat().st_mtime_ns for path in blobs}


def test_a_step_in_object_storage_comes_back(address: str) -> None:
    saved(address, STATE | {"step": 7})
    target: dict[str, Any] = {"model": {"w": torch.zeros(6)}, "step": None}
    load(target, checkpoint_id="run:1", storage_reader=StoreReader(address))
    assert torch.equal(target["model"]["w"], STATE["model"]["w"])
    assert target["step"] == 7
    assert torch.equal(
        blobstore.open(f"{address}/run:1", framework="torch", cache="none")["v"], torch.ones(2)
    )


def test_object_storage_has_what_a_push_from_a_folder_sends(address: str, tmp_path: Path) -> None:
    saved(address, STATE)
    before = files(address)
    writer = StoreWriter(tmp_path / "store", model="model")
    save(STATE, checkpoint_id="run:1", storage_writer=writer)
    for name in ("run:1", "run:1.state"):
        assert push_model(name, address, store=tmp_path / "store").bytes_sent == 0
    assert files(address) == before


def test_tensors_that_have_not_changed_are_not_sent_again(address: str) -> None:
    saved(address, STATE)
    before = files(address)
    saved(address, STATE | {"optimizer": {"m": torch.ones(3)}}, "run:2")
    after = files(address)
    names = [digest.file_name for digest in tensors(address, "run:1.state")]
    assert [after[name] for name in names] == [before[name] for name in names]
    # The tensor, the config and the manifest; the model is the same.
    assert len(after) - len(before) == 3


def test_a_step_that_fails_has_no_name_and_no_lease(address: str) -> None:
    saved(address, STATE)
    with pytest.raises(CheckpointException, match="object"):
        saved(address, STATE | {"other": object()}, "run:2")
    store = objects(address)
    assert [str(name) for name in store.references()] == ["run:1", "run:1.state"]
    assert list(store.client.list(".blobstore/leases")) == []


def test_a_blob_that_was_collected_in_the_meantime_fails_the_step(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(address, STATE)
    store = objects(address)
    lost = tensors(address, "run:1")[0]
    publish = places._Objects.publish

    def after_a_collection(self: Any, *arguments: Any) -> None:
        store.client.delete([blob_key(lost)])
        publish(self, *arguments)

    monkeypatch.setattr(places._Objects, "publish", after_a_collection)
    with pytest.raises(CheckpointException, match="garbage was collected"):
        saved(address, STATE, "run:2")
    assert not [name for name in store.references() if name.tag.startswith("2")]
    monkeypatch.undo()
    saved(address, STATE, "run:2")
    assert blobstore.open(f"{address}/run:2", cache="none")["v"].tolist() == [1, 1]


def test_a_name_that_another_process_has_given_is_not_taken(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = places._Objects.publish

    def after_another(self: Any, *arguments: Any) -> None:
        monkeypatch.undo()
        saved(address, {"model": {"w": torch.full((6,), 9.0)}})
        publish(self, *arguments)

    monkeypatch.setattr(places._Objects, "publish", after_another)
    with pytest.raises(CheckpointException, match="another process"):
        saved(address, STATE)
    assert blobstore.open(f"{address}/run:1", cache="none")["w"].tolist() == [9] * 6


def test_an_address_must_be_valid() -> None:
    with pytest.raises(CheckpointException, match="file:///folder"):
        saved("file://bucket", STATE)
    with pytest.raises(InvalidReference):
        places.open_place("s3://")
    assert isinstance(places.open_place("folder"), places._Folder)
    assert LocalStore("folder")

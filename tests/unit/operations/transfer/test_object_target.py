"""Pushes to object storage and pulls from it, against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.errors import InvalidHeader, ModelNotFound
from blobstore.objects.address import StoreAddress
from blobstore.objects.store import ObjectStore
from blobstore.operations.maintenance.names import copy_model
from blobstore.operations.transfer.pull import pull_model
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.damage import blob_path, flip


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    frozen.put(store, "team/one:v1", {"shared": 1, "own": 2})
    return store


def test_a_model_travels_through_object_storage(
    local: LocalStore,
    object_address: StoreAddress,
    tmp_path: Path,
) -> None:
    pushed = push_model("team/one:v1", str(object_address), store=local, verify=True)
    assert str(pushed.remote) == f"{object_address}/team/one:v1"
    assert pushed.bytes_sent == pushed.bytes_verified > 0
    again = push_model("team/one:v1", object_address, store=local)
    assert again.is_unchanged
    assert again.bytes_sent == 0
    pulled = pull_model(f"{object_address}/team/one:v1", store=tmp_path / "other")
    assert str(pulled.reference) == "team/one:v1"
    other = LocalStore(tmp_path / "other")
    assert other.read_manifest("team/one:v1") == local.read_manifest("team/one:v1")
    for blob in local.resolve("team/one:v1").blobs:
        assert other.read_blob(*blob.id) == local.read_blob(*blob.id)


def test_a_missing_model_says_where_it_was_looked_for(
    object_address: StoreAddress, tmp_path: Path
) -> None:
    with pytest.raises(ModelNotFound, match=r"looked for 'one:v1' in .*, 'team/one:v1' in"):
        pull_model(f"{object_address}/team/one:v1", store=tmp_path / "other")
    assert ObjectStore(object_address).references() == []


@pytest.mark.parametrize("spelled", ["", "/team/none", "/none:v1"])
def test_the_advice_for_a_missing_model_lists_a_store_that_has_some(
    local: LocalStore, tmp_path: Path, spelled: str
) -> None:
    address = f"file://{tmp_path}/objects"
    push_model("team/one:v1", address, store=local)
    with pytest.raises(ModelNotFound) as raised:
        pull_model(f"{address}{spelled}", store=tmp_path / "other")
    assert f"'blobstore list {address}' lists the models there" in str(raised.value)


def test_a_damaged_header_is_named_although_the_blob_has_arrived(
    local: LocalStore, tmp_path: Path
) -> None:
    address = f"file://{tmp_path}/objects"
    push_model("team/one:v1", address, store=local)
    flip(blob_path(local, "own", "team/one:v1"), 7)  # the highest byte of its length
    copy_model("team/one:v1", "two", store=local)
    with pytest.raises(InvalidHeader, match="layer 'own': blob sha256:.*over the limit"):
        push_model("two", address, store=local)
    with pytest.raises(ModelNotFound):
        pull_model(f"{address}/two", store=tmp_path / "other")

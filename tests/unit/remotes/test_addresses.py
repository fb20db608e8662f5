"""Models by name or address, and plans of what reading them takes, against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

import blobstore
from blobstore.errors import InvalidReference
from blobstore.objects.store import ObjectStore
from blobstore.operations.transfer.push import push_model
from blobstore.remotes.addresses import ReadPlan, check_address, is_address, is_in_objects
from blobstore.store.local import LocalStore
from tests.support import frozen


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    frozen.put(store, "one", {"shared": 1, "own": 2})
    frozen.put(store, "two", {"shared": 1, "other": 3})
    return store


@pytest.mark.parametrize(
    ("name", "is_one", "in_objects"),
    [
        ("s3://bucket/m", True, True),
        ("file:///folder/m", True, True),
        ("oci://host/m", True, False),
        ("http://host:8080/m", True, False),
        ("https://host/m", True, False),
        ("team/m:v1", False, False),
        ("s3:/bucket/m", False, False),
    ],
)
def test_addresses_begin_with_a_scheme(name: str, is_one: bool, in_objects: bool) -> None:
    assert is_address(name) is is_one
    assert is_in_objects(name) is in_objects


@pytest.mark.parametrize(
    "address", ["s3://", "s3://bucket", "s3://bucket/m:", "oci://", "http://", "https://host"]
)
def test_addresses_of_no_model_are_refused(address: str) -> None:
    with pytest.raises(InvalidReference):
        check_address(address)


def test_a_plan_reports_what_would_be_read_and_reads_nothing(
    local: LocalStore, objects: ObjectStore, other: LocalStore
) -> None:
    for name in ("one", "two"):
        push_model(name, objects.address, store=local)
    manifest = local.resolve("two")
    size = sum(item.size for item in manifest.blobs)
    plan = blobstore.open(f"{objects.address}/two", store=other, plan=True)
    assert (plan.size, plan.bytes_to_read, plan.blobs_present) == (size, size, 0)
    with blobstore.open(f"{objects.address}/one", store=other) as model:
        model.tensors()
    plan = blobstore.open(f"{objects.address}/two", store=other, plan=True)
    layer = frozen.layers(local, "one")["shared"]
    assert plan.bytes_to_read == size - plan.bytes_present <= size - layer.size
    assert blobstore.open("two", store=local, plan=True) == ReadPlan(
        blobs=len(manifest.blobs),
        size=size,
        blobs_present=len(manifest.blobs),
        bytes_present=size,
        bytes_to_read=0,
    )

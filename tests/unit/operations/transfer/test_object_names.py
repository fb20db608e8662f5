"""The names that models get in object storage, and stores that overlap."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.errors import InvalidReference, ModelNotFound
from blobstore.objects.address import StoreAddress
from blobstore.operations.transfer.object_target import find_target
from blobstore.operations.transfer.pull import pull_model
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.support import frozen


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    frozen.put(store, "one:v1", {"shared": 1, "own": 2})
    return store


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


def test_an_address_with_a_tag_names_the_model_there_and_a_pull_finds_it(
    local: LocalStore, bucket: str, tmp_path: Path
) -> None:
    push_model("one:v1", f"{bucket}/team", store=local)
    address = f"{bucket}/team/other:v2"
    pushed = push_model("one:v1", address, store=local)
    assert (str(pushed.remote), pushed.bytes_sent, pushed.notices) == (address, 0, ())
    pulled = pull_model(address, store=tmp_path / "other")
    assert str(pulled.reference) == "other:v2"


def test_the_store_that_has_models_gets_a_name_with_a_namespace(
    local: LocalStore, bucket: str
) -> None:
    push_model("one:v1", bucket, store=local)
    pushed = push_model("one:v1", f"{bucket}/team/one:v3", store=local)
    assert (pushed.bytes_sent, str(pushed.remote)) == (0, f"{bucket}/team/one:v3")
    assert not Path(bucket.removeprefix("file://"), "team").exists()


def test_stores_that_overlap_are_noticed(local: LocalStore, bucket: str) -> None:
    push_model("one:v1", f"{bucket}/team", store=local)
    around = push_model("one:v1", bucket, store=local)
    within = push_model("one:v1", f"{bucket}/team/deep", store=local)
    assert around.notices == (
        (
            f"'{bucket}' is a new store around '{bucket}/team', and they share no blobs; push to "
            f"'{bucket}/NAME:TAG' to keep all models in one"
        ),
    )
    assert [text.partition(", and")[0] for text in within.notices] == [
        f"'{bucket}/team/deep' is a new store within '{bucket}/team'",
        f"'{bucket}/team/deep' is a new store within '{bucket}'",
    ]
    assert push_model("one:v1", f"{bucket}/team/deep", store=local).notices == ()


def test_a_real_server_lists_stores_that_overlap(
    local: LocalStore, object_address: StoreAddress
) -> None:
    push_model("one:v1", f"{object_address}/team", store=local)
    around = push_model("one:v1", object_address, store=local)
    assert "is a new store around" in around.notices[0]
    assert str(find_target(f"{object_address}/x/one:v1")) == f"{object_address}/x/one:v1"


@pytest.mark.parametrize("end", ["one:", ":v1", "a b:v1"])
def test_a_name_that_is_not_valid_is_refused(end: str, local: LocalStore, bucket: str) -> None:
    with pytest.raises(InvalidReference):
        push_model("one:v1", f"{bucket}/{end}", store=local)
    assert not Path(bucket.removeprefix("file://")).exists()


def test_reading_makes_no_folder(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        pull_model(f"{bucket}/typo/one:v1", store=tmp_path / "other")
    assert not Path(bucket.removeprefix("file://")).exists()

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.errors import (
    InvalidReference,
    ModelNotFound,
    NameTaken,
    RemoteRefused,
    StoreBusy,
    UsageError,
)
from blobstore.objects.address import StoreAddress
from blobstore.objects.leases import Collection, leased
from blobstore.objects.store import ObjectStore
from blobstore.operations.create.save import save
from blobstore.operations.load import load
from blobstore.operations.maintenance import remote_names
from blobstore.operations.maintenance.gc_objects import collect_objects
from blobstore.operations.maintenance.remote_names import remove_remote, tag_remote
from blobstore.operations.transfer.pull import pull_model
from blobstore.operations.transfer.push import push_model
from blobstore.remotes.catalog import read_remote_catalog
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.registry import Server, running_registry


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "local")
    frozen.put(store, "one", {"own": 2})
    frozen.put(store, "two", {"other": 3})
    return store


@pytest.fixture(params=["objects", "registry"])
def place(request: pytest.FixtureRequest, tmp_path: Path, local: LocalStore) -> str:
    """Where the model ``one`` has the tag v1, and ``two`` the tag v2."""
    if request.param == "registry":
        server: Server = request.getfixturevalue("server")
        place = f"oci://{server.host}/{request.node.name.translate(str.maketrans('[]', '--'))}m"
    else:
        place = f"file://{tmp_path}/bucket/m"
    push_model("one", f"{place}:v1", store=local)
    push_model("two", f"{place}:v2", store=local)
    return place


def tags(place: str) -> list[str]:
    where = place if place.startswith("oci:") else place.removesuffix("/m")
    return [entry.address.rpartition(":")[2] for entry in read_remote_catalog(where)]


def test_a_model_gets_another_tag(place: str, local: LocalStore) -> None:
    done = tag_remote(f"{place}:v1", "best")
    assert (done.is_new, done.replaced) == (True, False)
    assert tags(place) == ["best", "v1", "v2"]
    again = tag_remote(f"{place}:v1", "best")
    assert (again.is_new, again.replaced) == (False, False)


def test_the_state_of_a_step_goes_with_its_model(tmp_path: Path, local: LocalStore) -> None:
    bucket = f"file://{tmp_path}/bucket"
    for step in (1, 2):
        state = {"model": {"w": np.full(2, step)}, "moments": {"w": np.full(2, -step)}}
        save(state, f"m:step-{step}", model="model", store=bucket)
    tag_remote(f"{bucket}/m:step-1", "best")
    assert tags(f"{bucket}/m") == [
        f"{tag}{state}" for tag in ("best", "step-1", "step-2") for state in ("", ".state")
    ]
    assert not tag_remote(f"{bucket}/m:step-1", "best").is_new
    with pytest.raises(NameTaken, match="another model has the name .*best.state"):
        tag_remote(f"{bucket}/m:step-2", "best")
    assert load("m:best", store=bucket)["moments"]["w"].tolist() == [-1, -1]
    assert tag_remote(f"{bucket}/m:step-2", "best", force=True).replaced
    assert load("m:best", store=bucket)["moments"]["w"].tolist() == [-2, -2]
    # A model without a state leaves none of another one, and a state of other weights is no state of it.
    push_model("one", f"{bucket}/m:step-1", store=local)
    tag_remote(f"{bucket}/m:step-1", "best", force=True)
    assert "best.state" not in tags(f"{bucket}/m")
    long = "l" * 76
    assert tag_remote(f"{bucket}/m:step-2", long).is_new
    assert f"{long}.state" not in tags(f"{bucket}/m")


def test_the_tag_of_another_model_is_taken_by_force_alone(place: str, local: LocalStore) -> None:
    with pytest.raises(NameTaken, match="another model has the name"):
        tag_remote(f"{place}:v1", "v2")
    assert tag_remote(f"{place}:v1", "v2", force=True).replaced
    assert push_model("one", f"{place}:v2", store=local).is_unchanged


def test_a_collection_keeps_the_blobs_of_a_tag_that_comes_in_the_meantime(
    local: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"file://{tmp_path}/bucket"
    for name in ("one", "two"):
        push_model(name, f"{place}/{name}:v1", store=local)
    given = ObjectStore.place

    def collected_before(*arguments: Any) -> None:
        remove_remote([f"{place}/one:v1"])  # a user renames a model
        assert not collect_objects(place, older_than=0).removed
        given(*arguments)

    monkeypatch.setattr(ObjectStore, "place", collected_before)
    tag_remote(f"{place}/one:v1", "best")
    pull_model(f"{place}/one:best", "back", store=local)
    assert local.read_manifest("back") == local.read_manifest("one")


def test_a_tag_waits_for_a_collection_that_may_not_have_seen_it(
    local: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_names, "leased", partial(leased, wait=0))
    place = f"file://{tmp_path}/bucket"
    push_model("one", f"{place}/one:v1", store=local)
    with Collection(ObjectStore(StoreAddress.parse(place)).client):
        with pytest.raises(StoreBusy, match="garbage is being collected"):
            tag_remote(f"{place}/one:v1", "best")
        tag_remote(f"{place}/one:v1", "v1")  # which it has
    assert tag_remote(f"{place}/one:v1", "best").is_new


def test_a_malformed_tag_is_refused(place: str) -> None:
    for tag in ("a b", f"sha256:{'0' * 64}", ""):
        with pytest.raises((InvalidReference, UsageError)):
            tag_remote(f"{place}:v1", tag)
    with pytest.raises(ModelNotFound):
        tag_remote(f"{place}:none", "new")


def test_names_in_object_storage_are_removed_all_or_none(local: LocalStore, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/bucket/m"
    push_model("one", f"{place}:v1", store=local)
    push_model("one", f"{place}:v2", store=local)
    with pytest.raises(ModelNotFound):
        remove_remote([f"{place}:v1", f"{place}:none"])
    remove_remote([f"{place}:v1"], dry_run=True)
    assert tags(place) == ["v1", "v2"]
    assert [str(one) for one in remove_remote([f"{place}:v1"])] == [f"{place}:v1"]
    assert tags(place) == ["v2"]


def test_a_registry_without_tags_to_delete_removes_a_manifest_with_all_of_them(
    server: Server, local: LocalStore
) -> None:
    place = f"oci://{server.host}/deletion"
    pushed = push_model("one", f"{place}:v1", store=local)
    with pytest.raises(RemoteRefused, match="the registry deletes no tags; 'blobstore rm oci://"):
        remove_remote([f"{place}:v1"])
    with pytest.raises(ModelNotFound):
        remove_remote([f"{place}@{Digest.of(b'x')}"])
    remove_remote([f"{place}@{pushed.digest}"])
    with pytest.raises(ModelNotFound):
        remove_remote([f"{place}:v1"])

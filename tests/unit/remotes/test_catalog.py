from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidManifest, ModelNotFound, NotFound
from blobstore.objects.address import StoreAddress
from blobstore.objects.store import ObjectStore
from blobstore.operations.transfer.push import push_model
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.remotes.catalog import find_store, read_remote_catalog, shared_sizes
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.stub_registry import StubRegistry


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "local")
    frozen.put(store, "one", {"shared": 1, "own": 2})
    frozen.put(store, "team/two:v1", {"shared": 1, "other": 3})
    return store


@pytest.fixture
def place(local: LocalStore, tmp_path: Path) -> str:
    """The address of a store with both models."""
    address = f"file://{tmp_path}/bucket/team"
    for name in ("one", "team/two:v1"):
        push_model(name, address, store=local)
    return address


def test_a_store_is_listed_with_sizes_and_ids(place: str, local: LocalStore) -> None:
    one, two = read_remote_catalog(place)
    assert (one.address, two.address) == (f"{place}/one:latest", f"{place}/team/two:v1")
    assert one.digest == Digest.of(local.read_manifest("one"))
    assert one.size == sum(blob.size for blob in local.resolve("one").blobs)
    shared = {blob.digest: blob.size for blob in one.blobs}
    common = sum(shared.get(blob.digest, 0) for blob in two.blobs)
    assert shared_sizes([one, two]) == [common, common]
    assert common > 0


def test_an_address_of_a_model_is_that_model_alone(place: str) -> None:
    assert [entry.address for entry in read_remote_catalog(f"{place}/one")] == [
        f"{place}/one:latest"
    ]
    assert find_store(f"{place}/one:latest") is None


def test_a_manifest_that_cannot_be_read_is_an_entry_with_its_error(place: str) -> None:
    objects = ObjectStore(StoreAddress.parse(place))
    objects.client.put("manifests/registry.ollama.ai/library/one/latest", b"{")
    one, two = read_remote_catalog(place)
    assert isinstance(one.error, InvalidManifest)
    assert (one.size, two.error) == (None, None)


def test_a_mistyped_store_is_not_found_and_one_near_is_named(place: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no store or model at") as caught:
        read_remote_catalog(f"{place}x")
    assert not isinstance(caught.value, ModelNotFound)
    with pytest.raises(NotFound, match=f"there is one at '{place}'"):
        read_remote_catalog(place.removesuffix("/team"))
    assert not (tmp_path / "bucket" / "teamx").exists()


def test_a_store_whose_names_were_all_removed_is_empty(place: str) -> None:
    objects = ObjectStore(StoreAddress.parse(place))
    objects.remove(objects.references())
    assert read_remote_catalog(place) == []


def test_a_real_server_is_listed_and_a_typo_is_not_found(
    local: LocalStore, object_address: StoreAddress
) -> None:
    push_model("one", object_address, store=local)
    (entry,) = read_remote_catalog(str(object_address))
    assert entry.modified is not None
    with pytest.raises(NotFound):
        read_remote_catalog(f"{object_address}x")


def test_tags_of_one_manifest_are_read_once(local: LocalStore) -> None:
    plan = plan_ollama(local.read_manifest("one"))
    with StubRegistry() as registry:
        for tag in ("v2", "v1"):
            registry.put(local, plan, "team/a", tag)
        registry.put_manifest("team/a", "x", "application/json", b"[]")
        referrers = f"sha256-{plan.root.digest.hex}"  # no models: these and cosign's signatures
        for tag in (referrers, f"{referrers}.sig"):
            registry.put_manifest("team/a", tag, "application/json", b"[]")
        found = read_remote_catalog(f"oci://{registry.host}/team/a")
        requests = Counter(registry.requests)
    assert [entry.address for entry in found] == [
        f"{registry.host}/team/a:{tag}" for tag in ("v1", "v2", "x")
    ]
    assert [entry.registry_digest for entry in found[:2]] == [plan.root.digest] * 2
    assert [entry.digest for entry in found[:2]] == [Digest.of(local.read_manifest("one"))] * 2
    assert found[0].size == sum(blob.size for blob in local.resolve("one").blobs)
    assert found[2].error is not None
    assert requests[f"GET /v2/team/a/manifests/{plan.root.digest}"] == 1

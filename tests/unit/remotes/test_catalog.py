from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidManifest, ModelNotFound, NotFound
from blobstore.objects.address import StoreAddress
from blobstore.objects.store import ObjectStore
from blobstore.operations.transfer.push import push_model
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.registry.layouts.plan import MODEL_CONFIG
from blobstore.registry.manifest import OCI_MANIFEST
from blobstore.remotes.catalog import RemoteEntry, find_store, read_remote_catalog, shared_sizes
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.hostile_s3 import hostile_s3
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


def test_steps_are_listed_in_their_order(local: LocalStore, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/bucket/steps"
    for tag in ("step-10", "step-9"):
        frozen.put(local, f"run:{tag}", {"w": 1})
        push_model(f"run:{tag}", address, store=local)
    addresses = [entry.address for entry in read_remote_catalog(address)]
    assert addresses == [f"{address}/run:step-9", f"{address}/run:step-10"]


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
        for tag in ("v10", "v9"):
            registry.put(local, plan, "team/a", tag)
        registry.put_manifest("team/a", "x", "application/json", b"[]")
        referrers = f"sha256-{plan.root.digest.hex}"  # no models: these and cosign's signatures
        for tag in (referrers, f"{referrers}.sig"):
            registry.put_manifest("team/a", tag, "application/json", b"[]")
        found = read_remote_catalog(f"oci://{registry.host}/team/a")
        requests = Counter(registry.requests)
    assert [entry.address for entry in found] == [
        f"{registry.host}/team/a:{tag}" for tag in ("v9", "v10", "x")
    ]
    assert [entry.registry_digest for entry in found[:2]] == [plan.root.digest] * 2
    assert [entry.digest for entry in found[:2]] == [Digest.of(local.read_manifest("one"))] * 2
    assert found[0].size == sum(blob.size for blob in local.resolve("one").blobs)
    assert found[2].error is not None
    assert requests[f"GET /v2/team/a/manifests/{plan.root.digest}"] == 1


def test_a_list_reads_only_manifests_that_are_new_since_the_last(local: LocalStore) -> None:
    plans = {name: plan_ollama(local.read_manifest(name)) for name in ("one", "team/two:v1")}
    with StubRegistry() as registry:
        address = f"oci://{registry.host}/team/a"

        def read() -> tuple[list[RemoteEntry], set[str]]:
            registry.requests.clear()
            entries = read_remote_catalog(address, kept_in=local)
            return entries, {request.partition("/team/a/")[2] for request in registry.requests}

        registry.put(local, plans["one"], "team/a", "v1")
        first, _ = read()
        assert read() == (first, {"tags/list?n=1000", "manifests/v1"})
        registry.put(local, plans["team/two:v1"], "team/a", "v1")
        (other,), requests = read()
        assert other.digest == Digest.of(local.read_manifest("team/two:v1"))
        assert set(other.blobs) == {blob.id for blob in local.resolve("team/two:v1").blobs}
        assert f"manifests/{plans['team/two:v1'].root.digest}" in requests
        kept = next(local.folder("headers").parent.glob(f"references-{os.geteuid()}-*"))
        kept.write_bytes(kept.read_bytes()[:-1])
        assert read()[0] == [other]


def test_files_of_another_tool_and_errors_are_listed_again_as_before(local: LocalStore) -> None:
    config = {"mediaType": MODEL_CONFIG, "digest": str(Digest.of(b"{}")), "size": 2}
    layer = {
        "mediaType": "application/vnd.cncf.model.weight.v1.raw",
        "digest": str(Digest.of(b"weights")),
        "size": 7,
        "annotations": {"org.cncf.model.filepath": "model.safetensors"},
    }
    manifest = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": [layer]}
    with StubRegistry() as registry:
        data = json.dumps(manifest).encode()
        for name in ("files", str(Digest.of(data))):
            registry.put_manifest("a", name, OCI_MANIFEST, data)
        registry.put_manifest("a", "x", "application/json", b"[]")
        lists = [read_remote_catalog(f"oci://{registry.host}/a", kept_in=local) for _ in range(2)]
    for files, broken in lists:
        assert (files.digest, files.size, files.error) == (None, 9, None)
        assert (broken.size, str(broken.error)) == (None, str(lists[0][1].error))


def test_a_list_of_a_bucket_reads_no_manifest_again(
    local: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hostile_s3() as server:
        server.set_environment(monkeypatch)
        push_model("one", str(server.address), store=local)
        requests: list[str] = []
        server.disturb = lambda request: requests.append(request.path)
        first = read_remote_catalog(str(server.address), kept_in=local)
        assert any("/manifests/" in path.partition("?")[0] for path in requests)
        requests.clear()
        assert read_remote_catalog(str(server.address), kept_in=local) == first
        assert not any("/manifests/" in path.partition("?")[0] for path in requests)


def test_a_replaced_object_is_read_again(place: str, local: LocalStore) -> None:
    read_remote_catalog(place, kept_in=local)
    objects = ObjectStore(StoreAddress.parse(place))
    manifest = objects.read_manifest("team/two:v1")
    objects.client.put("manifests/registry.ollama.ai/library/one/latest", manifest)
    one, two = read_remote_catalog(place, kept_in=local)
    assert one.digest == two.digest == Digest.of(manifest)
    assert one.blobs == two.blobs

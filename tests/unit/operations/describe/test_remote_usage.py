from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.errors import ModelNotFound, NotFound
from blobstore.objects.address import StoreAddress
from blobstore.objects.store import ObjectStore
from blobstore.operations.describe.remote_usage import measure_remote
from blobstore.operations.transfer.push import push_model
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.stub_registry import StubRegistry


def test_a_store_is_measured_with_what_its_models_share(tmp_path: Path) -> None:
    local, place = LocalStore(tmp_path / "local"), f"file://{tmp_path}/bucket"
    frozen.put(local, "one", {"shared": 1, "own": 2})
    frozen.put(local, "two", {"shared": 1, "other": 3})
    for name in ("one", "two"):
        push_model(name, place, store=local)
    ids = {name: {blob.id for blob in local.resolve(name).blobs} for name in ("one", "two")}
    sizes = {name: sum(size for _, size in blobs) for name, blobs in ids.items()}
    both = ids["one"] | ids["two"]

    usage = measure_remote(place, store=local)
    assert [(model.address, model.size, model.missing) for model in usage.models] == [
        (f"{place}/one:latest", sizes["one"], 0),
        (f"{place}/two:latest", sizes["two"], 0),
    ]
    assert usage.without_sharing == sum(sizes.values())
    assert (usage.together.blobs, usage.together.size) == (
        len(both),
        sum(size for _, size in both),
    )
    elsewhere = measure_remote([f"{place}/one"], store=tmp_path / "empty")
    assert elsewhere.together.missing == sizes["one"]
    ObjectStore(StoreAddress.parse(place)).client.put(
        "manifests/registry.ollama.ai/library/one/latest", b"{"
    )
    assert measure_remote(place, store=local).models[0].error is not None
    with pytest.raises(NotFound):
        measure_remote(f"{place}/typo", store=local)


def test_a_registry_and_its_repositories_are_measured(store: LocalStore) -> None:
    frozen.put(store, "one", {"shared": 1, "own": 2})
    frozen.put(store, "two", {"shared": 1, "other": 3})
    with StubRegistry() as registry:
        for name, repository in (("one", "team/one"), ("two", "team/two"), ("two", "two")):
            registry.put(store, plan_ollama(store.read_manifest(name)), repository, "v1")

        def addresses(place: str) -> list[str]:
            models = measure_remote(f"oci://{registry.host}{place}", store=store).models
            return [model.address.removeprefix(f"{registry.host}/") for model in models]

        assert addresses("") == ["team/one:v1", "team/two:v1", "two:v1"]
        assert addresses("/team") == addresses("/team/") == ["team/one:v1", "team/two:v1"]
        assert addresses("/team/one") == ["team/one:v1"]
        registry.put(store, plan_ollama(store.read_manifest("one")), "two", "latest")
        model = f"oci://{registry.host}/two"
        (only,) = measure_remote(model, store=store).models
        assert only.address == model, "a model wins over the tags of its repository"
        for typo in ("/teams", "/two:v2"):
            with pytest.raises(ModelNotFound):
                addresses(typo)

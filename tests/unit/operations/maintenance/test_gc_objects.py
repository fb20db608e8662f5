"""Garbage of stores in object storage, against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import ImplausibleGarbage, InvalidManifest, StoreBusy
from blobstore.manifests.reference import Reference
from blobstore.objects.locks import Collection, leased
from blobstore.objects.store import ObjectStore
from blobstore.operations.maintenance.gc_objects import collect_objects
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.support import frozen


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    frozen.put(store, "one", {"shared": 1, "own": 2})
    frozen.put(store, "two", {"shared": 1, "other": 3})
    return store


def test_blobs_of_removed_models_are_deleted_and_shared_ones_stay(
    local: LocalStore,
    objects: ObjectStore,
) -> None:
    for name in ("one", "two"):
        push_model(name, objects.address, store=local)
    assert collect_objects(objects.address, older_than=0).removed == ()
    objects.remove([Reference.parse("two")])
    assert collect_objects(objects.address).removed == ()
    planned = collect_objects(objects.address, older_than=0, dry_run=True)
    found = collect_objects(objects.address, older_than=0)
    assert found.is_complete
    assert found.removed == planned.removed
    folders = sorted(item.key.rpartition("/")[0] for item in found.removed)
    assert folders == [".blobstore/headers", "blobs", "blobs"]
    push = push_model("one", objects.address, store=local, verify=True)
    assert push.is_unchanged


def test_a_leased_blob_is_kept(objects: ObjectStore) -> None:
    data = b"a blob that an import has found"
    digest = Digest.of(data)
    objects.put_blob(digest, len(data), [data])
    with leased(objects.client, [digest]):
        found = collect_objects(objects.address, older_than=0, force=True)
        assert (found.leased, found.removed) == (1, ())
    assert len(collect_objects(objects.address, older_than=0, force=True).removed) == 1


def test_an_import_waits_for_a_collection(objects: ObjectStore) -> None:
    with (
        Collection(objects.client),
        pytest.raises(StoreBusy, match="garbage is being collected"),
        leased(objects.client, [], wait=0),
    ):
        pass
    with leased(objects.client, [], wait=0):
        pass


def test_two_collections_do_not_run_at_once(objects: ObjectStore) -> None:
    with Collection(objects.client), pytest.raises(StoreBusy):
        Collection(objects.client)
    with Collection(objects.client):
        pass


def test_blobs_without_any_manifest_are_not_deleted(objects: ObjectStore) -> None:
    objects.put_blob(Digest.of(b"x"), 1, [b"x"])
    with pytest.raises(ImplausibleGarbage, match="1 blobs and no manifest"):
        collect_objects(objects.address, older_than=0)
    assert objects.exists(Digest.of(b"x"), 1)


def test_nothing_is_deleted_if_a_manifest_is_damaged(
    local: LocalStore,
    objects: ObjectStore,
) -> None:
    push_model("one", objects.address, store=local)
    objects.place(Reference.parse("two"), b"{}", None)
    with pytest.raises(InvalidManifest, match="two:latest"):
        collect_objects(objects.address, older_than=0)

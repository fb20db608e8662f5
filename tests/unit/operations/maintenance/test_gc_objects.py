"""Garbage of stores in object storage, against a real server."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.core.workers import WorkerPool
from blobstore.errors import ImplausibleGarbage, InvalidManifest, NotFound, StoreBusy
from blobstore.manifests.reference import Reference
from blobstore.objects.client import ObjectClient
from blobstore.objects.leases import Collection, leased
from blobstore.objects.store import ObjectStore
from blobstore.operations.maintenance import gc_objects
from blobstore.operations.maintenance.gc_objects import collect_objects
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.objects import no_lease


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


def test_one_request_for_each_model_is_enough(
    local: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"file://{tmp_path}/bucket"
    for name in ("one", "two"):
        push_model(name, place, store=local)
    asked: list[str] = []
    get = ObjectClient.get

    def noted(client: ObjectClient, key: str, *arguments: Any) -> Any:
        asked.append(key)
        return get(client, key, *arguments)

    monkeypatch.setattr(ObjectClient, "get", noted)
    collect_objects(place, older_than=0)
    assert sum(key.startswith("manifests/") for key in asked) == 2
    assert not any("cold" in key for key in asked)


def test_a_mistyped_store_is_an_error_and_nothing_is_written(
    local: LocalStore, tmp_path: Path
) -> None:
    place = f"file://{tmp_path}/bucket/team"
    push_model("one", place, store=local)
    (tmp_path / "bucket" / "taem").mkdir()
    with pytest.raises(NotFound, match="there is no store or model at"):
        collect_objects(place.replace("team", "taem"))
    assert not list((tmp_path / "bucket" / "taem").iterdir())
    with pytest.raises(NotFound, match=f"there is one at '{place}'"):
        collect_objects(place.removesuffix("/team"))


def test_a_store_that_only_a_push_that_was_killed_has_begun_is_collected(
    objects: ObjectStore,
) -> None:
    with leased(objects.client, [Digest.of(b"x")]):
        assert collect_objects(objects.address).removed == ()


def test_a_leased_blob_is_kept(objects: ObjectStore) -> None:
    data = b"a blob that an import has found"
    digest = Digest.of(data)
    objects.put_blob(digest, len(data), [data])
    with leased(objects.client, [digest]):
        objects.put_blob(Digest.of(b"written since"), 13, [b"written since"])
        found = collect_objects(objects.address, older_than=0, force=True)
        assert (found.leased, found.young, found.removed) == (2, 0, ())
        found = collect_objects(objects.address, older_than=3600, force=True)
        assert (found.leased, found.young, found.removed) == (2, 0, ())
    assert collect_objects(objects.address, older_than=3600, force=True).young == 2
    assert len(collect_objects(objects.address, older_than=0, force=True).removed) == 2


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
    objects.place(Reference.parse("two"), b"{}", None, no_lease)
    with pytest.raises(InvalidManifest, match="two:latest"):
        collect_objects(objects.address, older_than=0)


@pytest.mark.parametrize("call", ["read_manifest", "delete"])
def test_a_request_to_stop_ends_a_collection_which_can_be_repeated(
    local: LocalStore, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    names = [f"model-{number}" for number in range(8)]
    for number, name in enumerate(names):
        frozen.put(local, name, {"x": number})
        push_model(name, objects.address, store=local)
    objects.remove(map(Reference.parse, names[:4]))
    owner: type = ObjectStore if call == "read_manifest" else ObjectClient
    original, calls = getattr(owner, call), list[object]()
    noticed = threading.Event()

    def asked(self: Any, what: Any, *arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            calls.append(what)
            patch.setattr(interrupts._State, "number", signal.SIGTERM)
            noticed.wait(60)
        return original(self, what, *arguments)

    class Pool(WorkerPool):
        def run(self, items: Any, job: Any, on_stop: Any = None) -> Any:
            del on_stop
            return super().run(items, job, noticed.set)

    with monkeypatch.context() as patch:
        patch.setattr(interrupts, "_thread", interrupts._Thread())
        patch.setattr(owner, call, asked)
        patch.setattr(gc_objects, "_STREAMS", 2)
        patch.setattr(gc_objects, "WorkerPool", Pool)
        with pytest.raises(interrupts.Stopped):
            collect_objects(objects.address, older_than=0)
    assert 1 <= len(calls) <= 2
    collect_objects(objects.address, older_than=0)
    assert objects.references() == sorted(map(Reference.parse, names[4:]))
    for name in names[4:]:
        assert push_model(name, objects.address, store=local, verify=True).is_unchanged

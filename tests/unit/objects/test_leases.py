"""Leases of pushes and collections of garbage in object storage, and those that last longer than others wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.system import seconds_since_start
from blobstore.errors import StoreBusy
from blobstore.manifests.reference import Reference
from blobstore.objects import client as objects_client
from blobstore.objects import leases
from blobstore.objects.address import StoreAddress
from blobstore.objects.client import ObjectClient
from blobstore.objects.leases import Collection, leased
from blobstore.objects.store import ObjectStore
from blobstore.operations.maintenance import gc_objects
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.hostile_s3 import HostileS3, hostile_s3

Later = Callable[[float], None]
HOUR = 3600.0
ONE = Digest.of(b"one")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileS3]:
    with hostile_s3() as running:
        monkeypatch.setattr(objects_client, "_RETRIES", {"max_retries": 0})
        running.set_environment(monkeypatch)
        yield running


@pytest.fixture
def store(server: HostileS3) -> ObjectStore:
    return ObjectStore(server.address)


def test_a_collection_has_the_time_of_the_server_and_leaves_nothing(
    server: HostileS3, store: ObjectStore
) -> None:
    with Collection(store.client) as collection:
        assert collection.now == store.client.modified(".blobstore/gc")
        assert collection.may_delete
    assert set(server.objects) == {"p/.blobstore/probe"}


def test_a_collection_sees_what_a_push_relies_on(store: ObjectStore) -> None:
    with leased(store.client, [ONE]), Collection(store.client) as collection:
        found = collection.leased()
    assert found.digests == {ONE}
    assert found.since == collection.now
    with Collection(store.client) as collection:
        assert not collection.leased().digests


def test_a_push_waits_for_a_collection(store: ObjectStore) -> None:
    pauses: list[float] = []
    collection = Collection(store.client)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            collection.__exit__()

    with leased(store.client, [ONE], pause=pause):
        assert len(pauses) == 2
    with Collection(store.client), pytest.raises(StoreBusy), leased(store.client, [ONE], wait=0):
        pytest.fail("it is running")


def test_two_collections_do_not_run_at_once(store: ObjectStore) -> None:
    with Collection(store.client), pytest.raises(StoreBusy, match="is being collected"):
        Collection(store.client)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Return what lets the clock of durations go on by some seconds."""
    now = seconds_since_start()

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(leases, "seconds_since_start", lambda: now)
    return wait


@pytest.fixture
def client(tmp_path: Path) -> ObjectClient:
    return ObjectClient(StoreAddress("file", "", str(tmp_path / "remote").lstrip("/")))


def test_an_import_of_more_than_a_day_gives_nothing_a_name(
    client: ObjectClient, later: Later
) -> None:
    with leases.leased(client, []) as check:
        later(23 * HOUR)
        check()
        later(HOUR)
        with pytest.raises(StoreBusy, match=r"may have been collected as garbage.*run it again"):
            check()


def test_a_push_that_was_suspended_for_a_day_publishes_no_name(
    client: ObjectClient, later: Later, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalStore(tmp_path / "store")
    frozen.put(local, "one", {"own": 1})
    store = ObjectStore(client.address)
    put_headers = ObjectStore.put_headers

    def suspended(self: ObjectStore, digest: Digest, data: bytes) -> None:
        put_headers(self, digest, data)
        later(30 * HOUR)

    monkeypatch.setattr(ObjectStore, "put_headers", suspended)
    with pytest.raises(StoreBusy):
        push_model("one", client.address, store=local)
    assert not store.has_model(Reference.parse("one"))
    monkeypatch.undo()
    assert push_model("one", client.address, store=local, verify=True).bytes_sent == 0


def test_a_collection_deletes_nothing_when_imports_no_longer_wait(
    client: ObjectClient, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(client.address)
    for number in range(40):
        data = b"%d" % number
        store.put_blob(Digest.of(data), len(data), [data])
    delete = ObjectClient.delete

    def slow(self: ObjectClient, keys: list[str]) -> None:
        delete(self, keys)
        if keys[0].startswith("blobs/"):
            later(HOUR)

    monkeypatch.setattr(ObjectClient, "delete", slow)
    found = gc_objects.collect_objects(client.address, older_than=0, force=True)
    assert not found.is_complete
    assert 1 <= len(found.removed) <= gc_objects._STREAMS
    assert len(list(store.client.list("blobs"))) == 40 - len(found.removed)


def test_a_collection_that_took_too_long_leaves_the_note_of_another(
    client: ObjectClient, later: Later
) -> None:
    with leases.Collection(client):
        later(HOUR)
        client.put(leases._NOTE, b"of another collection, an hour later")
    assert client.get(leases._NOTE, 100) is not None


def test_a_collection_of_half_an_hour_lets_imports_begin_when_it_ends(
    client: ObjectClient, later: Later
) -> None:
    with leases.Collection(client) as collection:
        later(HOUR / 2)
        assert not collection.may_delete
    assert client.get(leases._NOTE, 100) is None

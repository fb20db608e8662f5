"""Leases of pushes and collections of garbage in object storage, and those that last longer than others wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.core.system import seconds_since_start
from blobstore.errors import RemoteError, StoreBusy
from blobstore.manifests.reference import Reference
from blobstore.objects import client as objects_client
from blobstore.objects import leases
from blobstore.objects.address import StoreAddress
from blobstore.objects.conditional_writes import ConditionalClient
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
def client(tmp_path: Path) -> ConditionalClient:
    return ConditionalClient(StoreAddress("file", "", str(tmp_path / "remote").lstrip("/")))


def test_an_import_of_more_than_a_day_gives_nothing_a_name(
    client: ConditionalClient, later: Later
) -> None:
    with leases.leased(client, []) as check:
        later(23 * HOUR)
        check()
        later(HOUR)
        with pytest.raises(StoreBusy, match=r"may have been collected as garbage.*run it again"):
            check()


def test_a_push_that_was_suspended_for_a_day_publishes_no_name(
    client: ConditionalClient, later: Later, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    client: ConditionalClient, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(client.address)
    for number in range(40):
        data = b"%d" % number
        store.put_blob(Digest.of(data), len(data), [data])
    delete = ConditionalClient.delete

    def slow(self: ConditionalClient, keys: list[str]) -> None:
        delete(self, keys)
        if keys[0].startswith("blobs/"):
            later(HOUR)

    monkeypatch.setattr(ConditionalClient, "delete", slow)
    found = gc_objects.collect_objects(client.address, older_than=0, force=True)
    assert not found.is_complete
    assert 1 <= len(found.removed) <= gc_objects._STREAMS
    assert len(list(store.client.list("blobs"))) == 40 - len(found.removed)


def age(path: Path, seconds: float) -> None:
    """Let an object count as one that was written some seconds ago."""
    os.utime(path, (0, time.time() - seconds))


def test_the_note_of_a_collection_that_was_killed_counts_for_an_hour(
    client: ConditionalClient, tmp_path: Path
) -> None:
    Collection(client)
    age(tmp_path / "remote" / leases._NOTE, HOUR / 2)
    with pytest.raises(StoreBusy):
        Collection(client)
    age(tmp_path / "remote" / leases._NOTE, HOUR + 1)
    with leased(client, [ONE], wait=0), Collection(client) as collection:
        assert collection.leased().digests == {ONE}


def test_the_lease_of_an_import_that_was_killed_counts_for_a_day(
    client: ConditionalClient, tmp_path: Path
) -> None:
    key = f"{leases._LEASES}/killed"
    client.put(key, f'["{ONE.hex}"]'.encode())
    age(tmp_path / "remote" / key, 23 * HOUR)
    with Collection(client) as collection:
        assert collection.leased().digests == {ONE}
    age(tmp_path / "remote" / key, 24 * HOUR + 1)
    with Collection(client) as collection:
        assert collection.leased() == (set(), None)
    assert client.size(key) is None


@pytest.mark.parametrize("content", [b"", b"{", b"5", b"[[]]"])
def test_a_lease_that_cannot_be_read_ends_a_collection(
    client: ConditionalClient, content: bytes
) -> None:
    client.put(f"{leases._LEASES}/damaged", content)
    with Collection(client) as collection, pytest.raises(RemoteError, match="damaged' cannot be"):
        collection.leased()


def test_leases_have_a_limit_together(
    client: ConditionalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEASE", limits.Limit(100, 1000, 2))
    for number in range(3):
        client.put(f"{leases._LEASES}/{number}", b"[]")
    with Collection(client) as collection, pytest.raises(RemoteError, match="more than 2 entries"):
        collection.leased()


def test_of_two_collections_that_begin_at_once_one_fails(
    client: ConditionalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = ConditionalClient.put

    def put_second(self: ConditionalClient, key: str, data: bytes) -> None:
        put(self, key, data)
        client.replace(leases._NOTE, b"of another collection", None)

    monkeypatch.setattr(ConditionalClient, "put", put_second)
    with pytest.raises(StoreBusy, match="is being collected"):
        Collection(client)


def test_a_collection_that_took_too_long_leaves_the_note_of_another(
    client: ConditionalClient, later: Later
) -> None:
    with leases.Collection(client):
        later(HOUR)
        client.put(leases._NOTE, b"of another collection, an hour later")
    assert client.get(leases._NOTE, 100) is not None


def test_a_collection_of_half_an_hour_lets_imports_begin_when_it_ends(
    client: ConditionalClient, later: Later
) -> None:
    with leases.Collection(client) as collection:
        later(HOUR / 2)
        assert not collection.may_delete
    assert client.get(leases._NOTE, 100) is None

"""Leases of pushes, and collections of garbage, of one store in object storage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import StoreBusy
from blobstore.objects import client
from blobstore.objects.locks import Collection, leased
from blobstore.objects.store import ObjectStore
from tests.support.hostile_s3 import HostileS3, hostile_s3

ONE = Digest.of(b"one")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileS3]:
    with hostile_s3() as running:
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        monkeypatch.setattr(client, "_RETRIES", {"max_retries": 0})
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
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

"""A policy that refuses a model says that signatures could not be listed, where that may be why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import blobstore
from blobstore.errors import NotTrusted
from blobstore.http.retry import Patience
from blobstore.operations.transfer.push import push_model
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.registry import client as client_module
from blobstore.store.local import LocalStore
from tests.attacks.test_response_rules import Registry
from tests.support.hostile_s3 import HostileS3, failure, hostile_s3
from tests.support.models import add_blobs, blob
from tests.support.raw_server import RawServer, Received, reply
from tests.support.signing import KeyFiles, policy


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    add_blobs(store, "m", {"x": blob(("x", "U8", (3,), b"abc"))})
    return store


@pytest.fixture
def other(tmp_path: Path, key: KeyFiles) -> LocalStore:
    other = LocalStore(tmp_path / "other")
    policy(other, key)
    return other


@pytest.mark.parametrize("denied", [r"/referrers/", r"/manifests/sha256-|/referrers/"])
@pytest.mark.parametrize("status", [403, 500])
def test_registry_that_denies_the_list_is_named_with_its_status(
    store: LocalStore,
    other: LocalStore,
    key: KeyFiles,
    monkeypatch: pytest.MonkeyPatch,
    denied: str,
    status: int,
) -> None:
    monkeypatch.setattr(client_module, "Patience", lambda: Patience(attempts=2, first=0))
    registry = Registry()

    def deny(request: Received) -> bytes | None:
        is_it = request.method == "GET" and re.search(denied, request.path)
        return reply(status) if is_it else None

    with RawServer(registry) as server:
        blobstore.push(
            "m", f"{server.host}/a:v1", store=store, registry=RegistryOptions(layout="ollama")
        )
        registry.override = deny
        with pytest.raises(NotTrusted, match=f"signatures could not be read: .*status {status}"):
            blobstore.pull(f"{server.host}/a:v1", "m", store=other)
        registry.override = lambda _: None
        with pytest.raises(NotTrusted, match="it has no signature") as caught:
            blobstore.pull(f"{server.host}/a:v1", "m", store=other)
        assert "could not be read" not in str(caught.value)
        policy(other, key, "warn")
        registry.override = deny
        [notice] = blobstore.pull(f"{server.host}/a:v1", "m", store=other).notices
        assert f"status {status}" in notice


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileS3]:
    with hostile_s3() as running:
        running.set_environment(monkeypatch)
        yield running


@pytest.mark.parametrize("denied", ["list-type", r"\.sig"])
def test_bucket_that_denies_its_signatures_is_named_with_its_status(
    bucket: HostileS3, store: LocalStore, other: LocalStore, key: KeyFiles, denied: str
) -> None:
    blobstore.sign("m", key.private, store=store)
    push_model("m", bucket.address, store=store)
    bucket.disturb = lambda request: (
        failure(403, "AccessDenied") if re.search(denied, request.path) else None
    )
    with pytest.raises(NotTrusted, match=r"signatures could not be read: .*status 403"):
        blobstore.pull(f"{bucket.address}/m", store=other)
    bucket.disturb = lambda _: None
    blobstore.pull(f"{bucket.address}/m", store=other)

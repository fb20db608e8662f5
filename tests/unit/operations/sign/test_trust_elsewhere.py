"""Policies that models in object storage are opened under."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import NotTrusted
from blobstore.objects import client, conditional_writes
from blobstore.objects.store import ObjectStore
from blobstore.operations.open import open_files
from blobstore.operations.sign.sign import sign_model
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.support.hostile_s3 import HostileS3, action_of, hostile_s3
from tests.support.raw_server import Answer, Received
from tests.support.signing import KeyFiles, key_files, policy


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileS3]:
    monkeypatch.setattr(client, "_RETRIES", {"max_retries": 0})
    monkeypatch.setattr(conditional_writes, "_PAUSE", 0)
    monkeypatch.setitem(sys.modules, "botocore.session", None)  # the keys are in the environment
    with hostile_s3() as running:
        running.set_environment(monkeypatch)
        yield running


@pytest.fixture
def address(server: HostileS3, key: KeyFiles, tmp_path: Path) -> str:
    """Return the address of a signed model."""
    store = LocalStore(tmp_path / "source")
    put(store, "model", {"x": 1})
    sign_model("model", key.private, store=store)
    push_model("model", server.address, store=store)
    return f"{server.address}/model"


@pytest.fixture
def reader(tmp_path: Path, address: str) -> LocalStore:
    """Return a store that has neither the model nor its signature."""
    del address
    return LocalStore(tmp_path / "reader")


def requests_of_signatures(server: HostileS3) -> list[str]:
    seen: list[str] = []

    def note(request: Received) -> Answer | None:
        if "signatures" in request.path:
            seen.append(action_of(request))
        return None

    server.disturb = note
    return seen


def test_the_signatures_of_the_bucket_count(
    address: str, reader: LocalStore, key: KeyFiles
) -> None:
    policy(reader, key)
    with blobstore.open(address, store=reader) as model:
        assert sorted(model.tensors()) == ["x"]
    with open_files(address, reader) as files:
        assert files.reference == model.reference


def test_a_model_without_a_signature_by_a_key_of_the_policy_is_refused(
    address: str, reader: LocalStore, tmp_path: Path
) -> None:
    policy(reader, key_files(tmp_path, "other"))
    with pytest.raises(NotTrusted, match="the policy refuses model model:latest"):
        blobstore.open(address, store=reader)


def test_a_signature_of_another_manifest_does_not_count(
    address: str, server: HostileS3, reader: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    policy(reader, key)
    source = LocalStore(tmp_path / "source")
    signatures = set(source.signatures(Digest.of(source.read_manifest("model"))))
    put(source, "model", {"x": 2})
    push_model("model", server.address, store=source)
    manifest = Digest.of(source.read_manifest("model"))
    bucket = ObjectStore(server.address)
    for data in signatures:
        bucket.keep_signature(manifest, data)
    assert set(bucket.read_signatures(manifest)) == signatures
    with pytest.raises(NotTrusted):
        blobstore.open(address, store=reader)


def test_signatures_that_may_not_be_listed_are_named_where_they_are_needed(
    address: str, server: HostileS3, reader: LocalStore, key: KeyFiles
) -> None:
    server.allow("s3:GetObject")
    blobstore.open(address, store=reader).close()
    policy(reader, key)
    with pytest.raises(NotTrusted, match="signatures could not be read: .*access denied"):
        blobstore.open(address, store=reader)
    policy(reader, key, "warn")
    with pytest.warns(UserWarning, match="is not trusted.*access denied"):
        blobstore.open(address, store=reader).close()


def test_signatures_are_not_asked_for_unless_the_policy_needs_them(
    address: str, server: HostileS3, reader: LocalStore, key: KeyFiles
) -> None:
    seen = requests_of_signatures(server)
    blobstore.open(address, store=reader).close()
    policy(reader, key, pattern="others/*")
    blobstore.open(address, store=reader).close()
    assert not seen
    policy(reader, key)
    blobstore.open(address, store=reader).close()
    assert seen == ["s3:ListBucket", "s3:GetObject"]

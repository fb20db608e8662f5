from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blobstore.errors import RemoteRefused
from blobstore.registry.client import RegistryClient
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.registry.manifest import OCI_INDEX, RemoteManifest
from blobstore.remotes.referrers import tag_to_extend
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.stub_registry import StubRegistry

REPOSITORY, TAG = "team/a", "list"


@pytest.fixture
def root(tmp_path: Path, registry: StubRegistry) -> RemoteManifest:
    """The manifest of a model that the registry has."""
    store = LocalStore(tmp_path)
    frozen.put(store, "a", {"x": 1})
    plan = plan_ollama(store.read_manifest("a"))
    registry.put(store, plan, REPOSITORY, "latest")
    return plan.root


@pytest.fixture
def client(registry: StubRegistry) -> Iterator[RegistryClient]:
    with RegistryClient(registry.host) as client:
        yield client


def test_a_tag_that_is_there_is_extended(
    client: RegistryClient, registry: StubRegistry, root: RemoteManifest
) -> None:
    registry.put_manifest(REPOSITORY, TAG, OCI_INDEX, b'{"schemaVersion": 2, "manifests": []}')
    found = tag_to_extend(client, REPOSITORY, TAG, root)
    assert found is not None
    assert found.media_type == OCI_INDEX


def test_a_tag_that_is_not_there_is_new(client: RegistryClient, root: RemoteManifest) -> None:
    assert tag_to_extend(client, REPOSITORY, TAG, root) is None


def test_a_refused_tag_is_new_only_if_the_model_can_be_read(
    client: RegistryClient, registry: StubRegistry, root: RemoteManifest
) -> None:
    registry.refused = {(REPOSITORY, TAG)}
    assert tag_to_extend(client, REPOSITORY, TAG, root) is None
    registry.refused.add((REPOSITORY, str(root.digest)))
    with pytest.raises(RemoteRefused):  # the entries of an existing tag would be lost
        tag_to_extend(client, REPOSITORY, TAG, root)

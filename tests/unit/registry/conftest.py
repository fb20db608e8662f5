"""Registries for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blobstore.registry.client import RegistryClient
from tests.support.registry import Server, running_registry


@pytest.fixture(scope="session")
def open_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_registry(tmp_path_factory.mktemp("open")) as server:
        yield server


@pytest.fixture
def client(open_registry: Server) -> Iterator[RegistryClient]:
    with RegistryClient(open_registry.host) as client:
        yield client

"""A real registry for the tests of this folder."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.registry import Server, running_registry


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def remote(server: Server, request: pytest.FixtureRequest) -> str:
    """Return the address of a repository that no other test uses."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    return f"{server.host}/tests/{name}"

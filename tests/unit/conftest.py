"""Fixtures of all unit tests."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from blobstore.core import interrupts
from tests.support.registry import Server, running_registry
from tests.support.stub_registry import StubRegistry

if TYPE_CHECKING:
    from tests.support.signing import KeyFiles


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask this process to end, without a signal."""
    monkeypatch.setattr(interrupts._State, "number", signal.SIGTERM)
    monkeypatch.setattr(interrupts, "_thread", interrupts._Thread())


@pytest.fixture(params=["numpy", "torch", "mlx"])
def framework(request: pytest.FixtureRequest) -> Any:
    """Return the name of each framework that runs on this machine."""
    if request.param == "mlx":
        pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    return request.param


@pytest.fixture
def key(tmp_path: Path) -> KeyFiles:
    """Write the files of a key."""
    from tests.support.signing import key_files  # skips the test if cryptography is not installed

    return key_files(tmp_path)


@pytest.fixture
def registry() -> Iterator[StubRegistry]:
    with StubRegistry() as server:
        yield server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a real registry for all tests."""
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def repository(request: pytest.FixtureRequest) -> str:
    """Return a repository that no other test uses."""
    return "tests/" + re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")


@pytest.fixture
def remote(server: Server, repository: str) -> str:
    """Return the address of a repository that no other test uses."""
    return f"{server.host}/{repository}"

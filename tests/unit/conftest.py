"""Fixtures of all unit tests."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from blobstore.core import interrupts


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

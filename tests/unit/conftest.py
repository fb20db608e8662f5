"""Fixtures of all unit tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Return an empty store."""
    return LocalStore(tmp_path / "store")

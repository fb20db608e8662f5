"""Fixtures of the tests of exports and links."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.operations.create.create import create
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, moe_tensors, write_folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return the folder to write, which does not exist."""
    return tmp_path / "out"


@pytest.fixture
def dense(tmp_path: Path, store: LocalStore) -> Path:
    """Create model ``m`` of a dense folder; return the folder."""
    folder = write_folder(tmp_path / "source", dense_tensors())
    create(folder, "m", store=store)
    return folder


@pytest.fixture
def stacked(tmp_path: Path, store: LocalStore) -> Path:
    """Create model ``m`` with stacked experts; return the source folder."""
    folder = write_folder(tmp_path / "source", moe_tensors())
    create(folder, "m", store=store, experts="stacked")
    return folder

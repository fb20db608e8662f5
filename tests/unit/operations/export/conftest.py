"""Fixtures of the tests of exports and links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blobstore.operations.create.create import create
from tests.support.models import dense_tensors, write_folder

if TYPE_CHECKING:
    from pathlib import Path

    from blobstore.store.local import LocalStore


@pytest.fixture
def dense(tmp_path: Path, store: LocalStore) -> Path:
    """Create model ``m`` of a dense folder; return the folder."""
    folder = write_folder(tmp_path / "dense", dense_tensors())
    create(folder, "m", store=store)
    return folder

"""What the tests with real models and libraries share."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers quiet, where a module of tests has imported it."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        yield
        return
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")

"""Fixtures shared by the tests with real models and libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers, if a test module has imported it."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        yield
        return
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.meta_models import Maker


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[Maker]:
    with Maker(tmp_path) as made:
        yield made

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.meta_models import Maker


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[Maker]:
    from tests.support.meta_models import Maker  # which needs torch

    with Maker(tmp_path) as made:
        yield made

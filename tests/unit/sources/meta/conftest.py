from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.meta_models import Maker

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[Maker]:
    with Maker(tmp_path) as made:
        yield made

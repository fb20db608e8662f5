"""What runs out or is refused: one clear line, and a store that is whole."""

from __future__ import annotations

import pytest

from tests.faults import full
from tests.faults.outcomes import Effort


@pytest.mark.parametrize("case", full.CASES)
def test_what_is_refused_leaves_the_store_whole(case: str) -> None:
    (outcome,) = full.run(Effort(6), only={case})
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.injected >= 6
    assert outcome.violations == []

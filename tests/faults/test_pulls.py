"""Pulls that are disturbed: nothing is fetched twice, and names are complete or absent."""

from __future__ import annotations

import pytest

from tests.faults import pulls
from tests.faults.outcomes import Effort
from tests.support.samples import samples


@pytest.mark.parametrize("case", pulls.CASES)
def test_a_disturbed_pull_leaves_the_store_whole(case: str) -> None:
    (outcome,) = pulls.run(Effort(samples(4)), only={case})
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.injected >= 1
    assert outcome.violations == []

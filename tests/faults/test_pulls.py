"""Pulls that are disturbed: nothing is fetched twice, and names are complete or absent."""

from __future__ import annotations

import pytest

from tests.faults import pulls
from tests.faults.outcomes import Effort
from tests.support.samples import samples


@pytest.mark.parametrize("case", pulls.CASES)
def test_a_disturbed_pull_leaves_the_store_whole(case: str) -> None:
    # Some kills come too late.
    effort = Effort(3 if "killed" in case else samples(4))
    (outcome,) = pulls.run(effort, only={case})
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.injected >= 1
    assert outcome.violations == []

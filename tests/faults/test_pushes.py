"""Pushes that are disturbed: little is sent twice, and tags of registries are complete or absent."""

from __future__ import annotations

import pytest

from tests.faults import pushes
from tests.faults.outcomes import Effort
from tests.support.samples import samples


@pytest.mark.parametrize("case", pushes.CASES)
def test_a_disturbed_push_leaves_the_registry_whole(case: str) -> None:
    (outcome,) = pushes.run(Effort(samples(4)), only={case})
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.injected >= 1
    assert outcome.violations == []

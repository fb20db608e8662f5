"""Models that are fetched from an upstream, disturbed: names are complete or absent, and so are files."""

from __future__ import annotations

import pytest

from tests.faults import arrivals
from tests.faults.outcomes import Effort
from tests.support.samples import samples

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")


@pytest.mark.parametrize("case", arrivals.CASES)
def test_a_disturbed_fetch_leaves_the_store_whole(case: str) -> None:
    (outcome,) = arrivals.run(Effort(samples(4)), only={case})
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.injected >= 1
    assert outcome.violations == []

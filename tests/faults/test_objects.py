"""Object storage whose clients or server are killed: names are complete or absent."""

from __future__ import annotations

import pytest

from tests.faults import objects
from tests.faults.outcomes import Effort
from tests.support.samples import samples

CLIENTS = [case for case in objects.CASES if "object storage killed" not in case]


@pytest.mark.parametrize(
    ("cases", "times"), [(CLIENTS, samples(4)), (["object storage killed during push"], 1)]
)
def test_kills_leave_names_in_object_storage_complete_or_absent(
    cases: list[str], times: int
) -> None:
    outcomes = objects.run(Effort(times), only=cases)
    assert len(outcomes) == len(cases)
    assert [outcome.violations for outcome in outcomes] == [[]] * len(cases)
    assert all(outcome.injected for outcome in outcomes)

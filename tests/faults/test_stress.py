"""Many processes at once: nothing reachable is ever missing."""

from __future__ import annotations

from tests.faults import stress
from tests.faults.outcomes import Effort


def test_nothing_is_missing_while_eight_processes_work() -> None:
    (outcome,) = stress.run(Effort(3))
    assert outcome.injected > 8
    assert outcome.violations == []

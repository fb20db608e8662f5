"""Power cuts: what was acknowledged is there afterwards."""

from __future__ import annotations

import pytest

from tests.faults import disks, power
from tests.faults.outcomes import Effort

pytestmark = pytest.mark.skipif(
    bool(disks.why_not(in_file=True)), reason=disks.why_not(in_file=True)
)


def test_a_power_cut_loses_nothing_that_was_acknowledged() -> None:
    (outcome,) = power.run(Effort(3))
    assert outcome.injected == 3
    assert outcome.violations == []


def test_a_store_that_does_not_sync_would_be_found() -> None:
    (outcome,) = power.run(Effort(4), unsynced="files")
    assert outcome.violations != []

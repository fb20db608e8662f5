"""Power cuts: what was acknowledged is there afterwards, in whatever order the disk was written."""

from __future__ import annotations

import pytest

from tests.faults import power
from tests.faults.operations import OPERATIONS
from tests.faults.outcomes import Effort
from tests.support.samples import samples


@pytest.mark.parametrize("name", [operation.name for operation in OPERATIONS])
def test_a_power_cut_loses_nothing_that_was_acknowledged(name: str) -> None:
    (outcome,) = power.run(Effort(1), only={name}, most=samples(40))
    assert outcome.injected > 2
    assert outcome.violations == []


@pytest.mark.parametrize("name", ["create", "repair", "thaw", "export"])
@pytest.mark.parametrize("what", ["files", "folders"])
def test_a_command_that_does_not_sync_is_found(name: str, what: str) -> None:
    (outcome,) = power.run(Effort(1), only={name}, unsynced=what)
    assert outcome.violations != []

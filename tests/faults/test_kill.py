"""Commands that are killed: names are whole or absent, and everything goes on."""

from __future__ import annotations

import pytest

from tests.faults import kill
from tests.faults.outcomes import Effort
from tests.support.samples import samples


@pytest.mark.parametrize("name", [operation.name for operation in kill.victims()])
def test_a_killed_command_leaves_the_store_whole(name: str) -> None:
    (outcome,) = kill.run(Effort(samples(8)), only={name})
    assert outcome.injected == samples(8)
    assert outcome.violations == []

"""Commands that are asked to end: they end, say so in one line, and leave nothing half done."""

from __future__ import annotations

import pytest

from tests.faults import signals
from tests.faults.outcomes import Effort


@pytest.mark.parametrize("name", signals.names())
def test_a_command_that_is_stopped_leaves_nothing_half_done(name: str) -> None:
    (outcome,) = signals.run(Effort(3, seconds=4), only={name})
    assert outcome.violations == []

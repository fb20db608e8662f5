"""Commands that are asked to end: they end, say so in one line, and leave nothing half done."""

from __future__ import annotations

import pytest

from tests.faults import signals
from tests.faults.outcomes import Effort
from tests.faults.stoppable import SERVER

_READERS = {*("verify", "list", "show", "du", "find", "history", "diff", "inspect", SERVER)}
"""Commands that give nothing a name."""


@pytest.mark.parametrize("name", signals.names())
def test_a_command_that_is_stopped_leaves_nothing_half_done(name: str) -> None:
    (outcome,) = signals.run(Effort(2, seconds=2), only={name})
    assert outcome.violations == []


@pytest.mark.parametrize("name", [name for name in signals.names() if name not in _READERS])
def test_a_command_that_is_complete_reports_success(name: str) -> None:
    ended = signals.finish(name)
    assert ended is None or (ended.code, "interrupted" in ended.stderr) == (0, False)

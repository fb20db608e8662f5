"""System calls that fail: no fault is swallowed, none leaves anything half-done."""

from __future__ import annotations

import pytest

from tests.faults import inject, tracing
from tests.faults.outcomes import Effort
from tests.support.samples import samples

pytestmark = pytest.mark.skipif(bool(tracing.why_not()), reason=tracing.why_not())


@pytest.mark.parametrize("name", ["create", "gc", "rm", "repair"])
def test_a_failing_call_leaves_the_store_whole(name: str) -> None:
    outcomes = inject.run(Effort(samples(20)), only={name})
    assert sum(outcome.injected for outcome in outcomes) >= samples(10)
    assert [text for outcome in outcomes for text in outcome.violations] == []


def test_a_failed_fsync_is_a_failed_create() -> None:
    outcomes = inject.run(Effort(30), only={"create"}, calls={"fsync"})
    assert {outcome.fault.partition(" ")[0] for outcome in outcomes} >= {"EIO", "ENOSPC"}
    assert [text for outcome in outcomes for text in outcome.violations] == []

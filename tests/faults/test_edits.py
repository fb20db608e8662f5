"""Edits in place that are killed: tensors have old or new bytes, and blobs do not change."""

from __future__ import annotations

import pytest

from tests.faults import edits
from tests.faults.outcomes import Effort
from tests.support.samples import samples


@pytest.mark.parametrize("case", edits.CASES)
def test_a_killed_edit_leaves_old_or_new_bytes(case: str) -> None:
    (outcome,) = edits.run(Effort(samples(10)), only={case})
    assert outcome.injected == samples(10)
    assert outcome.violations == []

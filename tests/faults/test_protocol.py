"""The store's protocol against a plain dictionary."""

from __future__ import annotations

from tests.faults import protocol
from tests.faults.outcomes import Effort


def test_the_store_is_the_dictionary_that_it_must_be() -> None:
    (outcome,) = protocol.run(Effort(10, seed=1))
    assert outcome.injected > 50
    assert outcome.violations == []

"""Single bits that flip: ``verify`` finds each, and says where."""

from __future__ import annotations

import pytest

from tests.faults import flips
from tests.faults.outcomes import Effort, Outcome


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return flips.run(Effort(60))


def test_verify_finds_every_bit_that_flips_in_a_blob(outcomes: list[Outcome]) -> None:
    blobs, _, _ = outcomes
    assert blobs.injected > 20
    assert blobs.violations == []


def test_verify_finds_every_bit_that_flips_in_a_manifest(outcomes: list[Outcome]) -> None:
    _, manifests, _ = outcomes
    assert manifests.injected > 5
    assert manifests.violations == []


def test_verify_finds_every_bit_that_flips_in_what_is_frozen(outcomes: list[Outcome]) -> None:
    *_, frozen = outcomes
    assert frozen.injected > 5
    assert frozen.violations == []

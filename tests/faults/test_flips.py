"""Single bits that flip: ``verify`` finds each, and says where."""

from __future__ import annotations

from tests.faults import flips
from tests.faults.outcomes import Effort


def test_verify_finds_every_bit_that_flips_in_a_blob() -> None:
    blobs, _, _ = flips.run(Effort(40))
    assert blobs.injected > 20
    assert blobs.violations == []


def test_verify_finds_every_bit_that_flips_in_a_manifest() -> None:
    _, manifests, _ = flips.run(Effort(40))
    assert manifests.injected > 5
    assert manifests.violations == []


def test_verify_finds_every_bit_that_flips_in_what_is_frozen() -> None:
    *_, frozen = flips.run(Effort(60))
    assert frozen.injected > 5
    assert frozen.violations == []

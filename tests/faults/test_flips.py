"""Single bits that flip: ``verify`` finds each, and says where."""

from __future__ import annotations

from tests.faults import flips
from tests.faults.outcomes import Effort


def test_verify_finds_every_bit_that_flips_in_a_blob() -> None:
    blobs, _ = flips.run(Effort(40))
    assert blobs.injected > 20
    assert blobs.violations == []


def test_verify_finds_every_bit_that_flips_in_a_manifest() -> None:
    _, manifests = flips.run(Effort(40))
    assert manifests.injected > 5
    assert manifests.violations == []

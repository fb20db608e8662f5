from __future__ import annotations

import pytest

from blobstore.core.digest import Digest
from blobstore.core.sample import ALL, NONE, Sample

DIGESTS = [Digest.of(str(number).encode()) for number in range(2000)]
EDGES = [Digest("0" * 64), Digest("f" * 64)]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100])
def test_each_digest_is_in_one_part(parts: int) -> None:
    samples = [Sample.parse(f"{part + 1} / {parts}") for part in range(parts)]
    assert all(sum(one in sample for sample in samples) == 1 for one in DIGESTS + EDGES)


@pytest.mark.parametrize("share", ["5%", 0.05])
def test_a_share_is_one_of_other_blobs_each_time(share: str | float) -> None:
    samples = [{one for one in DIGESTS if one in Sample.parse(share)} for _ in range(8)]
    assert all(40 < len(sample) < 170 for sample in samples)
    assert len(set(map(frozenset, samples))) > 1


def test_all_and_none() -> None:
    assert all(one in ALL and one in Sample.parse("100%") for one in DIGESTS + EDGES)
    assert not any(one in NONE for one in DIGESTS + EDGES)

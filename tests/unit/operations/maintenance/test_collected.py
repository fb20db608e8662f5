from __future__ import annotations

import time
from pathlib import Path

from blobstore.operations.maintenance.collected import Collected, KeptBlob, Reason, Removed


def kept(size: int, reason: Reason) -> KeptBlob:
    return KeptBlob(Path("blobs"), size, reason, (), time.time())


def test_bases_are_counted_apart_from_other_kept_blobs() -> None:
    found = Collected(
        blobs=(Removed(Path("a"), 1),),
        leftovers=(Removed(Path("b"), 2),),
        kept_blobs=(kept(4, "base"), kept(8, "lost manifest"), kept(16, "young")),
    )

    assert found.size == 3
    assert (found.kept, found.kept_size) == (2, 24)
    assert (found.bases, found.bases_size) == (1, 4)

"""How many random cases a test tries: all of them in CI, fewer elsewhere."""

from __future__ import annotations

import os


def samples(number: int) -> int:
    """Return ``number`` where ``BLOBSTORE_TESTS_COMPLETE`` is set, and a quarter of it elsewhere."""
    return number if "BLOBSTORE_TESTS_COMPLETE" in os.environ else max(1, number // 4)

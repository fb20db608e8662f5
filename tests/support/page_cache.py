"""The page cache of the system, emptied of a file."""

from __future__ import annotations

import os
from pathlib import Path

from blobstore.core.mmap import is_cached


def dropped(path: Path | str) -> bool:
    """Drop a file from the page cache; return whether that worked."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return not is_cached(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)

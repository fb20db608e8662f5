"""Limits the read speed of a disk for this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup/blkio")


@contextmanager
def slow_disk(folder: Path, rate: int) -> Iterator[bool]:
    """Limit reads from the disk of a folder to ``rate`` bytes per second; yield whether that works.

    It needs Linux's control groups, version 1, and root rights.
    """
    number = os.stat(folder).st_dev
    group = _GROUPS / f"blobstore-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield False
        return
    try:
        limit = f"{os.major(number)}:{os.minor(number)} {rate}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield True
    except OSError:
        yield False
    finally:
        (_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()

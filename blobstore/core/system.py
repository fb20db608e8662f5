"""What Linux and macOS do differently: the one module that asks what the system can do.

Linux can do all of it. What macOS cannot, a function does by other means, or says that it did not. Builds of Python
for old versions of Linux lack some calls too, so each call is looked up by its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

# Python exports it from 3.13 on.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# The same on Linux, macOS and the BSDs; Python's mmap does not export it.
MAP_FIXED = 0x10
# Linux numbers. macOS rejects them, which does no harm.
MADV_HUGEPAGE, MADV_POPULATE_READ = 14, 22
CANNOT_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOTTY}
"""Errors of file systems that do not support a sync, such as some of FUSE and SMB for folders."""
_CANNOT_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}
"""Errors of systems and file systems that do not copy between files."""
_FICLONERANGE = 0x4020940D
"""Linux's request: source descriptor, offset, length, and the offset in the target."""
_MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MAPS = Path("/proc/self/maps")
_MOUNTS = Path("/proc/self/mountinfo")
_MEMORY = Path("/proc/meminfo")
_MEMORY_GROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Where a container reads its limit and what it uses, in both versions of Linux's control groups."""
_GPUS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""Devices of drivers for CUDA: NVIDIA's, that of Windows, and AMD's."""


def booted_system() -> str:
    """Return the identifier of the running kernel, which processes of other machines do not have; "" if unknown."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


class MapCounts(NamedTuple):
    """How many maps this process has, and how many it may have."""

    present: int
    limit: int


def flush(descriptor: int) -> None:
    """Make the bytes of a file durable, and on macOS all that was synced before.

    Raises:
        OSError: they cannot be written, or the file system cannot sync this.
    """
    if hasattr(fcntl, "F_FULLFSYNC"):  # there, fsync leaves the bytes in the cache of the disk
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in CANNOT_SYNC:
                raise
        else:
            return
    os.fsync(descriptor)


def will_read(descriptor: int, size: int) -> None:
    """Ask the system to read a file in the background, if it takes advice.

    Raises:
        OSError: this kind of file cannot be read ahead.
    """
    if sys.platform != "darwin":
        os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_WILLNEED)


def can_drop_pages() -> bool:
    """Return whether :func:`drop_pages` does anything."""
    return sys.platform != "darwin"


def drop_pages(descriptor: int) -> None:
    """Remove a file from the page cache, if the system takes advice.

    Raises:
        OSError: this kind of file has no pages to drop.
    """
    if sys.platform != "darwin":
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def direct_flag() -> int:
    """Return the flag of a descriptor whose reads pass the page cache; 0 if there is none."""
    return getattr(os, "O_DIRECT", 0)


def is_in_page_cache(descriptor: int, offset: int, count: int) -> bool:
    """Return whether a range is probably in the page cache; true if the system does not say.

    Only its ends are checked.
    """
    if not count or not hasattr(os, "RWF_NOWAIT"):
        return True
    byte = bytearray(1)
    try:
        for place in (offset, offset + count - 1):
            os.preadv(descriptor, [byte], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def copy_range(source: int, begin: int, count: int, target: int, offset: int) -> int | None:
    """Let the system copy bytes between files; return how many it did, None if it cannot.

    Raises:
        OSError: they cannot be read or written.
    """
    if hasattr(os, "copy_file_range"):
        try:
            return int(os.copy_file_range(source, target, count, begin, offset))
        except OSError as error:
            if error.errno not in _CANNOT_COPY:
                raise
    return None


def share_range(source: int, begin: int, count: int, target: int, offset: int) -> bool:
    """Let whole blocks of two files be the same on the disk; return whether they are now.

    macOS shares whole files alone.
    """
    if sys.platform == "linux":
        request = struct.pack("=qQQQ", source, begin, count, offset)
        with contextlib.suppress(OSError):  # not supported, or no space
            fcntl.ioctl(target, _FICLONERANGE, request)
            return True
    return False


def unnamed_file() -> int:
    """Return the descriptor of a new file that has no name: in memory, if the system can.

    Raises:
        OSError: it cannot be created.
    """
    if hasattr(os, "memfd_create"):
        return int(os.memfd_create("blobstore"))
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def use_large_pages(memory: mmap.mmap) -> None:
    """Put fresh memory into large pages, if the system has any."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # some kernels have none
            memory.madvise(mmap.MADV_HUGEPAGE)


def map_counts() -> MapCounts | None:
    """Return the number of this process's maps and their limit, or None if the system does not say."""
    try:
        limit = int(_MAX_MAP_COUNT.read_bytes())
        with _MAPS.open("rb") as file:  # line by line, as there may be no memory for all of it
            return MapCounts(sum(1 for _ in file), limit)
    except (OSError, ValueError):
        return None


def mount_table() -> str:
    """Return the mounts that this process sees, as proc(5) describes them; empty if the system does not say."""
    with contextlib.suppress(OSError):
        return _MOUNTS.read_text("utf-8", "surrogateescape")
    return ""


def available_memory() -> int:
    """Return about how many bytes of memory processes may still take."""
    # If the system does not report free memory, use all of it.
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError, IndexError):
        found.append(int(_MEMORY.read_text().partition("MemAvailable:")[2].split()[0]) << 10)
    for folder, limit, used in _MEMORY_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max"
            size = int((folder / limit).read_text()) - int((folder / used).read_text())
            found.append(max(0, size + _cached_files(folder)))
    return min(found)


def _cached_files(group: Path) -> int:
    """Return the bytes of page cache in a control group, which the system can take back."""
    with contextlib.suppress(OSError, ValueError):
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # In version 1, names without "total_" leave out the groups below this one.
        kinds = ("active_file", "inactive_file")
        return sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in kinds)
    return 0


def may_have_gpu() -> bool:
    """Return whether the system has a driver of GPUs that CUDA programs use."""
    return any(path.exists() for path in _GPUS)


def seconds_since_start() -> float:
    """Return the seconds of a clock that counts those in which the machine was suspended."""
    # The monotonic clock of macOS counts them.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

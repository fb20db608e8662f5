"""Disks of our own: small ones in memory, and ext4 in a file with copies as of when the power goes."""

from __future__ import annotations

import atexit
import contextlib
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MIB = 2**20
_TRIES = 20
_mounted: list[Path] = []


def why_not(*, in_file: bool = False) -> str:
    """Return why no disk can be mounted here, in memory or in a file; empty if one can."""
    if sys.platform != "linux":
        return "disks are mounted as Linux does"
    if os.geteuid() != 0:
        return "mounting a disk takes root"
    for tool in ("mount", "umount", *(["mkfs.ext4"] if in_file else [])):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    with tempfile.TemporaryDirectory(prefix="blobstore-disk-") as folder:
        image, place = Path(folder, "probe"), Path(folder, "mount")
        try:
            if in_file:
                make_disk(image, 4)
            with mounted(image, place) if in_file else in_memory(place, 4096):
                return ""
        except (OSError, subprocess.CalledProcessError) as error:
            return f"no disk can be mounted: {error}"


def make_disk(image: Path, mebibytes: int) -> None:
    """Write an empty ext4, with a journal."""
    with image.open("wb") as stream:
        stream.truncate(mebibytes * _MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True, capture_output=True)


def mounted(image: Path, place: Path) -> contextlib.AbstractContextManager[Path]:
    """Mount a disk in a file, which replays its journal, and unmount it whatever happens.

    Raises:
        OSError: it cannot be mounted.
    """
    return _mounting(place, "-t", "ext4", "-o", "loop,noatime", str(image))


def in_memory(place: Path, size: int) -> contextlib.AbstractContextManager[Path]:
    """Mount a new disk of ``size`` bytes in memory, as :func:`mounted` does."""
    return _mounting(place, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def remount(place: Path, options: str) -> None:
    """Change how a disk is mounted."""
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)


@contextlib.contextmanager
def _mounting(place: Path, *arguments: str) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *arguments, str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OSError(done.returncode, done.stderr.strip())
    _mounted.append(place)
    try:
        yield place
    finally:
        unmount(place)


def unmount(place: Path) -> None:
    """Unmount a disk, which also frees its loop device; later, if somebody is still there."""
    if place in _mounted:
        _mounted.remove(place)
        if subprocess.run(["umount", place], capture_output=True, check=False).returncode:
            subprocess.run(["umount", "--lazy", place], check=True)


def copy_as_it_is(image: Path, copy: Path) -> None:
    """Copy a mounted disk at one instant; who writes to it must be stopped.

    The kernel may still write on its own. The disk was at one instant what the copy is if it has not
    changed while it was copied.
    """
    for _ in range(_TRIES):
        subprocess.run(["cp", "--sparse=always", image, copy], check=True)
        if filecmp.cmp(image, copy, shallow=False):
            return
    raise OSError(f"{image} has changed each time it was copied")


@atexit.register
def _unmount_all() -> None:
    for place in _mounted:
        with contextlib.suppress(subprocess.CalledProcessError):
            unmount(place)

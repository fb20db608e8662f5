"""Small disks in memory, that can be full or read-only."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_mounted: list[Path] = []


def why_not() -> str:
    """Return why no disk can be mounted here; empty if one can."""
    if sys.platform != "linux":
        return "disks are mounted as Linux does"
    if os.geteuid() != 0:
        return "mounting a disk takes root"
    for tool in ("mount", "umount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    with tempfile.TemporaryDirectory(prefix="blobstore-disk-") as folder:
        try:
            with in_memory(Path(folder, "mount"), 4096):
                return ""
        except OSError as error:
            return f"no disk can be mounted: {error}"


@contextlib.contextmanager
def in_memory(place: Path, size: int) -> Iterator[Path]:
    """Mount a new disk of ``size`` bytes in memory, and unmount it whatever happens.

    Raises:
        OSError: it cannot be mounted.
    """
    place.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(done.returncode, done.stderr.strip())
    _mounted.append(place)
    try:
        yield place
    finally:
        unmount(place)


@contextlib.contextmanager
def mounted_folder(folder: Path, place: Path) -> Iterator[None]:
    """Mount ``folder`` over the folder ``place`` too, and unmount it if :func:`unmount` has not."""
    subprocess.run(["mount", "--bind", folder, place], check=True)
    _mounted.append(place)
    try:
        yield
    finally:
        unmount(place)


def remount(place: Path, options: str) -> None:
    """Change how a disk is mounted."""
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)


def unmount(place: Path) -> None:
    """Unmount a disk, later if it is still in use."""
    if place in _mounted:
        _mounted.remove(place)
        if subprocess.run(["umount", place], capture_output=True, check=False).returncode:
            subprocess.run(["umount", "--lazy", place], check=True)


@atexit.register
def _unmount_all() -> None:
    for place in _mounted:
        with contextlib.suppress(subprocess.CalledProcessError):
            unmount(place)

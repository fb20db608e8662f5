"""Folders that one process of a test run makes, and all others read."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder ``name`` that ``make`` fills, which is called by the first worker that needs it.

    A fixture of a module or session would be made by each worker that runs one of its tests. Tests must not write
    into the folder. If ``make`` fails, the next worker calls it again with another folder.
    """
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / f"once-{name}"
    with (shared / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            new = factory.mktemp(name)
            make(new)
            folder.symlink_to(new)
    return folder.resolve()

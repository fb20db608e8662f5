"""Which files this process has open."""

from __future__ import annotations

import contextlib
from pathlib import Path

ANYWHERE = Path("/")
"""All files, but no sockets and pipes, which other tests may close in the background."""


def open_files(folder: Path) -> list[str]:
    """Return the open files below a folder, sorted. Other tests may have left other files open."""
    found = []
    for descriptor in Path("/dev/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            path = descriptor.readlink()
            if path.is_relative_to(folder):
                found.append(str(path))
    return sorted(found)

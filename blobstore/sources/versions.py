"""The versions of a source's files, which show whether a program wrote to them while they were read.

A version is recorded before the first byte of a file is read, and compared after the last one. A file that
was replaced by another of the same name counts as changed too: its own bytes are intact, but the files of
a model belong together, and the others may be those of the new model. Two traps:

- Writes within one tick of the file system's clock leave the same times. So a file that has only just
  changed is not read before the clock has moved on.
- A write through a shared memory map may change no time until the system writes it to disk.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from blobstore.core import interrupts
from blobstore.core.escape import quote
from blobstore.core.files import FileVersion
from blobstore.errors import DamagedSource

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TICK = 0.02
"""Seconds; more than one tick of Linux's coarsest clock."""
_MAX_WAITS = 25


class SourceVersions:
    """The files of a source as they were before they were read, by absolute path."""

    def __init__(self) -> None:
        self._versions: dict[str, FileVersion | None] = {}

    def record(self, path: Path) -> None:
        """Record the version of a file that is about to be read, unless it is already recorded.

        Raises:
            DamagedSource: a program keeps writing to the file.
        """
        name = os.path.abspath(path)  # noqa: PTH100 - links in it must stay
        if name in self._versions:
            return
        version = _version(name)
        for _ in range(_MAX_WAITS):
            if version is None or version.changed < time.time_ns() - _TICK * 10**9:
                break
            interrupts.sleep(_TICK)
            before, version = version, _version(name)
            if before == version:
                break
        else:
            raise _changed(name)
        self._versions[name] = version

    def check(self, opened: Mapping[Path, FileVersion]) -> None:
        """Check that no file has changed, neither at its path nor as ``opened``.

        ``opened`` has the versions that open files have now.

        Raises:
            DamagedSource: one has.
        """
        for name, version in self._versions.items():
            if version is None or _version(name) != version:
                raise _changed(name)
        for path, version in opened.items():
            name = os.path.abspath(path)  # noqa: PTH100
            if version != self._versions[name]:
                raise _changed(name)

    def check_same(self, other: SourceVersions) -> None:
        """Check that another process has recorded the same versions.

        Machines that share a file system number its device differently.

        Raises:
            DamagedSource: a file differs.
        """
        for name, version in self._versions.items():
            found = other._versions.get(name)
            if version is None or found is None or found[1:] != version[1:]:
                raise _changed(name)


def _version(name: str) -> FileVersion | None:
    try:
        return FileVersion.of_status(os.stat(name))  # noqa: PTH116
    except OSError:  # opening the file reports the error
        return None


def _changed(name: str) -> DamagedSource:
    return DamagedSource(
        f"{quote(name)} changed while it was read, so nothing that was read is used; try again when no "
        "program writes to the source"
    )

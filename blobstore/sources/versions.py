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
from blobstore.core.file_kinds import HEAD, absence
from blobstore.core.files import FileVersion, open_regular
from blobstore.errors import DamagedSource

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from blobstore.core.untrusted_folder import Folder

_TICK = 0.02
"""Seconds; more than one tick of Linux's coarsest clock."""
_MAX_WAITS = 25


class SourceVersions:
    """The files of a source as they were before they were read, by absolute path.

    All of them are opened here: each time, it must be the file that was recorded, and the first time, its first
    bytes must not say that it is something else: a pointer to the file, a web page, an unfinished download.
    """

    def __init__(self, folder: Folder | None = None) -> None:
        """Record nothing yet; ``folder`` is the open folder of all files, if they have one."""
        self._folder = folder
        self._versions: dict[str, FileVersion | None] = {}
        self._looked_at: set[str] = set()
        self.takes_anything = False
        """Whether files are taken for what they are listed as, whatever their first bytes say."""

    def record(self, path: Path) -> None:
        """Record the version of a file that is about to be read, unless it is already recorded.

        Raises:
            DamagedSource: a program keeps writing to the file.
            SourceError: a link leads out of the folder.
        """
        name = str(path.absolute())
        if name in self._versions:
            return
        version = self._version(name)
        for _ in range(_MAX_WAITS):
            if version is None or version.changed < time.time_ns() - _TICK * 10**9:
                break
            interrupts.sleep(_TICK)
            before, version = version, self._version(name)
            if before == version:
                break
        else:
            raise _changed(name)
        self._versions[name] = version

    def open(self, path: Path, *, looks: bool = True) -> tuple[int, int]:
        """Open a recorded file, as :func:`~blobstore.core.files.open_regular` does.

        ``looks`` is false to compare the file with a digest before anything is said about its content.

        Raises:
            OSError: it cannot be opened.
            DamagedSource: it is not the file that was recorded, or something else is in its place.
            BlobstoreError: a link leads out of the folder, or it is not a regular file.
        """
        path = path.absolute()
        opener = open_regular if self._folder is None else self._folder.open_path
        descriptor, size = opener(path)
        version = FileVersion.of_status(os.fstat(descriptor))
        if self._versions.get(str(path), version) != version:
            os.close(descriptor)
            raise _changed(str(path))
        if looks and not self.takes_anything and str(path) not in self._looked_at:
            try:
                _check_is_there(descriptor, path)
            except BaseException:
                os.close(descriptor)
                raise
            self._looked_at.add(str(path))
        return descriptor, size

    def check(self, opened: Mapping[Path, FileVersion]) -> None:
        """Check that no file has changed, neither at its path nor as ``opened``.

        ``opened`` has the versions that open files have now.

        Raises:
            DamagedSource: one has.
        """
        for name, version in self._versions.items():
            if version is None or self._version(name) != version:
                raise _changed(name)
        for path, version in opened.items():
            name = str(path.absolute())
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

    def _version(self, name: str) -> FileVersion | None:
        try:
            if self._folder is None:
                return FileVersion.of_status(os.stat(name))  # noqa: PTH116
            return FileVersion.of_status(
                self._folder.status(os.path.relpath(name, self._folder.path))
            )
        except OSError:  # opening the file reports the error
            return None


def _check_is_there(descriptor: int, path: Path) -> None:
    """Check by its first bytes that a file is not something else in its place. Raises DamagedSource, OSError."""
    if kind := absence(path.name, os.pread(descriptor, HEAD, 0)):
        raise kind.error(quote(path))


def _changed(name: str) -> DamagedSource:
    return DamagedSource(
        f"{quote(name)} changed while it was read, so nothing that was read is used; try again when no "
        "program writes to the source"
    )

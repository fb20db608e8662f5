"""A folder that another user may write to, opened once.

Everything in it is opened relative to its descriptor, one part of a name after the other, and the system
follows no link. So a folder or file that is replaced by a link at any instant is refused, and not read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from blobstore.core.escape import quote, shell_word
from blobstore.core.files import OPEN_FLAGS, check_regular
from blobstore.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, Self

MAX_DEPTH: Final = 64
"""Folders in folders that are walked through: others are opened one by one from the top."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_T = TypeVar("_T")


class Folder:
    """An open folder, whose files and folders are read by their names with ``/`` between the parts."""

    def __init__(
        self, path: Path, *, boundary: Path | None = None, descriptor: int | None = None
    ) -> None:
        """Open nothing yet, unless ``descriptor`` is the folder's.

        Args:
            path: the folder. The user has named it, so links in this path are followed.
            boundary: the resolved folder, which is this one or above it, that links must not leave. None
                to follow no link.
            descriptor: the open folder, which this object closes.
        """
        self.path = path.absolute()
        self._boundary = boundary
        self._start = os.path.relpath(os.path.realpath(path), boundary) if boundary else ""
        self._descriptor = descriptor

    def open(self, name: str) -> tuple[int, int]:
        """Open a regular file for reading; return its descriptor and size in bytes.

        Raises:
            OSError: it cannot be opened.
            SourceError: a link leads out.
            BlobstoreError: it is a folder, device, pipe or socket.
        """
        flags = OPEN_FLAGS | os.O_NOFOLLOW
        descriptor = self.at(name, lambda last, at: os.open(last, flags, dir_fd=at))
        return check_regular(descriptor, self.path / name)

    def open_path(self, path: Path) -> tuple[int, int]:
        """Open a file by its path, which begins with that of the folder. Raises as :meth:`open`."""
        return self.open(str(path.relative_to(self.path)))

    def status(self, name: str) -> os.stat_result:
        """Return the status of a file or folder. Raises OSError, SourceError."""
        return self.at(name, _status)

    def names(self, name: str = "") -> list[str]:
        """Return the names in the folder, or in a folder below it, sorted. Raises OSError, SourceError."""
        descriptor = self._open_folder(name)
        try:
            return _names_in(descriptor)
        finally:
            os.close(descriptor)

    def folder(self, name: str) -> Self:
        """Open a folder below this one, in which no link is followed. Raises OSError, SourceError."""
        return type(self)(self.path / name, descriptor=self._open_folder(name))

    def walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the name and status of all that is below the folder, and follow no link.

        Raises:
            OSError: something cannot be looked at, or lies too deep.
        """
        folders = [""]
        while folders:
            folder = folders.pop()
            if folder.count("/") > MAX_DEPTH:
                why = f"it has folders more than {MAX_DEPTH} deep"
                raise OSError(errno.ENAMETOOLONG, why, str(self.path))
            descriptor = self._open_folder(folder)
            try:
                for name in _names_in(descriptor):
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    yield folder + name, status
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(f"{folder}{name}/")
            finally:
                os.close(descriptor)

    def close(self) -> None:
        """Close the folder. Nothing can be opened any more."""
        if self._descriptor is not None and self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        """Close the folder of a source that could not be opened."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which opens the folder itself."""
        return {**self.__dict__, "_descriptor": None}

    def _open_folder(self, name: str) -> int:
        flags = _FOLDER_FLAGS | os.O_NOFOLLOW
        return self.at(name, lambda last, at: os.open(last, flags, dir_fd=at))

    def _opened(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._boundary or self.path, _FOLDER_FLAGS)
        return self._descriptor

    def at(self, name: str, act: Callable[[str, int], _T]) -> _T:
        """Call ``act`` with the last part of a name and the descriptor of the folder that it is in. Raises OSError."""
        try:
            if self._boundary is None:
                return self._walk(name, act)
            try:
                return self._walk(f"{self._start}/{name}", act)
            except OSError as error:  # ENOTDIR is that of a link in place of a folder
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
            return self._walk(self._resolved(name, self._boundary), act)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None

    def _walk(self, name: str, act: Callable[[str, int], _T]) -> _T:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise OSError(errno.EXDEV, "the name leads out of the folder")
        top = at = self._opened()
        try:
            for part in parts[:-1]:
                inner = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=at)
                if at != top:
                    os.close(at)
                at = inner
            return act(parts[-1] if parts else ".", at)
        finally:
            if at != top:
                os.close(at)

    def _resolved(self, name: str, boundary: Path) -> str:
        """Return where links lead, relative to the boundary.

        This is only text: what it names is opened without following links.
        """
        real = Path(os.path.realpath(self.path / name))
        if real.is_relative_to(boundary):
            return real.relative_to(boundary).as_posix()
        if not real.exists():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        raise SourceError(
            f"{quote(self.path / name)} leads out of the model's folder by a link; copy the file into the "
            f"folder, or leave it out with --exclude {shell_word(name)}"
        )


def _names_in(folder: int) -> list[str]:
    return sorted(os.listdir(folder))


def _status(name: str, folder: int) -> os.stat_result:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return status

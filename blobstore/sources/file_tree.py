"""The files of a model folder: those on disk, or those that a listing of the Hub names.

Files are selected from a tree, before anything is downloaded.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.file_kinds import HEAD, kind_of
from blobstore.core.files import is_absence
from blobstore.core.globs import any_glob_matches
from blobstore.core.untrusted_folder import Folder
from blobstore.errors import DamagedSource, SourceError
from blobstore.manifests.file_names import MAX_DEPTH
from blobstore.sources.versions import SourceVersions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_APPLE_DOUBLE = re.compile(r"\._(?!_)")
"""Matches the start of what macOS writes next to each file on disks of others. Nobody misses it."""
CACHED_REPOSITORY = "models--"
"""Start of the name of a repository's folder in the Hub's cache."""


class FileTree:
    """Files by their names relative to a folder, with ``/`` between the parts.

    Each folder is listed once, so that all decisions see the same files.
    """

    def __init__(
        self,
        root: Path,
        *,
        exclude: Sequence[str] = (),
        listed: Mapping[str, int] | None = None,
        label: str = "",
        opened: Folder | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            root: the folder.
            exclude: patterns of names that are treated as if they did not exist.
            listed: the sizes of all files by name; None to look at the disk.
            label: what messages call the folder; its path by default.
            opened: the folder, if it is open; by default its links are followed as far as they stay in it.
        """
        self.root = root
        if opened is None and listed is None:
            opened = Folder(root, boundary=_link_boundary(root))
        self._folder = opened
        self.versions = SourceVersions(opened)
        """The versions of all files whose path was asked for."""
        self.place = label or str(root)
        """What messages call the folder, and what commands take for it."""
        self._exclude = exclude
        self._listed = listed
        self._entries: dict[str, set[str]] = {}
        self.heads: dict[str, bytes | None] = {}
        """The first bytes of files that were looked at, by name."""
        for file in listed or ():
            name = file
            while name:
                folder, _, last = name.rpartition("/")
                if not self.is_excluded(folder):
                    names = self._entries.setdefault(folder, set())
                    if not self.is_excluded(name):
                        names.add(last)
                name = folder

    @property
    def is_local(self) -> bool:
        """Whether the files are those of a folder on the disk."""
        return self._folder is not None

    def label(self, name: str = "") -> str:
        """Return the quoted name of a file, or of the folder itself, for messages."""
        return quote(f"{self.place}/{name}".removesuffix("/"))

    def entries(self, folder: str = "") -> list[str]:
        """Return the names of the files and folders in a folder, sorted; none if it does not exist.

        Raises:
            OSError: the folder cannot be read.
            SourceError: it is a link that leads out.
        """
        return sorted(self._names_in(folder))

    def has(self, name: str) -> bool:
        """Return whether there is a file or folder of this name. Raises as :meth:`entries`."""
        folder, _, last = name.rpartition("/")
        return last in self._names_in(folder)

    def _names_in(self, folder: str) -> set[str]:
        if self._folder is not None and folder not in self._entries:
            try:
                there = self._folder.names(folder)
            except (FileNotFoundError, NotADirectoryError):
                there = []
            self._entries[folder] = {
                name
                for name in there
                if not _APPLE_DOUBLE.match(name) and not self.is_excluded(joined(folder, name))
            }
        return self._entries.get(folder, set())

    def is_folder(self, name: str) -> bool:
        """Return whether there is a folder of this name, or a link to one, even if it leads out."""
        if self._folder is None:
            return name in self._entries
        if self.is_excluded(name):
            return False
        try:
            return stat.S_ISDIR(self._folder.status(name).st_mode)
        except OSError as error:
            self._check_absent(name, error)
            return False
        except SourceError:
            return (self.root / name).is_dir()

    def size(self, name: str) -> int | None:
        """Return the size of a file; None for a folder, a pipe or a device.

        Raises:
            DamagedSource: it is a broken link.
            SourceError: it is a link that leads out.
        """
        if self._folder is None:
            return (self._listed or {}).get(name)
        try:
            status = self._folder.status(name)
        except OSError as error:
            self._check_absent(name, error)
            if (self.root / name).is_symlink():  # pruned caches have such links
                raise DamagedSource(
                    f"{self.label(name)} is a broken link", advice=self._link_advice(name)
                ) from None
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def _link_advice(self, name: str) -> str:
        """Return the advice for a broken link, which may be one of git-annex."""
        kind = kind_of(os.fsencode((self.root / name).readlink()))
        return kind.advice if kind else ""

    def head(self, name: str) -> bytes | None:
        """Return the first bytes of a file, as many as say what it is; None if it is not here yet.

        Raises:
            DamagedSource: something else is in its place, such as a pointer.
            SourceError: it cannot be read.
        """
        if name not in self.heads:
            self.heads[name] = self._read_head(name)
        return self.heads[name]

    def _read_head(self, name: str) -> bytes | None:
        return None if self._folder is None else self._read_local(name)

    def _read_local(self, name: str) -> bytes:
        path = self.root / name
        self.versions.record(path)
        try:
            descriptor, _ = self.versions.open(path)
        except OSError as error:
            raise SourceError(f"cannot read {self.label(name)}: {error.strerror}") from error
        try:
            return os.pread(descriptor, HEAD, 0)
        finally:
            os.close(descriptor)

    def path(self, name: str) -> Path:
        """Return the path of a file that is about to be read.

        Raises:
            SourceError: a link leads to a file outside the folder.
        """
        path = self.root / name
        self.versions.record(path)
        return path

    def document(self, name: str, most: int) -> Path:
        """Return the path of a file that is about to be parsed. Its size is looked at before it is fetched.

        Raises:
            DamagedSource: it has more than ``most`` bytes.
            SourceError: as :meth:`path`.
        """
        size = self.size(name)
        if size is not None and size > most:
            raise DamagedSource(f"{self.label(name)} has {size} bytes, over the limit of {most}")
        return self.path(name)

    def files_below(self, folder: str = "") -> Iterator[str]:
        """Yield the names of all files in a folder and its folders, to the depth of a store's names."""
        depth = len(folder.split("/")) if folder else 0
        for entry in self.entries(folder) if depth < MAX_DEPTH else ():
            name = joined(folder, entry)
            if not self.is_folder(name):
                yield name
            elif not entry.startswith(".") and self._is_inside(name):  # .git and .cache
                yield from self.files_below(name)

    def is_excluded(self, name: str) -> bool:
        """Return whether a pattern matches a name, or a folder that it is in."""
        while name:
            if any_glob_matches(name, self._exclude):
                return True
            name = name.rpartition("/")[0]
        return False

    def _is_inside(self, name: str) -> bool:
        """Return whether no link leads from a name out of the folder."""
        try:
            return self._folder is None or bool(self._folder.status(name))
        except OSError as error:
            self._check_absent(name, error)
        except SourceError:
            pass
        return False

    def _check_absent(self, name: str, error: OSError) -> None:
        """Raise SourceError unless an error says that nothing is there: what is skipped would be lost."""
        if not is_absence(error) and error.errno != errno.EXDEV:  # that is a name with ".."
            raise SourceError(f"cannot read {self.label(name)}: {error.strerror}") from error

    def close(self) -> None:
        """Close the folder."""
        if self._folder is not None:
            self._folder.close()


def _link_boundary(folder: Path) -> Path:
    """Return the folder that links must not leave: this one, or the repository in a Hub cache that has it."""
    root = Path(os.path.realpath(folder))
    snapshots = (folder for folder in (root, *root.parents) if folder.name == "snapshots")
    caches = (it.parent for it in snapshots if it.parent.name.startswith(CACHED_REPOSITORY))
    return next(caches, root)


def joined(folder: str, name: str) -> str:
    """Return the name of an entry of a folder; the root is the empty name."""
    return f"{folder}/{name}" if folder else name

"""The files of a model that lies elsewhere: each is fetched to a folder before it is read.

Which files are needed is decided from the listing and a few small files, before anything else is fetched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from blobstore.core.escape import quote
from blobstore.errors import DamagedSource
from blobstore.sources.file_tree import FileTree
from blobstore.sources.selection import select_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from blobstore.core.progress import Progress
    from blobstore.sources.base import SourceOptions


class Downloads(Protocol):
    """Where files are fetched to that are needed for one import only."""

    def folder(self, source: str, version: str, part: str = "") -> Path:
        """Return the folder for a version of a source, or a part of it, which only this process uses. Raises StoreError."""

    def check_space(self, to_fetch: int, weights: int) -> None:
        """Check that so many bytes can be fetched, and those of the weights be stored. Raises StoreError."""


class FetchedTree(FileTree, ABC):
    """A listing of files; :meth:`path` fetches the file."""

    def __init__(
        self,
        folder: Path,
        listed: Mapping[str, int],
        options: SourceOptions,
        label: str,
        downloads: Downloads | None,
    ) -> None:
        """Fetch nothing yet.

        Args:
            folder: where the files are once they are fetched. It need not exist yet.
            listed: the sizes of all files by name.
            options: what to select.
            label: what messages call the source.
            downloads: what checks the space; None to check nothing.
        """
        super().__init__(folder, exclude=options.exclude, listed=listed, label=label)
        self._tree = FileTree(folder, exclude=options.exclude, listed=listed, label=label)
        # What is read must be what was fetched, and be chosen by the same bytes.
        self._tree.versions, self._tree.heads = self.versions, self.heads
        self._options = options
        self._sizes = listed
        self._downloads = downloads
        self._fetched: set[str] = set()

    def path(self, name: str) -> Path:
        """Return the path of a file, which is fetched first."""
        self._get([name], None)
        return super().path(name)

    def _read_head(self, name: str) -> bytes | None:
        self._check_files([name])
        return self._read_local(name) if (self.root / name).is_file() else self.first_bytes(name)

    def take(self, progress: Progress | None) -> tuple[FileTree, Sequence[str]]:
        """Select files and fetch them; return the tree that reads them, and their names."""
        selection = select_files(self, self._options)
        weights = sorted(selection.weight_names())
        names = [*selection.files, *weights]
        self._check_files(names)
        if self._downloads is not None:
            to_fetch = sum(map(self.left_of, set(names) - self._fetched))
            self._downloads.check_space(to_fetch, sum(self._sizes[name] for name in weights))
        self._get(names, progress)
        return self._tree, names

    def _check_files(self, names: Iterable[str]) -> None:
        if folder := next((name for name in names if name not in self._sizes), None):
            raise DamagedSource(f"{quote(folder)} is listed as a folder, and should be a file")

    def _get(self, names: Sequence[str], progress: Progress | None) -> None:
        self._check_files(names)
        self.fetch([name for name in names if name not in self._fetched], progress)
        self._fetched.update(names)

    @abstractmethod
    def first_bytes(self, name: str) -> bytes | None:
        """Return the first bytes of a file that was not fetched, to choose files; None if they are unknown."""

    @abstractmethod
    def left_of(self, name: str) -> int:
        """Return how many bytes of a file must be fetched."""

    @abstractmethod
    def fetch(self, names: Sequence[str], progress: Progress | None) -> None:
        """Fetch files to the folder, and check them.

        Raises:
            DamagedSource: a file is not what the listing says.
        """

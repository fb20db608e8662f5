"""The names in folders of manifests by the versions of these folders: to ask for a status costs a third of a listing.

They are kept in the file of references, and are as little believed as that: ``gc`` lists all folders itself.
"""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING, Final

from blobstore.core.files import FileVersion
from blobstore.store.scan import folders_and_files

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSION: Final = struct.Struct("=3Q2q")
"""Of a file or folder, as bytes: they take a third of the memory of the numbers."""
MARGIN_NS: Final = 3 * 10**9
"""What was changed so short a time ago may change again without a new version; see ``verified_cache``."""


def is_settled(version: FileVersion, margin: int = MARGIN_NS) -> bool:
    """Return whether a file or folder will have another version once it changes again."""
    return max(version.modified, version.changed) < time.time_ns() - margin


class Listings:
    """The names in folders that have only files or only folders, by path. A slash follows those of folders."""

    def __init__(self, versions: Buffer = b"", names: Buffer = b"") -> None:
        """Take the tables that :meth:`tables` returned."""
        known = [version for (version,) in struct.iter_unpack("40s", versions)]
        texts = os.fsdecode(bytes(names)).split("\0")
        self._known: dict[str, tuple[bytes, str]] = dict(
            zip(texts, zip(known, texts[len(known) :], strict=False), strict=False)
        )
        self._seen: dict[str, tuple[bytes, str]] = {}
        self.is_new = False
        """Whether a folder was listed that is kept."""

    def folders_and_files(self, folder: str) -> tuple[list[str], list[str]]:
        """Return what :func:`.folders_and_files` does, from what is kept if the folder has not changed."""
        version = FileVersion.of(folder)  # before it is listed: a change in between makes another
        key = VERSION.pack(*version or (0,) * 5)
        known = self._known.get(folder)
        if known is not None and known[0] == key:
            self._seen[folder] = known
            names = known[1].split("/")
            return ([], names) if names[-1] else (names[:-1], [])
        folders, files = folders_and_files(folder)
        if version is not None and bool(files) != bool(folders) and is_settled(version):
            self._known[folder] = self._seen[folder] = key, "/".join(files or (*folders, ""))
            self.is_new = True
        return folders, files

    def tables(self) -> tuple[bytes, bytes]:
        """Return the versions and the names of the folders that were asked for, or of all if none was."""
        kept = self._seen or self._known
        versions = b"".join(version for version, _ in kept.values())
        return versions, os.fsencode("\0".join((*kept, *(names for _, names in kept.values()))))

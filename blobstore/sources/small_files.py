"""Which small files of a folder are kept."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.errors import DamagedSource, SourceError
from blobstore.sources.base import KEPT_FILES, SourceFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PART = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_MAX_FILE_SIZE = 64 * 2**20
_WEIGHT_INDEXES = ("*.safetensors.index*.json", "*.bin.index*.json")


def is_part(name: str) -> bool:
    """Tell whether a store can take ``name`` as a file's or a folder's."""
    return _PART.fullmatch(name) is not None and name not in (".", "..")


def is_kept(name: str) -> bool:
    """Tell whether a file of that name is one to keep."""
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in _WEIGHT_INDEXES):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in KEPT_FILES)


def files_of(folder: Path, prefix: str = "") -> Iterator[SourceFile]:
    """Yield the files to keep of a folder, not of those below it, as ``prefix`` and the name.

    Raises:
        DamagedSource: one is a link to nothing.
        SourceError: one is too large.
    """
    for path in folder.iterdir():
        if not is_part(path.name) or not is_kept(path.name):
            continue
        if path.is_symlink() and not path.exists():  # a cache that was pruned holds such
            raise DamagedSource(f"{quote(path)} is a link to nothing; fetch the complete model")
        if path.is_file():
            if path.stat().st_size > _MAX_FILE_SIZE:
                raise SourceError(
                    f"{quote(path)} is over {_MAX_FILE_SIZE} bytes, too large to keep"
                )
            yield SourceFile(prefix + path.name, path)

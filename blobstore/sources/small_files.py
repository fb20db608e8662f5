"""Lists the small files of a folder that a store keeps."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.errors import DamagedSource, SourceError
from blobstore.manifests.file_names import is_valid_part
from blobstore.sources.base import KEPT_FILES, SourceFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAX_FILE_SIZE = 64 * 2**20
_WEIGHT_INDEXES = ("*.safetensors.index*.json", "*.bin.index*.json")


def is_kept(name: str) -> bool:
    """Return whether files of this name are kept."""
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in _WEIGHT_INDEXES):
        return False
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in KEPT_FILES)


def files_of(folder: Path, prefix: str = "") -> Iterator[SourceFile]:
    """Yield the files to keep of a folder itself, with ``prefix`` in front of their names.

    Raises:
        DamagedSource: a file is a broken link.
        SourceError: a file is too large.
    """
    for path in folder.iterdir():
        if not is_valid_part(path.name) or not is_kept(path.name):
            continue
        if path.is_symlink() and not path.exists():  # pruned caches have such links
            raise DamagedSource(f"{quote(path)} is a broken link; download the complete model")
        if path.is_file():
            if path.stat().st_size > _MAX_FILE_SIZE:
                raise SourceError(
                    f"{quote(path)} is over {_MAX_FILE_SIZE} bytes, too large to keep"
                )
            yield SourceFile(prefix + path.name, path)


def unusable_name(path: Path) -> str | None:
    """Return a notice if a file would be kept, but a store cannot hold its name."""
    if not is_kept(path.name) or is_valid_part(path.name):
        return None
    return f"left out: {quote(path)}; names in a store have only letters, digits, '_', '.' and '-'"

"""The names that files of a model may have: ``file``, ``folder/file`` or one folder more."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from blobstore.core.escape import quote
from blobstore.errors import InvalidManifest

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_DEPTH: Final = 3
"""Parts of a file's name."""
_PART = re.compile(r"[A-Za-z0-9_.-]{1,255}", re.ASCII)


def is_valid_part(part: str) -> bool:
    """Return whether a file or a folder may have this name."""
    return _PART.fullmatch(part) is not None and part not in (".", "..")


def is_valid_name(name: str) -> bool:
    """Return whether a layer may have this name as a file."""
    parts = name.split("/")
    return len(parts) <= MAX_DEPTH and all(map(is_valid_part, parts))


def is_safe_name(name: str) -> bool:
    """Return whether a weight file may be written under this name, relative to a folder.

    Weight files keep the names of the source, which may have any printable characters.
    """
    parts = name.split("/")
    return len(parts) <= MAX_DEPTH and all(
        part.isprintable()
        and "\\" not in part
        and part not in ("", ".", "..")
        and len(part.encode()) <= 255  # the limit of file systems
        for part in parts
    )


def check_paths(names: Iterable[str]) -> None:
    """Check that files can be in one folder together.

    Raises:
        InvalidManifest: two have one name, or the folder of one is a file too.
    """
    known: set[str] = set()
    for name in (listed := list(names)):
        if name in known:
            raise InvalidManifest(f"two files would both be {quote(name)}")
        known.add(name)
    for name in listed:
        parts = name.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            if (folder := "/".join(parts[:depth])) in known:
                raise InvalidManifest(f"{quote(folder)} would be both a file and a folder")

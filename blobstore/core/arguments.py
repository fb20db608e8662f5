"""What public functions accept besides the types that they work with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with a leading ``~`` expanded, as shells do."""
    # Unlike Path.expanduser, this keeps "~" where there is no home folder.
    return Path(os.path.expanduser(path))  # noqa: PTH111


def one_or_more(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Return the strings of an argument. One string is not the collection of its characters."""
    return (texts,) if isinstance(texts, str) else tuple(texts)

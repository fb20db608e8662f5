"""The folders that ``run`` makes of a store's models for servers that read files: one place per user and store.

They are outside of the store, which may be read-only. A server holds all of them as long as it runs, because it
may open a file again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.errors import StoreError
from blobstore.store.scan import scan_folder, walk_files

if TYPE_CHECKING:
    from collections.abc import Iterator


def copies_folder(root: Path) -> Path | None:
    """Return the place for the store ``root``, which need not exist; None if the user has no home folder."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    key = Digest.of(os.fsencode(os.path.realpath(root))).hex[:16]
    return Path(cache, "blobstore", "run", key)


def hold_copies(folder: Path) -> None:
    """Make the place, and hold what it has until this process, or a program that takes its place, has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(descriptor, True)
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def copies(root: Path) -> list[Path]:
    """Return the folders of the store ``root``; none if this user must not list them."""
    folder = copies_folder(root)
    with contextlib.suppress(StoreError):
        return [] if folder is None else [Path(entry.path) for entry in scan_folder(folder)]
    return []


def remove_copies(root: Path, *, is_dry: bool) -> Iterator[tuple[Path, int]]:
    """Remove the folders unless a server holds them; yield paths and bytes."""
    found = copies(root)
    if not found:
        return
    descriptor = os.open(found[0].parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # It fails if a server runs, or the file system has no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in found:
                size = sum(it.stat(follow_symlinks=False).st_size for it in walk_files(path))
                if not is_dry:
                    shutil.rmtree(path)
                yield path, size
    finally:
        os.close(descriptor)

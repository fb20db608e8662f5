"""Folders of a store, listed with one policy for errors.

A folder that does not exist is empty. Anything else that cannot be listed is an error, and so is a broken
symbolic link to a folder: it may point to a disk that is not mounted.
"""

from __future__ import annotations

import os
import re
import stat
from array import array
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import status_of
from blobstore.errors import StoreError
from blobstore.manifests.reference import natural_order

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator
    from pathlib import Path


ABSENT: Final = -1
_BATCH = 64
_MAY_BE_LINKS: Final = frozenset({"cold", "trust.toml"})
"""Of ``.blobstore``: nothing there is removed or written because of its place alone."""
_BLOB = re.compile(r"sha256-([0-9a-f]{64})", re.ASCII)


def list_names(folder: str | Path) -> list[str]:
    """Return the names in a folder, sorted.

    Raises:
        StoreError: it cannot be listed.
    """
    return sorted(each_name(folder))


def each_name(folder: str | Path) -> list[str]:
    """Return the names in a folder in any order, which is faster for very many. Raises as :func:`list_names`."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - the names are enough
    except OSError as error:
        _check_absent(folder, error)
        return []


def scan_folder(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, sorted by name. Raises as :func:`list_names`."""
    interrupts.check()
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=attrgetter("name"))
    except OSError as error:
        _check_absent(folder, error)
        return []


def folders_and_files(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the folders in a folder, also behind links, and those of all else, each in their natural order.

    Raises as :func:`list_names`.
    """
    interrupts.check()
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(folder) as found:
            for entry in found:
                # Pipes and broken links are files: reading such a manifest says what is wrong with it.
                is_inside = entry.is_dir(follow_symlinks=False)
                if not is_inside and entry.is_symlink():
                    is_inside = is_folder(entry.path)
                (folders if is_inside else files).append(entry.name)
    except OSError as error:
        _check_absent(folder, error)
    folders.sort(key=natural_order)
    files.sort(key=natural_order)
    return folders, files


def _check_absent(folder: str | Path, error: OSError) -> None:
    if not isinstance(error, FileNotFoundError) or os.path.islink(folder):  # noqa: PTH114 - may be a string
        raise StoreError(f"cannot list {quote(folder)}: {error.strerror}") from error


def check_own(root: Path) -> None:
    """Check that nothing of a store's own is a link, but for what may lie on another disk.

    Another user of the store may have set it, or a stranger who gave the store as a folder. What is behind it is not
    the store's.

    Raises:
        OSError: the folder cannot be listed.
        StoreError: there is a link, or it is not known whether there is one.
    """
    own = root / ".blobstore"
    inside = own.iterdir() if is_folder(own) else ()
    for place in (own, *(one for one in inside if one.name not in _MAY_BE_LINKS)):
        status = status_of(place)
        if status is not None and stat.S_ISLNK(status.st_mode):
            raise StoreError(
                f"{quote(place)} is a link, which nothing of the store's own may be",
                advice="remove it, or mount the other folder there",
            )


def walk_files(folder: str | Path, without: Collection[str] = ()) -> Iterator[os.DirEntry[str]]:
    """Yield everything below a folder that is not a folder, sorted, except below ``without``.

    Symbolic links are not followed. Raises as :func:`list_names`.
    """
    for entry in scan_folder(folder):
        interrupts.check()
        if not entry.is_dir(follow_symlinks=False):
            yield entry
        elif entry.path not in without:
            yield from walk_files(entry.path, without)


def each_file(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield what :func:`walk_files` does, in any order and one at a time, for folders with very many files."""
    try:
        with os.scandir(folder) as found:
            for number, entry in enumerate(found):
                if not number % _BATCH:
                    interrupts.check()
                if entry.is_dir(follow_symlinks=False):
                    yield from walk_files(entry.path)
                else:
                    yield entry
    except OSError as error:
        _check_absent(folder, error)


def file_sizes(folder: str | Path, names: Iterable[str]) -> array[int]:
    """Return the sizes of files of a folder by name; ``ABSENT`` if none is there or it is not regular.

    Raises as :func:`list_names`.
    """
    sizes, rest = array("q"), iter(names)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    except OSError as error:
        _check_absent(folder, error)
        return array("q", (ABSENT for _ in rest))
    try:
        while batch := list(islice(rest, _BATCH)):
            interrupts.check()
            for name in batch:
                try:
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                except FileNotFoundError:
                    sizes.append(ABSENT)
                else:
                    sizes.append(status.st_size if stat.S_ISREG(status.st_mode) else ABSENT)
    finally:
        os.close(descriptor)
    return sizes


def is_folder(path: str | Path) -> bool:
    """Return whether a path is a folder or a symbolic link to one.

    Raises:
        StoreError: it cannot be reached.
    """
    status = status_of(path, follow=True)
    return status is not None and stat.S_ISDIR(status.st_mode)


def digest_of(name: str) -> Digest | None:
    """Return the digest that the name of a blob's file spells, None for other files."""
    match = _BLOB.fullmatch(name)
    return None if match is None else Digest(match[1])


def digests_of(names: Iterable[str]) -> set[Digest]:
    """Return the digests that the names of blobs' files spell; other files are skipped."""
    return {digest for digest in map(digest_of, names) if digest is not None}


def files_without(
    files: Iterable[os.DirEntry[str]], digests: Container[Digest]
) -> list[os.DirEntry[str]]:
    """Return the files whose names do not begin with one of these digests."""
    return [one for one in files if Digest(one.name.partition(".")[0]) not in digests]

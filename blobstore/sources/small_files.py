"""Lists the files of a folder, besides its weights, that a store keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.globs import any_glob_matches
from blobstore.manifests.file_names import is_valid_name, is_valid_part
from blobstore.sources.base import KEPT_FILES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from blobstore.sources.file_tree import FileTree

MAX_SMALL_FILE = 64 * 2**20
_WEIGHT_INDEXES = ("*.safetensors.*index*.json", "*.bin.*index*.json")


def is_kept(name: str) -> bool:
    """Return whether files of this name are kept, whatever folder they are in."""
    return any_glob_matches(name, KEPT_FILES) and not is_weight_index(name)


def is_weight_index(name: str) -> bool:
    """Return whether a file of this name is an index of weight files."""
    return any_glob_matches(name, _WEIGHT_INDEXES)


def small_files(tree: FileTree, names: Iterable[str], notices: list[str]) -> Iterator[str]:
    """Yield those of ``names`` that are files to keep; add notices of those that cannot be kept.

    Raises:
        DamagedSource: a file is a broken link.
    """
    for name in names:
        if not is_kept(name.rpartition("/")[2]) or not is_valid_name(name):
            continue
        size = tree.size(name)
        if size is not None and size > MAX_SMALL_FILE:
            notices.append(
                f"left out: {tree.label(name)}, over {MAX_SMALL_FILE >> 20} MiB; store it with "
                f"--keep {quote(name)}"
            )
        elif size is not None:
            yield name
        elif not tree.is_folder(name):
            notices.append(f"left out: {tree.label(name)}, not a regular file")


def matching_files(tree: FileTree, keep: Collection[str], used: Collection[str]) -> set[str]:
    """Return the names of the files that match a pattern of ``keep``, except those in ``used``.

    Raises:
        DamagedSource: a file is a broken link.
    """
    return {
        name
        for name in (tree.files_below() if keep else ())
        if name not in used and is_valid_name(name) and any_glob_matches(name, keep)
        if tree.size(name) is not None
    }


def unusable_name(tree: FileTree, name: str, keep: Collection[str] = ()) -> str | None:
    """Return a notice if a file would be kept, but a store cannot hold its name."""
    if is_valid_part(name) or not (is_kept(name) or any_glob_matches(name, keep)):
        return None
    return f"left out: {tree.label(name)}; names in a store have only letters, digits, '_', '.' and '-'"

"""Lists the files of a folder, besides its weights, that a store keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.escape import join_some, shell_word
from blobstore.core.globs import any_glob_matches
from blobstore.manifests.file_names import is_valid_name
from blobstore.sources.base import SourceFile
from blobstore.sources.file_tree import joined
from blobstore.sources.parts import check_finished

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from blobstore.sources.file_tree import FileTree

KEPT_FILES = (
    # Configs, labels and code, which is never executed.
    *("*.json", "*.jinja", "*.txt", "*.txt.gz", "*.py", "*.csv", "*.tsv"),
    *("*.yaml", "*.yml", "*.toml", "*.cfg", "*.ini", "*.conf"),
    # Tokenizers.
    *("*.model", "*.model.v*", "*.tiktoken", "*.spm", "*.bpe", "*.vocab", "*.codes"),
    # Voices of text-to-speech models, without which they do not load.
    *("spk_dict.pt", "spk2info.pt", "speakers*.pt", "speakers*.pth"),
    # Texts for people.
    *("*.md", "*.rst", "*.cff", "LICENSE*", "LICENCE*", "License*", "Licence*", "COPYING*"),
    *("COPYRIGHT*", "NOTICE*", "*POLICY*", "README*", "AUTHORS*", "Modelfile*"),
)
"""Patterns of the small files that runtimes or users need."""
MAX_SMALL_FILE = 64 * 2**20
_WEIGHT_INDEXES = ("*.safetensors.*index*.json", "*.bin.*index*.json")
_OF_PROGRAMS = (
    *(".git*", ".hg*", ".svn", ".dvc*", ".cache", ".huggingface", ".no_exist", ".locks"),
    *(".ms?", ".mdl", ".mv", "._____temp", "manifest=*=*=*.json", "*.gguf.json", "*.gguf.etag"),
    *(".DS_Store", "Thumbs.db", "desktop.ini", "__MACOSX", "__pycache__", ".ipynb_checkpoints"),
)
"""Patterns of files and folders of git, downloaders and operating systems, which nobody misses."""
_SHOWN = 5


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
                f"--keep {shell_word(name)}"
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


def files_next_to(
    tree: FileTree, used: Collection[str], keep: Collection[str], notices: list[str]
) -> list[SourceFile]:
    """Return the files of a folder to keep besides those in ``used``; add notices of all others.

    Raises:
        DamagedSource: a file is a broken link, or not completely downloaded.
    """
    kept = matching_files(tree, keep, used)
    kept |= {*small_files(tree, (name for name in tree.entries() if name not in used), notices)}
    notices += check_finished(tree, {*used, *kept}, is_kept)
    notices += left_out(tree, {*used, *kept}, keep, notices)
    return [SourceFile(name, tree.path(name)) for name in sorted(kept)]


def left_out(
    tree: FileTree,
    imported: Collection[str],
    keep: Collection[str] = (),
    notices: Collection[str] = (),
) -> Iterator[str]:
    """Yield the notices of what is not imported: one of names that a store cannot hold, and one of all others.

    Args:
        tree: the files of the source.
        imported: the names of those that are imported, or that a notice counts.
        keep: the patterns of files to store as they are.
        notices: those that there are already. They say why some files are left out.
    """
    files: list[str] = []
    folders: list[str] = []
    unusable: list[str] = []
    for name in _unread(tree, imported):
        if any(tree.label(name) in notice for notice in notices):
            continue
        if tree.is_folder(name):
            folders.append(name)
        elif is_valid_name(name) or not (
            is_kept(name.rpartition("/")[2]) or any_glob_matches(name, keep)
        ):
            files.append(name)
        else:
            unusable.append(name)
    if unusable:
        yield (
            f"left out: {counted(tree, unusable, 'file')}; names in a store have only letters, digits, "
            "'_', '.' and '-'"
        )
    parts = [
        counted(tree, names, noun)
        for names, noun in ((folders, "folder"), (files, "file"))
        if names
    ]
    if parts:
        yield f"left out: {' and '.join(parts)}; --keep PATTERN stores files as they are"


def counted(tree: FileTree, names: Sequence[str], noun: str) -> str:
    """Return the number of some files or folders, each of which is a ``noun``, and the first names."""
    listed = join_some([*map(tree.label, names)], _SHOWN)
    return f"{len(names)} {noun}{'s' * (len(names) != 1)} ({listed})"


def _unread(tree: FileTree, imported: Collection[str]) -> Iterator[str]:
    """Yield the files and folders next to those that are imported, except those that nobody misses."""
    read = {""}
    for name in imported:
        folder = name
        while folder := folder.rpartition("/")[0]:
            read.add(folder)
    for folder in sorted(read):
        for entry in tree.entries(folder):
            name = joined(folder, entry)
            is_used = name in imported or name in read
            if not is_used and not any_glob_matches(entry, _OF_PROGRAMS):
                yield name

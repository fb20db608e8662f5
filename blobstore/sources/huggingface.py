"""Reads model folders of Hugging Face's libraries.

The tensors of a component get the name of its folder as a prefix.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.globs import any_glob_matches
from blobstore.errors import UnsupportedSource
from blobstore.manifests.source_record import RecordedFile, SourceRecord
from blobstore.sources.base import DEFAULT_OPTIONS, SourceFile
from blobstore.sources.file_tree import FileTree
from blobstore.sources.parts import check_downloaded, check_whole_path
from blobstore.sources.selection import read_json, select_files
from blobstore.sources.sharded import ShardSet, add_indexed, read_index, read_weight_map

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from blobstore.sources.base import SourceOptions


class HuggingFaceFolder(ShardSet):
    """A :class:`TensorSource` over a folder, or over a single weight file."""

    def __init__(
        self, path: Path, options: SourceOptions = DEFAULT_OPTIONS, tree: FileTree | None = None
    ) -> None:
        """Open all weight files of ``path`` and check that they are intact and consistent.

        ``tree`` has the files of the folder; by default those on disk.

        Raises:
            DamagedSource: a file is missing, truncated or malformed, or files and index contradict
                each other.
            SourceError: there are no weights, or several sets and ``weights`` chooses none.
            UsageError: there is no such subtree.
        """
        super().__init__(options)
        self.reopen = functools.partial(HuggingFaceFolder, path.absolute(), options, tree)
        self.config: Mapping[str, Any] = {}
        self.files: Sequence[SourceFile] = ()
        self.repository = self.commit = self.kind = ""
        self.digests: Mapping[str, str] = {}
        """The SHA-256 of files by name, as the Hub lists them, in hexadecimal digits."""
        self._path = path
        self._is_folder = tree is not None or path.is_dir()
        self._tree: FileTree | None = None
        self._indexes: list[Path] = []
        try:
            if self._is_folder:
                tree = tree or FileTree(path, exclude=options.exclude)
                self.versions, self._tree = tree.versions, tree
                self._open_folder(tree, options)
            else:
                check_downloaded(path, functools.partial(any_glob_matches, globs=options.exclude))
                self._open_file(path, options)
            self.check_stripped(path)
            self.check_complete()
            if self.values:
                self._check_not_empty()
                from blobstore.sources.pytorch.values import with_values

                self.files, notices = with_values(self.files, self.values, path)
                self.notices += notices
        except BaseException:
            self.close()
            raise

    def record(self) -> SourceRecord:
        """See :class:`TensorSource`."""
        is_folder = self._is_folder

        def name_of(path: Path) -> str:
            return path.relative_to(self._path).as_posix() if is_folder else path.name

        files = []
        for file in self.recorded(name_of):
            digest = self.digests.get(file.name)
            files.append(file._replace(sha256=Digest(digest) if digest else None))
        for path in self._indexes:
            data = read_index(path, self.versions.open)
            files.append(RecordedFile(name_of(path), "index", len(data), data))
        return SourceRecord(
            kind=self.kind or ("hub" if self.repository else "folder" if is_folder else "file"),
            repository=self.repository,
            commit=self.commit,
            files=tuple(sorted(files)),
            is_converted=self.is_partial or any(file.format == "pytorch" for file in files),
        )

    def close(self) -> None:
        """See :class:`TensorSource`."""
        super().close()
        if self._tree is not None:
            self._tree.close()

    def _check_not_empty(self) -> None:
        """Check that checkpoints have elements. Raises UnsupportedSource if all tensors are empty."""
        if self.specs and not any(spec.elements for spec in self.specs.values()):
            raise UnsupportedSource(
                f"all tensors of {quote(self._path)} are empty, such as {quote(min(self.specs))}: they "
                "are the placeholders of DeepSpeed's ZeRO stage 3",
                advice="import the folder of a step of DeepSpeed, such as global_step100",
            )

    def _open_file(self, path: Path, options: SourceOptions) -> None:
        if any_glob_matches(path.name, options.keep):
            self.versions.record(path)
            self.files = [SourceFile(path.name, path)]
        else:
            check_whole_path(path, is_part=options.subtree is not None)
            self.add(path)

    def _open_folder(self, tree: FileTree, options: SourceOptions) -> None:
        check_whole_path(self._path)
        self.config = read_json(tree, "config.json", dict)
        selection = select_files(tree, options)
        self.notices += selection.notices
        self._indexes = [tree.path(name) for name in selection.indexes]
        for part in selection.weights:
            prefix = f"{part.folder}/" if part.folder else ""
            if part.index_name is None:
                for name in part.files:
                    self.add(tree.path(name), prefix=prefix)
                continue
            path = tree.path(part.index_name)
            weight_map, ignore = read_weight_map(path, self.versions.open), options.ignore_unindexed
            is_tied = not prefix and self.config.get("tie_word_embeddings") is True
            # Adding shards adds notices too.
            self.notices += [
                *add_indexed(self, path, weight_map, prefix=prefix, ignore=ignore, is_tied=is_tied)
            ]
        self.files = [SourceFile(name, tree.path(name)) for name in selection.files]

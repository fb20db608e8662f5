"""Reads Meta's Llama folders as the same model in Hugging Face's form.

The weights are in ``consolidated.00.pth``, ``consolidated.01.pth`` and so on, each with a part of every
tensor. Reading joins them, some megabytes at a time. So the tensors have exactly the bytes of the same
model in Hugging Face's form, whatever the number of shards.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import join_some, quote
from blobstore.errors import DamagedSource
from blobstore.manifests.source_record import RecordedFile, SourceRecord
from blobstore.sources.base import DEFAULT_OPTIONS, SourceFile
from blobstore.sources.file_tree import FileTree
from blobstore.sources.meta.layout import ShardSpecs, check_same, lay_out
from blobstore.sources.meta.params import PARAMS_FILE, Params, make_config, notices
from blobstore.sources.small_files import files_next_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.core.files import Opener
    from blobstore.core.tensor import TensorSpec
    from blobstore.sources.base import SourceOptions
    from blobstore.sources.meta.layout import Joined
    from blobstore.sources.meta.reordered_rows import Shard

_SHARD = re.compile(r"consolidated\.[0-9]+\.pth", re.ASCII)
_CONFIG = "config.json"


def is_meta_folder(folder: Path) -> bool:
    """Return whether a folder has ``consolidated.NN.pth`` files and ``params.json``."""
    return (folder / PARAMS_FILE).is_file() and any(
        _SHARD.fullmatch(path.name) for path in folder.iterdir()
    )


class MetaFolder:
    """A :class:`TensorSource` over a folder of shards and their ``params.json``."""

    metadata: Mapping[Path, Mapping[str, str]] = {}
    block_types: Mapping[str, str] = {}

    def __init__(
        self,
        folder: Path,
        open_shard: Callable[[Path, Opener], Shard],
        options: SourceOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Open all shards and check that they form a model.

        With ``options.keep_names``, tensors keep Meta's names and row order, and no ``config.json`` is
        generated. A single shard may then have any tensors.

        Raises:
            DamagedSource: a shard is missing, or shards and ``params.json`` contradict each other.
            UnsupportedSource: the model is not a plain Llama.
        """
        self.reopen = functools.partial(MetaFolder, folder.absolute(), open_shard, options)
        keep_names = options.keep_names
        self.notices: list[str] = []
        self.config: Mapping[str, Any] = {}
        self.files: Sequence[SourceFile] = ()
        self._paths: Sequence[Path] = ()
        self._tree = tree = FileTree(folder, exclude=options.exclude)
        self._shards: list[Shard] = []
        self._joined: Mapping[str, Joined] | None = None
        """The parts of each tensor; None if a single shard is read unchanged."""
        self.specs: Mapping[str, TensorSpec] = {}
        try:
            self.versions = tree.versions
            self._paths = _shard_paths(tree)
            for path in self._paths:
                tree.path(path.name)
                shard = open_shard(path, tree.versions.open)
                self._shards.append(shard)
                self.notices.extend(f"{quote(path)}: {notice}" for notice in shard.notices)
            self._list_files(tree, options)
            if keep_names and len(self._shards) == 1:
                self.specs = self._shards[0].specs
            else:
                self._join(folder, keep_names=keep_names)
            from blobstore.sources.pytorch.values import with_values  # imports the unpickler

            values = {
                path.name: shard.values
                for path, shard in zip(self._paths, self._shards, strict=True)
            }
            self.files, more = with_values(self.files, values, folder)
            self.notices += more
        except BaseException:
            self.close()
            raise

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """See :class:`TensorSource`."""
        if self._joined is None:
            return self._shards[0].read(name, buffer)
        from blobstore.sources.meta.reordered_rows import read_joined

        return read_joined(self._shards, self._paths, self._joined[name], buffer)

    def check_unchanged(self) -> None:
        """See :class:`TensorSource`."""
        self.versions.check({shard.path: shard.version() for shard in self._shards})

    def record(self) -> SourceRecord:
        """See :class:`TensorSource`."""
        files = [
            RecordedFile(path.name, "pytorch", shard.version().size, b"")
            for path, shard in zip(self._paths, self._shards, strict=True)
        ]
        return SourceRecord(kind="meta-llama", files=tuple(files), is_converted=True)

    def close(self) -> None:
        """See :class:`TensorSource`."""
        while self._shards:
            self._shards.pop().close()
        self._tree.close()

    def _join(self, folder: Path, *, keep_names: bool) -> None:
        shards = [
            ShardSpecs(path, shard.specs)
            for path, shard in zip(self._paths, self._shards, strict=True)
        ]
        check_same(shards)
        params = Params.read(self._tree.path(PARAMS_FILE), self.versions.open)
        layout = lay_out(shards, params, keep_names=keep_names)
        self._joined = layout.tensors
        self.specs = {name: joined.spec for name, joined in layout.tensors.items()}
        if layout.left_out:
            left_out = join_some([*map(quote, layout.left_out)], 1)
            self.notices.append(f"left out: tensor {left_out}, which runtimes compute")
        if not keep_names:
            self.config = make_config(params, layout.measured)
            self.notices.extend(notices(params, layout.measured))
            content = json.dumps(self.config, indent=2, sort_keys=True).encode() + b"\n"
            made = SourceFile(_CONFIG, folder / PARAMS_FILE, content)
            self.files = sorted([*self.files, made], key=lambda file: file.name)

    def _list_files(self, tree: FileTree, options: SourceOptions) -> None:
        used = {path.name for path in self._paths}
        if not options.keep_names and tree.has(_CONFIG):
            used.add(_CONFIG)
            self.notices.append(
                f"left out: {tree.label(_CONFIG)}; one generated from {PARAMS_FILE} replaces it"
            )
        self.files = files_next_to(tree, used, options.keep, self.notices)


def _shard_paths(tree: FileTree) -> list[Path]:
    """Return the shards in order, checked by their numbers to be complete."""
    found = sorted(name for name in tree.entries() if _SHARD.fullmatch(name))
    wanted = [f"consolidated.{number:02}.pth" for number in range(max(len(found), 1))]
    for name in wanted:
        if name not in found:
            more = f" among {len(found)} shards, up to {quote(found[-1])}" if found else ""
            raise DamagedSource(f"{tree.label(name)} is missing{more}; download the complete model")
    return [tree.root / name for name in wanted]

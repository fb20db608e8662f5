"""Describes a folder of ``torch.distributed.checkpoint``, also if it could not be imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.files import read_regular
from blobstore.errors import BlobstoreError, DamagedSource, SourceError, UnsupportedSource
from blobstore.sources.base import SourceOptions
from blobstore.sources.distributed.file_names import FORMAT, METADATA_FILE
from blobstore.sources.distributed.metadata import MAX_METADATA_SIZE, is_allowed
from blobstore.sources.distributed.torch_folder import TorchFolder, read_metadata, subtrees_in
from blobstore.sources.file_tree import FileTree, joined
from blobstore.sources.parts import DATA_FILE
from blobstore.sources.pytorch.inspect import GlobalUse, Inspection
from blobstore.unpickler.machine import scan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from blobstore.core.files import Opener
    from blobstore.core.tensor import TensorSpec
    from blobstore.sources.pytorch.state_dict import Subtree


def inspect_folder(folder: Path, inner: str, *, subtree: str | None = None) -> Inspection:
    """Describe what a folder contains.

    Args:
        folder: the folder of the model.
        inner: the folder of the data files, relative to it.
        subtree: the part whose tensors are listed; the model by default.

    Raises:
        UsageError: there is no such subtree.
        OSError: the folder cannot be read.
    """
    tree = FileTree(folder)
    names = [joined(inner, name) for name in tree.entries(inner) if name.endswith(DATA_FILE)]
    path = tree.path(joined(inner, METADATA_FILE))
    refusal: str | None = None
    is_damaged = False
    tensors: Sequence[TensorSpec] = ()
    unreadable: dict[str, str] = {}
    subtrees: Sequence[Subtree] = ()
    notices: Sequence[str] = ()
    try:
        # First, so that the parts are shown even if the folder cannot be opened.
        subtrees = subtrees_in(read_metadata(path, tree.versions.open))
        opened = TorchFolder(folder, inner, SourceOptions(subtree=subtree, skip_unreadable=True))
        tensors, notices = tuple(opened.specs.values()), opened.notices
        unreadable = opened.unreadable
    except (DamagedSource, UnsupportedSource) as error:
        refusal, is_damaged = error.message, isinstance(error, DamagedSource)
    except SourceError as error:  # it has no model
        notices = [error.message]
    return Inspection(
        path=folder,
        size=sum(tree.size(name) or 0 for name in names),
        kind=f"folder of {FORMAT}" if refusal is None else None,
        refusal=refusal,
        is_damaged=is_damaged,
        globals=_globals_of(path, tree.versions.open),
        tensors=tensors,
        unreadable=unreadable,
        subtrees=subtrees,
        notices=notices,
    )


def _globals_of(path: Path, opener: Opener) -> list[GlobalUse]:
    """Return the globals of the metadata, as far as they can be read."""
    try:
        data = read_regular(path, MAX_METADATA_SIZE, opener)
    except (OSError, BlobstoreError):  # opening the folder reports it
        return []
    return [
        GlobalUse(
            str(item),
            (item.use.value if item.use else "class of the metadata") if is_allowed(item) else None,
            METADATA_FILE,
            item.offset,
        )
        for item in scan(data).globals
    ]

"""Describes what a PyTorch checkpoint contains, without executing any of it.

Files that could not be imported are described too, as far as they can be read.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blobstore.core.arguments import local_path
from blobstore.core.file_kinds import CHECKPOINT, HEAD, kind_of
from blobstore.core.files import open_regular, read_exactly
from blobstore.errors import CheckpointRefused, DamagedSource, SourceError, UnsupportedSource
from blobstore.sources.pytorch.checkpoint import Checkpoint, errors_of
from blobstore.sources.pytorch.container import ZIP_STARTS
from blobstore.sources.pytorch.legacy import LEGACY_PICKLES, is_legacy
from blobstore.sources.pytorch.storages import MAX_PICKLE_SIZE
from blobstore.sources.pytorch.zip import read_pickle
from blobstore.sources.pytorch.zip_entries import read_entries
from blobstore.unpickler.machine import scan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from blobstore.core.tensor import TensorSpec
    from blobstore.sources.pytorch.state_dict import Subtree

_MAX_PICKLES = 64


@dataclass(frozen=True, slots=True)
class GlobalUse:
    """A global that a pickle uses."""

    name: str
    """Module and name, joined by a dot."""
    use: str | None
    """Its use in a checkpoint; None if it is unknown, so that the file would be refused."""
    pickle: str
    """The zip entry of the pickle; empty for other files."""
    offset: int
    """Offset in the pickle, or in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The contents of a file."""

    path: Path
    size: int
    """Bytes of the file."""
    kind: str | None
    """Kind of checkpoint; None if it cannot be read."""
    refusal: str | None
    """The reason if it cannot be imported."""
    is_damaged: bool = False
    """Whether the reason is that it is truncated, altered, or contradicts itself."""
    globals: Sequence[GlobalUse]
    tensors: Sequence[TensorSpec] = field(repr=False)
    """The tensors that would be imported."""
    unreadable: dict[str, str] = field(repr=False)
    """Tensors of an unsupported kind, with the reason."""
    subtrees: Sequence[Subtree]
    """The parts that ``subtree`` can name."""
    notices: Sequence[str]


def inspect_checkpoint(path: Path | str, *, subtree: str | None = None) -> Inspection:
    """Describe the contents of a file.

    Args:
        path: a PyTorch checkpoint.
        subtree: keys, joined by dots, below which tensors are listed; by default of the whole file.

    Returns:
        the parts, tensors and globals of the checkpoint, and the reason if it is refused.

    Raises:
        SourceNotFound: the file does not exist.
        SourceError: it cannot be read.
        UsageError: there is no such subtree.
    """
    path = local_path(path, "source")
    size, found = _globals_of(path)
    try:
        with Checkpoint(path, subtree=subtree) as checkpoint:
            return Inspection(
                path=path,
                size=size,
                kind=checkpoint.kind,
                refusal=None,
                globals=found,
                tensors=tuple(checkpoint.specs.values()),
                unreadable=checkpoint.unreadable,
                subtrees=checkpoint.subtrees,
                notices=checkpoint.notices,
            )
    except (CheckpointRefused, UnsupportedSource) as error:
        return Inspection(
            path=path,
            size=size,
            kind=None,
            refusal=error.message,
            is_damaged=isinstance(error, DamagedSource),
            globals=found,
            tensors=(),
            unreadable={},
            subtrees=getattr(error, "subtrees", ()),
            notices=(),
        )


def _globals_of(path: Path) -> tuple[int, list[GlobalUse]]:
    """Return the size of any file, and the globals of all its pickles."""
    found: list[GlobalUse] = []
    with errors_of(path), contextlib.ExitStack() as stack:
        descriptor, size = open_regular(path)
        stack.callback(os.close, descriptor)
        if not read_exactly(descriptor, 4, 0).startswith(ZIP_STARTS):
            data = read_exactly(descriptor, min(size, MAX_PICKLE_SIZE), 0)
            if kind_of(data[:HEAD]) in (None, CHECKPOINT):
                # The pickles of a legacy stream are followed by storages, which are not pickles.
                count = LEGACY_PICKLES if is_legacy(data) else _MAX_PICKLES
                found += _in_pickles(data, "", count)
            return size, found
        try:
            entries = read_entries(descriptor, size)
        except (DamagedSource, SourceError):  # opening the checkpoint reports it
            return size, []
        left = MAX_PICKLE_SIZE
        for name, entry in entries.items():
            if name.endswith(".pkl"):
                with contextlib.suppress(DamagedSource, UnsupportedSource):
                    data = read_pickle(descriptor, entry, left)
                    left -= len(data)
                    found += _in_pickles(data, name, 1)
    return size, found


def _in_pickles(data: bytes, name: str, count: int) -> Iterator[GlobalUse]:
    end = 0
    for _ in range(count):
        found, result, _ = scan(data, start=end)
        for item in found:
            is_refused = item.use is None and (item.is_called or not item.is_class)
            use = "class of a module" if item.use is None else item.use.value
            yield GlobalUse(str(item), None if is_refused else use, name, item.offset)
        if result is None or result.end >= len(data):
            break
        end = result.end

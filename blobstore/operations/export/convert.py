"""Workflow: the tensors of any source as one safetensors file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.progress import Meter
from blobstore.errors import BlobstoreError
from blobstore.safetensors.writer import write_safetensors
from blobstore.sources.base import SourceOptions
from blobstore.sources.open import open_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.core.progress import Progress

_METADATA = {"format": "pt"}
"""Without it, transformers loads no file."""
_BUFFER_SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What :func:`convert_checkpoint` did."""

    path: Path
    tensors: int
    bytes_written: int
    """Bytes of the file."""
    notices: tuple[str, ...]
    """What a person should know, one line each."""


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    subtree: str | None = None,
    weights: str | None = None,
    keep_names: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Copied:
    """Write the tensors of a checkpoint, file or folder to a new safetensors file.

    Args:
        source: as of :func:`blobstore.create`.
        target: the file, which appears complete and synced, or not at all.
        subtree: the part of a PyTorch checkpoint, by its keys with dots between.
        weights: pattern of file names, where a folder holds several sets of weights.
        keep_names: keep the names and the order of rows of Meta's Llamas.
        overwrite: replace a file that is there.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        SourceError, DamagedSource, SourceNotFound: the source cannot be read.
        BlobstoreError: the target is there already, or cannot be written.
    """
    path = Path(target)
    if os.path.lexists(path) and not (overwrite and path.is_file()):
        raise BlobstoreError(
            f"{quote(path)} exists already" + ("" if overwrite else "; replace it with --force")
        )
    opened = open_source(
        source,
        SourceOptions(weights=weights, subtree=subtree, keep_names=keep_names),
        progress=progress,
    )
    try:
        meter = Meter(progress, sum(spec.nbytes for spec in opened.specs.values()))
        buffer = memoryview(bytearray(_BUFFER_SIZE))

        def read(name: str) -> Iterator[memoryview]:
            for piece in opened.read(name, buffer):
                yield piece
                meter.add(len(piece), name)

        written = write_safetensors(path, opened.specs.values(), read, _METADATA)
    except OSError as error:
        raise BlobstoreError(f"cannot write {quote(path)}: {error.strerror}") from error
    finally:
        opened.close()
    return Copied(
        path=path,
        tensors=len(opened.specs),
        bytes_written=written,
        notices=tuple(opened.notices),
    )

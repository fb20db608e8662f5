"""The operation ``convert``: writes the tensors of a source to one safetensors file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from blobstore.core.arguments import local_path
from blobstore.core.escape import join_some, quote
from blobstore.core.files import replacing, write_all
from blobstore.core.targets import check_new_file
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import BlobstoreError, UsageError
from blobstore.safetensors.header import encode_header, in_file_order
from blobstore.sources.base import SourceOptions
from blobstore.sources.open import open_source
from blobstore.sources.pytorch.values import VALUES_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from blobstore.core.progress import Progress
    from blobstore.core.tensor import TensorSpec
    from blobstore.sources.base import TensorSource

_METADATA = {"format": "pt"}
"""The metadata of a file whose source has no other. transformers loads no file without it."""
_SHOWN = 8
_BUFFER_SIZE = 1 << 20
_BATCH_SIZE = 1 << 24
"""Bytes of tensors per job, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The result of :func:`blobstore.convert`."""

    path: Path
    tensors: int
    bytes_written: int
    """Bytes of the file."""
    notices: tuple[str, ...]
    """Remarks about the source, one line each."""


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    subtree: str | None = None,
    strip_prefix: str | None = None,
    weights: str | None = None,
    keep_names: bool = False,
    skip_unreadable: bool = False,
    force: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Write the tensors of a checkpoint, file or folder to a new safetensors file.

    The file has the ``__metadata__`` of the source, if that is of safetensors files.

    Args:
        source: as for :func:`blobstore.create`.
        target: the file. It appears complete and synced, or not at all.
        subtree: as for :func:`blobstore.create`.
        strip_prefix: as for :func:`blobstore.create`.
        weights: as for :func:`blobstore.create`.
        keep_names: as for :func:`blobstore.create`.
        skip_unreadable: as for :func:`blobstore.create`.
        force: replace an existing file.
        jobs: number of threads; by default one per processor.
        progress: called with the current step, bytes done and total bytes.

    Returns:
        the file, and how many tensors and bytes it has.

    Raises:
        SourceError, DamagedSource, SourceNotFound: the source cannot be read.
        BlobstoreError: the target exists already, or cannot be written.
        UsageError: ``jobs`` is below 1, or the target has another ending.
    """
    check_jobs(jobs)
    path = local_path(target)
    check_new_file(path, force=force)
    if path.suffix != ".safetensors":
        raise UsageError(f"the file must end in .safetensors, got {quote(target)}")
    opened = open_source(
        source,
        SourceOptions(
            weights=weights,
            subtree=subtree,
            strip_prefix=strip_prefix,
            keep_names=keep_names,
            skip_unreadable=skip_unreadable,
        ),
        progress=progress,
    )
    try:
        specs = in_file_order(opened.specs.values())
        notices = list(opened.notices)
        metadata, differing = _common(opened.metadata.values())
        if any(file.name == VALUES_FILE and file.content for file in opened.files):
            notices.append("left out: the values that are not tensors; create keeps them")
        if differing:
            keys = join_some([*map(quote, differing)], _SHOWN)
            notices.append(f"left out: metadata {keys}, which differs between the files")
        header = encode_header(specs, _METADATA | metadata)
        size = sum(spec.nbytes for spec in specs)
        pool = WorkerPool(jobs, progress, size)
        with replacing(path) as descriptor:
            write_all(descriptor, header)
            offsets = accumulate((spec.nbytes for spec in specs), initial=len(header))
            places = zip(offsets, specs, strict=False)
            batches = [list(run) for _, run in groupby(places, lambda it: it[0] // _BATCH_SIZE)]
            pool.run(batches, partial(_write_batch, opened, pool, descriptor))
            opened.check_unchanged()
            check_new_file(path, force=force)  # it may have appeared since
    except OSError as error:
        raise BlobstoreError(f"cannot write {quote(path)}: {error.strerror}") from error
    finally:
        opened.close()
    return Copied(
        path=path,
        tensors=len(opened.specs),
        bytes_written=len(header) + size,
        notices=tuple(notices),
    )


def _common(files: Iterable[Mapping[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Return the metadata on which files agree, and the keys of which they have different values."""
    values: dict[str, set[str]] = {}
    for metadata in files:
        for key, value in metadata.items():
            values.setdefault(key, set()).add(value)
    common = {key: next(iter(found)) for key, found in values.items() if len(found) == 1}
    return common, sorted(values.keys() - common)


def _write_batch(
    source: TensorSource,
    pool: WorkerPool,
    descriptor: int,
    places: Iterable[tuple[int, TensorSpec]],
) -> None:
    """Write tensors to their offsets in the file: a job of ``pool``."""
    buffer = memoryview(bytearray(_BUFFER_SIZE))
    for start, spec in places:
        offset = start
        for piece in source.read(spec.name, buffer):
            left = piece
            while left:  # one write may take only a part
                written = os.pwrite(descriptor, left, offset)
                left, offset = left[written:], offset + written
            pool.report(len(piece), spec.name)

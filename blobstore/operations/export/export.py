"""Workflow: a stored model given back as a Hugging Face folder.

First everything is decided from the manifest and the blobs' headers: which tensor goes into which file
at which offset. Then the files are filled, blob by blob. The folder is built under a temporary name
beside the target, synced, and renamed: the target is either absent or complete.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.errors import BlobstoreError, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.export.folder import plan_export
from blobstore.operations.export.shards import SHARD_SIZE
from blobstore.operations.export.writer import building, free_target, write_new, write_weights
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from blobstore.core.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What :func:`export_model` did."""

    folder: Path
    files: int
    """Files in the folder: weights, weight indexes and small files."""
    tensors: int
    shards: int
    """Files of weights."""
    bytes_written: int
    seconds: float


def export_model(
    reference: str | Reference,
    folder: str | os.PathLike[str],
    *,
    store: LocalStore | None = None,
    shard_size: int = SHARD_SIZE,
    dequantize: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write a model as a Hugging Face folder: its tensors bit for bit, and its small files.

    Stacked experts become the tensors that they were made of. Quantized weights and their companions
    are written as stored, under the names and with the ``config.json`` that MLX reads. Layers that
    have no place in such a folder (Ollama's template, system, parameter and license layers) are
    left out.

    Args:
        reference: the name, ``[host/][namespace/]model[:tag]``.
        folder: where to; it must not exist, or be an empty folder.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        shard_size: bytes of tensors in a file; a model of more becomes several, with an index.
        dequantize: write quantized weights as plain numbers of their original element type, as far
            as the store knows it, and bfloat16 otherwise.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is not whole, or names files that
            must not be written.
        UsageError: ``shard_size`` is below 1.
        BlobstoreError: the model has no tensors, or the folder exists or cannot be written.
    """
    started = time.monotonic()
    if isinstance(reference, str):
        reference = Reference.parse(reference)
    if shard_size < 1:
        raise UsageError(f"the shard size must be at least 1 byte, got {shard_size}")
    store = store or LocalStore()
    manifest = store.resolve(reference)
    target = free_target(folder)
    try:
        layout = plan_export(store, manifest, shard_size, dequantize=dequantize)
        with building(target) as new:
            write_weights(store, layout.weights, layout.tensors, new, progress)
            for name, layer in layout.files.items():
                write_new(new / name, store.read_blob(layer.digest, layer.size))
            for name, content in layout.written.items():
                write_new(new / name, content)
            written = [path for path in new.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in written)
    except BlobstoreError as error:
        where = f"model {reference}"
        raise error.at(where) from error
    return Exported(
        folder=target,
        files=len(written),
        tensors=len(layout.tensors),
        shards=len(layout.weights),
        bytes_written=size,
        seconds=time.monotonic() - started,
    )

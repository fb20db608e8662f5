"""Workflow: write a stored model as a Hugging Face folder.

First the manifest and the headers of the blobs decide which tensor goes to which offset of which
file. Then the files are written, blob by blob. The folder is built under a temporary name next to
the target, synced, and renamed: the target is either absent or complete.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.core.workers import check_jobs
from blobstore.errors import BlobstoreError, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.export import writer
from blobstore.operations.export.folder import plan_export
from blobstore.operations.export.shards import SHARD_SIZE
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
    """All files of the folder: weights, weight indexes and small files."""
    tensors: int
    shards: int
    """Weight files."""
    bytes_written: int
    seconds: float


def export_model(
    reference: str | Reference,
    folder: str | os.PathLike[str],
    *,
    store: LocalStore | str | os.PathLike[str] | None = None,
    shard_size: int = SHARD_SIZE,
    dequantize: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write a model as a Hugging Face folder: its tensors, bit for bit, and its small files.

    Stacked experts become the tensors that the stack was made of. Quantized weights are written as
    stored, with the names and the ``config.json`` that MLX expects. Layers that such a folder does
    not have (Ollama's template, system, parameter and license layers) are left out.

    Args:
        reference: the name, ``[host/][namespace/]model[:tag]``.
        folder: the folder to create; it may exist if it is empty.
        store: the store or its folder; by default the store of ``$BLOBSTORE_HOME`` or
            ``~/.blobstore``.
        shard_size: bytes of tensors per file; a larger model becomes several files with an index.
        dequantize: write quantized weights as plain values of their original element type if the
            store knows it, otherwise as bfloat16.
        jobs: number of threads; by default one per processor.
        progress: called with the current step, bytes done and total bytes.

    Raises:
        ModelNotFound: the store has no model of this name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged, or names files that must
            not be written.
        UsageError: ``shard_size`` or ``jobs`` is below 1.
        BlobstoreError: the model has no tensors, or the folder exists or cannot be written.
    """
    started = time.monotonic()
    check_jobs(jobs)
    reference = Reference.of(reference)
    if shard_size < 1:
        raise UsageError(f"the shard size must be at least 1 byte, got {shard_size}")
    store = LocalStore.of(store)
    manifest = store.resolve(reference)
    target = writer.resolve_target(folder)
    try:
        plan = plan_export(store, manifest, shard_size, dequantize=dequantize)
        with writer.atomic_folder(target) as new:
            writer.write_weights(store, plan.weights, plan.tensors, new, jobs, progress)
            for name, layer in plan.files.items():
                writer.write_blob(store, layer, new / name)
            for name, content in plan.written.items():
                writer.write_new(new / name, content)
            written = [path for path in new.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in written)
    except BlobstoreError as error:
        raise error.at(f"model {reference}") from error
    return Exported(
        folder=target,
        files=len(written),
        tensors=len(plan.tensors),
        shards=len(plan.weights),
        bytes_written=size,
        seconds=time.monotonic() - started,
    )

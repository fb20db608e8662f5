"""The operation ``export``: writes a stored model as a Hugging Face folder.

First the manifest and the headers of the blobs decide which tensor goes to which offset of which
file. Then the files are written, blob by blob. The folder is built under a temporary name next to
the target, synced, and renamed: the target is either absent or complete.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blobstore.core.arguments import bytes_of, local_path
from blobstore.core.escape import quote
from blobstore.core.outcomes import Outcome, each_of
from blobstore.core.targets import check_target
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobstoreError, NameConflict, UsageError
from blobstore.folders import writer
from blobstore.folders.files import files_of
from blobstore.manifests.reference import DEFAULT_TAG, Reference
from blobstore.models.contents import ModelContents
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

    from blobstore.core.progress import Progress
    from blobstore.manifests.reference import Names


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of :func:`blobstore.export`."""

    folder: Path
    files: int
    """All files of the folder: weights, weight indexes and small files."""
    tensors: int
    shards: int
    """Weight files."""
    is_original: bool
    """Whether the files are those of the source, byte for byte."""
    bytes_written: int
    seconds: float


def exported_folder(new: Path, target: Path, started: float, **numbers: Any) -> Exported:
    """Return what was written to the folder ``new``, which becomes ``target``."""
    sizes = [path.stat().st_size for path in new.rglob("*") if path.is_file()]
    size, seconds = sum(sizes), time.monotonic() - started
    return Exported(folder=target, files=len(sizes), bytes_written=size, seconds=seconds, **numbers)


def export_model(
    reference: str | Reference,
    folder: str | os.PathLike[str],
    *,
    store: StoreLike = None,
    shard_size: float | str | None = None,
    single: bool = False,
    dequantize: bool = False,
    force: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write the files that a model was imported from, or a Hugging Face folder of the model.

    Without other wishes, the weight files, their indexes and the small files are those of the source,
    byte for byte. That is possible if the source had safetensors files, of which the import converted
    no tensor; earlier versions did not record what it takes. Whole files are compared with their
    digests if the Hub lists them.

    Otherwise the folder has the tensors, bit for bit, and the small files. Stacked experts become the
    tensors that the stack was made of. Quantized weights are written as stored, with the names and the
    ``config.json`` that MLX expects. Layers that such a folder does not have (Ollama's template,
    system, parameter and license layers) are left out.

    Args:
        reference: the name, ``[host/][namespace/]model[:tag]``.
        folder: the folder to create; it may exist if it is empty.
        store: the store or its folder; by default the store of ``$BLOBSTORE_HOME`` or
            ``~/.blobstore``.
        shard_size: bytes of tensors per file, or a text such as ``5GB``, instead of the source's files; a larger
            model becomes several files with an index.
        single: write the tensors of each component to one file, instead of the source's files.
        dequantize: write quantized weights as plain values of their original element type if the
            store knows it, otherwise as bfloat16.
        force: replace a folder that has only files of a model, of this one or another.
        jobs: number of threads; by default one per processor.
        progress: called with the current step, bytes done and total bytes.

    Returns:
        the folder, and the numbers of files, tensors and bytes.

    Raises:
        ModelNotFound: the store has no model of this name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged, or names files that must
            not be written.
        UsageError: ``shard_size`` or ``jobs`` is below 1, or both ``shard_size`` and ``single`` are
            given.
        BlobstoreError: the model has no tensors, or the folder exists or cannot be written.
    """
    started = time.monotonic()
    check_jobs(jobs)
    reference = Reference.of(reference)
    size = None if shard_size is None else bytes_of(shard_size)
    if size is not None and size < 1:
        raise UsageError(f"the shard size must be at least 1 byte, got {shard_size}")
    if single and shard_size is not None:
        raise UsageError("a single file has no shards; give --single or --shards")
    store = LocalStore.to_read(store)
    manifest = store.resolve(reference)
    target = writer.resolve_target(folder, force=force)
    try:
        model = ModelContents(store, manifest)
        plan = files_of(model, shard_size=size, single=single, dequantize=dequantize)
        blobs = (blob.digest for blob in manifest.blobs)
        with store.lease_if_writable(blobs), writer.atomic_folder(target, force=force) as new:
            writer.write_weights(store, plan.weights, plan.tensors, new, jobs, progress)
            for name, layer in plan.files.items():
                writer.write_blob(store, layer, new / name)
            for name, content in plan.written.items():
                writer.write_new(new / name, content)
            exported = exported_folder(
                new,
                target,
                started,
                tensors=sum(len(file.tensors) for file in plan.weights),
                shards=len(plan.weights),
                is_original=plan.is_original,
            )
    except BlobstoreError as error:
        raise error.at(f"model {reference}") from error
    return replace(exported, seconds=time.monotonic() - started)


def export_models(
    references: Names,
    folder: str | os.PathLike[str],
    *,
    store: StoreLike = None,
    progress: Progress | None = None,
    **options: Any,
) -> list[Outcome[Exported]]:
    """Write several models, each to a folder of its own below ``folder``, and return the outcome for each.

    A folder has the name of the model, without what is before the last slash if that is equal in all names.
    ``--`` stands for other slashes, and for the colon before a tag that is not ``latest``.

    Args:
        references: the models.
        folder: the folder of these folders; it may exist.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        progress: called with the number of the model and its name, and the bytes of all models.
        options: as for :func:`export_model`.

    Raises:
        NameConflict: two models would get one folder, at least where case is ignored; nothing is written.
        BlobstoreError: the folder cannot be made.
    """
    local = LocalStore.to_read(store)
    names = named_models(local, references)
    folders = _folder_names(names)
    sizes = [sum(blob.size for blob in local.blobs_of(name)) for name in names]
    target = local_path(folder)
    try:
        check_target(target)
        target.mkdir(exist_ok=True)
    except OSError as error:
        raise BlobstoreError(f"cannot make {quote(target)}: {error.strerror}") from error

    def export(number: int, step: Progress | None) -> Exported:
        path = target / folders[number]
        return export_model(names[number], path, store=local, progress=step, **options)

    return list(each_of([str(name) for name in names], sizes, progress, export))


def _folder_names(references: Sequence[Reference]) -> list[str]:
    is_one_place = len({one.parts[:2] for one in references}) == 1
    found: dict[str, Reference] = {}
    names = []
    for reference in references:
        text = str(reference).removesuffix(f":{DEFAULT_TAG}")
        name = re.sub("[/:]", "--", text.rpartition("/")[2] if is_one_place else text)
        if (other := found.setdefault(name.casefold(), reference)) != reference:
            raise NameConflict(
                f"{quote(other)} and {quote(reference)} would both be in the folder {quote(name)}",
                advice="export one of them to another folder",
            )
        names.append(name)
    return names

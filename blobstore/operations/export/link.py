"""The operation ``link``: writes a stored model as a Hugging Face folder of links to its blobs.

Blobs that are valid weight files as they are stored are linked. Other weight files share their bytes
with a blob if the file system can do that, and are copies otherwise. Other files are linked if they are
large. Small ones are copies, so that a program that writes to one does not change the store.

Linked and shared blobs have their size and header checked, copied ones their digest too. The folder
is built under a temporary name next to the target and renamed: the target is either absent or
complete.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from blobstore.core import interrupts
from blobstore.core.escape import cli_command, quote
from blobstore.core.gc_pause import gc_paused
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobstoreError, StoreError
from blobstore.folders import writer
from blobstore.folders.link_plan import plan_links
from blobstore.folders.reflink import clone_data
from blobstore.manifests.ollama_files import MANIFEST
from blobstore.manifests.reference import Reference
from blobstore.models.contents import ModelContents
from blobstore.quantization.old_config_keys import file_with_old_keys
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from blobstore.core.progress import Progress
    from blobstore.folders.link_plan import Link, LinkPlan, WithNewHeader
    from blobstore.manifests.model import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """The result of :func:`blobstore.link`."""

    folder: Path
    files: int
    """All files of the folder, including links."""
    tensors: int
    links: int
    bytes_linked: int
    """Bytes of the linked blobs."""
    shared: int
    """Weight files that share the bytes of a blob."""
    bytes_shared: int
    copied: int
    """Weight files that are copies."""
    bytes_copied: int
    notices: Sequence[str]
    seconds: float


def link_model(
    reference: str | Reference,
    folder: str | os.PathLike[str],
    *,
    store: StoreLike = None,
    hard: bool = False,
    old_keys: bool = False,
    force: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Linked:
    """Create a Hugging Face folder of a model whose weight files are links to its blobs.

    The folder has the tensors of :func:`~blobstore.operations.export.export.export_model`, in other
    files. Blobs of quantized weights, stacked experts and pipeline components cannot be links,
    because their tensors have other names or bounds in such a folder.

    Args:
        reference: the name, ``[host/][namespace/]model[:tag]``.
        folder: the folder to create; it may exist if it is empty.
        store: the store or its folder; by default the store of ``$BLOBSTORE_HOME`` or
            ``~/.blobstore``.
        hard: make hard links, which keep the bytes if the store removes a blob. Symbolic links
            would then be broken.
        old_keys: repeat in ``config.json``, under the keys of transformers 4, the values of keys
            that only transformers 5 has. mlx-lm needs them. Quantized models always have both.
        force: replace a folder that has only files of a model, of this one or another.
        jobs: number of threads that copy; by default one per processor.
        progress: called with the file being copied, bytes done and total bytes.

    Returns:
        the folder, and the numbers of files, links and bytes.

    Raises:
        ModelNotFound: the store has no model of this name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged, or names files that must
            not be written.
        BlobstoreError: the model has no tensors, the folder exists or cannot be written, or hard
            links cannot be made there.
        StoreError: the model is frozen, and its files are not copies in any case.
        UsageError: ``jobs`` is below 1.
    """
    check_jobs(jobs)
    reference = Reference.of(reference)
    store = LocalStore.to_read(store)
    manifest = store.resolve(reference)
    return link_manifest(
        manifest,
        reference,
        folder,
        store=store,
        hard=hard,
        old_keys=old_keys,
        force=force,
        jobs=jobs,
        progress=progress,
    )


def link_manifest(
    manifest: Manifest,
    reference: Reference,
    folder: str | os.PathLike[str],
    *,
    store: LocalStore,
    hard: bool = False,
    old_keys: bool = False,
    force: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Linked:
    """Do as :func:`link_model`, for a manifest of which ``reference`` may be another model's name by now."""
    started = time.monotonic()
    target = writer.resolve_target(folder, force=force)
    try:
        with gc_paused():  # a model has thousands of tensors
            plan = plan_links(ModelContents(store, manifest))
        layers = [*(it.layer for it in plan.links), *(it.layer for it in plan.relabelled)]
        if any(store.is_cold(layer.digest) for layer in layers):
            raise StoreError(
                "it is frozen, but links need uncompressed blobs",
                advice=f"{cli_command('thaw', reference)}, or link with --thaw, decompresses them",
            )
        blobs = (blob.digest for blob in manifest.blobs)
        with store.lease_if_writable(blobs), writer.atomic_folder(target, force=force) as new:
            for name, layer in plan.files.items():
                content = store.read_blob(layer.digest, layer.size)
                if old_keys and PurePosixPath(name).name == "config.json":
                    content = file_with_old_keys(content)
                writer.write_new(new / name, content)
            for name, content in plan.written.items():
                writer.write_new(new / name, content)
            _link(store, plan.links, new, hard=hard)
            copied = [
                item for item in plan.relabelled if not _shares(store, item, new / item.file.name)
            ]
            files = [*(item.file for item in copied), *plan.gathered]
            tensors = [*(it for item in copied for it in item.tensors), *plan.gathered_tensors]
            writer.write_weights(store, files, tensors, new, jobs, progress)
    except BlobstoreError as error:
        raise error.at(f"model {reference}") from error
    return _result(target, plan, copied, time.monotonic() - started)


def is_linked(manifest: Manifest, folder: Path, *, store: LocalStore) -> bool:
    """Return whether a folder still has each file that :func:`link_manifest` has written, and its links lead to blobs.

    Raises:
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
    """
    if not folder.is_dir():
        return False
    names = plan_links(ModelContents(store, manifest)).names()
    return all((folder / name).is_file() for name in names)


def _link(store: LocalStore, links: Sequence[Link], folder: Path, *, hard: bool) -> None:
    # The real path, so that links stay valid if a link that leads to the store is removed.
    blobs = f"{os.path.realpath(store.folder('blobs'))}{os.sep}"
    for parent in {os.path.dirname(name) for name, _ in links}:  # noqa: PTH120 - there are thousands
        (folder / parent).mkdir(parents=True, exist_ok=True)
    base = f"{folder}{os.sep}"
    for name, layer in links:
        interrupts.check()
        blob = blobs + layer.digest.file_name
        if store.is_shared(layer.digest):
            blob = store.readable_path(layer.digest)
        if hard:
            try:
                os.link(blob, base + name, follow_symlinks=False)
            except OSError as error:
                root = quote(store.root)
                reason = {
                    errno.EXDEV: f"the folder and the store {root} are on different file systems",
                    errno.EPERM: f"the blobs of the store {root} belong to another user, or its "
                    "file system has no hard links",
                    errno.EMLINK: f"blob {quote(blob)} has as many names as a file can have",
                }.get(error.errno or 0)
                if reason is None:
                    raise
                raise StoreError(
                    f"{reason}, so hard links cannot be made; use symbolic links"
                ) from error
        else:
            os.symlink(blob, base + name)  # noqa: PTH211 - there are thousands


def _shares(store: LocalStore, item: WithNewHeader, path: Path) -> bool:
    """Write a file that shares the bytes of its blob; return whether that is possible."""
    if store.is_cold(item.layer.digest):  # the file system has no blocks with its bytes
        return False
    source = store.open_blob(item.layer.digest, item.layer.size)
    try:
        writer.write_new(path, b"")
        target = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            if clone_data(source, item.layer.size, item.data_start, target, item.file.header):
                os.fsync(target)
                return True
        finally:
            os.close(target)
    finally:
        os.close(source)
    path.unlink()
    return False


def _result(
    target: Path, plan: LinkPlan, copied: Sequence[WithNewHeader], seconds: float
) -> Linked:
    copied_size = sum(item.data_size for item in copied)
    gathered = len(plan.gathered)
    gathered_size = sum(tensor.spec.nbytes for tensor in plan.gathered_tensors)
    notices = []
    if copied:
        notices.append(
            f"weight files that are copies: {len(copied)}; their tensors have other names in such a "
            "folder than in the store, and their bytes could not be shared"
        )
    if gathered:
        notices.append(
            f"weight files that are copies: {gathered}; their tensors have another order in such a "
            "folder than in the store, or have to be in one file"
        )
    if MANIFEST in plan.files:
        notices.append(
            "no server but Ollama reads the folder 'ollama'; 'blobstore run' gives llama.cpp the "
            "parameters in it"
        )
    weights = len(plan.links) + len(plan.relabelled) + gathered
    return Linked(
        folder=target,
        files=weights + len(plan.written) + len(plan.files),
        tensors=plan.tensors,
        links=len(plan.links),
        bytes_linked=sum(layer.size for _, layer in plan.links),
        shared=len(plan.relabelled) - len(copied),
        bytes_shared=sum(item.data_size for item in plan.relabelled) - copied_size,
        copied=len(copied) + gathered,
        bytes_copied=copied_size + gathered_size,
        notices=tuple(notices),
        seconds=seconds,
    )

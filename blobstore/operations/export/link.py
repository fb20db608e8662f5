"""Workflow: a stored model as a Hugging Face folder of links to its blobs.

Weights that a server can read as they are stored are linked and not copied. Files that cannot be links
share their bytes with the blobs where the file system allows it, and are copies otherwise. Small files
are copies: whoever writes to one must not reach the store through it.

What is linked or shared has had its size and header checked; what is copied, its digest too. The
folder is built under a temporary name beside the target and renamed: the target is either absent or
complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.gc_pause import gc_paused
from blobstore.errors import BlobstoreError, StoreError
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.export.link_plan import lay_out_farm
from blobstore.operations.export.reflink import clone_data
from blobstore.operations.export.writer import building, free_target, write_new, write_weights
from blobstore.quantization.mlx_layout import mlx_config
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from blobstore.core.progress import Progress
    from blobstore.operations.export.link_plan import Link, LinkPlan, Repacked, WithNewHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """What :func:`link_model` did."""

    folder: Path
    files: int
    """Files in the folder, links among them."""
    tensors: int
    links: int
    bytes_linked: int
    """Bytes of the blobs that are linked."""
    shared: int
    """Weight files that share their bytes with a blob."""
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
    store: LocalStore | None = None,
    hard: bool = False,
    old_keys: bool = False,
    progress: Progress | None = None,
) -> Linked:
    """Make a Hugging Face folder of a model whose weight files are links to its blobs.

    It holds what :func:`~blobstore.operations.export.export.export_model` writes, in other files. Blobs of quantized
    weights, of stacked experts and of components of a pipeline cannot be links, because their tensors
    have other names or bounds in such a folder: they share the blobs' bytes, or are copies.

    Args:
        reference: the name, ``[host/][namespace/]model[:tag]``.
        folder: where to; it must not exist, or be an empty folder.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        hard: make hard links, which keep the bytes when the store removes a blob, and not symbolic
            ones, which then lead nowhere.
        old_keys: let ``config.json`` say also under the keys of transformers 4 what only those of
            transformers 5 say; mlx-lm reads those. That of quantized weights always does.
        progress: called with what is being copied, bytes done and bytes in all.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is not whole, or names files that
            must not be written.
        BlobstoreError: the model has no tensors, the folder exists or cannot be written, or hard
            links cannot be made there.
        StoreError: the model is frozen.
    """
    started = time.monotonic()
    if isinstance(reference, str):
        reference = Reference.parse(reference)
    store = store or LocalStore()
    manifest = store.resolve(reference)
    cold = [item for item in manifest.layers_of(media_types.TENSOR) if store.is_cold(item.digest)]
    if cold:
        raise StoreError(
            f"model {reference} is frozen, and links need files; run 'blobstore thaw {reference}'"
        )
    target = free_target(folder)
    try:
        with gc_paused():  # a model has thousands of tensors
            layout = lay_out_farm(store, manifest)
        with building(target) as new:
            for name, layer in layout.files.items():
                content = store.read_blob(layer.digest, layer.size)
                if old_keys and PurePosixPath(name).name == "config.json":
                    content = _with_old_keys(content)
                write_new(new / name, content)
            for name, content in layout.written.items():
                write_new(new / name, content)
            _link(store, layout.links, new, hard=hard)
            shared, copied = _share(store, layout.relabelled, new)
            _copy(store, copied, layout.gathered, new, progress)
    except BlobstoreError as error:
        where = f"model {reference}"
        raise error.at(where) from error
    return _result(target, layout, shared, copied, time.monotonic() - started)


def _with_old_keys(content: bytes) -> bytes:
    """Return a config that says all under both names; what is no config stays as it is."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(config, dict) or (both := mlx_config(config)) == config:
        return content
    return f"{json.dumps(both, indent=2)}\n".encode()


def _link(store: LocalStore, links: Sequence[Link], folder: Path, *, hard: bool) -> None:
    # Resolved, so that a link says where its blob is whatever names led to the store.
    blobs = f"{os.path.realpath(store.folder('blobs'))}{os.sep}"
    for parent in {os.path.dirname(name) for name, _ in links}:  # noqa: PTH120 - there are thousands
        (folder / parent).mkdir(parents=True, exist_ok=True)
    base = f"{folder}{os.sep}"
    for name, layer in links:
        blob = blobs + layer.digest.file_name
        if hard:
            with _explained(store, blob):
                os.link(blob, base + name, follow_symlinks=False)
        else:
            os.symlink(blob, base + name)  # noqa: PTH211 - there are thousands


@contextlib.contextmanager
def _explained(store: LocalStore, blob: str) -> Iterator[None]:
    """Say why there can be no hard link to a blob.

    Raises:
        StoreError: there cannot.
    """
    try:
        yield
    except OSError as error:
        root = quote(store.root)
        reasons = {
            errno.EXDEV: f"the folder and the store {root} are on different file systems",
            errno.EPERM: f"the blobs of the store {root} belong to someone else, or its file "
            "system has no hard links",
            errno.EMLINK: f"blob {quote(blob)} has as many names as a file can have",
        }
        reason = reasons.get(error.errno or 0)
        if reason is None:
            raise
        raise StoreError(f"{reason}, so hard links cannot be made; use symbolic links") from error


def _share(
    store: LocalStore, files: Sequence[WithNewHeader], folder: Path
) -> tuple[list[WithNewHeader], list[WithNewHeader]]:
    """Write the files that can share the bytes of a blob; return them, and the others."""
    shared: list[WithNewHeader] = []
    copied: list[WithNewHeader] = []
    for item in files:
        is_shared = _is_shared(store, item, folder / item.file.name)
        (shared if is_shared else copied).append(item)
    return shared, copied


def _is_shared(store: LocalStore, item: WithNewHeader, path: Path) -> bool:
    if store.is_cold(item.layer.digest):  # its blocks are none of the file
        return False
    source = store.open_blob(item.layer.digest, item.layer.size)
    try:
        write_new(path, b"")
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


def _copy(
    store: LocalStore,
    copied: Sequence[WithNewHeader],
    gathered: Repacked,
    folder: Path,
    progress: Progress | None,
) -> None:
    files = [*(item.file for item in copied), *gathered.files]
    tensors = [*(tensor for item in copied for tensor in item.tensors), *gathered.tensors]
    write_weights(store, files, tensors, folder, progress)


def _result(
    target: Path,
    layout: LinkPlan,
    shared: Sequence[WithNewHeader],
    copied: Sequence[WithNewHeader],
    seconds: float,
) -> Linked:
    links, (gathered, scattered) = layout.links, layout.gathered
    renamed = sum(_data_size(item) for item in copied)
    moved = sum(tensor.spec.nbytes for tensor in scattered)
    files = len(links) + len(layout.relabelled) + len(gathered)
    return Linked(
        folder=target,
        files=files + len(layout.written) + len(layout.files),
        tensors=layout.tensors,
        links=len(links),
        bytes_linked=sum(layer.size for _, layer in links),
        shared=len(shared),
        bytes_shared=sum(map(_data_size, shared)),
        copied=len(copied) + len(gathered),
        bytes_copied=renamed + moved,
        notices=tuple(_notices(len(copied), renamed, len(gathered), moved)),
        seconds=seconds,
    )


def _data_size(item: WithNewHeader) -> int:
    return item.layer.size - item.data_start


def _notices(renamed: int, renamed_size: int, moved: int, moved_size: int) -> Iterator[str]:
    if renamed:
        yield (
            f"weight files that are copies: {renamed}, {renamed_size} bytes; their tensors have other "
            "names in such a folder than in the store, and their bytes could not be shared"
        )
    if moved:
        yield (
            f"weight files that are copies: {moved}, {moved_size} bytes; their tensors lie in "
            "another order in such a folder than in the store"
        )

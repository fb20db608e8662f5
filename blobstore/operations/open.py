"""Workflow: a stored model opened inside a program."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from blobstore.errors import StoreError
from blobstore.manifests.reference import Reference
from blobstore.models.checks import Verify, check_level, reads_headers
from blobstore.models.model import Framework, Model
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from blobstore.core.progress import Progress
    from blobstore.models.memory import Prefetch, Read

__all__ = ["Framework", "Model", "Verify", "open_model"]


def open_model(
    reference: str | Reference,
    *,
    store: LocalStore | None = None,
    framework: Framework = "numpy",
    device: str = "cpu",
    verify: Verify = "size",
    dequantize: bool = False,
    read: Read = "mmap",
    prefetch: Prefetch | None = None,
    copy: bool = False,
    thaw: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Open a model for loading.

    Args:
        reference: the name, ``[host/][namespace/]model[:tag]``.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        framework: what tensors become: ``numpy`` arrays (read-only views), ``torch`` tensors
            (views of private memory: writing to them never reaches the store) or ``mlx`` arrays
            (copies; MLX cannot adopt memory).
        device: where torch tensors are put; anything but ``cpu`` is a copy.
        verify: how closely the blobs are looked at first, each level including those before.
            ``none`` leaves that to the first use of each blob. ``size`` finds it there and of its
            size; it maps or reads it at once, so that nothing can happen to it later. ``header``
            compares its header with the manifest and the header index, and uses the header.
            ``digest`` hashes it, unless it was hashed before and its file was not touched since.
            ``rehash`` hashes it in any case, which alone finds what has rotted on the disk.
        dequantize: give quantized weights as plain numbers, under their names alone; see
            :meth:`Model.dequantized`. They are computed at every look-up.
        read: ``mmap`` maps the blobs; ``pread`` reads them, with several requests at a time, into
            memory of this process, for network file systems and stores that may be damaged later.
        prefetch: of mapped blobs: ``read`` brings all into memory before it returns, ``willneed``
            asks for that and does not wait; by default they are read when they are touched.
        copy: another word for ``read="pread"``: what happens to the files later cannot reach this
            process. (One that touches a map of a file that was cut short is killed.)
        thaw: write blobs that are cold as they were before, so that programs share what they map; by
            default they are decoded into memory of this process.
        progress: told of the bytes that are waited for.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is not whole.
        UsageError: an unknown framework or level, or a device that the framework has not.
    """
    check_level(verify)
    if copy:
        read, prefetch = "pread", None
    if isinstance(reference, str):
        reference = Reference.parse(reference)
    store = store or LocalStore()
    if thaw:
        for fault in thaw_models([reference], store=store, progress=progress).faults:
            raise fault.at(str(reference))
    with contextlib.ExitStack() as unlocking:
        unlocking.enter_context(store.reading_lock())
        model = Model(
            reference,
            store.read_manifest(reference),
            store,
            framework=framework,
            device=device,
            dequantize=dequantize,
            use_index=not reads_headers(verify),
            read=read,
            prefetch=prefetch,
            progress=progress,
        )
        if verify == "size" and read == "mmap" and prefetch is None and model.map_hot():
            return model
        # What follows takes longer than others can wait for the lock; decoding does too.
        needed = (blob.digest for blob in model.manifest.blobs)
        with contextlib.ExitStack() as leasing:
            with contextlib.suppress(StoreError):  # a lease that cannot be written stops no reader
                leasing.enter_context(store.lease_if_writable(needed))
            unlocking.close()
            model.check(verify)
            if not model.is_resident:
                model.at_end(leasing.pop_all().close)
        return model

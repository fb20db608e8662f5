"""``open``: load a stored model in a program."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from blobstore.errors import Damaged
from blobstore.manifests.reference import Reference
from blobstore.models.checks import Verify, check_level, reads_headers
from blobstore.models.frameworks import Framework
from blobstore.models.model import Model
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.sign.trust import require_trust
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    import os
    from collections.abc import Collection
    from typing import Unpack

    import mlx.core
    import torch
    from numpy.typing import NDArray

    from blobstore.core.progress import Progress
    from blobstore.models.memory import Prefetch, Read

__all__ = ["Framework", "Model", "Verify", "open_model"]


class _Options(TypedDict, total=False):
    """The options that do not change the type of the tensors."""

    store: LocalStore | str | os.PathLike[str] | None
    device: str
    verify: Verify
    dequantize: bool | str | Collection[str]
    read: Read
    prefetch: Prefetch | None
    copy: bool
    thaw: bool
    progress: Progress | None


@overload
def open_model(
    reference: str | Reference,
    *,
    framework: Literal["numpy", "np"] = "numpy",
    **options: Unpack[_Options],
) -> Model[NDArray[Any]]: ...
@overload
def open_model(
    reference: str | Reference, *, framework: Literal["torch", "pt"], **options: Unpack[_Options]
) -> Model[torch.Tensor]: ...
@overload
def open_model(
    reference: str | Reference, *, framework: Literal["mlx"], **options: Unpack[_Options]
) -> Model[mlx.core.array]: ...
@overload
def open_model(
    reference: str | Reference, *, framework: Framework, **options: Unpack[_Options]
) -> Model: ...
def open_model(
    reference: str | Reference,
    *,
    store: LocalStore | str | os.PathLike[str] | None = None,
    framework: Framework = "numpy",
    device: str = "cpu",
    verify: Verify = "size",
    dequantize: bool | str | Collection[str] = False,
    read: Read = "mmap",
    prefetch: Prefetch | None = None,
    copy: bool = False,
    thaw: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Open a model, to load its tensors.

    Args:
        reference: the name, ``[host/][namespace/]model[:tag]``.
        store: the store, or its folder. The default is ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        framework: the type of the tensors. ``numpy`` arrays are read-only views. ``torch`` tensors
            are views of private memory; writing to them never changes the store. ``mlx`` arrays are
            copies, since MLX cannot adopt memory. ``np`` and ``pt`` are numpy and torch, as in
            ``safetensors``.
        device: the device of torch tensors. Any device but ``cpu`` requires a copy.
        verify: how closely to check the blobs first. Each level includes the ones before it.
            ``none`` checks each blob on first use. ``size`` checks that all blobs exist and have
            the right size, and maps or reads them at once, so that later changes of the store have
            no effect. ``header`` reads the headers and compares them with the manifest and the
            header index. ``digest`` hashes each blob, unless it was hashed before and its file has
            not changed since. ``rehash`` hashes all blobs; no other level finds bit rot.
        dequantize: return quantized weights dequantized, without their companions; see
            :meth:`Model.dequantized`. Every look-up computes them again. A collection of quantization
            types, such as ``{"fp8"}``, restricts this to weights of these types.
        read: ``mmap`` maps the blobs. ``pread`` reads them into memory of this process, with
            concurrent requests. Use it for network file systems, and for stores that may be damaged
            while the model is open.
        prefetch: for mapped blobs, ``read`` loads all of them before the function returns, and
            ``willneed`` requests that without waiting. By default, pages are read on first use.
        copy: the same as ``read="pread"``: later changes to the files cannot affect this process.
            (A process that touches a map of a file that was truncated is killed.)
        thaw: decompress cold blobs in the store first, so that programs share their maps. By
            default they are decompressed into memory of this process.
        progress: called with the bytes that the function waits for.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is incomplete or damaged.
        NotTrusted: the policy refuses the model; see docs/signatures.md.
        InvalidPolicy: the policy cannot be used.
        UsageError: an unknown framework or level, or a device that the framework does not have.
        MissingLibrary: the framework is not installed.
    """
    check_level(verify)
    if copy:
        read, prefetch = "pread", None
    reference = Reference.of(reference)
    store = LocalStore.of(store)
    if thaw:
        for fault in thaw_models([reference], store=store, progress=progress).faults:
            raise fault.at(str(reference))
    while True:
        version = store.manifest_version(reference)
        try:
            with contextlib.ExitStack() as lease:
                data = store.read_manifest(reference)
                require_trust(store, reference, data)
                model = Model(
                    reference,
                    data,
                    store,
                    framework=framework,
                    device=device,
                    dequantize=dequantize,
                    use_index=not reads_headers(verify),
                    read=read,
                    prefetch=prefetch,
                    progress=progress,
                )
                if not (verify == "size" and read == "mmap" and model.map_hot()):
                    # Blobs are opened later than the manifest was read. A lease keeps them.
                    digests = (blob.digest for blob in model.manifest.blobs)
                    lease.enter_context(store.lease_if_writable(digests))
                    if store.manifest_version(reference) != version:
                        continue  # they may have been removed before they were leased
                model.check(verify)
                if not model.is_resident:
                    model.at_end(lease.pop_all().close)
                return model
        except Damaged:
            # No lock keeps others from removing the name and its blobs in the meantime.
            if store.manifest_version(reference) == version:
                raise

"""``open``: load a stored model in a program."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args, overload

from blobstore.core.arguments import local_path
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.public_calls import no_attribute
from blobstore.errors import Damaged, InvalidReference, UsageError
from blobstore.gguf.file import is_gguf
from blobstore.gguf.header import InvalidGguf
from blobstore.manifests.reference import Reference
from blobstore.models.checks import Verify, check_level, reads_headers
from blobstore.models.frameworks import Framework
from blobstore.models.model import Model
from blobstore.models.small_files import ModelFiles
from blobstore.operations.describe.list import ListedModel, list_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.sign.require_trust import require_trust
from blobstore.remotes.addresses import Cache, ReadPlan, find_model, is_address
from blobstore.store import local
from blobstore.store.outside_gguf import GgufFile, is_gguf_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import Unpack

    import mlx.core
    import torch
    from numpy.typing import NDArray

    from blobstore.core.progress import Progress
    from blobstore.errors import RemoteError, StoreError
    from blobstore.manifests.reference import Names
    from blobstore.models.read_strategy import Read
    from blobstore.remotes.remote_store import RemoteStore
    from blobstore.signatures.policy import Verdict

__all__ = ["Framework", "Model", "Verify", "open_model"]


class _StoreOptions(TypedDict, total=False):
    """The options for the models of one store that do not change the type of the tensors."""

    device: str
    verify: Verify
    dequantize: bool | str | Collection[str]
    read: Read
    thaw: bool
    cache: Cache
    cache_limit: float | str | None
    progress: Progress | None


class _Options(_StoreOptions, total=False):
    """The options that do not change the type of the tensors."""

    store: local.StoreLike


@overload
def open_model(
    reference: str | os.PathLike[str] | Reference,
    *,
    framework: Literal["numpy", "np"] = "numpy",
    **options: Unpack[_Options],
) -> Model[NDArray[Any]]: ...
@overload
def open_model(
    reference: str | os.PathLike[str] | Reference,
    *,
    framework: Literal["torch", "pt"],
    **options: Unpack[_Options],
) -> Model[torch.Tensor]: ...
@overload
def open_model(
    reference: str | os.PathLike[str] | Reference,
    *,
    framework: Literal["mlx"],
    **options: Unpack[_Options],
) -> Model[mlx.core.array]: ...
@overload
def open_model(
    reference: str | os.PathLike[str] | Reference,
    *,
    framework: Framework,
    **options: Unpack[_Options],
) -> Model: ...
@overload
def open_model(
    reference: str | os.PathLike[str] | Reference,
    *,
    plan: Literal[True],
    **options: Unpack[_Options],
) -> ReadPlan: ...
def open_model(
    reference: str | os.PathLike[str] | Reference,
    *,
    store: local.StoreLike = None,
    framework: Framework = "numpy",
    device: str = "cpu",
    verify: Verify = "size",
    dequantize: bool | str | Collection[str] = False,
    read: Read = "auto",
    thaw: bool = False,
    cache: Cache = "keep",
    cache_limit: float | str | None = None,
    plan: bool = False,
    progress: Progress | None = None,
) -> Model | ReadPlan:
    """Open a model, to load its tensors.

    Args:
        reference: the name, ``[host/][namespace/]model[:tag]``, or the address of a model elsewhere, such as
            ``s3://bucket/prefix/model:tag``, ``http://host:8080/model:tag`` of ``blobstore serve``, or
            ``oci://host/repository:tag``. The tensors of a model elsewhere are read into memory of this
            process when they are used, unless the store has their blobs. Or the path of a GGUF file: a
            :class:`~pathlib.Path`, or a text that ends in ``.gguf`` and is not a name of the store.
            Policies do not apply to files, nor do ``thaw``, ``cache``, ``cache_limit`` and ``plan``, and
            ``verify`` is at most ``header``.
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
            not changed since. ``rehash`` hashes all blobs; no other level finds bit rot. Remote blobs
            are always hashed when they are read completely; ``digest`` and ``rehash`` read all of them first.
        dequantize: return quantized weights dequantized, without their scales and biases; see
            :meth:`Model.dequantized`. Every look-up computes them again. A collection of quantization
            types, such as ``{"fp8"}``, restricts this to weights of these types.
        read: how to read the blobs. ``auto`` chooses by the file system that they are on; :attr:`Model.reading`
            says what and why. ``mmap`` maps them, and pages are read on first use. ``populate`` maps them and
            loads all pages before the function returns; of a remote model, it loads all blobs. ``pread`` reads
            them into memory of this process, with concurrent requests, so that later changes to the files cannot
            affect this process. Use it for stores that may be damaged while the model is open: a process that
            touches a map of a truncated file is killed.
        thaw: decompress cold blobs in the store first, so that programs share their maps. By
            default they are decompressed into memory of this process.
        cache: whether blobs of a remote model that were read completely are kept in the
            store: ``keep`` or ``none``.
        cache_limit: bytes of blobs to keep for remote models, at most, or a text such as ``50GB``; those of the models that were not
            used for longest are removed first. The default is ``$BLOBSTORE_CACHE_LIMIT``, or no limit.
        plan: open nothing, and return how many bytes would be read.
        progress: called with the bytes that the function waits for.

    Returns:
        the model, whose tensors are views of its blobs; with ``plan``, the bytes that would be read.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is incomplete or damaged.
        NotTrusted: the policy refuses the model; see docs/guides/signatures.md.
        InvalidPolicy: the policy cannot be used.
        UsageError: an unknown framework or level, or a device that the framework does not have.
        MissingLibrary: the framework is not installed.
    """
    check_level(verify)
    store = LocalStore.to_read(store)
    options: dict[str, Any] = {
        "framework": framework,
        "device": device,
        "dequantize": dequantize,
        "read": read,
        "progress": progress,
    }
    if isinstance(reference, os.PathLike) or is_gguf_path(reference, store.has_model):
        return _open_file(reference, verify, **options)
    if is_address(reference):
        if thaw:
            raise UsageError("thaw is for models of the store; pull the model first")
        with contextlib.ExitStack() as ending:
            found = _find_remote(store, reference, cache, cache_limit)
            remote, verdict = ending.enter_context(found)
            if plan:
                return remote.read_plan()
            model = remote.open(verify, **options)
            model.verdict = verdict
            # After what the model itself ends with: it may be reading until then.
            model.at_end(ending.pop_all().close)
            return model
    if plan:
        return ReadPlan.of(store, store.resolve(reference))
    reference = _named(reference)
    if thaw:
        _thaw(reference, store, progress)
    return _open_local(reference, store, verify, **options)


class LocalStore(local.LocalStore):
    """A folder of blobs and manifests in Ollama's layout.

    Reading needs only read permission; the first import creates the folders. Any number of processes may
    use a store at once. A process waits at most ``lock_timeout`` seconds for a lock that others hold.
    Methods take references as strings too.
    """

    def list(
        self,
        references: Names = (),
        *,
        read_sources: bool = False,
        read_metrics: bool = False,
        on_error: Callable[[StoreError], object] | None = None,
    ) -> tuple[ListedModel, ...]:
        """Return models of the store, sorted by name, as :func:`blobstore.list`.

        Args:
            references: the models, by name or glob; none means all.
            read_sources: read what the models were imported from too.
            read_metrics: read the metrics of the models too.
            on_error: called with the error of each folder of manifests that cannot be read.

        Raises:
            ModelNotFound: a model in ``references`` does not exist.
            StoreError: the store is not a folder or cannot be read.
        """
        return list_models(
            references,
            store=self,
            read_sources=read_sources,
            read_metrics=read_metrics,
            on_error=on_error,
        )

    def open(
        self,
        reference: str | os.PathLike[str] | Reference,
        *,
        framework: Framework = "numpy",
        **options: Unpack[_StoreOptions],
    ) -> Model:
        """Return a model of the store whose tensors can be loaded, as :func:`blobstore.open`.

        Args:
            reference: the name of the model.
            framework: the type of the tensors: ``numpy``, ``torch`` or ``mlx``.
            options: the other options of :func:`blobstore.open`.

        Raises:
            BlobstoreError: as :func:`blobstore.open`.
        """
        return open_model(reference, store=self, framework=framework, **options)

    if not TYPE_CHECKING:  # or no attribute would be wrong

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, functions=sys.modules["blobstore"].__all__)


def _named(reference: str | Reference) -> Reference:
    """Return the name that a text spells. Raises InvalidReference, with advice about a path."""
    try:
        return Reference.of(reference)
    except InvalidReference as error:
        text = str(reference)
        advice = error.advice
        if text.endswith(".safetensors"):
            advice = "blobstore.safetensors.safe_open reads a file, and blobstore.create imports it"
        elif Path(text).is_dir() or text.startswith((".", "/", "~")):
            advice = "blobstore.create imports a folder, and names the model"
        raise InvalidReference(error.message, advice=advice) from None


def _open_file(path: str | os.PathLike[str], verify: Verify, **options: Any) -> Model:
    """Open a GGUF file that is in no store."""
    file = GgufFile(local_path(path, "source").resolve())
    manifest = file.manifest()
    if not is_gguf(file.root):
        raise InvalidGguf(f"{quote(file.root)} is not a GGUF file: it does not begin with 'GGUF'")
    if verify in ("digest", "rehash"):
        file.check_digest()
    model = Model(str(path), manifest.to_bytes(), file, **options)
    model.check(verify)
    return model


@contextlib.contextmanager
def open_files(reference: str | Reference, store: local.StoreLike = None) -> Iterator[ModelFiles]:
    """Give the manifest, config and small files of a model whose policy is checked; no tensor is read.

    Raises:
        ModelNotFound: there is no such model.
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
        NotTrusted, InvalidPolicy: as :func:`open_model`.
        RemoteError: the address is that of a remote model, which cannot be reached.
    """
    store = LocalStore.to_read(store)
    if not is_address(reference):
        reference = Reference.of(reference)
        files = ModelFiles.of(reference, store)
        require_trust(store, reference, files.data)
        yield files
        return
    with _find_remote(store, reference, "none", None) as (remote, _):
        remote.begin()
        yield ModelFiles(remote.reference, remote.manifest_data, remote)


def _open_local(
    reference: Reference, store: local.LocalStore, verify: Verify, **options: Any
) -> Model:
    """Open a model of a store, also if it is replaced at the same time."""
    while True:
        version = store.manifest_version(reference)
        try:
            with contextlib.ExitStack() as lease:
                data = store.read_manifest(reference)
                verdict = require_trust(store, reference, data)
                model = Model(
                    reference,
                    data,
                    store,
                    use_index=not reads_headers(verify),
                    **options,
                )
                model.verdict = verdict
                is_mapped = verify == "size" and model.reading.how != "pread"
                if not (is_mapped and model.map_hot()):
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


def _thaw(reference: Reference, store: local.LocalStore, progress: Progress | None) -> None:
    for fault in thaw_models([reference], store=store, progress=progress).faults:
        raise fault.at(str(reference))


@contextlib.contextmanager
def _find_remote(
    store: local.LocalStore, address: str, cache: Cache, cache_limit: float | str | None
) -> Iterator[tuple[RemoteStore, Verdict | None]]:
    """Find a remote model, and what the policy says about it; its connections end with the block."""
    from blobstore.remotes.fetch_attached import attached
    from blobstore.remotes.remote_store import RemoteStore

    if cache not in get_args(Cache):
        raise UsageError(f"cache must be keep or none, got {quote(cache)}")
    with find_model(address) as source:
        reference = source.address.nearest_name()
        errors: list[RemoteError] = []
        with_model = attached(source, Digest.of(source.data), errors.append)

        def signed(on_error: Callable[[RemoteError], object]) -> Iterator[bytes]:
            yield from with_model.signatures
            for error in errors:
                on_error(error)

        verdict = require_trust(store, reference, source.data, signed)
        remote = RemoteStore(
            store,
            source,
            reference,
            cold_layers=with_model.fetch_layers,
            base_layers=with_model.fetch_bases,
            cache=cache,
            cache_limit=cache_limit,
        )
        yield remote, verdict

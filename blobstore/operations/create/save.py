"""Saves the tensors of a running program as a model, without a file in between."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from blobstore.core.escape import quote
from blobstore.core.files import read_regular
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobstoreError, SafetensorError, UnsupportedSource, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import import_source
from blobstore.operations.create.import_options import ImportOptions
from blobstore.sources.memory import MemorySource
from blobstore.sources.small_files import MAX_SMALL_FILE
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Buffer

    from blobstore.core.progress import Progress
    from blobstore.core.tensor import TensorSpec
    from blobstore.operations.create.create import Created

    File = bytes | Path | Mapping[str, Any]

_METADATA: Final = {"torch": {"format": "pt"}, "mlx": {"format": "mlx"}}
"""What transformers and mlx-lm write into their files, and look for."""


@overload
def save(
    tensors: Mapping[str, Any],
    reference: str | Reference,
    *,
    files: Mapping[str, File] = ...,
    store: StoreLike = ...,
    background: Literal[False] = ...,
    jobs: int | None = ...,
    progress: Progress | None = ...,
) -> Created: ...


@overload
def save(
    tensors: Mapping[str, Any],
    reference: str | Reference,
    *,
    files: Mapping[str, File] = ...,
    store: StoreLike = ...,
    background: Literal[True],
    jobs: int | None = ...,
    progress: Progress | None = ...,
) -> Future[Created]: ...


def save(
    tensors: Mapping[str, Any],
    reference: str | Reference,
    *,
    files: Mapping[str, File] | None = None,
    store: StoreLike = None,
    background: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Created | Future[Created]:
    """Save a state dict as a model: as :func:`create` would import it from one safetensors file.

    Tensors that the store already has are hashed, but not written again. The name appears when all of the
    model is durable. Tensors that share memory are stored once per name.

    Args:
        tensors: tensors of torch, numpy or MLX by name, on any device. They need not be contiguous.
        reference: the name, ``[host/][namespace/]model[:tag]``; a model that has it is replaced.
        files: small files by name: their contents, their paths, or a dict that becomes JSON, as
            ``{"config.json": model.config.to_dict()}``.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        background: copy the tensors, and return a future of the result. The caller may change the tensors
            then; an error of the import is raised by ``future.result()``. Waits for earlier background
            saves first, and in Python 3.12.0 and 3.12.1 for this one too.
        jobs: number of threads; by default one per processor.
        progress: called with the name of a blob, bytes done and total bytes; with ``background`` on
            another thread.

    Returns:
        the name, the digest, and what was written; with ``background``, a future of it.

    Raises:
        UnsupportedSource: a tensor is sparse, distributed, without data, or of a type that safetensors
            files do not have.
        StoreError, StoreBusy, NameConflict: the store cannot be used.
        InvalidReference, UsageError: an argument is invalid.
    """
    started = time.monotonic()
    reference = Reference.of(reference)
    check_jobs(jobs)
    store = LocalStore.of(store)
    store.names.check_name(reference)
    frameworks = {name: _framework(name, tensor) for name, tensor in tensors.items()}
    found = dict(_described(frameworks[name], name, tensor) for name, tensor in tensors.items())
    if "torch" in frameworks.values():
        from blobstore.safetensors import torch

        torch.wait_for_devices(tensors.values())
    metadata = _METADATA.get(next(iter(frameworks.values()), ""), {})
    contents = {name: _content(name, file) for name, file in (files or {}).items()}
    source = MemorySource(found, metadata, contents)

    def run() -> Created:
        with contextlib.closing(source):
            return import_source(
                source,
                reference,
                store,
                ImportOptions(),
                started=started,
                jobs=jobs,
                progress=progress,
            )

    if not background:
        return run()
    wait(list(_RUNNING))  # a name must not get older tensors, and each save needs memory for a copy
    source.copy()
    thread = ThreadPoolExecutor(1, thread_name_prefix="blobstore-save")
    future = thread.submit(run)
    thread.shutdown(wait=False)
    _register_exit()
    _RUNNING.add(future)
    future.add_done_callback(_RUNNING.discard)
    if _STARTS_NO_THREADS_AT_EXIT:
        wait([future])
    return future


_STARTS_NO_THREADS_AT_EXIT: Final = (3, 12) <= sys.version_info < (3, 12, 2)
"""Whether saves that the interpreter waits for would fail (python/cpython#113964); none is in the background then."""
_RUNNING: set[Future[Created]] = set()
"""The saves in the background; a forked process has none."""
os.register_at_fork(after_in_child=_RUNNING.clear)


@functools.cache
def _register_exit() -> None:
    """Let the interpreter wait for background saves before it ends the thread pools that they use."""
    # No public function runs that early. Without this one, the save fails, and the name stays what it was.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_exit)


def _exit() -> None:
    for future in wait(list(_RUNNING)).done:
        error = future.exception()
        if error is not None:  # nobody can ask for the result any more
            sys.excepthook(type(error), error, error.__traceback__)


def _framework(name: str, tensor: object) -> str:
    """Return the library that a tensor is of."""
    for base in type(tensor).__mro__:
        library = base.__module__.partition(".")[0]
        kind = f"{library}.{base.__name__}"
        if kind in ("torch.Tensor", "numpy.ndarray", "mlx.array"):
            return library
    raise UsageError(
        f"{quote(name)} is {quote(type(tensor).__name__)}, and not a tensor of torch, numpy or MLX"
    )


def _described(framework: str, name: str, tensor: Any) -> tuple[TensorSpec, Callable[[], Buffer]]:
    """Return the spec of a tensor, and what returns its bytes.

    Raises:
        UsageError: the name is not a text.
        UnsupportedSource: it cannot be stored.
    """
    if not isinstance(name, str):
        raise UsageError(f"a tensor has the name {quote(name)}, which is not a text")
    if hasattr(tensor, "mask"):  # numpy's masked arrays
        raise UnsupportedSource(f"tensor {quote(name)} has a mask, which would be lost; fill it")
    try:
        if framework == "torch":
            from blobstore.safetensors import torch

            torch.check_has_bytes(name, tensor)
            return torch.spec_of(name, tensor), functools.partial(torch.file_bytes, tensor)
        from blobstore.safetensors import numpy

        if framework == "mlx":
            from blobstore.safetensors import mlx

            tensor = mlx.as_numpy(tensor)
        return numpy.spec_of(name, tensor), functools.partial(numpy.file_bytes, tensor)
    except (KeyError, SafetensorError):
        raise UnsupportedSource(
            f"tensor {quote(name)} is of type {tensor.dtype}, which safetensors files do not have",
            advice="convert it to another type, or leave it out",
        ) from None


def _content(name: str, file: File) -> bytes:
    """Return the content of a small file. Raises UsageError if it cannot be read or encoded."""
    if not isinstance(name, str):
        raise UsageError(f"a file has the name {quote(name)}, which is not a text")
    if isinstance(file, bytes):
        return file
    try:
        if isinstance(file, Path):
            return read_regular(file, MAX_SMALL_FILE)
        return (json.dumps(dict(file), indent=2, ensure_ascii=False) + "\n").encode()
    except (BlobstoreError, OSError, TypeError, ValueError) as error:
        raise UsageError(f"file {quote(name)}: {error}") from error

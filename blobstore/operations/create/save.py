"""Saves the tensors of a running program as a model, without a file in between."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, overload

from blobstore.core.escape import escape, quote
from blobstore.core.files import read_regular
from blobstore.core.mmap import new_buffer
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobstoreError, SafetensorError, UnsupportedSource, UsageError
from blobstore.manifests.plain_values import depth_checked
from blobstore.manifests.reference import Reference
from blobstore.manifests.step_record import encode_state, take_tensors
from blobstore.objects.address import is_address
from blobstore.operations.create.create import import_source
from blobstore.operations.create.step import METADATA, StepPlan, save_step
from blobstore.planning.import_options import ImportOptions
from blobstore.sources.memory import MemorySource
from blobstore.sources.small_files import MAX_SMALL_FILE
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Unpack

    from typing_extensions import Buffer

    from blobstore.core.progress import Progress
    from blobstore.core.tensor import TensorSpec
    from blobstore.operations.create.create import Created

    _Described = tuple[TensorSpec, Callable[[], Buffer]]

File = bytes | Path | Mapping[str, Any]


class _Options(TypedDict, total=False):
    """The options that do not change the type of the result."""

    model: str
    files: Mapping[str, File] | None
    metrics: Mapping[str, float] | None
    store: StoreLike
    jobs: int | None
    progress: Progress | None


@overload
def save(
    tensors: Mapping[Any, Any],
    reference: str | Reference,
    *,
    background: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Created: ...


@overload
def save(
    tensors: Mapping[Any, Any],
    reference: str | Reference,
    *,
    background: Literal[True],
    **options: Unpack[_Options],
) -> Future[Created]: ...


def save(
    tensors: Mapping[Any, Any],
    reference: str | Reference,
    *,
    model: str = "",
    files: Mapping[str, File] | None = None,
    metrics: Mapping[str, float] | None = None,
    store: StoreLike = None,
    background: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Created | Future[Created]:
    """Save a state dict as a model, or the nested state of a training program as a step.

    A dict of tensors of one library becomes what :func:`create` would import from one safetensors file. Anything else
    is a step, and with ``model`` or ``metrics`` a dict of tensors is, too: what a ``StoreWriter`` would save on one
    rank, and :func:`load` returns.

    Tensors that the store already has are hashed, but not written again. The name appears when all of the
    model is durable. Tensors that share memory are stored once per name.

    Args:
        tensors: tensors of torch, numpy or MLX by name, on any device. They need not be contiguous. Or dicts,
            lists and tuples of such tensors and of plain values: None, booleans, numbers, texts, bytes, sets,
            and dtypes, devices and sizes of torch. With tensors of torch or MLX, arrays of numpy are plain values.
        reference: the name, ``[host/][namespace/]model[:tag]``; a model that has it is replaced.
        model: the part of a step that is the model, such as ``model`` for ``{"model": …, "optimizer": …}``. The
            step then has two names: ``run:step-1000``, the model alone under its own names, and
            ``run:step-1000.state``, everything. Without it, everything has the one name.
        files: small files of the model by name: their contents, their paths, or a dict that becomes JSON, as
            ``{"config.json": model.config.to_dict()}``.
        metrics: numbers to keep with a step, such as ``{"loss": 1.2}``.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``. Or the address of
            one in object storage, such as ``s3://bucket/prefix``, for a step.
        background: copy the tensors, and return a future of the result. The caller may change the tensors
            then; an error of the import is raised by ``future.result()``. If nobody asks for it, the next save
            in the background raises it, or it ends the process with one line and exit status 120. Waits for
            earlier background saves first, and in Python 3.12.0 and 3.12.1 for this one too. The memory of
            the copy is kept for the next one, until a save without ``background``.
        jobs: number of threads; by default one per processor.
        progress: called with the name of a blob, bytes done and total bytes; with ``background`` on
            another thread.

    Returns:
        the name, the digest, and what was written; with ``background``, a future of it.

    Raises:
        UnsupportedSource: a tensor is sparse, distributed, without data, or of a type that safetensors
            files do not have; or a value is not plain.
        DamagedSource: a tensor was replaced while it was saved, or its framework cannot read it.
        BlobstoreError: with ``background``, there is no memory for the copy, or the interpreter is ending.
        StoreError, StoreBusy, NameConflict: the store cannot be used.
        NameTaken: another process gave the name another model in the meantime.
        InvalidReference, UsageError: an argument is invalid.
    """
    started = time.monotonic()
    check_mapping(tensors, "tensors", "a state dict")
    check_mapping({} if files is None else files, "files", "a dict of small files")
    reference = Reference.of(reference)
    check_jobs(jobs)
    contents = {name: file_content(name, file) for name, file in (files or {}).items()}
    with depth_checked():
        libraries = set(_libraries(tensors))
    framework = next((one for one in ("torch", "mlx") if one in libraries), "numpy")
    options: dict[str, Any] = {"started": started, "jobs": jobs, "progress": progress}
    is_model = {_library(one) for one in tensors.values()} <= {framework}
    if model or metrics is not None or is_address(store) or not is_model:
        state, flat = take_tensors(tensors, lambda one: _library(one) == framework, model)
        record, described = encode_state(state), _described(flat)
        plan = StepPlan(
            described, model=model, files=contents, metrics=metrics, framework=framework
        )
        source = plan.source
        run = functools.partial(save_step, plan, record, reference, store, **options)
    else:
        store = LocalStore.of(store)
        store.names.check_name(reference)
        source = MemorySource(dict(_described(tensors).values()), METADATA[framework], contents)
        run = functools.partial(_save_model, source, reference, store, **options)
    if background:
        return _in_background(run, source, reference)
    _KEPT.clear()
    with contextlib.closing(source):
        return run()


def _in_background(
    run: Callable[[], Created], source: MemorySource, reference: Reference
) -> Future[Created]:
    """Copy the tensors of ``source``, and call ``run`` on another thread."""
    # A name must not get older tensors, and two copies may be too large for the memory.
    for earlier in list(_SAVES):
        earlier.result()
    memory = _memory(sum(spec.nbytes for spec in source.specs.values()))

    def run_and_keep() -> Created:
        try:
            return run()
        finally:
            source.close()
            _KEPT[:] = [memory]

    source.copy(memory)
    future = _Save(reference)
    thread = ThreadPoolExecutor(1, thread_name_prefix="blobstore-save")
    try:
        future.settled = thread.submit(future.settle, run_and_keep)
    except RuntimeError as error:
        _SAVES.discard(future)
        raise BlobstoreError(f"{reference} cannot be saved in the background: {error}") from error
    thread.shutdown(wait=False)
    _register_exit()
    if _STARTS_NO_THREADS_AT_EXIT:
        wait([future])
    return future


_STARTS_NO_THREADS_AT_EXIT: Final = (3, 12) <= sys.version_info < (3, 12, 2)
"""Whether saves that the interpreter waits for would fail (python/cpython#113964); none is in the background then."""


def _save_model(
    source: MemorySource, reference: Reference, store: LocalStore, **options: Any
) -> Created:
    """Import tensors as a model."""
    return import_source(source, store.names.seen(reference), store, ImportOptions(), **options)


def _memory(size: int) -> memoryview:
    """Return memory for a copy of the tensors: that of the last one, if it is large enough."""
    with contextlib.suppress(IndexError):  # another thread may have taken it
        if len(memory := _KEPT.pop()) >= size:
            return memory
        del memory
    try:
        return new_buffer(size)
    except (MemoryError, OSError) as error:
        raise BlobstoreError(
            f"no memory for a copy of the tensors, {size} bytes",
            advice="leave out background, which needs the copy",
        ) from error


class _Save(Future["Created"]):
    """A save in the background, which remembers whether its result was asked for."""

    def __init__(self, reference: Reference) -> None:
        super().__init__()
        self.reference = reference
        self.settled: Future[None] = Future()
        """Done when all that was to be called with the result has been called."""
        self.set_running_or_notify_cancel()
        _SAVES.add(self)

    def settle(self, run: Callable[[], Created]) -> None:
        """Call ``run``, and set what becomes of it."""
        try:
            self.set_result(run())
        except BaseException as error:  # noqa: BLE001 - it is that of the future
            self.set_exception(error)
        else:
            _SAVES.discard(self)

    def result(self, timeout: float | None = None) -> Created:
        try:
            return super().result(timeout)
        finally:
            self._was_asked()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self._was_asked()

    def _was_asked(self) -> None:
        if self.done():
            _SAVES.discard(self)


_KEPT: list[memoryview] = []
"""The memory that the last background save has copied its tensors to, for the next one."""
_SAVES: set[_Save] = set()
"""Saves that are running, and failed ones whose result was not asked for; a forked process has none."""
os.register_at_fork(after_in_child=_SAVES.clear)


@functools.cache
def _register_exit() -> None:
    """Let the interpreter wait for background saves before it ends the thread pools that they use."""
    # No public function runs that early. Without this one, the save fails, and the name stays what it was.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_exit)


def _exit() -> None:
    """Report the saves that failed, and let the process fail, because results cannot be asked for any more."""
    is_failure = False
    wait([future.settled for future in list(_SAVES)])
    for future in list(_SAVES):
        error = future.exception()
        if error is not None:
            is_failure = True
            if not isinstance(error, BlobstoreError):
                sys.excepthook(type(error), error, error.__traceback__)
            if sys.stderr is not None:
                sys.stderr.write(
                    f"blobstore: error: saving {future.reference} in the background failed: "
                    f"{escape(str(error))}\n"
                )
    if is_failure:
        sys.stderr = _FailingAtExit(sys.stderr)


class _FailingAtExit:
    """A standard error that cannot be flushed at the end, which makes the exit status of Python 120.

    Nothing else fails a process that is ending: ``os._exit`` would skip what others do at exit.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush the stream; fail when the interpreter does it for the last time."""
        if self._stream is not None:
            self._stream.flush()
        if sys.is_finalizing():
            raise OSError(errno.EIO, "a background save failed")


def check_mapping(value: object, name: str, expected: str) -> None:
    """Check the type of an argument. Raises UsageError."""
    if not isinstance(value, Mapping):
        advice = "pass its state_dict()" if hasattr(value, "state_dict") else ""
        advice = (
            "the name comes after it" if name == "tensors" and isinstance(value, str) else advice
        )
        raise UsageError(f"{name} is {expected}, got {quote(type(value).__name__)}", advice=advice)


def _library(value: object) -> str:
    """Return the library that a tensor is of; empty for other values."""
    kind: Any = type(value)
    return _library_of(kind)


@functools.lru_cache(maxsize=256)
def _library_of(kind: type) -> str:
    for base in kind.__mro__:
        library = base.__module__.partition(".")[0]
        if f"{library}.{base.__name__}" in ("torch.Tensor", "numpy.ndarray", "mlx.array"):
            return library
    return ""


def _libraries(value: Any) -> Iterator[str]:
    """Yield the libraries of all tensors of a state."""
    if not isinstance(value, Mapping | list | tuple):
        yield _library(value)
        return
    for one in value.values() if isinstance(value, Mapping) else value:
        yield from _libraries(one)


def _described(tensors: Mapping[Any, Any]) -> dict[str, _Described]:
    """Return the specs of tensors and functions that return their bytes, which may be read on other threads.

    Raises:
        UsageError: a name is not a text.
        UnsupportedSource: a tensor cannot be stored.
    """
    described = {name: _described_one(name, tensor) for name, tensor in tensors.items()}
    if any(_library(one) == "torch" for one in tensors.values()):
        from blobstore.safetensors import torch

        torch.wait_for_devices(tensors.values())
    return described


def _described_one(name: str, tensor: Any) -> _Described:
    if not isinstance(name, str):
        raise UsageError(f"a tensor has the name {quote(name)}, which is not a text")
    if hasattr(tensor, "mask"):  # numpy's masked arrays
        raise UnsupportedSource(f"tensor {quote(name)} has a mask, which would be lost; fill it")
    framework = _library(tensor)
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


def file_content(name: str, file: object) -> bytes:
    """Return the content of a small file. Raises UsageError if it cannot be read or encoded."""
    if not isinstance(name, str):
        raise UsageError(f"a file has the name {quote(name)}, which is not a text")
    if isinstance(file, bytes):
        return file
    if not isinstance(file, Path | Mapping):
        what = "its content in bytes, its Path, or a dict that becomes JSON"
        raise UsageError(f"file {quote(name)} is {quote(type(file).__name__)}; give {what}")
    try:
        if isinstance(file, Path):
            return read_regular(file, MAX_SMALL_FILE)
        return (json.dumps(dict(file), indent=2, ensure_ascii=False) + "\n").encode()
    except (BlobstoreError, OSError, TypeError, ValueError) as error:
        raise UsageError(f"file {quote(name)}: {error}") from error

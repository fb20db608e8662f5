"""The rates of loads onto a device, compared with bare copies to it.

A load keeps all of its tensors, so what it takes is bounded by the memory that the device has left. Of a
model that is too large, as many of its first tensors are loaded as need half of that.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import interrupts
from blobstore.core.escape import quote
from blobstore.core.libraries import optional_libraries
from blobstore.core.mmap import new_buffer
from blobstore.core.system import available_memory, may_have_gpu
from blobstore.errors import BlobstoreError, MissingLibrary, UnsupportedSource, UsageError
from blobstore.models.device import transfer
from blobstore.models.frameworks import ArrayTarget
from blobstore.models.header_index import TensorLocation
from blobstore.operations.bench.measurements import (
    PASSES,
    Measurement,
    Place,
    Run,
    call_of_open,
    fits,
    passes_of,
)
from blobstore.operations.open import Verify, open_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from blobstore.core.tensor import TensorSpec
    from blobstore.core.workers import WorkerPool
    from blobstore.manifests.reference import Reference
    from blobstore.models.frameworks import DeviceStream
    from blobstore.store.local import LocalStore

    _Copy = Callable[[WorkerPool], object]
    """Copies, and returns what must not be freed while time is measured."""

AUTO: Final = "auto"
NONE: Final = "none"
_KINDS: Final = ("cpu", "cuda")
_MAX_COPIED: Final = 4 << 30
"""Bytes that bare copies copy at most, if no tensor has more."""
_PIECE: Final = 4 << 20
_PAGE: Final = 4096


def target_of(device: str) -> ArrayTarget | None:
    """Return the device to measure; None without a GPU.

    ``auto`` is the first CUDA device that torch can use. Torch is not imported without a GPU.

    Raises:
        UsageError: no such device can be measured here.
        MissingLibrary: torch is not installed.
    """
    if device == NONE or (device == AUTO and not _has_cuda()):
        return None
    if device == AUTO:
        device = "cuda:0"
    target = None
    if device.partition(":")[0] in _KINDS:
        target = ArrayTarget.of("torch", device)
    if target is None or not (target.has_stream or target.has_views):
        raise UsageError(f"device must be auto, none, cpu, cuda or cuda:N, got {quote(device)}")
    return target


def _has_cuda() -> bool:
    if "torch" not in sys.modules and not may_have_gpu():
        return False
    try:
        with optional_libraries():
            from blobstore.safetensors.copies import has_cuda
    except (MissingLibrary, OSError):  # a broken installation has no device
        return False
    return has_cuda()


def runs_to(
    target: ArrayTarget,
    subject: Path | Reference,
    store: LocalStore | None,
    before: dict[Place, Callable[[], object]],
    ways: Sequence[dict[str, Any]],
    jobs: int,
    notices: list[str],
) -> list[Run]:
    """Return the ways to measure bare copies to a device, and loads onto it.

    Args:
        target: the device, for torch.
        subject: a model of the store, or a GGUF file.
        store: the store.
        before: what to call before a load from each of these places.
        ways: the options of ``open`` that are compared.
        jobs: number of threads that copy to memory of this process.
        notices: collects what is not measured, and why.

    Raises:
        UnsupportedSource: the model has no bytes.
        BlobstoreError: the device has too little memory, or fails. Otherwise as ``open``.
    """
    from blobstore.safetensors.copies import free_memory

    with open_model(subject, store=store, framework="torch", verify="none") as model:
        specs = [spec for spec in model.specs.values() if spec.nbytes]
    total = sum(spec.nbytes for spec in specs)
    if not total:
        raise UnsupportedSource("the model has no bytes to copy")
    free = free_memory(target.device)
    free = available_memory() if free is None else free
    parts = 1 if fits(total, free) else _parts(specs, target.device, free, notices)
    if parts > 1:  # the others bring all of the model into memory of the host
        ways = [
            way for way in ways if not way or (way.get("read") == "pread" and target.has_stream)
        ]
    runs = _copies(target, _first(specs, min(free // 2, _MAX_COPIED)), jobs, notices)
    size = total // parts
    for place, way in itertools.product(before, ways):
        load = functools.partial(_loaded, target, subject, store, place, way, parts)
        runs.append(Run(measure=load, before=before[place], size=size, passes=passes_of(size)))
    return runs


def _parts(specs: Sequence[TensorSpec], device: str, free: int, notices: list[str]) -> int:
    """Return of how many parts of a large model one fits into the memory that is free."""
    largest, total = max(spec.nbytes for spec in specs), sum(spec.nbytes for spec in specs)
    if largest > free // 2:
        raise BlobstoreError(
            f"{device} has {free / 1e6:,.0f} MB of free memory, too little for a tensor of "
            f"{largest / 1e6:,.0f} MB"
        )
    # A part may have half a tensor more than its share.
    parts = -(-total // (free // 2))
    notices.append(
        f"{device} has {free / 1e6:,.0f} MB of free memory, so about {total / parts / 1e6:,.0f} of "
        f"{total / 1e6:,.0f} MB were loaded"
    )
    return parts


def _first(specs: Sequence[TensorSpec], limit: int) -> list[TensorSpec]:
    """Return the first tensors, up to a number of bytes; at least one."""
    ends = itertools.accumulate(spec.nbytes for spec in specs)
    count = sum(end <= limit for end in ends)
    return list(specs[: max(count, 1)])


# Bare copies


def _copies(
    target: ArrayTarget, specs: Sequence[TensorSpec], jobs: int, notices: list[str]
) -> list[Run]:
    """Return the ways to copy tensors of a model from host memory."""
    from blobstore.safetensors.copies import source_of_copies

    device, size = target.device, sum(spec.nbytes for spec in specs)
    source = source_of_copies(size, is_pinned=False)
    copies: dict[str, _Copy] = {"pageable, one by one": _one_by_one(device, specs, source)}
    if (stream := target.stream()) is None:
        how = f"large pages, {jobs} thread{'s' if jobs > 1 else ''}"
        copies[how] = functools.partial(_in_threads, size, source)
    else:
        if (pinned := source_of_copies(size, is_pinned=True)) is not None:
            copies["pinned, one by one"] = _one_by_one(device, specs, pinned)
        else:
            notices.append(
                f"this system refuses pinned memory, from which copies to {device} are faster"
            )
        copies["in the buffers of open"] = functools.partial(_in_buffers, stream, specs)
    return [
        Run(
            measure=functools.partial(_copied, device, how, size, copy),
            size=size,
            passes=PASSES,
            threads=jobs,
        )
        for how, copy in copies.items()
    ]


def _one_by_one(device: str, specs: Sequence[TensorSpec], source: Any) -> _Copy:
    from blobstore.safetensors.copies import copy_each

    return lambda _: copy_each(specs, source, device)


def _in_threads(size: int, source: Any, pool: WorkerPool) -> object:
    """Copy bytes into new memory of this process, as a load that reads does."""
    import numpy as np

    target, values = np.frombuffer(new_buffer(size), np.uint8), source.numpy()

    def copy(begin: int) -> None:
        at = begin % len(values)
        count = min(_PIECE, size - begin)
        np.copyto(target[begin : begin + count], values[at : at + count])  # releases the GIL

    pool.run(range(0, size, _PIECE), copy)
    return target


def _in_buffers(stream: DeviceStream, specs: Sequence[TensorSpec], pool: WorkerPool) -> object:
    """Copy tensors through the buffers of a load, whose threads read no file."""
    del pool  # the load has threads of its own
    begins = itertools.accumulate((spec.nbytes for spec in specs), initial=0)
    places = [TensorLocation(spec, 0, begin) for spec, begin in zip(specs, begins, strict=False)]
    found = []
    for _, tensor in transfer(places, stream, _touch):
        interrupts.check()
        found.append(tensor)
    return found


def _touch(slot: int, begin: int, memory: memoryview) -> None:
    """Write to each page, as memory that was never written to is one page of zeros."""
    del slot, begin
    memory[::_PAGE] = bytes(-(-len(memory) // _PAGE))


def _copied(device: str, how: str, size: int, copy: _Copy, pool: WorkerPool) -> Measurement:
    from blobstore.safetensors.copies import release

    release(device)
    started = time.perf_counter()
    copies = copy(pool)
    seconds = time.perf_counter() - started
    del copies
    pool.report(size, f"copies to {device}")
    return Measurement(
        place="host memory", reader="bare", how=how, size=size, seconds=seconds, device=device
    )


# Loads


def _loaded(
    target: ArrayTarget,
    subject: Path | Reference,
    store: LocalStore | None,
    place: Place,
    way: dict[str, Any],
    parts: int,
    pool: WorkerPool,
) -> Measurement:
    """Load the model onto the device, or one of several parts of it, and return how long that took."""
    from blobstore.safetensors.copies import copy_of_bytes, release, synchronize

    options: dict[str, Any] = {"device": target.device} | way
    how = call_of_open(options)
    # Maps become memory of this process only when they are copied.
    is_mapped = target.has_views and way.get("read") != "pread"
    release(target.device)
    found, size = [], 0
    started = time.perf_counter()
    verify: Verify = "size" if parts == 1 else "none"
    with open_model(subject, store=store, framework="torch", verify=verify, **options) as model:
        for _, tensor in model.iter_tensors(shard=(0, parts)):
            interrupts.check()
            found.append(copy_of_bytes(tensor) if is_mapped else tensor)
            size += tensor.nbytes
            pool.report(tensor.nbytes, how)
        synchronize(target.device)
        seconds = time.perf_counter() - started
        found.clear()
    return Measurement(
        place=place, reader="open", how=how, size=size, seconds=seconds, device=target.device
    )

"""The job of an import that adds one blob, on a thread of the import or in a worker process.

A worker process opens the source and joins the import once, and keeps both open for its other jobs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.quantization.recipes import Copied, Prequantized
from blobstore.quantization.representable import UnreadableGroups
from blobstore.quantization.tensor_bytes import Converter
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from typing_extensions import Buffer

    from blobstore.planning.grouping import BlobPlan
    from blobstore.sources.base import TensorSource
    from blobstore.sources.versions import SourceVersions
    from blobstore.store.ingest import Buffers, Ingest, Ingested


def add_blob(
    blob: BlobPlan,
    ingest: Ingest,
    converter: Converter,
    report: Callable[[int, str], object] = lambda *_: None,
) -> Ingested | UnreadableGroups:
    """Convert the tensors of a blob and add it to an import.

    Returns the added blob, or why a tensor cannot be quantized.

    Args:
        blob: the plan of the blob.
        ingest: the import.
        converter: converts the tensors of its source.
        report: called with the number of bytes added and the name of the blob.

    Raises:
        BlobDamaged, OSError, Cancelled: as :meth:`Ingest.add`.
        DamagedSource: the source cannot be read, or has values that cannot be converted.
    """
    is_copied = all(isinstance(recipe, Copied | Prequantized) for recipe in blob.tensors)
    buffers = reporting(lambda: blob.buffers(converter.convert), report, blob.name)
    try:
        return ingest.add(blob.size, buffers, once=not is_copied)
    except UnreadableGroups as error:
        return error


def reporting(buffers: Buffers, report: Callable[[int, str], object], name: str) -> Buffers:
    """Return ``buffers`` that report their bytes, once even if they are read twice."""
    reported = 0

    def reporting_buffers() -> Iterator[Buffer]:
        nonlocal reported
        done = 0
        for buffer in buffers():
            yield buffer
            done += len(buffer)  # type: ignore[arg-type]
            if done > reported:  # a new blob may be read twice
                report(done - reported, name)
                reported = done

    return reporting_buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedImport:
    """An import that worker processes can join: a picklable value."""

    open_source: Callable[[], TensorSource]
    versions: SourceVersions
    """The versions of the source's files when the import was planned."""
    store: Path
    lock_timeout: float
    name: str
    """See :attr:`Ingest.name`."""
    is_paranoid: bool


class _JoinedImport:
    """The open source and store of an import, in a worker process."""

    def __init__(self, shared: SharedImport) -> None:
        self.source = shared.open_source()
        self.converter = Converter(self.source.read)
        self.running_jobs = 0
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.source.close)
            shared.versions.check_same(self.source.versions)
            store = LocalStore(shared.store, lock_timeout=shared.lock_timeout)
            self.ingest = store.join_ingest(shared.name, paranoid=shared.is_paranoid)
            on_error.pop_all()


_JOINED: dict[str, _JoinedImport] = {}
_LOCK = threading.Lock()


def _forget_in_child() -> None:
    # A forked process has neither the thread that may hold the lock, nor the jobs of the others.
    global _LOCK  # noqa: PLW0603
    _LOCK = threading.Lock()
    _JOINED.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def add_in_worker(shared: SharedImport, blob: BlobPlan) -> Ingested | UnreadableGroups:
    """Do as :func:`add_blob`, in a process that does not have the import's objects."""
    close_joined()
    with _LOCK:
        joined = _JOINED.get(shared.name)
        if joined is None:
            joined = _JOINED[shared.name] = _JoinedImport(shared)
        joined.running_jobs += 1
    try:
        return add_blob(blob, joined.ingest, joined.converter)
    finally:
        with _LOCK:
            joined.running_jobs -= 1


def close_joined(name: str = "") -> None:
    """Close what this process opened for the import ``name``, and for imports that have ended."""
    with _LOCK:
        for other, joined in list(_JOINED.items()):
            if not joined.running_jobs and (other == name or joined.ingest.has_ended):
                del _JOINED[other]
                joined.source.close()
                joined.ingest.close()

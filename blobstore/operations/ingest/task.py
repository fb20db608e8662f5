"""The import of one model, as a worker does it: it takes and returns plain values only."""

from __future__ import annotations

import contextlib
import tempfile
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core import interrupts
from blobstore.errors import BlobstoreError, RemoteError, RemoteRefused, StoreError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.store.local import LocalStore
from blobstore.store.names import ABSENT, NameUpdate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class Outcome(NamedTuple):
    """The outcome for one model."""

    is_present: bool
    """Whether the target had the name already, so that nothing was done."""
    blobs: int
    bytes_written: int
    """Bytes of blobs that the target did not have."""
    seconds: float
    error: str
    """Why it failed; empty if it did not."""
    kind: str
    """The type of that error."""
    exit_code: int
    is_final: bool
    """Whether another attempt would fail in the same way."""


def run_task(task: Callable[..., Outcome], *args: Any) -> Outcome:
    """Run a task in a worker process, which SIGTERM ends: at once, or after the clean-up of the task."""
    with interrupts.recorded():
        return task(*args)


def find_present(name: str, target: LocalStore | str) -> Outcome | None:
    """Return the outcome for a name that a store has already; None if it must be imported, or is not a name."""
    with contextlib.suppress(BlobstoreError):
        if isinstance(target, LocalStore) and target.has_model(name):
            return Outcome(True, 0, 0, 0.0, "", "", 0, is_final=True)
    return None


def import_model(
    source: str, name: str, target: LocalStore | str, options: Mapping[str, Any]
) -> Outcome:
    """Import a model, unless the target has the name already.

    A worker may be killed at any time, and do the same again later: the name appears last.

    Args:
        source: as for :func:`~blobstore.operations.create.create.create`.
        name: the name that the model gets.
        target: a store, or the address of one in object storage.
        options: of that function.
    """
    started = time.monotonic()

    def outcome(*, present: bool = False, blobs: int = 0, written: int = 0) -> Outcome:
        return Outcome(
            present, blobs, written, time.monotonic() - started, "", "", 0, is_final=True
        )

    try:
        reference = Reference.parse(name)
        if isinstance(target, str):
            return _import_remote(source, reference, target, options, outcome)
        store = _store(target.root, target.lock_timeout)
        if store.has_model(reference):
            return outcome(present=True)
        created = create(source, NameUpdate(reference, ABSENT), store=store, **options)
        return outcome(blobs=created.blobs, written=created.bytes_written)
    except (BlobstoreError, OSError) as error:
        may_pass = isinstance(error, (RemoteError, StoreError, OSError))
        return Outcome(
            is_present=False,
            blobs=0,
            bytes_written=0,
            seconds=time.monotonic() - started,
            error=str(error),
            kind=type(error).__name__,
            exit_code=getattr(error, "exit_code", 1),
            is_final=not may_pass or isinstance(error, RemoteRefused),
        )


@lru_cache(maxsize=1)
def _store(root: Path, lock_timeout: float) -> LocalStore:
    """Return the store of all tasks of a worker, so that they list the names of a namespace once.

    Each task gets a copy of the store, as it was before the first one.
    """
    return LocalStore(root, lock_timeout=lock_timeout)


def _import_remote(
    source: str, reference: Reference, target: str, options: Mapping[str, Any], outcome: Any
) -> Outcome:
    """Import a model into a temporary store of this machine, and push it from there."""
    from blobstore.objects.address import StoreAddress
    from blobstore.objects.store import ObjectStore
    from blobstore.operations.transfer.push import push_model

    if ObjectStore(StoreAddress.parse(target)).has_model(reference):
        found: Outcome = outcome(present=True)
        return found
    with tempfile.TemporaryDirectory(prefix="blobstore-ingest-") as folder:
        create(source, reference, store=folder, **options)
        pushed = push_model(reference, target, store=folder)
    done: Outcome = outcome(blobs=pushed.blobs, written=pushed.bytes_sent)
    return done

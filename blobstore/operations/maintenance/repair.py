"""Workflow: damaged and missing blobs are written anew, from a source or from another store.

The right bytes are on disk, under a temporary name, synced and their digest checked, before anything
is touched. Then, with the store's lock alone, what is damaged is put aside and they take its place. So
a crash leaves a blob as it was or whole. What does not have the digest is never put anywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digester
from blobstore.core.escape import quote
from blobstore.core.files import make_folders, write_all
from blobstore.core.progress import Meter
from blobstore.errors import BlobstoreError, ModelNotFound
from blobstore.manifests import media_types
from blobstore.manifests.check import ADVICE
from blobstore.manifests.model import layers_digest
from blobstore.manifests.reference import Reference
from blobstore.models.index import load_index, write_index
from blobstore.operations.maintenance.repair_manifests import restore_manifests
from blobstore.operations.maintenance.repair_sources import OwnOrigin, StoreOrigin, open_origin
from blobstore.operations.maintenance.verify import verify_models
from blobstore.sources.base import SourceOptions
from blobstore.store.bases import states, which_are_whole
from blobstore.store.local import LocalStore
from blobstore.store.quarantine import put_in_place, quarantine_cold

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

    from blobstore.core.digest import BlobId, Digest
    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.operations.maintenance.repair_manifests import Restored
    from blobstore.operations.maintenance.repair_sources import BlobProvider, Candidate
    from blobstore.operations.maintenance.verify import Fault, Verified

_BACKUP = "create the model again, or take the file from a backup"
_NO_MANIFEST = f"a manifest that is gone cannot be repaired; {_BACKUP}"
_MANIFEST = f"a manifest can be had only from another store that has the model; or {_BACKUP}"


class RepairedBlob(NamedTuple):
    """A blob that was written anew, or would be."""

    digest: Digest
    size: int
    layer: str
    """The name of a layer that it is, or its media type."""
    aside: Path | None
    """Where the damaged file is now; None where there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What :func:`repair_models` found and did."""

    verified: Verified
    """What was found of the blobs before."""
    restored: tuple[Restored, ...]
    """Manifests that were put back before that, or would be."""
    mended: tuple[RepairedBlob, ...]
    faults: tuple[Fault, ...]
    """What remains; none if all models are whole now."""
    notices: tuple[str, ...]
    """What a person should know of the source, one line each."""
    seconds: float


def repair_models(
    references: Sequence[Reference] = (),
    source: str | os.PathLike[str] | None = None,
    *,
    store: LocalStore | None = None,
    overrides: Sequence[str] = (),
    weights: str | None = None,
    ignore_unindexed: bool = False,
    subtree: str | None = None,
    keep_names: bool = False,
    dry_run: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Verify models, and write what is damaged or missing of their blobs anew.

    Args:
        references: the models; none means all of the store.
        source: what a model was created from, or the folder of another store; with None, damage is
            mended only in blobs that the store has in another form too.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        overrides: as they were when the model was quantized; other settings are found out.
        weights: as for :func:`blobstore.create`.
        ignore_unindexed: as for :func:`blobstore.create`.
        subtree: as for :func:`blobstore.create`.
        keep_names: as for :func:`blobstore.create`.
        dry_run: change nothing; the bytes are made nevertheless, to see whether they are right.
        jobs: threads; by default the machine's processors.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        ModelNotFound: a model that was asked for has no manifest; that cannot be repaired.
        SourceError, DamagedSource, SourceNotFound: the source cannot be read at all.
        StoreBusy: others have kept the store's lock all the time.
        StoreError: the store cannot be read or written. What was mended before stays.
        UsageError: an argument means nothing, or the source is the store itself.
    """
    started = time.monotonic()
    store = store or LocalStore()
    with contextlib.ExitStack() as stack:
        origin: BlobProvider | None = None
        notices: Sequence[str] = ()
        if source is not None:
            options = SourceOptions(
                weights=weights,
                ignore_unindexed=ignore_unindexed,
                subtree=subtree,
                keep_names=keep_names,
            )
            origin, notices = open_origin(source, store, overrides, options, progress)
            stack.callback(origin.close)
        restored: tuple[Restored, ...] = ()
        if isinstance(origin, StoreOrigin):
            names = references or tuple(store.references())
            restored = tuple(restore_manifests(store, origin.store, names, is_dry=dry_run))
        try:
            verified = verify_models(references, store=store, jobs=jobs, progress=progress)
        except ModelNotFound as error:
            raise ModelNotFound(f"{error}; {_NO_MANIFEST}") from None
        work = _Repair(store, verified.damaged, quote(source), jobs, progress, is_dry=dry_run)
        work.run(origin)
    whole = {str(digest) for digest, _ in work.whole}
    is_store = isinstance(origin, StoreOrigin)
    of_manifest = f"{quote(source)} has none that is surely the same; {_BACKUP}"
    work.reasons[""] = of_manifest if is_store else _MANIFEST
    faults = _without(verified, restored) if dry_run else verified.faults
    return Repaired(
        verified=verified,
        restored=restored,
        mended=tuple(work.mended),
        faults=tuple(_remaining(store, faults, whole, work.reasons, is_dry=dry_run)),
        notices=tuple(notices),
        seconds=time.monotonic() - started,
    )


def _without(verified: Verified, restored: Sequence[Restored]) -> list[Fault]:
    """Return the faults that are not those of manifests that would be put back."""
    damaged = {(blob.digest, blob.size) for blob in verified.damaged}
    left = {
        str(item.reference): {
            str(blob.digest) for blob in item.manifest.blobs if (blob.digest, blob.size) in damaged
        }
        for item in restored
    }
    return [it for it in verified.faults if it.blob in left.get(it.reference, {it.blob})]


def _remaining(
    store: LocalStore,
    faults: Sequence[Fault],
    whole: Collection[str],
    reasons: dict[str, str],
    *,
    is_dry: bool,
) -> Iterator[Fault]:
    """Yield the faults that are left, with the reason why, and those that others had hidden."""
    told = set()
    for fault in faults:
        if fault.blob not in whole:
            told.add((fault.reference, fault.layer, fault.blob))
            reason = reasons.get(fault.blob, "")
            message = fault.message.removesuffix(f"; {ADVICE}")
            yield replace(fault, message=f"{message}; {reason}") if reason else fault
    mended = dict.fromkeys(fault.reference for fault in faults if fault.blob in whole)
    for name in () if is_dry else mended:
        with contextlib.suppress(ModelNotFound):  # removed since
            for fault in verify_models([Reference.parse(name)], store=store, quick=True).faults:
                if (fault.reference, fault.layer, fault.blob) not in told:
                    yield fault


class _Unreadable(Exception):
    """The origin fails at a blob; that is no reason to leave the others."""


class _Repair:
    """The mending of blobs, a job each."""

    def __init__(
        self,
        store: LocalStore,
        damaged: Sequence[Descriptor],
        origin_name: str,
        jobs: int | None,
        progress: Progress | None,
        *,
        is_dry: bool,
    ) -> None:
        self._store = store
        self._own = OwnOrigin(store)
        self._wanted: dict[BlobId, Descriptor] = {blob.id: blob for blob in damaged}
        self._origin_name = origin_name
        self._jobs = jobs
        self._progress = progress
        self._is_dry = is_dry
        self._prefix = ""
        self._numbers = itertools.count()
        self._placing = threading.Lock()
        self._stop = threading.Event()
        self.mended: list[RepairedBlob] = []
        self.whole: set[BlobId] = set()
        """What is whole now, also if others have mended it meanwhile."""
        self.reasons: dict[str, str] = {}
        """Why a blob is not, by its digest."""

    def run(self, origin: BlobProvider | None) -> None:
        """Mend what can be mended. Raises as :func:`repair_models`."""
        if not self._wanted or (origin is None and not self._own.has_any(self._wanted)):
            return
        if self._is_dry:
            self._try_rounds(origin)
            return
        with self._store.writing():
            for folder in (self._store.folder("blobs"), self._store.folder("temporary")):
                make_folders(folder, self._store.root)
            # For its name alone, that temporary files are of a living process: manifests reach them.
            with self._store.lease() as lease:
                self._prefix = f"{lease.name}-"
                self._put_cold_aside()
                self._try_rounds(origin)
        # What was coded by a damaged blob is whole again with that one.
        cold = {key: it for key, it in self._wanted.items() if self._store.has_cold(it.digest)}
        self.whole |= {key for key, blob in cold.items() if self._judge(blob) == (True, True)}
        self._renew_indexes()

    def _put_cold_aside(self) -> None:
        """Put cold blobs aside that are damaged, but whole in their hot form."""
        for key, blob in list(self._wanted.items()):
            seen = states(self._store, blob.digest)
            if self._store.has_hot(blob.digest) and self._judge(blob) == (True, False):
                with self._store.exclusive_lock():
                    if states(self._store, blob.digest) == seen:
                        self._note(blob, quarantine_cold(self._store, blob.digest), is_right=True)
                        del self._wanted[key]

    def _try_rounds(self, origin: BlobProvider | None) -> None:
        for candidates in self._own.rounds(self._wanted):
            self._try_all(candidates)
        self.reasons = {}
        if origin is not None:
            missing = f"nothing in {self._origin_name} has its name and size"
            self.reasons = {str(digest): missing for digest, _ in self._wanted}
            for candidates in origin.rounds(self._wanted, set(self._lists())):
                self._try_all(candidates)

    def _try_all(self, candidates: Sequence[Candidate]) -> None:
        meter = Meter(self._progress, sum(item.blob.size for item in candidates))
        with ThreadPoolExecutor(
            self._jobs or os.cpu_count(), thread_name_prefix="blobstore-repair"
        ) as pool:
            try:
                jobs = [pool.submit(self._try, item, meter) for item in candidates]
                for done in as_completed(jobs):
                    done.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        for key in self.whole:
            self._wanted.pop(key, None)

    def _lists(self) -> Iterator[Digest]:
        """Yield what the configs that are wanted hold of their models."""
        if not any(blob.media_type == media_types.CONFIG for blob in self._wanted.values()):
            return
        for reference in self._store.references():
            with contextlib.suppress(BlobstoreError):
                _, manifest = self._store.parse(reference)
                if (manifest.config.digest, manifest.config.size) in self._wanted:
                    yield layers_digest(manifest.layers)

    def _try(self, candidate: Candidate, meter: Meter) -> None:
        digest = candidate.blob.digest
        try:
            if self._is_dry:
                is_right = self._is_right(candidate, meter, None)
                self._note(candidate.blob, None, is_right=is_right)
            else:
                self._mend(candidate, meter)
        except _Unreadable as error:
            self.reasons[str(digest)] = str(error)

    def _mend(self, candidate: Candidate, meter: Meter) -> None:
        path = self._store.folder("temporary") / f"{self._prefix}{next(self._numbers)}"
        # Read-only from the start: a descriptor opened for writing stays usable.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
        try:
            try:
                is_right = self._is_right(candidate, meter, descriptor)
                if is_right:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_right:
                self._place(candidate.blob, path)
            else:
                self._note(candidate.blob, None, is_right=False)
        finally:
            path.unlink(missing_ok=True)

    def _is_right(self, candidate: Candidate, meter: Meter, descriptor: int | None) -> bool:
        """Tell whether the bytes have the digest; write them to ``descriptor`` if there is one."""
        blob = candidate.blob
        digester = Digester()
        for piece in self._pieces(candidate):
            digester.update(piece)
            if digester.size > blob.size:  # another store's file that grows
                return False
            if descriptor is not None:
                write_all(descriptor, piece)
            meter.add(memoryview(piece).nbytes, blob.name or str(blob.digest))
        return (digester.digest(), digester.size) == (blob.digest, blob.size)

    def _pieces(self, candidate: Candidate) -> Iterator[Buffer]:
        try:
            for piece in candidate.buffers():
                self._check_going()
                yield piece
        except (BlobstoreError, OSError) as error:
            raise _Unreadable(f"{self._origin_name} cannot be read: {error}") from error

    def _check_going(self) -> None:
        if self._stop.is_set():
            raise _Unreadable("stopped")

    def _place(self, blob: Descriptor, ready: Path) -> None:
        """Put a file in a blob's place, unless that has become whole meanwhile."""
        while True:
            seen = states(self._store, blob.digest)
            is_whole, is_cold_whole = self._judge(blob)
            if is_whole and is_cold_whole:
                self.whole.add(blob.id)
                return
            # Threads of one process would keep each other from the store's lock.
            with self._placing, self._store.exclusive_lock():
                if states(self._store, blob.digest) != seen:
                    continue
                aside = None if is_whole else put_in_place(self._store, blob.digest, ready)
                if not is_cold_whole:
                    aside = quarantine_cold(self._store, blob.digest) or aside
                break
        self._note(blob, aside, is_right=True)

    def _judge(self, blob: Descriptor) -> tuple[bool, bool]:
        return which_are_whole(self._store, blob.digest, blob.size, lambda _: self._check_going())

    def _note(self, blob: Descriptor, aside: Path | None, *, is_right: bool) -> None:
        if is_right:
            self.whole.add(blob.id)
            name = blob.name or blob.media_type
            self.mended.append(RepairedBlob(blob.digest, blob.size, name, aside))
        else:
            self.reasons[str(blob.digest)] = f"{self._origin_name} gives other bytes for it"

    def _renew_indexes(self) -> None:
        """Make header indexes anew that may be of damaged headers."""
        digests = {digest for digest, _ in self.whole}
        for reference in self._store.references():
            with contextlib.suppress(BlobstoreError):
                data, manifest = self._store.parse(reference)
                if any(blob.digest in digests for blob in manifest.blobs):
                    write_index(self._store, data, load_index(self._store, data, use_index=False))

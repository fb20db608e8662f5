"""The operation ``repair``: rewrites damaged and missing blobs from a source or another store.

The right bytes are written under a temporary name, synced and hashed before anything else changes.
Then, under the store's exclusive lock, the damaged file moves to quarantine and the right one takes
its place. So a crash leaves each blob either as it was or intact, and bytes with a wrong digest are
never used.
"""

from __future__ import annotations

import contextlib
import glob
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core import interrupts
from blobstore.core.arguments import one_or_more
from blobstore.core.digest import Digester
from blobstore.core.escape import quote_place
from blobstore.core.files import make_folders, write_all
from blobstore.core.workers import Cancelled, WorkerPool, check_jobs
from blobstore.errors import BlobstoreError, ModelNotFound
from blobstore.manifests import media_types
from blobstore.manifests.layers_digest import layers_digest
from blobstore.models.header_index import rewrite_indexes
from blobstore.models.source_layers import read_source_record
from blobstore.operations.maintenance.repair_manifests import restore_manifests
from blobstore.operations.maintenance.repair_sources import (
    OtherBlobs,
    OtherFiles,
    RebuiltBlobs,
    open_other,
)
from blobstore.operations.maintenance.verify import Verified, verify_models
from blobstore.planning.import_options import ImportOptions
from blobstore.sources.base import DEFAULT_OPTIONS, SourceOptions
from blobstore.sources.open import open_source
from blobstore.store.bases import pin, states, which_are_whole
from blobstore.store.catalog import read_entries
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models
from blobstore.store.quarantine import quarantine_cold, replace_damaged

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

    from blobstore.core.digest import BlobId, Digest
    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Names, Reference
    from blobstore.operations.maintenance.repair_manifests import Restored
    from blobstore.operations.maintenance.repair_sources import BlobProvider, Candidate
    from blobstore.operations.maintenance.verify import Fault
    from blobstore.sources.base import TensorSource
    from blobstore.store.leases import Lease

_BACKUP = "create the model again, or take the file from a backup"
_NO_MANIFEST = (
    "only a store or a remote that has a model of this name can restore its manifest, if the store knows the name or has "
    f"the blobs; pull it or copy it from there, or {_BACKUP}"
)
_LOST = "; it has the options of create, so give them again"
_MANIFEST = f"only a store or a remote that has the model can restore a manifest; or {_BACKUP}"


class RepairedBlob(NamedTuple):
    """A blob that was rewritten, or would be."""

    digest: Digest
    size: int
    layer: str
    """The name of one of its layers, or its media type."""
    quarantined: Path | None
    """The new place of the damaged file; None if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """The result of :func:`blobstore.repair`."""

    verified: Verified
    """The faults before the repair of blobs."""
    restored: tuple[Restored, ...]
    """Manifests that were restored before that, or would be."""
    repaired: tuple[RepairedBlob, ...]
    faults: tuple[Fault, ...]
    """The faults that remain; none if all models are intact now."""
    notices: tuple[str, ...]
    """Notes on the source for the user, one line each."""
    seconds: float


def repair_models(
    references: Names = (),
    source: str | os.PathLike[str] | None = None,
    *,
    store: StoreLike = None,
    overrides: str | Sequence[str] = (),
    weights: str | None = None,
    ignore_unindexed: bool = False,
    subtree: str | None = None,
    strip_prefix: str | None = None,
    keep_names: bool = False,
    skip_unreadable: bool = False,
    keep: Sequence[str] = (),
    exclude: Sequence[str] = (),
    dry_run: bool = False,
    plain_http: bool | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Verify models, and rewrite damaged and missing blobs and manifests.

    Args:
        references: the models; none means all of the store.
        source: the source that a model was created from; or the folder of another store, or the address of
            models in a registry, object storage or ``blobstore serve``. With None, only blobs are repaired of
            which the store has another file.
        store: the store or its path; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        overrides: the overrides that the model was quantized with; other settings are detected.
        weights: as for :func:`blobstore.create`.
        ignore_unindexed: as for :func:`blobstore.create`.
        subtree: as for :func:`blobstore.create`.
        strip_prefix: as for :func:`blobstore.create`.
        keep_names: as for :func:`blobstore.create`.
        skip_unreadable: as for :func:`blobstore.create`.
        keep: as for :func:`blobstore.create`.
        exclude: as for :func:`blobstore.create`.
        dry_run: change nothing. The bytes are still built and hashed.
        plain_http: whether to use HTTP without TLS for a registry; by default only for this machine.
        jobs: number of threads; by default one per processor.
        progress: called with the current blob, bytes done and bytes in total.

    Returns:
        the blobs and manifests that were rewritten, and the faults that are left.

    Raises:
        ModelNotFound: a model in ``references`` has no manifest, and ``source`` has none of this name, or the store
            neither knows the name nor has the blobs.
        RemoteError: the remote cannot be reached, refuses access or misbehaves.
        SourceError, DamagedSource, SourceNotFound: the source cannot be read at all; or it changed
            while it was read, and not all blobs could be repaired.
        StoreBusy: the store's lock could not be acquired in time.
        StoreError: the store cannot be read or written. Blobs repaired before that stay repaired.
        UsageError: an argument is invalid, or the source is the store itself.
    """
    started = time.monotonic()
    check_jobs(jobs)
    store = LocalStore.of(store)
    chosen = named_models(store, references)
    options = SourceOptions(
        weights=weights,
        ignore_unindexed=ignore_unindexed,
        subtree=subtree,
        strip_prefix=strip_prefix,
        keep_names=keep_names,
        skip_unreadable=skip_unreadable,
        keep=tuple(keep),
        exclude=tuple(exclude),
    )
    opened: TensorSource | None = None
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(open_other(source, store, chosen, plain_http))
        restored = tuple(restore_manifests(store, other, chosen, is_dry=dry_run))
        if other is None and source is not None:
            models = chosen or store.references()
            opened, options = _open_source(source, options, store, models, progress)
            stack.callback(opened.close)
        new = {item.reference for item in restored if not store.has_model(item.reference)}
        there = [name for name in chosen if name not in new] if dry_run else chosen
        try:
            read_entries(store, there)  # fails for those of the shared store
            verified = (
                Verified()
                if chosen and not there
                else verify_models(there, store=store, jobs=jobs, progress=progress)
            )
        except ModelNotFound as error:
            raise ModelNotFound(f"{error.message}; {_NO_MANIFEST}", advice=error.advice) from None
        provider: BlobProvider | None = None
        if other is not None:
            provider = OtherBlobs(other)
        elif opened is not None:
            damaged = {blob.id for blob in verified.damaged}
            provider = _rebuilt(opened, options, one_or_more(overrides), store, damaged)
        work = _Repair(
            store, verified.damaged, quote_place(str(source)), jobs, progress, is_dry=dry_run
        )
        work.run(provider)
        if not dry_run:
            with interrupts.deferred():  # all blobs are in place
                _pin_bases(store)
        if opened is not None and not work.intact.issuperset(blob.id for blob in verified.damaged):
            opened.check_unchanged()  # otherwise the digests say wrong things about the source
    intact = {str(digest) for digest, _ in work.intact}
    of_other = f"{quote_place(str(source))} has no manifest that is certainly the same; {_BACKUP}"
    work.reasons[""] = _MANIFEST if other is None else of_other
    with interrupts.deferred():  # all is done, and the user learns what
        faults = tuple(_remaining(store, verified, restored, intact, work.reasons, is_dry=dry_run))
    return Repaired(
        verified=verified,
        restored=restored,
        repaired=tuple(work.repaired),
        faults=faults,
        notices=() if opened is None else tuple(opened.notices),
        seconds=time.monotonic() - started,
    )


def _open_source(
    source: str | os.PathLike[str],
    options: SourceOptions,
    store: LocalStore,
    references: Iterable[Reference],
    progress: Progress | None,
) -> tuple[TensorSource, SourceOptions]:
    """Open the source of models; return its options, too, by default those that the models record."""
    manifests = list(_manifests(store, references))
    recorded = {it.source for it in _recorded(store, manifests) or ()}
    if options == DEFAULT_OPTIONS and len(recorded) == 1:
        (options,) = recorded
    # The source must offer every file that the models have, even one that it leaves out by default.
    kept = {layer.name for it in manifests for layer in it.layers_of(media_types.FILE)}
    every = replace(options, keep=(*options.keep, *map(glob.escape, sorted(kept))))
    return open_source(source, every, progress=progress), options


def _rebuilt(
    opened: TensorSource,
    options: SourceOptions,
    overrides: Sequence[str],
    store: LocalStore,
    damaged: Collection[BlobId],
) -> RebuiltBlobs:
    """Return a builder of damaged blobs, with the options with which their models were created."""
    users = [
        manifest
        for manifest in _manifests(store, store.references())
        if any(blob.id in damaged for blob in manifest.blobs)
    ]
    lists = {layers_digest(manifest.layers) for manifest in users}
    return RebuiltBlobs(opened, options, overrides, lists, _recorded(store, users))


def _manifests(store: LocalStore, references: Iterable[Reference]) -> Iterator[Manifest]:
    """Yield the manifests that can be read."""
    for reference in references:
        with contextlib.suppress(BlobstoreError):
            yield store.parse(reference)[1]


def _recorded(store: LocalStore, manifests: Iterable[Manifest]) -> list[ImportOptions] | None:
    """Return the options that models were created with, each once; None if a model does not say."""
    found: dict[ImportOptions, None] = {}
    for manifest in manifests:
        try:
            record = read_source_record(store, manifest)
            if record is None:
                return None
            found[ImportOptions.from_json(record.options)] = None
        except BlobstoreError:
            return None
    return list(found)


def _remaining(
    store: LocalStore,
    verified: Verified,
    restored: Sequence[Restored],
    intact: Collection[str],
    reasons: dict[str, str],
    *,
    is_dry: bool,
) -> Iterator[Fault]:
    """Yield the faults that remain, with the reason, and faults that others had hidden."""
    faults: Sequence[Fault] = verified.faults
    if is_dry:  # the faults of manifests that would be restored do not remain
        damaged = {blob.id for blob in verified.damaged}
        left = {"": set[str]()} if restored else {}  # what is wrong with the whole store
        left |= {
            str(item.reference): {
                str(blob.digest) for blob in item.manifest.blobs if blob.id in damaged
            }
            for item in restored
        }
        faults = [it for it in faults if it.blob in left.get(it.reference, {it.blob})]
    reported = set()
    for fault in faults:
        if fault.blob not in intact:
            reported.add((fault.reference, fault.layer, fault.blob))
            reason = reasons.get(fault.blob, "")
            yield replace(fault, message=f"{fault.message}; {reason}") if reason else fault
    repaired = dict.fromkeys(fault.reference for fault in faults if fault.blob in intact)
    for name in () if is_dry else repaired:
        with contextlib.suppress(ModelNotFound):  # removed since
            for fault in verify_models([name], store=store, quick=True).faults:
                if (fault.reference, fault.layer, fault.blob) not in reported:
                    yield fault


def _pin_bases(store: LocalStore) -> None:
    """Give the hot bases of cold blobs their second links again, as the only derived files that are not caches."""
    bases = set(store.cold_bases().values())
    loose = [it for it in bases if store.has_hot(it) and not store.has_base_link(it)]
    if any(not store.has_cold(it) for it in loose):
        with store.writing(), store.exclusive_lock():
            for base in loose:
                pin(store, base)


class _Unreadable(Exception):
    """A candidate cannot be read. The other blobs are repaired all the same."""


class _Repair:
    """Repairs blobs, one job per candidate."""

    def __init__(
        self,
        store: LocalStore,
        damaged: Sequence[Descriptor],
        source_name: str,
        jobs: int | None,
        progress: Progress | None,
        *,
        is_dry: bool,
    ) -> None:
        self._store = store
        self._wanted = {blob.id: blob for blob in damaged}
        self._source_name = source_name
        self._jobs = jobs
        self._progress = progress
        self._is_dry = is_dry
        self._lease: Lease
        """Owns the temporary files; only set if blobs are written."""
        self._placing = threading.Lock()
        self._pool = WorkerPool(jobs, None, 0)
        self.repaired: list[RepairedBlob] = []
        self.intact: set[BlobId] = set()
        """Blobs that are intact now, including blobs that another process has repaired."""
        self.reasons: dict[str, str] = {}
        """Why a blob could not be repaired, by its digest."""

    def run(self, provider: BlobProvider | None) -> None:
        """Repair as many blobs as possible. Raises as :func:`repair_models`."""
        own = OtherFiles(self._store)
        if not self._wanted or (provider is None and not own.has_any(self._wanted)):
            return
        if self._is_dry:
            self._try_providers(own, provider)
            return
        with self._store.writing():
            for folder in (self._store.folder("blobs"), self._store.folder("temporary")):
                make_folders(folder, self._store.root)
            # The lease only marks the temporary files as used; manifests reference the blobs.
            with self._store.lease() as self._lease:
                self._remove_unneeded_cold()
                self._try_providers(own, provider)
        # A blob that is delta-encoded against a damaged base is intact again with its base.
        cold = {key: it for key, it in self._wanted.items() if self._store.has_cold(it.digest)}
        self.intact |= {key for key, blob in cold.items() if self._judge(blob) == (True, True)}
        # Header indexes may come from damaged headers.
        with interrupts.deferred():
            rewrite_indexes(self._store, {digest for digest, _ in self.intact})

    def _remove_unneeded_cold(self) -> None:
        """Move damaged cold blobs whose hot file is intact to quarantine: they are not needed."""
        for key, blob in list(self._wanted.items()):
            # Judging reads the files, which takes long, so the lock is taken after it, and the states
            # are compared.
            seen = states(self._store, blob.digest)
            if self._store.has_hot(blob.digest) and self._judge(blob) == (True, False):
                with self._store.exclusive_lock():
                    if states(self._store, blob.digest) == seen:
                        self._note_repair(blob, quarantine_cold(self._store, blob.digest))
                        del self._wanted[key]

    def _try_providers(self, own: OtherFiles, provider: BlobProvider | None) -> None:
        self._try_all(own.rounds(self._wanted))
        self.reasons = {}
        if provider is not None:
            missing = f"nothing in {self._source_name} has its name and size"
            self.reasons = {
                str(blob.digest): missing + (_LOST if blob.media_type == media_types.SOURCE else "")
                for blob in self._wanted.values()
            }
            self._try_all(provider.rounds(self._wanted))

    def _try_all(self, rounds: Iterable[Sequence[Candidate]]) -> None:
        for candidates in rounds:
            total = sum(candidate.blob.size for candidate in candidates)
            self._pool = WorkerPool(self._jobs, self._progress, total)
            self._pool.run(candidates, self._try)
            for key in self.intact:
                self._wanted.pop(key, None)

    def _try(self, candidate: Candidate) -> None:
        blob = candidate.blob
        try:
            if not self._is_dry:
                is_right = self._write(candidate)
            elif is_right := self._has_digest(candidate, None):
                self._note_repair(blob, None)
            if not is_right:
                wrong = f"the data rebuilt from {self._source_name} does not match its digest"
                self.reasons[str(blob.digest)] = wrong
        except _Unreadable as error:
            self.reasons[str(blob.digest)] = str(error)

    def _write(self, candidate: Candidate) -> bool:
        """Write a candidate to a temporary file, and put it in place if it has the digest."""
        path, descriptor = self._lease.create_file()
        try:
            try:
                is_right = self._has_digest(candidate, descriptor)
                if is_right:
                    # The bytes must be durable before they get the name of the blob.
                    os.fsync(descriptor)
            finally:
                self._lease.close_file(descriptor)
            if is_right:
                self._place(candidate.blob, path)
        finally:
            # A file that was put in place has the name of the blob by now.
            path.unlink(missing_ok=True)
        return is_right

    def _has_digest(self, candidate: Candidate, descriptor: int | None) -> bool:
        """Return whether the bytes have the digest; write them to ``descriptor`` if given."""
        blob = candidate.blob
        digester = Digester()
        for piece in self._pieces(candidate):
            self._check_running()
            digester.update(piece)
            if digester.size > blob.size:  # a file of the other store that is growing
                return False
            if descriptor is not None:
                write_all(descriptor, piece)
            self._pool.report(memoryview(piece).nbytes, blob.name or str(blob.digest))
        return (digester.digest(), digester.size) == blob.id

    def _pieces(self, candidate: Candidate) -> Iterator[Buffer]:
        try:
            yield from candidate.buffers()
        except (BlobstoreError, OSError) as error:
            raise _Unreadable(f"{self._source_name} cannot be read: {error}") from error

    def _check_running(self) -> None:
        if self._pool.stopping.is_set():
            raise Cancelled("stopped")

    def _place(self, blob: Descriptor, ready: Path) -> None:
        """Move a file to a blob's place, unless the blob has become intact in the meantime."""
        is_replaced, quarantined = replace_damaged(
            self._store, blob.id, ready, self._lock, lambda _: self._check_running()
        )
        if is_replaced:
            self._note_repair(blob, quarantined)
        else:
            self.intact.add(blob.id)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        # Threads of one process would keep each other from the store's lock.
        with self._placing, self._store.exclusive_lock():
            yield

    def _judge(self, blob: Descriptor) -> tuple[bool, bool]:
        return which_are_whole(self._store, blob.digest, blob.size, lambda _: self._check_running())

    def _note_repair(self, blob: Descriptor, quarantined: Path | None) -> None:
        self.intact.add(blob.id)
        name = blob.name or blob.media_type
        self.repaired.append(RepairedBlob(blob.digest, blob.size, name, quarantined))

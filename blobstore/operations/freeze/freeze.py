"""Freezes models: compresses their tensor blobs losslessly and removes the uncompressed files.

Three stages. The plan decides which blobs to compress and against which bases. Threads compress each blob
into a temporary file and verify that it decodes to the blob. Batches of these files are committed under
the store's exclusive lock: each file gets its path among the cold blobs, durably, and only then the hot
file is removed. So at every moment a blob is hot or cold or both.

A hot file stays if a process holds a lease on it, or if a name needs it that is not frozen. A name counts
as frozen if any of its blobs is cold only.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from blobstore.cold_blobs.batches import NO_SPACE, TemporaryFiles, run_in_batches
from blobstore.cold_blobs.blob_encoder import SizeEstimator
from blobstore.cold_blobs.builder import (
    BLOCK,
    ColdBlobBuilder,
    EncodedBlob,
    count_blocks,
)
from blobstore.cold_blobs.plan import FreezePlan, plan_freeze
from blobstore.compression.level import Level, check_compression_level
from blobstore.core.arguments import seconds_of
from blobstore.core.escape import quote
from blobstore.core.files import FileState, sync_folder
from blobstore.core.progress import of_passes
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import BlobDamaged, BlobMissing, UsageError
from blobstore.manifests.reference import Reference
from blobstore.store.bases import pin
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.errors import BlobstoreError
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Names

Outcome = Literal[
    "frozen", "cold", "shared", "in use", "elsewhere", "no gain", "missing", "damaged"
]
"""The outcome for a blob: it was frozen now or before, or the reason why not."""
Need = Literal["shared", "in use"]
"""Why a blob must stay hot."""


class FrozenBlob(NamedTuple):
    """A tensor blob of the models, and its outcome."""

    digest: Digest
    name: str
    """The name of one of its layers."""
    size: int
    stored: int
    """Bytes that it takes now, or would take."""
    outcome: Outcome
    base: Digest | None = None
    """The blob that it is delta-encoded against."""


class FrozenModel(NamedTuple):
    """A model, and what its tensors take now, or would take."""

    name: Reference
    base: Reference | None
    """The model that has most of the blobs that its own are stored as deltas against."""
    size: int
    stored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """The result of :func:`blobstore.freeze`."""

    references: tuple[Reference, ...]
    bases: tuple[tuple[Reference, Reference], ...]
    """Models and their base models."""
    models: tuple[FrozenModel, ...] = field(repr=False)
    """What each model takes. Blobs that models share count for each."""
    blobs: tuple[FrozenBlob, ...] = field(repr=False)
    """The tensor blobs, each once."""
    needed_by: tuple[Reference, ...]
    """Models that are not frozen, and so keep blobs uncompressed."""
    faults: tuple[BlobstoreError, ...]
    """Why blobs could not be read."""
    fallbacks: int
    """Number of blobs that are compressed without their base, because it or the delta is not intact."""
    seconds: float

    def count(self, *outcomes: Outcome) -> int:
        """Return the number of blobs with one of these ``outcomes``, such as ``frozen`` or ``no gain``."""
        return sum(blob.outcome in outcomes for blob in self.blobs)

    @property
    def size(self) -> int:
        """Bytes of the uncompressed blobs."""
        return sum(blob.size for blob in self.blobs)

    @property
    def stored(self) -> int:
        """Bytes that the blobs take now, or would take."""
        return sum(blob.stored for blob in self.blobs)


def freeze_models(
    references: Names = (),
    *,
    store: StoreLike = None,
    level: Level = "fast",
    base: str | Reference | None = None,
    find_base: bool = True,
    keep_hot: bool = False,
    older_than: float | str | None = None,
    dry_run: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Frozen:
    """Compress the tensors of models losslessly, until they are thawed.

    Frozen models are used like others: reading decompresses them.

    Args:
        references: the models; by default all models of the store, if ``older_than`` is given.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        level: ``fast`` to compress and decompress, or as ``small`` as possible.
        base: the base model of the others, used where it saves space. Its blobs are kept as long as
            the others need them.
        find_base: search for base models, in model cards and by similarity, unless ``base`` is given.
            Search also for equal tensors with other names.
        keep_hot: keep the uncompressed files too.
        older_than: skip models that were created, copied or thawed within so many seconds, or a text such as
            ``30d``.
        dry_run: write nothing, and estimate the sizes from samples.
        jobs: number of threads; by default one per processor.
        progress: called with the name of a layer, the bytes done and the bytes in total.

    Returns:
        the outcome for each blob, its sizes in bytes, and the base of each model.

    Raises:
        ModelNotFound: a named model does not exist.
        InvalidManifest: a manifest of the store cannot be read, so the blobs that it needs are unknown.
        StoreBusy: another process held the store's lock for too long.
        StoreError: the store cannot be read or written. Blobs that were frozen before remain frozen.
        UsageError: an argument is not valid.
    """
    started = time.monotonic()
    check_compression_level(level)
    check_jobs(jobs)
    age = None if older_than is None else seconds_of(older_than, "older_than")
    store = LocalStore.of(store)
    names = named_models(store, references)
    if not names and age is None:
        raise UsageError(
            "name the models to freeze, such as '*' for all, or give an age with older_than='30d'"
        )
    estimator = SizeEstimator(store, level)
    plan = plan_freeze(
        store,
        names,
        estimator,
        older_than=age,
        base=None if base is None else Reference.of(base),
        find_base=find_base,
        report=lambda what: progress(what, 0, 0) if progress is not None else None,
    )
    builder = ColdBlobBuilder(store, estimator, plan.base_blobs)
    run = _Run(store, plan, builder, keep_hot=keep_hot)
    size = sum(blob.size for blob in plan.blobs.values())
    with store.writing():
        if dry_run:
            run.estimate(WorkerPool(jobs, progress, size))
        elif plan.blobs:
            # Each byte is encoded, then decoded.
            run.freeze(WorkerPool(jobs, of_passes(progress, 2), 2 * size))
        plan.reachable.references.save()  # at last, when there is space
    blobs = tuple(run.results[digest] for digest in plan.blobs if digest in run.results)
    shared = [blob.digest for blob in blobs if blob.outcome == "shared"]
    needing = map(store.reference_of, map(Path, plan.needing(shared)))
    return Frozen(
        references=tuple(plan.references),
        bases=tuple(plan.bases.items()),
        models=tuple(run.models()),
        blobs=blobs,
        needed_by=tuple(name for name in needing if name is not None),
        faults=tuple(run.faults),
        fallbacks=len(builder.fallbacks),
        seconds=time.monotonic() - started,
    )


def _must_stay_hot(plan: FreezePlan, leased: Collection[Digest]) -> dict[str, Need]:
    """Return why blobs must stay hot, by the hex digests of the blobs."""
    references = plan.reachable.references
    numbers = references.numbers(plan.blobs)
    others: set[int] = set()
    rows: list[int] = []
    for path, (state, known, *_) in plan.reachable.by_path().items():
        # A name with another manifest than at the time of the plan is not the model that was to
        # be frozen. Only tensors get cold.
        if plan.frozen.get(path) == state:
            others.update(known.blobs[: known.record.others])
        else:
            rows.append(known.row)
    uses = references.uses(rows)
    needs: dict[str, Need] = {
        digest.hex: "shared"
        for digest, number in numbers.items()
        if uses[number] or number in others
    }
    return needs | dict.fromkeys((digest.hex for digest in leased), "in use")


class _Run:
    """Carries out a plan, or estimates what it would save, and collects the results."""

    def __init__(
        self, store: LocalStore, plan: FreezePlan, builder: ColdBlobBuilder, *, keep_hot: bool
    ) -> None:
        self._store = store
        self._plan = plan
        self._builder = builder
        self._keep_hot = keep_hot
        self.results: dict[Digest, FrozenBlob] = {}
        self.faults: list[BlobstoreError] = []

    def models(self) -> Iterator[FrozenModel]:
        """Yield what each model takes."""
        for name in self._plan.references:
            blobs = [
                self.results[digest] for digest in self._plan.models[name] if digest in self.results
            ]
            size, stored = sum(blob.size for blob in blobs), sum(blob.stored for blob in blobs)
            yield FrozenModel(name, self._plan.bases.get(name), size, stored)

    def estimate(self, pool: WorkerPool) -> None:
        """Estimate the compressed sizes from samples."""
        # Without the lock, because an estimate may be out of date.
        leased = self._store.read_leases().digests
        needs = _must_stay_hot(self._plan, leased)
        for blob in self._plan.blobs.values():
            if self._is_to_encode(blob, needs):
                try:
                    stored, base = self._builder.estimate(blob)
                except (BlobMissing, BlobDamaged) as error:
                    self._add_fault(blob, error)
                else:
                    is_gain = count_blocks(stored) < count_blocks(blob.size)
                    self._add(blob, *(("frozen", stored, base) if is_gain else ("no gain",)))
            pool.report(blob.size, blob.name)

    def freeze(self, pool: WorkerPool) -> None:
        """Encode the blobs on threads, and commit them in batches."""
        # Leases of other processes are ignored until then, because they may end before.
        needs = _must_stay_hot(self._plan, set())
        to_encode = [blob for blob in self._plan.blobs.values() if self._is_to_encode(blob, needs)]
        with TemporaryFiles(self._store) as files:
            # While blobs are encoded, other processes may remove the names that need them.
            files.lease.hold(self._plan.blobs)
            files.lease.hold(base.digest for base in self._plan.base_blobs.values())
            for digest in self.results:  # the blobs that need not be encoded
                pool.report(2 * self._plan.blobs[digest].size, self._plan.blobs[digest].name)
            build = partial(self._builder.build, files=files, report=pool.report)
            while to_encode:
                again: list[Descriptor] = []
                with contextlib.closing(run_in_batches(pool, to_encode, build)) as batches:
                    for batch in batches:
                        # Deltas whose base cannot be kept are encoded again without it.
                        again += self._commit(batch, files.lease.name)
                to_encode = again

    def _is_to_encode(self, blob: Descriptor, needs: Mapping[str, Need]) -> bool:
        """Return whether a blob must be encoded; add the result of one that need not be."""
        if not self._store.has_hot(blob.digest):
            if self._store.is_shared(blob.digest):
                self._add(blob, "elsewhere")
                return False
            if not self._store.has_cold(blob.digest):
                return True  # which reports that it is missing
            try:
                cold = self._store.open_cold(*blob.id)
                self._add(blob, "cold", cold.stored, cold.base)
            except BlobMissing:  # another process has just thawed it
                self._add(blob, "in use")
            except BlobDamaged as error:
                self._add_fault(blob, error)
            return False
        if not self._keep_hot and blob.digest.hex in needs:
            self._add(blob, needs[blob.digest.hex])
            return False
        if blob.size <= BLOCK:  # a cold blob takes at least one block
            self._add(blob, "no gain")
            return False
        return True

    def _commit(self, batch: Sequence[EncodedBlob], lease: str) -> list[Descriptor]:
        """Give cold blobs their paths and remove hot files; return the blobs to encode again."""
        self._store.cold_bases()  # opens the cold blobs that are new, before the lock is held
        with self._store.exclusive_lock():
            # Read again: while blobs were encoded, processes opened models, and models were created.
            leased = self._store.read_leases(without=lease).digests
            self._plan.reachable.update()
            needs = {} if self._keep_hot else _must_stay_hot(self._plan, leased)
            ready, again = self._select(batch, needs)
            entries = [
                (item.blob.digest, item.state, item.base)
                for item in ready
                if item.path is not None and item.state is not None
            ]
            # The index first: a cold blob that it does not list would hide from gc which base it needs.
            try:
                self._store.cold_index.append(entries)
            except OSError as error:
                if error.errno not in NO_SPACE or self._keep_hot:
                    raise  # else gc would read the bases of these blobs from their files, until below
            else:
                entries = []
            for item in ready:
                if item.path is not None:
                    item.path.replace(self._store.cold_path(item.blob.digest))
            # Renaming keeps the state: these are the files that were verified.
            placed = {
                item.blob.digest
                for item in ready
                if FileState.of(self._store.cold_path(item.blob.digest)) == item.state
            }
            # The names of the cold files must be durable before the hot files go.
            sync_folder(self._store.folder("cold"))
            if not self._keep_hot:
                for digest in placed:
                    Path(self._store.blob_path(digest)).unlink(missing_ok=True)
                    # A cold base needs no second link to outlive its hot file.
                    Path(self._store.base_path(digest)).unlink(missing_ok=True)
                sync_folder(self._store.folder("blobs"))
            self._store.cold_index.append(entries)  # removing the hot files has freed space
        for item in ready:
            if item.blob.digest in placed:
                self._add(item.blob, "frozen", item.stored, item.base)
            else:
                self._add(item.blob, "in use")  # by another program, which has replaced the file
        return again

    def _select(
        self, batch: Sequence[EncodedBlob], needs: Mapping[str, Need]
    ) -> tuple[list[EncodedBlob], list[Descriptor]]:
        """Return the blobs to commit, whose bases are kept from now on, and the blobs to encode again.

        The latter are deltas whose base cannot be kept, because the file system has no hard links.
        """
        ready: list[EncodedBlob] = []
        again: list[Descriptor] = []
        # Read under the lock, so no other process can make a delta of a base until these blobs have
        # their names.
        cold = self._store.cold_files()
        bases = set(self._store.cold_bases(cold).values())
        for item in batch:
            outcome = None if item.fault else self._obstacle(item, needs, cold, bases)
            if item.fault is not None:
                self._add_fault(item.blob, item.fault)
            elif outcome is not None:
                self._add(item.blob, outcome)
            elif item.base is None or pin(self._store, item.base):
                # Its base outlives the hot file from now on.
                ready.append(item)
                continue
            else:
                # From now on no delta against a hot base is tried.
                self._builder.has_links = False
                again.append(item.blob)
            if item.path is not None:
                item.path.unlink(missing_ok=True)
        return ready, again

    def _obstacle(
        self,
        item: EncodedBlob,
        needs: Mapping[str, Need],
        cold: Mapping[Digest, os.stat_result],
        bases: Collection[Digest],
    ) -> Outcome | None:
        """Return why an encoded blob must not be committed; None if it may be."""
        digest = item.blob.digest
        if item.state is None:
            return "no gain"
        if digest.hex in needs:
            return needs[digest.hex]
        if item.base is not None:
            if digest in bases:
                return "in use"  # no base has a base itself
            # Another process may have frozen the base as a delta since the plan was made.
            try:
                if item.base not in cold:
                    is_base = self._store.has_hot(item.base)
                else:
                    is_base = self._store.base_of(item.base, cold[item.base]) is None
            except BlobDamaged:
                is_base = False
            if not is_base:
                return "in use"
        if FileState.of(str(item.path or self._store.cold_path(digest))) != item.state:
            return "in use"  # another process has thawed it, or frozen it again
        return None

    def _add(
        self,
        blob: Descriptor,
        outcome: Outcome,
        stored: int | None = None,
        base: Digest | None = None,
    ) -> None:
        size = blob.size if stored is None else stored
        self.results[blob.digest] = FrozenBlob(
            blob.digest, blob.name, blob.size, size, outcome, base
        )

    def _add_fault(self, blob: Descriptor, error: BlobMissing | BlobDamaged) -> None:
        self.faults.append(error.at(f"layer {quote(blob.name)}"))
        self._add(blob, "missing" if isinstance(error, BlobMissing) else "damaged", 0)

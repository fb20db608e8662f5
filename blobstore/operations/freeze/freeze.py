"""Workflow: models that nobody uses at the moment are kept in less room.

A blob is coded into a file that is synced, read back, decoded and hashed (`making`); only then, with the
store's lock alone, it gets its name among the cold ones, durably, and the hot one is removed. So at every instant a
blob is hot or cold or both. A hot one stays if somebody needs it as it is: a process that holds it by a
lease, or a name that is not frozen. A name counts as frozen if any of its blobs is cold only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from blobstore.core.escape import quote
from blobstore.core.files import sync_folder
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobDamaged, BlobMissing, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.freeze.batches import BatchRunner
from blobstore.operations.freeze.blob_encoder import Level, SizeEstimator
from blobstore.operations.freeze.compress import BLOCK, ColdBlobBuilder, EncodedBlob, blocks
from blobstore.operations.freeze.plan import FreezePlan, Need
from blobstore.store.bases import pin
from blobstore.store.cold import file_state
from blobstore.store.local import LocalStore
from blobstore.store.locks import read_leases

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.progress import Progress
    from blobstore.errors import BlobstoreError
    from blobstore.manifests.descriptor import Descriptor

Outcome = Literal["frozen", "cold", "shared", "in use", "no gain", "missing", "damaged"]
"""What becomes of a blob: it is frozen now; it was; or it stays hot, and why."""


class FrozenBlob(NamedTuple):
    """A blob of the models, and what became of it."""

    digest: Digest
    name: str
    """Of a layer that it is."""
    size: int
    stored: int
    """Bytes that it takes now, or would."""
    outcome: Outcome
    base: Digest | None = None
    """What it is coded by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """What :func:`freeze_models` did, or would do."""

    references: tuple[Reference, ...]
    bases: tuple[tuple[Reference, Reference], ...]
    """Models, and those by which they are coded."""
    blobs: tuple[FrozenBlob, ...]
    """Those of tensors, each once."""
    faults: tuple[BlobstoreError, ...]
    """What is wrong with blobs that could not be frozen."""
    seconds: float

    def count(self, *outcomes: Outcome) -> int:
        """Return how many blobs came to one of these ends."""
        return sum(blob.outcome in outcomes for blob in self.blobs)

    @property
    def size(self) -> int:
        """Bytes of all the blobs before."""
        return sum(blob.size for blob in self.blobs)

    @property
    def stored(self) -> int:
        """Bytes of them now."""
        return sum(blob.stored for blob in self.blobs)


def freeze_models(
    references: Sequence[str | Reference] = (),
    *,
    store: LocalStore | None = None,
    level: Level = "fast",
    base: str | Reference | None = None,
    find_base: bool = True,
    keep_hot: bool = False,
    older_than: float | None = None,
    dry_run: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Frozen:
    """Keep the tensors of models in less room, without loss, until they are thawed.

    Frozen models can be used as others; what reads them decodes them.

    Args:
        references: the models; none means all of the store, which must be older than something then.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        level: ``fast`` to code and decode, or as ``small`` as can be.
        base: the model by which the others are coded, where that saves room; its blobs are kept as
            long as they need them.
        find_base: look for such a model if none is given: by the card of a model, or by its bytes.
            And for blobs with the same tensors under other names, whether one is given or not.
        keep_hot: make the cold form of all blobs, and remove no hot one.
        older_than: leave out models of which anything was written in the last so many seconds.
        dry_run: write nothing, and estimate from samples what would be.
        jobs: threads; by default the machine's processors.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        ModelNotFound: a model that was asked for does not exist.
        InvalidManifest: a manifest of the store cannot be read, so that nobody knows which blobs it
            needs.
        StoreBusy: others have kept the store's lock all the time.
        StoreError: the store cannot be read or written. What was frozen before stays so.
        UsageError: an argument means nothing.
    """
    started = time.monotonic()
    if level not in get_args(Level):
        raise UsageError(f"level must be fast or small, got {quote(level)}")
    check_jobs(jobs)
    if not references and older_than is None:
        raise UsageError("name the models to be frozen, or say how old they must be")
    store = store or LocalStore()
    store.check_root()
    asked = [_parsed(reference) for reference in references]
    names = tuple(dict.fromkeys(asked)) or tuple(store.references())
    with store.writing():
        estimator = SizeEstimator(store, level)
        chosen = FreezePlan(store)
        chosen.choose(names, older_than, must_exist=bool(asked))
        if base is not None or find_base:
            chosen.compare(None if base is None else _parsed(base), estimator)
        work = _Freezing(store, chosen, estimator, keep_hot=keep_hot)
        if dry_run:
            work.estimate(progress)
        elif work.blobs:
            work.run(jobs, progress)
    return Frozen(
        references=tuple(chosen.references),
        bases=tuple(chosen.bases.items()),
        blobs=tuple(work.results[digest] for digest in work.blobs if digest in work.results),
        faults=tuple(work.faults),
        seconds=time.monotonic() - started,
    )


def _parsed(reference: str | Reference) -> Reference:
    return Reference.parse(reference) if isinstance(reference, str) else reference


class _Freezing:
    def __init__(
        self, store: LocalStore, chosen: FreezePlan, estimator: SizeEstimator, *, keep_hot: bool
    ) -> None:
        self._store = store
        self._maker = ColdBlobBuilder(store, estimator, chosen.base_blobs)
        self._keeps_hot = keep_hot
        self._chosen = chosen
        self.blobs = chosen.blobs
        self.results: dict[Digest, FrozenBlob] = {}
        self.faults: list[BlobstoreError] = []
        self._unpinned: list[Descriptor] | None = []
        """What was coded by a blob that cannot be made sure of; None the second time."""

    def estimate(self, progress: Progress | None) -> None:
        """Tell what would be, from samples of the blobs."""
        from blobstore.core.progress import Meter

        total = sum(blob.size for blob in self.blobs.values())
        meter = Meter(progress, total)
        with self._store.reading_lock():
            needed = self._chosen.needed_hot(read_leases(self._store).digests)
        for digest, blob in self.blobs.items():
            outcome = self._outcome_before(blob, needed)
            try:
                if outcome is not None:
                    self._note(blob, outcome)
                else:
                    stored = self._maker.coding(blob).estimate().size
                    is_gain = blocks(stored) < blocks(blob.size)
                    self._note(blob, *(("frozen", stored) if is_gain else ("no gain",)))
            except (BlobMissing, BlobDamaged) as error:
                self._fault(blob, error)
            meter.add(blob.size, blob.name or str(digest))

    def run(self, jobs: int | None, progress: Progress | None) -> None:
        """Freeze the blobs."""
        total = 2 * sum(blob.size for blob in self.blobs.values())  # coded, and decoded again
        with BatchRunner(self._store, progress, total) as moving:
            moving.hold(self.blobs)  # before they are looked for
            moving.hold(blob.digest for blob in self._chosen.base_blobs.values())

            def make(blob: Descriptor) -> EncodedBlob | None:
                try:
                    return self._maker.make(blob, moving)
                except (BlobMissing, BlobDamaged) as error:
                    self._fault(blob, error)
                    return None

            def settle(made: Sequence[EncodedBlob | None]) -> None:
                self._settle([item for item in made if item is not None], moving.lease)

            needed = self._chosen.needed_hot(set())  # a lease may end before its blob's turn comes
            items = []
            for blob in self.blobs.values():
                outcome = self._outcome_before(blob, needed)
                if outcome is None:
                    items.append(blob)
                    continue
                moving.tell(2 * blob.size, blob.name)
                try:
                    self._note(blob, outcome)
                except (BlobMissing, BlobDamaged) as error:
                    self._fault(blob, error)
            moving.run(items, make, lambda blob: blob.size, settle, jobs)
            if self._unpinned:
                items, self._unpinned = self._unpinned, None
                moving.run(items, make, lambda blob: blob.size, settle, jobs)

    # What is to be

    def _outcome_before(self, blob: Descriptor, needed: Mapping[str, Need]) -> Outcome | None:
        """Return what becomes of a blob that need not be coded."""
        if not self._store.has_hot(blob.digest):
            return "cold" if self._store.has_cold(blob.digest) else None
        if not self._keeps_hot and blob.digest.hex in needed:
            return needed[blob.digest.hex]
        # The name of a cold blob takes room too, and its table some hundred bytes.
        return "no gain" if blob.size <= BLOCK else None

    # Settling

    def _settle(self, made: Sequence[EncodedBlob], lease: str) -> None:
        """Give cold blobs their names, and remove the hot ones that nobody needs."""
        with self._store.exclusive_lock():
            leased = read_leases(self._store, without=lease).digests
            self._chosen.update()
            needed = {} if self._keeps_hot else self._chosen.needed_hot(leased)
            cold = self._store.cold_files()
            bases = set(self._store.cold_bases(cold).values())
            kept: list[EncodedBlob] = []
            for item in made:
                outcome = self._unsettled(item, needed, bases)
                if outcome is None:
                    kept.append(item)
                    continue
                if item.path is not None:
                    item.path.unlink(missing_ok=True)
                self._note(item.blob, outcome)
            kept = [item for item in kept if self._is_pinned(item)]
            for item in kept:
                if item.path is not None:
                    item.path.replace(self._store.cold_path(item.blob.digest))
            sync_folder(self._store.folder("cold"))
            if not self._keeps_hot:
                self._remove_hot(kept)
            for item in kept:
                self._maker.settled(item)
                self._note(item.blob, "frozen", item.stored, item.base)

    def _is_pinned(self, item: EncodedBlob) -> bool:
        """Make sure of the blob by which another is coded; if that fails, that one is to be made anew."""
        if item.base is None or pin(self._store, item.base):
            return True
        if item.path is not None:
            item.path.unlink(missing_ok=True)
        self._maker.has_links = False
        if self._unpinned is None:
            self._note(item.blob, "in use")
        else:
            self._unpinned.append(item.blob)
        return False

    def _unsettled(
        self, item: EncodedBlob, needed: Mapping[str, Need], bases: Collection[Digest]
    ) -> Outcome | None:
        """Return why a blob is to stay as it is; None if it is to be frozen."""
        if item.state is None:
            return "no gain"
        digest = item.blob.digest
        if digest.hex in needed:
            return needed[digest.hex]
        if item.base is not None and (digest in bases or self._is_delta(item.base)):
            return "in use"  # edges are one deep
        where = self._store.cold_path(digest) if item.path is None else str(item.path)
        if file_state(where) != item.state:  # thawed, or frozen otherwise, by another process
            return "in use"
        return None

    def _is_delta(self, digest: Digest) -> bool:
        """Tell whether a base could not serve as one: it is coded by another, gone or damaged."""
        if not self._store.has_cold(digest):
            return not self._store.has_hot(digest)
        try:
            return self._store.open_cold(digest).base is not None
        except (BlobMissing, BlobDamaged):
            return True

    def _remove_hot(self, made: Sequence[EncodedBlob]) -> None:
        for item in made:
            # The rename has kept the file: what was checked is what has the name now.
            if file_state(self._store.cold_path(item.blob.digest)) == item.state:
                Path(self._store.blob_path(item.blob.digest)).unlink(missing_ok=True)
                # What is cold outlives its file without a second name.
                Path(self._store.base_path(item.blob.digest)).unlink(missing_ok=True)
        sync_folder(self._store.folder("blobs"))

    def _note(
        self, blob: Descriptor, outcome: Outcome, stored: int = -1, base: Digest | None = None
    ) -> None:
        if outcome == "cold":
            try:
                found = self._store.open_cold(blob.digest, blob.size)
                stored, base = found.stored, found.base
            except BlobMissing:  # thawed since it was looked for
                outcome = "in use"
        size = blob.size if stored < 0 else stored
        self.results[blob.digest] = FrozenBlob(
            blob.digest, blob.name, blob.size, size, outcome, base
        )

    def _fault(self, blob: Descriptor, error: BlobMissing | BlobDamaged) -> None:
        self.faults.append(error.at(f"layer {quote(blob.name)}"))
        self._note(blob, "missing" if isinstance(error, BlobMissing) else "damaged", 0)

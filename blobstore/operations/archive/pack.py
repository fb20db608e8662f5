"""Pack models of a store into one archive file, to be moved without a network.

Threads compress several members at once and write them in order. Each member is read back, decoded and
hashed while others are written. The table comes last, and the file gets its name when it is complete and
durable.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.encoder import encode
from blobstore.compression.level import Level
from blobstore.compression.spans import mark_duplicates, spans_of
from blobstore.core.digest import Digest, Digester
from blobstore.core.escape import quote
from blobstore.core.files import replacing, write_all
from blobstore.core.mmap import mapped
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    ColdDamaged,
    Damaged,
    StoreError,
    UsageError,
)
from blobstore.manifests.reference import Reference
from blobstore.operations.archive.format import PREFIX, ArchiveTable, Kind, Member, check_case
from blobstore.operations.archive.ordered_writer import OrderedSlot, OrderedWriter
from blobstore.operations.archive.plan import MAX_UNCOMPRESSED, plan_members, read_models
from blobstore.operations.freeze.blob_encoder import SizeEstimator, chunks_of
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.core.progress import Progress
    from blobstore.operations.archive.format import ArchivedModel
    from blobstore.operations.archive.plan import PlannedMember


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The result of :func:`pack_models`."""

    path: Path
    references: tuple[Reference, ...]
    blobs: int
    """Number of blobs in the archive."""
    deltas: int
    """Number of those that are deltas against others."""
    size: int
    """Bytes of the blobs."""
    stored: int
    """Bytes of the archive."""
    seconds: float


def pack_models(
    references: Sequence[str | Reference],
    path: str | os.PathLike[str],
    *,
    store: LocalStore | str | os.PathLike[str] | None = None,
    level: Level = "fast",
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Write models to a new archive, for :func:`blobstore.operations.archive.unpack.unpack_archive`.

    Args:
        references: the models.
        path: the file, which appears complete and synced, or not at all.
        store: the store or its folder; by default that of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        level: ``fast`` to compress and decompress, or ``small``. Frozen blobs are copied at any level.
        overwrite: replace an existing file.
        jobs: number of threads; by default one per processor.
        progress: called with the current blob, the bytes done and the total.

    Raises:
        ModelNotFound: the store has no such model.
        NameConflict: two names differ in case only.
        InvalidManifest, BlobMissing, BlobDamaged: a model is not intact.
        StoreBusy: timed out waiting for the store's lock.
        StoreError: the store cannot be read.
        BlobstoreError: the file exists, or cannot be written.
        UsageError: an argument is invalid.
    """
    started = time.monotonic()
    check_jobs(jobs)
    if level not in get_args(Level):
        raise UsageError(f"level must be fast or small, got {quote(level)}")
    names = list(map(Reference.of, references))
    if not names:
        raise UsageError("name the models to be packed")
    check_case(names)
    target = Path(path)
    _check_target(target, overwrite=overwrite)
    store = LocalStore.of(store)
    store.check_root()
    models = read_models(store, names)
    estimator = SizeEstimator(store, level)
    needed = [blob.digest for model in models for blob in model.manifest.blobs]
    with store.lease_if_writable(needed):
        planned = plan_members(store, models, estimator)
        workers = WorkerPool(jobs, progress, 2 * sum(item.blob.size for item in planned))
        try:
            with replacing(target) as descriptor:
                writer = _ArchiveWriter(store, estimator, level, target.parent, descriptor, workers)
                members = writer.write(models, planned)
                size = os.fstat(descriptor).st_size
                _check_target(target, overwrite=overwrite)  # it may have appeared since
        except OSError as error:
            raise BlobstoreError(f"cannot write {quote(target)}: {error.strerror}") from error
    return Packed(
        path=target,
        references=tuple(model.reference for model in models),
        blobs=len(planned),
        deltas=sum(member.kind == Kind.DELTA for member in members),
        size=sum(item.blob.size for item in planned),
        stored=size,
        seconds=time.monotonic() - started,
    )


def _check_target(target: Path, *, overwrite: bool) -> None:
    """Check that no file exists that must not be replaced."""
    if os.path.lexists(target) and not (overwrite and target.is_file()):
        raise BlobstoreError(
            f"{quote(target)} exists already"
            + (", and is not a regular file" if overwrite else "; replace it with --force")
        )


class _WrittenBlob(NamedTuple):
    """A blob in the archive, not yet verified."""

    number: int
    slot: OrderedSlot
    is_raw: bool
    """Whether it is stored uncompressed."""


class _ArchiveWriter:
    """Writes the members of an archive, and its table."""

    def __init__(
        self,
        store: LocalStore,
        estimator: SizeEstimator,
        level: Level,
        folder: Path,
        descriptor: int,
        workers: WorkerPool,
    ) -> None:
        self._store = store
        self._estimator = estimator
        self._level: Level = level
        self._folder = folder
        self._workers = workers
        self._writer = OrderedWriter(descriptor, PREFIX)
        self._written: dict[Digest, _WrittenBlob] = {}

    def write(
        self, models: Sequence[ArchivedModel], planned: Sequence[PlannedMember]
    ) -> list[Member]:
        """Write the archive, and return its members."""
        manifests = {Digest.of(model.data): model.data for model in models}
        members: list[Member] = []
        for digest, data in manifests.items():
            with OrderedSlot(self._writer, len(members)) as slot:
                slot.write(data)
            members.append(Member(Kind.MANIFEST, len(data), digest, len(data), digest))
        members += self._workers.run(
            enumerate(planned, start=len(members)),
            lambda item: self._write_blob(*item),
            self._writer.close,
        )
        named = {blob.digest for model in models for blob in model.manifest.blobs}
        bases = {member.base for member in members}
        for number, member in enumerate(members[len(manifests) :], start=len(manifests)):
            if member.digest not in named and number not in bases:
                # It was added as a base, but its deltas were thawed and are compressed without it.
                raise StoreError("models were thawed while they were packed; pack them again")
        numbers = {digest: number for number, digest in enumerate(manifests)}
        names = [(model.reference.full, numbers[Digest.of(model.data)]) for model in models]
        write_all(self._writer.descriptor, ArchiveTable(members, names).to_bytes())
        return members

    def _write_blob(self, number: int, planned: PlannedMember) -> Member:
        """Write a blob in its smallest form, and verify what is in the file."""
        blob = planned.blob
        try:
            with OrderedSlot(self._writer, number) as slot:
                is_raw = not self._write_cold(planned, slot)
                if is_raw:
                    for piece in self._store.read_pieces(*blob):
                        slot.write(piece)
                        self._workers.report(0, planned.label)
                    # Bytes that were compressed in vain have been reported already.
                    is_reported = blob.size > MAX_UNCOMPRESSED
                    self._workers.report(0 if is_reported else blob.size, planned.label)
                self._written[blob.digest] = written = _WrittenBlob(number, slot, is_raw)
            base = self._verify(planned, written)
        except Damaged as error:
            raise error.at(planned.label) from None
        kind = Kind.RAW if is_raw else Kind.COLD if base is None else Kind.DELTA
        return Member(kind, blob.size, blob.digest, slot.size, slot.digest, base)

    def _write_cold(self, planned: PlannedMember, slot: OrderedSlot) -> bool:
        """Write the cold form of a blob; return False, with nothing written, if it is not smaller."""
        blob, copied = planned.blob, planned.cold

        def report(count: int) -> None:
            self._workers.report(count, planned.label)

        if copied is not None and self._store.has_hot(blob.digest):
            try:
                cold = self._store.open_cold(*blob)
                cold.check(lambda _: report(0))
            except (BlobMissing, BlobDamaged):
                copied = None
        if copied is not None:
            for chunk in chunks_of(copied, lambda _: report(0)):
                slot.write(chunk)
            report(blob.size)
            return True
        if blob.size <= MAX_UNCOMPRESSED:
            return False
        if self._store.has_hot(blob.digest):
            self._estimator.choose_encoder(blob, planned.base).write(slot.write, report)
        else:  # it is compressed again, without its base, which is not in the archive
            with tempfile.TemporaryFile(dir=self._folder) as file:
                for piece in self._store.read_pieces(*blob):
                    write_all(file.fileno(), piece)
                    report(0)
                data = mapped(file.fileno(), blob.size)
                spans = mark_duplicates(spans_of(data, blob.size), data)
                chunks = chunks_of(data, report)
                encode(chunks, spans, slot.write, level=self._level, digest=blob.digest)
        if slot.size < blob.size:
            return True
        slot.clear()
        return False

    def _verify(self, planned: PlannedMember, written: _WrittenBlob) -> int | None:
        """Decode and hash a blob as it is in the file; return the number of its base.

        Raises:
            BlobDamaged: it is not the blob.
        """

        def report(count: int) -> None:
            self._workers.report(count, planned.label)

        data = written.slot.read_back()
        if written.is_raw:
            digester = Digester()
            for chunk in chunks_of(data, report):
                digester.update(chunk)
            if digester.digest() == written.slot.digest == planned.blob.digest:
                return None
        else:
            with contextlib.suppress(ColdDamaged):
                cold, base = ColdBlobDecoder(data), None
                if cold.table.base is not None:
                    base = self._written[cold.table.base.digest]
                    cold.give_base(
                        BaseBlob.hot(base.slot.read_back(), cold.table.base.digest)
                        if base.is_raw
                        else ColdBlobDecoder(base.slot.read_back()).as_base()
                    )
                for piece in cold.pieces():
                    report(len(piece))
                return None if base is None else base.number
        # If the store is damaged, report that.
        self._store.check_digest(*planned.blob)
        if planned.base is not None:
            self._store.check_digest(*planned.base)
        raise BlobDamaged(f"blob {planned.blob.digest} does not match its digest after packing")

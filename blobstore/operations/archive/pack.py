"""Workflow: models of a store become one file, for machines without a network.

Threads make several members at once and write them in their turns. What has been written is read back,
decoded and hashed while others are written. The table comes last, and the file's name when all of it is
durable.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.encoder import encode
from blobstore.compression.spans import spans_of, with_equals
from blobstore.compression.tuning import Level as Effort
from blobstore.core.digest import BlobId, Digest, Digester
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
from blobstore.operations.archive.format import PREFIX, ArchiveTable, Kind, Member
from blobstore.operations.archive.ordered_writer import OrderedSlot, OrderedWriter
from blobstore.operations.archive.plan import SMALLEST, gather_blobs, gather_models
from blobstore.operations.archive.reader import check_case
from blobstore.operations.freeze.blob_encoder import Level, SizeEstimator
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.core.progress import Progress
    from blobstore.operations.archive.plan import GatheredModel, PlannedMember

_PIECE = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What :func:`pack_models` did."""

    path: Path
    references: tuple[Reference, ...]
    blobs: int
    """Blobs in the archive, each once."""
    deltas: int
    """Those of them that are coded by others."""
    size: int
    """Bytes of the blobs."""
    stored: int
    """Bytes of the archive."""
    seconds: float


def pack_models(
    references: Sequence[str | Reference],
    path: str | os.PathLike[str],
    *,
    store: LocalStore | None = None,
    level: Level = "fast",
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Write models to one new file, from which :func:`blobstore.operations.archive.unpack.unpack_archive` has them again.

    Args:
        references: the models.
        path: the file, which appears complete and synced, or not at all.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        level: ``fast`` to code and decode, or as ``small`` as can be; what is frozen is taken as it is.
        overwrite: replace a file that is there.
        jobs: threads; by default the machine's processors.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        ModelNotFound: the store has no such model.
        NameConflict: two names differ in case only.
        InvalidManifest, BlobMissing, BlobDamaged: a model is not whole.
        StoreBusy: others have kept the store's lock all the time.
        StoreError: the store cannot be read.
        BlobstoreError: the file is there already, or cannot be written.
        UsageError: an argument means nothing.
    """
    started = time.monotonic()
    check_jobs(jobs)
    if level not in get_args(Level):
        raise UsageError(f"level must be fast or small, got {quote(level)}")
    names = [Reference.parse(item) if isinstance(item, str) else item for item in references]
    if not names:
        raise UsageError("name the models to be packed")
    check_case(names)
    target = Path(path)
    _check_free(target, overwrite=overwrite)
    store = store or LocalStore()
    store.check_root()
    models = gather_models(store, names)
    needed = [blob.digest for model in models for blob in model.manifest.blobs]
    with store.lease_if_writable(needed):
        blobs = gather_blobs(store, models, level)
        try:
            with replacing(target) as descriptor:
                work = _ArchiveWriter(store, target.parent, descriptor, level)
                members = work.run(models, blobs, jobs, progress)
                size = os.fstat(descriptor).st_size
                _check_free(target, overwrite=overwrite)  # it may have come meanwhile
        except OSError as error:
            raise BlobstoreError(f"cannot write {quote(target)}: {error.strerror}") from error
    return Packed(
        path=target,
        references=tuple(model.reference for model in models),
        blobs=len(blobs),
        deltas=sum(member.kind == Kind.DELTA for member in members),
        size=sum(blob.size for blob in blobs),
        stored=size,
        seconds=time.monotonic() - started,
    )


def _check_free(target: Path, *, overwrite: bool) -> None:
    """Check that nothing is there that must not be replaced."""
    if os.path.lexists(target) and not (overwrite and target.is_file()):
        raise BlobstoreError(
            f"{quote(target)} exists already"
            + (", and is not a regular file" if overwrite else "; replace it with --force")
        )


class _ArchiveWriter:
    def __init__(self, store: LocalStore, folder: Path, descriptor: int, level: Level) -> None:
        self._store = store
        self._folder = folder
        self._level: Level = level
        self._estimator = SizeEstimator(store, level)
        self._line = OrderedWriter(descriptor, PREFIX)
        self._written: dict[Digest, tuple[int, OrderedSlot, bool]] = {}
        """The numbers of blobs that were written, their bytes, and whether these are as they are."""

    def run(
        self,
        models: Sequence[GatheredModel],
        blobs: Sequence[PlannedMember],
        jobs: int | None,
        progress: Progress | None,
    ) -> Sequence[Member]:
        """Write the archive."""
        manifests = {Digest.of(model.data): model.data for model in models}
        members = [self._manifest(*item) for item in enumerate(manifests.items())]
        self._crew = WorkerPool(jobs, progress, 2 * sum(blob.size for blob in blobs))
        members += self._crew.run(
            enumerate(blobs, start=len(members)), lambda item: self._blob(*item), self._line.close
        )
        _check_needed(models, members)
        places = list(manifests)
        names = [(model.reference.full, places.index(Digest.of(model.data))) for model in models]
        write_all(self._line.descriptor, ArchiveTable(members, names).to_bytes())
        return members

    def _manifest(self, number: int, item: tuple[Digest, bytes]) -> Member:
        digest, data = item
        with OrderedSlot(self._line, number) as entry:
            entry.write(data)
        return Member(Kind.MANIFEST, len(data), digest, len(data), digest)

    def _blob(self, number: int, blob: PlannedMember) -> Member:
        """Write a blob, and make sure that it is what is in the archive."""
        try:
            with OrderedSlot(self._line, number) as entry:
                is_raw = self._write(blob, entry)
                self._written[blob.digest] = number, entry, is_raw
            kind, base = self._checked(blob, entry, is_raw=is_raw)
        except Damaged as error:
            raise error.at(blob.where) from None
        return Member(kind, blob.size, blob.digest, entry.size, entry.digest, base)

    def _write(self, blob: PlannedMember, entry: OrderedSlot) -> bool:
        """Write the smallest form of a blob, and tell whether that is the blob as it is."""
        if blob.cold is not None and self._is_best(blob):
            for begin in range(0, len(blob.cold), _PIECE):
                entry.write(blob.cold[begin : begin + _PIECE])
                self._crew.report(0, blob.where)
            self._crew.report(blob.size, blob.where)
            return False
        if blob.size > SMALLEST:
            self._code(blob, entry)
            if entry.size < blob.size:
                return False
            entry.clear()
        for data in self._store.read_pieces(blob.digest, blob.size):
            entry.write(data)
            self._crew.report(0, blob.where)
        self._crew.report(0 if blob.size > SMALLEST else blob.size, blob.where)
        return True

    def _is_best(self, blob: PlannedMember) -> bool:
        """Tell whether to take the cold form of a blob: one that is damaged only if there is no hot one."""
        if not self._store.has_hot(blob.digest):
            return True
        try:
            cold = self._store.open_cold(blob.digest, blob.size)
            cold.check(lambda _: self._crew.report(0, blob.where))
        except (BlobMissing, BlobDamaged):
            return False
        return True

    def _code(self, blob: PlannedMember, entry: OrderedSlot) -> None:
        """Write the cold form of a blob."""
        found = BlobId(blob.digest, blob.size)
        if self._store.has_hot(blob.digest):
            coding = self._estimator.choose_encoder(found, blob.base)
            coding.write(entry.write, lambda count: self._crew.report(count, blob.where))
            return
        # It is cold, but what it is coded by does not come along.
        with tempfile.TemporaryFile(dir=self._folder) as file:
            for piece in self._store.read_pieces(blob.digest, blob.size):
                write_all(file.fileno(), piece)
                self._crew.report(0, blob.where)
            data = mapped(file.fileno(), blob.size)
            runs = with_equals(spans_of(data, blob.size), data)
            effort = Effort(self._level)
            pieces = self._pieces(data, blob.where)
            encode(pieces, runs, entry.write, level=effort, digest=blob.digest)

    def _pieces(self, data: memoryview, where: str) -> Iterator[memoryview]:
        """Yield bytes piece by piece, and tell of them."""
        for begin in range(0, len(data), _PIECE):
            piece = data[begin : begin + _PIECE]
            yield piece
            self._crew.report(len(piece), where)

    def _checked(
        self, blob: PlannedMember, entry: OrderedSlot, *, is_raw: bool
    ) -> tuple[Kind, int | None]:
        """Return the kind and the base of what was written, after it was hashed."""
        if is_raw and self._read_back(blob, entry) == entry.digest == blob.digest:
            return Kind.RAW, None
        with contextlib.suppress(ColdDamaged):
            if not is_raw:
                return self._decoded(blob, entry)
        # By what is wrong with the store, if anything is.
        self._store.check_digest(blob.digest, blob.size)
        if blob.base is not None:
            self._store.check_digest(*blob.base)
        raise BlobDamaged(f"blob {blob.digest} was packed as other bytes than a moment later")

    def _read_back(self, blob: PlannedMember, entry: OrderedSlot) -> Digest:
        """Return the digest of what was written as it is."""
        digester = Digester()
        for piece in self._pieces(entry.read_back(), blob.where):
            digester.update(piece)
        return digester.digest()

    def _decoded(self, blob: PlannedMember, entry: OrderedSlot) -> tuple[Kind, int | None]:
        """Decode what was written, by what else was written, and hash it."""
        cold = ColdBlobDecoder(entry.read_back())
        base = cold.table.base
        number = None
        if base is not None:
            number, written, is_raw = self._written[base.digest]
            data = written.read_back()
            cold.give_base(
                BaseBlob.hot(data, base.digest) if is_raw else ColdBlobDecoder(data).as_base()
            )
        for piece in cold.pieces():
            self._crew.report(len(piece), blob.where)
        return (Kind.COLD if number is None else Kind.DELTA), number


def _check_needed(models: Sequence[GatheredModel], members: Sequence[Member]) -> None:
    """Check that all members are needed: others were to be bases, but what needed them was thawed."""
    named = {blob.digest for model in models for blob in model.manifest.blobs}
    bases = {member.base for member in members}
    for number, member in enumerate(members):
        if not (member.kind == Kind.MANIFEST or member.digest in named or number in bases):
            raise StoreError("models were thawed while they were packed; pack them again")

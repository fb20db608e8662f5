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
from typing import TYPE_CHECKING, NamedTuple

from blobstore.archives.ordered_writer import OrderedSlot, OrderedWriter
from blobstore.archives.plan import plan_members, read_models
from blobstore.archives.table import PREFIX, ArchiveTable, Kind, Member, check_case
from blobstore.cold_blobs.batches import BlobProgress
from blobstore.cold_blobs.blob_encoder import (
    BlobEncoder,
    SizeEstimator,
    chunks_of,
    write_verified,
)
from blobstore.compression.base import BaseBlob
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.level import Level, check_compression_level
from blobstore.core.arguments import local_path
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import replacing, write_all
from blobstore.core.mmap import mapped
from blobstore.core.progress import of_passes
from blobstore.core.targets import check_new_file
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import (
    BlobDamaged,
    BlobstoreError,
    ColdDamaged,
    Damaged,
    StoreError,
    UsageError,
)
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models
from blobstore.store.names import NewSignature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from blobstore.archives.plan import PlannedMember
    from blobstore.archives.table import ArchivedModel
    from blobstore.core.progress import Progress
    from blobstore.manifests.reference import Names, Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The result of :func:`blobstore.pack`."""

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
    fallbacks: int
    """Number of blobs that are stored without their base, because the delta could not be verified."""
    signatures: int
    """Signatures of the models that the archive has."""
    seconds: float
    notices: tuple[str, ...] = ()
    """Models whose signatures stay in the store."""


def pack_models(
    references: Names,
    path: str | os.PathLike[str],
    *,
    store: StoreLike = None,
    level: Level = "fast",
    signatures: bool = True,
    force: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Write models to a new archive, for :func:`blobstore.operations.archive.unpack.unpack_archive`.

    Args:
        references: the models.
        path: the file, which appears complete and synced, or not at all.
        store: the store or its folder; by default that of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        level: ``fast`` to compress and decompress, or ``small``. Frozen blobs are copied at any level.
        signatures: pack the signatures of the models, too. Programs that expect none in archives refuse the file.
        force: replace an existing file.
        jobs: number of threads; by default one per processor.
        progress: called with the current blob, the bytes done and the total.

    Returns:
        the file, the models, and the bytes before and after compression.

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
    check_compression_level(level)
    store = LocalStore.to_read(store)
    names = named_models(store, references)
    if not names:
        raise UsageError("name the models to be packed")
    check_case(names)
    target = local_path(path)
    check_new_file(target, force=force)
    store.check_root()
    models = read_models(store, names)
    packed, notices = _signatures_of(store, models, wanted=signatures)
    needed = [blob.digest for model in models for blob in model.manifest.blobs]
    with store.lease_if_writable(needed):
        planned = plan_members(
            store,
            models,
            SizeEstimator(store, level),
            lambda what: progress(what, 0, 0) if progress is not None else None,
        )
        workers = WorkerPool(
            jobs, of_passes(progress, 2), 2 * sum(item.blob.size for item in planned)
        )
        try:
            with replacing(target) as descriptor:
                writer = _ArchiveWriter(store, level, target.parent, descriptor, workers)
                members = writer.write(models, packed, planned)
                size = os.fstat(descriptor).st_size
                check_new_file(target, force=force)  # it may have appeared since
        except OSError as error:
            raise BlobstoreError(f"cannot write {quote(target)}: {error.strerror}") from error
    return Packed(
        path=target,
        references=tuple(model.reference for model in models),
        blobs=len(planned),
        deltas=sum(member.kind == Kind.DELTA for member in members),
        size=sum(item.blob.size for item in planned),
        stored=size,
        fallbacks=len(writer.fallbacks),
        signatures=len(packed),
        seconds=time.monotonic() - started,
        notices=notices,
    )


def _signatures_of(
    store: LocalStore, models: Iterable[ArchivedModel], *, wanted: bool
) -> tuple[list[NewSignature], tuple[str, ...]]:
    """Return the intact signatures of models, in an order that depends on them alone, and what stays."""
    found: dict[bytes, NewSignature] = {}
    notices = []
    for manifest, name in {Digest.of(model.data): model.reference for model in models}.items():
        kept = list(store.kept_signatures(manifest))
        own = sorted(one.data for one in kept if wanted and one.data is not None)
        found |= {data: NewSignature(manifest, data, is_verified=False) for data in own}
        if left := len(kept) - len(own):
            why = "damaged: " if wanted else ""
            folder = quote(store.signature_folder(manifest))
            notices.append(f"{name}: the archive lacks signatures ({why}{left}) of {folder}")
    return list(found.values()), tuple(notices)


class _Encoding(NamedTuple):
    """How a blob is stored."""

    kind: Kind
    base: int | None = None
    """The number of its base."""


class _WrittenBlob(NamedTuple):
    """A blob that is in the archive, or will be when its turn has come."""

    slot: OrderedSlot
    kind: Kind


class _ArchiveWriter:
    """Writes the members of an archive, and its table."""

    def __init__(
        self,
        store: LocalStore,
        level: Level,
        folder: Path,
        descriptor: int,
        workers: WorkerPool,
    ) -> None:
        self._store = store
        self._level: Level = level
        self._workers = workers
        self._writer = OrderedWriter(descriptor, folder, PREFIX)
        self._written: dict[Digest, _WrittenBlob] = {}
        self._numbers: dict[Digest, int] = {}
        self._deltas: set[Digest] = set()
        """Blobs that are to be deltas."""
        self.fallbacks: set[Digest] = set()
        """Blobs that are compressed alone, because their delta could not be verified."""

    def write(
        self,
        models: Sequence[ArchivedModel],
        signatures: Sequence[NewSignature],
        planned: Sequence[PlannedMember],
    ) -> list[Member]:
        """Write the archive, and return its members."""
        manifests = {Digest.of(model.data): model.data for model in models}
        numbers = {digest: number for number, digest in enumerate(manifests)}
        members: list[Member] = []
        plain = [(Kind.MANIFEST, data, None) for data in manifests.values()]
        signed = [(Kind.SIGNATURE, one.data, numbers[one.manifest]) for one in signatures]
        for kind, data, signs in (*plain, *signed):
            with OrderedSlot(self._writer, len(members)) as slot:
                slot.write(data)
            digest = Digest.of(data)
            members.append(Member(kind, len(data), digest, len(data), digest, signs))
        first = len(members)
        self._numbers = {
            item.blob.digest: number for number, item in enumerate(planned, start=first)
        }
        self._deltas = {item.blob.digest for item in planned if item.base is not None}
        members += self._workers.run(
            enumerate(planned, start=first),
            lambda item: self._write_blob(*item),
            self._writer.close,
        )
        named = {blob.digest for model in models for blob in model.manifest.blobs}
        bases = {member.base for member in members}
        for number, member in enumerate(members[first:], start=first):
            if member.digest not in named and number not in bases:
                # It was added as a base, but its deltas were thawed and are compressed without it.
                raise StoreError("models were thawed while they were packed; pack them again")
        names = [(model.reference.full, numbers[Digest.of(model.data)]) for model in models]
        write_all(self._writer.descriptor, ArchiveTable(members, names).to_bytes())
        return members

    def _write_blob(self, number: int, planned: PlannedMember) -> Member:
        """Write a blob in its smallest encoding, and verify what is in the file.

        Raises:
            BlobMissing, BlobDamaged: the blob is not intact, or the file does not have it.
        """
        blob = planned.blob
        progress = BlobProgress(self._workers.report, planned.label, 2 * blob.size)
        try:
            with OrderedSlot(self._writer, number) as slot:
                encoding = self._write_cold(planned, slot, progress.add)
                if encoding is None:
                    encoding = _Encoding(Kind.RAW)
                    for piece in self._store.read_pieces(*blob):
                        slot.write(piece)
                        progress.add(memoryview(piece).nbytes)
                    if slot.digest != blob.digest:
                        raise self._fault(planned)
                self._written[blob.digest] = _WrittenBlob(slot, encoding.kind)
            if not slot.is_intact():
                raise self._fault(planned)
        except Damaged as error:
            raise error.at(planned.label) from None
        progress.finish()
        return Member(encoding.kind, blob.size, blob.digest, slot.size, slot.digest, encoding.base)

    def _fault(self, planned: PlannedMember) -> BlobDamaged:
        """Return the error for a blob that was not written correctly.

        Raises:
            BlobDamaged: it or its base is damaged in the store.
        """
        self._store.check_digest(*planned.blob)
        if planned.base is not None:
            self._store.check_digest(*planned.base)
        return BlobDamaged(f"blob {planned.blob.digest} does not match its digest after packing")

    def _write_cold(
        self, planned: PlannedMember, slot: OrderedSlot, report: Callable[[int], None]
    ) -> _Encoding | None:
        """Compress a blob; return None, with nothing written, if it is not smaller.

        Raises:
            BlobDamaged: the cold blob does not decode to the blob.
        """
        blob = planned.blob
        is_hot = self._store.has_hot(blob.digest)
        if planned.cold is not None:
            try:
                for chunk in chunks_of(planned.cold, lambda _: report(0)):
                    slot.write(chunk)
                return self._verify(slot, report)
            except ColdDamaged:
                if not is_hot:
                    raise self._fault(planned) from None
                slot.clear()
        if planned.is_too_small:
            return None
        with contextlib.ExitStack() as files:
            if is_hot:
                in_chain = planned.base is not None and planned.base.digest in self._deltas
                encoder = BlobEncoder(
                    self._store, blob, self._level, planned.base, chains=True, in_chain=in_chain
                )
            else:  # it is compressed again, without its base, which is not in the archive
                file = files.enter_context(tempfile.TemporaryFile(dir=self._writer.folder))
                for piece in self._store.read_pieces(*blob):
                    write_all(file.fileno(), piece)
                    report(0)
                data = mapped(file.fileno(), blob.size)
                encoder = BlobEncoder(self._store, blob, self._level, data=data)
            try:
                encoding = write_verified(
                    encoder,
                    slot,
                    is_gain=lambda: slot.size < blob.size,
                    verify=lambda: self._verify(slot, report),
                    report=report,
                    on_fallback=lambda: self.fallbacks.add(blob.digest),
                )
            except ColdDamaged:
                raise self._fault(planned) from None
        return encoding

    def _verify(self, slot: OrderedSlot, report: Callable[[int], None]) -> _Encoding:
        """Decode and hash the cold blob in a slot, against the bases that are in the archive.

        Raises:
            ColdDamaged: it does not decode to the blob.
        """
        cold = self._opened(slot)
        for piece in cold.pieces():
            report(len(piece))
        base = cold.table.base
        return (
            _Encoding(Kind.COLD)
            if base is None
            else _Encoding(Kind.DELTA, self._numbers[base.digest])
        )

    def _opened(self, slot: OrderedSlot) -> ColdBlobDecoder:
        """Open the cold blob in a slot, with its base as soon as that is in the archive."""
        cold = ColdBlobDecoder(slot.read_back())
        if cold.table.base is not None:
            digest = cold.table.base.digest
            self._writer.wait_until(self._numbers[digest] + 1)
            base = self._written[digest]
            cold.give_base(
                BaseBlob.hot(base.slot.read_back(), digest)
                if base.kind == Kind.RAW
                else self._opened(base.slot).as_base()
            )
        return cold

"""Import the models of an archive into a store, or only check them.

The table of the archive is checked first, then the manifests of the models. Each blob is decoded into a
file of the store's ingest, which hashes it. Names are published last, when all blobs are durable. If
anything is wrong with the archive, no name appears.

Bases are decoded before their deltas, which read them from the files of the ingest, or from files without
names if the archive is only checked. So each member of a chain is decoded once.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from blobstore.archives.reader import label_blobs, open_archive
from blobstore.archives.table import Kind, check_case
from blobstore.core.arguments import local_path
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import write_all
from blobstore.core.mmap import map_file, mapped
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import (
    ArchiveDamaged,
    BlobstoreError,
    InvalidSignature,
)
from blobstore.manifests.reference import Reference, all_under
from blobstore.operations.sign.require_trust import check_trust, read_policy, read_signature
from blobstore.remotes.signatures import SelectedSignatures
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.names import NewModel, NewSignature

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from blobstore.archives.reader import ArchiveReader
    from blobstore.archives.table import ArchivedModel
    from blobstore.core.progress import Progress
    from blobstore.manifests.reference import Names
    from blobstore.store.ingest import Ingest, Ingested

Done = TypeVar("Done")

_MAX_MAPPED: Final = 1 << 14
"""Bases whose decoded files are mapped at most; Linux allows a process four times as many maps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """The result of :func:`blobstore.unpack`."""

    path: Path
    references: tuple[Reference, ...]
    blobs: int
    """Blobs of the models."""
    bytes_written: int
    bytes_present: int
    """Bytes of blobs that the store already had."""
    stored: int
    """Bytes that the blobs take in the archive."""
    signatures: int
    """Signatures that are kept: those that were given, and of the archive with a policy that has keys those
    by its keys."""
    seconds: float
    notices: tuple[str, ...] = ()
    """Models that the policy does not trust, and only warns about; signatures that are not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedArchive:
    """The result of :func:`blobstore.check_archive`, which found no damage."""

    path: Path
    references: tuple[Reference, ...]
    blobs: int
    """Blobs that were decoded and hashed."""
    size: int
    """Bytes of these blobs."""
    stored: int
    """Bytes that they take in the archive."""
    seconds: float


def unpack_archive(
    path: str | os.PathLike[str],
    references: Names = (),
    *,
    store: StoreLike = None,
    signatures: Iterable[str | os.PathLike[str]] = (),
    prefix: str | None = None,
    force: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Unpacked:
    """Import models of an archive into a store: all of them, or none.

    Args:
        path: the archive.
        references: the models, by default all. Only their members are read.
        store: the store or its folder; by default that of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        signatures: files with more signatures of the models, which are stored with them.
        prefix: ``[host/]namespace`` that the models get instead of their own.
        force: replace other models that have the names.
        jobs: number of threads; by default one per processor.
        progress: called with the current blob, the bytes done and the total.

    Returns:
        the models, and the bytes that were written and present.

    Raises:
        NotTrusted: the policy refuses a model.
        InvalidPolicy: the policy cannot be used.
        InvalidSignature: one of ``signatures`` is malformed, or signs no model of the archive.
        ArchiveDamaged: the archive is truncated or altered, or breaks the format.
        ModelNotFound: it has no such model.
        NotFound: there is no such file.
        NameTaken: a name belongs to another model of the store, or was given to one in the meantime.
        NameConflict: a name differs only in case from one in the store or from another model's.
        StoreBusy: timed out waiting for the store's lock.
        StoreError: the store cannot be written, or is short of space.
        UsageError: an argument is invalid.
    """
    started = time.monotonic()
    check_jobs(jobs)
    store = LocalStore.of(store)
    with open_archive(path) as archive:
        models = archive.models(references)
        given_names = all_under(prefix, (model.reference for model in models))
        # Names are given in the order of their numbers: the last step is the newest here, too.
        models = sorted(
            (model._replace(reference=one) for model, one in zip(models, given_names, strict=True)),
            key=lambda model: model.reference,
        )
        stored = sum(archive.members[number].stored_size for number in archive.needed(models))
        check_case(model.reference for model in models)
        updates = [
            store.names.claim(model.reference, Digest.of(model.data), force=force)
            for model in models
        ]
        given = _read_signatures(signatures, models)
        arriving, notices = _trusted(store, archive, models, given)
        with store.ingest() as ingest:
            ingested = _ingest_blobs(archive, models, store, ingest, jobs, progress)
            ingest.publish()
            store.names.install(
                [
                    NewModel(update, model.data, model.manifest.blobs)
                    for update, model in zip(updates, models, strict=True)
                ],
                arriving,
                ingest=ingest,
            )
    return Unpacked(
        path=local_path(path, "source"),
        references=tuple(model.reference for model in models),
        blobs=len(ingested),
        bytes_written=sum(item.size for item in ingested if item.written),
        bytes_present=sum(item.size for item in ingested if not item.written),
        stored=stored,
        signatures=len(arriving),
        seconds=time.monotonic() - started,
        notices=tuple(notices),
    )


def check_archive(
    path: str | os.PathLike[str],
    references: Names = (),
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> CheckedArchive:
    """Decode and hash the models of an archive, and leave nothing behind.

    The bases of deltas are decoded once, into files without names next to the archive, if that is possible.

    Args:
        path: the archive.
        references: the models to check; by default all.
        jobs: number of threads; by default one per processor.
        progress: called with the current step, bytes done and total bytes.

    Returns:
        the models, and the bytes of their blobs.

    Raises:
        BlobstoreError: as :func:`unpack_archive`.
    """
    started = time.monotonic()
    check_jobs(jobs)
    with open_archive(path) as archive:
        models = archive.models(references)
        for manifest in {Digest.of(model.data) for model in models}:
            deque(archive.signatures(manifest), maxlen=0)
        labels = label_blobs(models, archive)
        numbers = sorted(labels)
        members = [archive.members[number] for number in numbers]
        workers = WorkerPool(jobs, progress, sum(member.size for member in members))

        folder, bases = local_path(path, "source").parent, _bases_of(archive, numbers)

        def check(number: int) -> None:
            pieces = _pieces(archive, number, labels[number], workers.report)
            if number in bases and archive.members[number].kind != Kind.RAW:
                _check_and_keep(archive, number, pieces, folder)
            else:
                deque(pieces, maxlen=0)

        _run_in_order(archive, numbers, workers, check)
    return CheckedArchive(
        path=local_path(path, "source"),
        references=tuple(model.reference for model in models),
        blobs=len(members),
        size=sum(member.size for member in members),
        stored=sum(member.stored_size for member in members),
        seconds=time.monotonic() - started,
    )


def _check_and_keep(
    archive: ArchiveReader, number: int, pieces: Iterator[memoryview], folder: Path
) -> None:
    """Decode a base once for all its deltas, into a file without a name, if there is space for that."""
    size = archive.members[number].size
    with contextlib.ExitStack() as files:
        file = None
        with contextlib.suppress(OSError):  # nothing can be written there
            if shutil.disk_usage(folder).free > size:
                file = files.enter_context(tempfile.TemporaryFile(dir=folder))
        for piece in pieces:
            try:
                if file is not None:
                    write_all(file.fileno(), piece)
            except OSError:  # the disk is full
                file = None
        if file is not None:
            with contextlib.suppress(BlobstoreError, OSError):
                archive.keep_decoded(number, mapped(file.fileno(), size))


def _read_signatures(
    files: Iterable[str | os.PathLike[str]], models: Sequence[ArchivedModel]
) -> list[NewSignature]:
    """Return the signatures in files, each of which signs one of the models."""
    manifests = {Digest.of(model.data) for model in models} if files else set()
    found = []
    for file in files:
        signature = read_signature(local_path(file, "source"))
        if signature.manifest not in manifests:
            raise InvalidSignature(f"{quote(file)} signs none of the models that are unpacked")
        found.append(NewSignature(signature.manifest, signature.data, is_verified=True))
    return found


def _trusted(
    store: LocalStore,
    archive: ArchiveReader,
    models: Sequence[ArchivedModel],
    given: Sequence[NewSignature],
) -> tuple[list[NewSignature], list[str]]:
    """Check that the policy does not refuse a model; return the signatures to keep, and notices."""
    policy = read_policy(store)
    kept = dict.fromkeys(given)
    notices: list[str] = []
    names = {Digest.of(model.data): model.reference for model in models}
    for manifest, name in names.items():
        found = SelectedSignatures.of(archive.signatures(manifest), manifest, policy)
        notices += found.notices(name)
        kept |= dict.fromkeys(
            NewSignature(manifest, data, is_verified=found.is_verified) for data in found.data
        )
    for model in models:
        own = (one.data for one in kept if one.manifest == Digest.of(model.data))
        verdict = check_trust(store, model.reference, model.data, own, policy)
        notices += verdict.notices(model.reference) if verdict is not None else ()
    return list(kept), notices


def _ingest_blobs(
    archive: ArchiveReader,
    models: Sequence[ArchivedModel],
    store: LocalStore,
    ingest: Ingest,
    jobs: int | None,
    progress: Progress | None,
) -> list[Ingested]:
    """Add the blobs of the models that the store does not have."""
    present: list[Ingested] = []
    missing: list[int] = []
    for number in archive.needed(models):
        member = archive.members[number]
        found = ingest.find(member.digest, member.size, is_hashed=False)
        if found is None:
            missing.append(number)
        else:
            present.append(found)
    size = sum(archive.members[number].size for number in missing)
    bases = _bases_of(archive, missing)
    # Each name has a manifest of its own.
    store.check_space(size + sum(len(model.data) for model in models))
    labels = label_blobs(models, archive)
    workers = WorkerPool(jobs, progress, size)

    def add(number: int) -> Ingested:
        def pieces() -> Iterator[memoryview]:
            return _pieces(archive, number, labels[number], workers.report)

        added = ingest.add(archive.members[number].size, pieces, once=True)
        if added.file and number in bases:
            file = store.folder("temporary") / added.file
            # Without it, the base is decoded again.
            with contextlib.suppress(BlobstoreError, OSError):
                archive.keep_decoded(number, map_file(file, added.size))
        return added

    return present + _run_in_order(archive, missing, workers, add)


def _bases_of(archive: ArchiveReader, numbers: Sequence[int]) -> set[int | None]:
    """Return the bases of members whose decoded files can be mapped."""
    users = (archive.members[number].base for number in numbers)
    return set(islice(dict.fromkeys(users), _MAX_MAPPED))


def _run_in_order(
    archive: ArchiveReader, numbers: Sequence[int], workers: WorkerPool, do: Callable[[int], Done]
) -> list[Done]:
    """Do something with members after their bases, whose decoded files are kept until then."""
    done: list[Done] = []
    earlier: list[int] = []
    try:
        for generation in _generations(archive, numbers):
            done += workers.run(generation, do)
            archive.forget_decoded(earlier)
            earlier = generation
    finally:
        archive.forget_decoded(numbers)
    return done


def _generations(archive: ArchiveReader, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers such that the base of each is in the list before, if it is one of them."""
    places: dict[int | None, int] = {}
    found: list[list[int]] = []
    for number in numbers:  # ascending, and bases come first in archives
        places[number] = place = 1 + places.get(archive.members[number].base, -1)
        if place == len(found):
            found.append([])
        found[place].append(number)
    return found


def _pieces(
    archive: ArchiveReader, number: int, label: str, report: Callable[[int, str], None]
) -> Iterator[memoryview]:
    """Yield and report the bytes of a blob; errors name its model and layer."""
    try:
        for piece in archive.pieces(number, lambda: report(0, label)):
            yield piece
            report(len(piece), label)
    except ArchiveDamaged as error:
        raise error.at(label) from None

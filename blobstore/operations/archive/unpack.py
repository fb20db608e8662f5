"""Workflow: models of an archive come into a store, or are only checked.

The archive's table is checked before anything else, then the manifests that are wanted, against the
members. Each blob is decoded into a file of the store's import, which hashes it; names come last, when
all that they need is durable. Whatever is wrong with the archive, no name appears.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import write_file
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import ArchiveDamaged, BlobstoreError, NameTaken, StoreError
from blobstore.manifests.reference import Reference
from blobstore.operations.archive.reader import check_case, layers_by_blob, open_archive
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from blobstore.core.progress import Progress
    from blobstore.operations.archive.reader import ArchivedModel, ArchiveReader
    from blobstore.store.ingest import Ingest, Ingested


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """What :func:`unpack_archive` did."""

    path: Path
    references: tuple[Reference, ...]
    blobs: int
    """Blobs of the models."""
    bytes_written: int
    bytes_present: int
    """Bytes of blobs that the store had already."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedArchive:
    """What :func:`check_archive` found: nothing wrong."""

    path: Path
    references: tuple[Reference, ...]
    blobs: int
    """Blobs that were decoded and hashed."""
    size: int
    """Bytes of these."""
    stored: int
    """Bytes of them in the archive."""
    seconds: float


def unpack_archive(
    path: str | os.PathLike[str],
    references: Sequence[str | Reference] = (),
    *,
    store: LocalStore | None = None,
    force: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Unpacked:
    """Bring models of an archive into a store: all of them, or none.

    Args:
        path: the archive.
        references: the models; by default all of it. No more is read than they need.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        force: take the names from other models that have them.
        jobs: threads; by default the machine's processors.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        ArchiveDamaged: the archive is cut short, altered, or breaks the format.
        ModelNotFound: it has no such model.
        NotFound: there is no such file.
        NameTaken: another model has a name.
        NameConflict: a name of the store, or another of the models, differs from one in case only.
        BlobDamaged: the store has a blob, and it is not whole.
        StoreBusy: others have kept the store's lock all the time.
        StoreError: the store cannot be written, or has not enough room.
        UsageError: an argument means nothing.
    """
    started = time.monotonic()
    check_jobs(jobs)
    wanted = [_parsed(reference) for reference in references]
    store = store or LocalStore()
    with open_archive(path) as bundle:
        models = bundle.models(list(dict.fromkeys(wanted)))
        check_case(model.reference for model in models)
        _check_names(store, models, force=force)
        with store.ingest() as ingest:
            work = _Unpacking(bundle, models, ingest)
            ingested = work.run(store, jobs, progress)
            ingest.publish()
            with store.exclusive_lock():
                _check_names(store, models, force=force)
                _place(store, models)
    return Unpacked(
        path=Path(path),
        references=tuple(model.reference for model in models),
        blobs=len(ingested),
        bytes_written=sum(item.size for item in ingested if item.written),
        bytes_present=sum(item.size for item in ingested if not item.written),
        seconds=time.monotonic() - started,
    )


def check_archive(
    path: str | os.PathLike[str],
    references: Sequence[str | Reference] = (),
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> CheckedArchive:
    """Decode and hash what is in an archive, and write nothing. Args and raises as :func:`unpack_archive`."""
    started = time.monotonic()
    check_jobs(jobs)
    wanted = [_parsed(reference) for reference in references]
    with open_archive(path) as bundle:
        models = bundle.models(list(dict.fromkeys(wanted)))
        members = bundle.bundle.members
        needed = set(bundle.needed(models))
        bases = {base for number in needed if (base := members[number].base) is not None}
        numbers = sorted(needed | bases)
        layers = layers_by_blob(models, bundle.bundle)
        crew = WorkerPool(jobs, progress, sum(members[number].size for number in numbers))

        def check(number: int) -> None:
            for _ in _pieces(bundle, number, layers, crew):
                pass

        crew.run(numbers, check)
    return CheckedArchive(
        path=Path(path),
        references=tuple(model.reference for model in models),
        blobs=len(numbers),
        size=sum(members[number].size for number in numbers),
        stored=sum(members[number].stored for number in numbers),
        seconds=time.monotonic() - started,
    )


class _Unpacking:
    def __init__(
        self, bundle: ArchiveReader, models: Sequence[ArchivedModel], ingest: Ingest
    ) -> None:
        self._bundle = bundle
        self._ingest = ingest
        self._members = bundle.bundle.members
        self._numbers = bundle.needed(models)
        self._layers = layers_by_blob(models, bundle.bundle)
        self._manifests = sum(len(model.data) for model in models)
        """Bytes of the manifests, one for each name."""

    def run(self, store: LocalStore, jobs: int | None, progress: Progress | None) -> list[Ingested]:
        """Take in the blobs that the store has not."""
        found: list[Ingested] = []
        missing: list[int] = []
        for number in self._numbers:
            member = self._members[number]
            present = self._ingest.find(member.digest, member.size)
            if present is None:
                missing.append(number)
            else:
                found.append(present)
        size = sum(self._members[number].size for number in missing)
        free = shutil.disk_usage(store.folder("temporary")).free
        needed = size + self._manifests
        if needed > free:
            raise StoreError(
                f"not enough space for the store {quote(store.root)}: {needed} bytes are "
                f"needed, and {free} are free"
            )
        crew = WorkerPool(jobs, progress, size)

        def add(number: int) -> Ingested:
            def pieces() -> Iterator[memoryview]:
                return _pieces(self._bundle, number, self._layers, crew)

            return self._ingest.add(self._members[number].size, pieces, once=True)

        return [*found, *crew.run(missing, add)]


def _pieces(
    bundle: ArchiveReader, number: int, layers: Callable[[int], str], crew: WorkerPool
) -> Iterator[memoryview]:
    """Yield the bytes of a blob, and tell of them; errors say which layer it is."""
    layer = layers(number)
    try:
        for piece in bundle.pieces(number, lambda: crew.report(0, layer)):
            yield piece
            crew.report(len(piece), layer)
    except ArchiveDamaged as error:
        raise error.at(layer) from None


def _check_names(store: LocalStore, models: Sequence[ArchivedModel], *, force: bool) -> None:
    """Check that the models may have their names."""
    for model in models:
        store.check_name(model.reference)
        if not force and store.is_taken(model.reference, model.data):
            raise NameTaken(
                f"another model has the name {quote(model.reference)}; replace it with --force"
            )


def _place(store: LocalStore, models: Sequence[ArchivedModel]) -> None:
    """Give the models their names: all of them, or none if one cannot have its."""
    with contextlib.ExitStack() as undo:
        for model in models:
            undo.callback(_put_back, store, model, _before(store, model.reference))
            store.place(model.reference, model.data, model.manifest.blobs)
        undo.pop_all()


def _before(store: LocalStore, reference: Reference) -> bytes | None:
    """Return the manifest that a name has; None if it has none, or what is there cannot be read."""
    try:
        return store.read_manifest(reference)
    except BlobstoreError:
        return None


def _put_back(store: LocalStore, model: ArchivedModel, before: bytes | None) -> None:
    """Give a name the manifest that it had, or take it away, as far as that can be done."""
    if before == model.data or store.is_taken(model.reference, model.data):
        return  # the name has not become this model's
    with contextlib.suppress(BlobstoreError, OSError):
        if before is None:
            store.remove(model.reference)
        else:
            path, temporary = store.manifest_path(model.reference), store.folder("temporary")
            write_file(path, [before], mode=0o644, temporary=temporary)


def _parsed(reference: str | Reference) -> Reference:
    return Reference.parse(reference) if isinstance(reference, str) else reference

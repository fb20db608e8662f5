"""The operation ``pull``: fetches a model from a registry into a store.

The manifest is resolved and checked first. Blobs that the store has are hashed, unless they were before;
the others are fetched into partial files, several at a time, large ones in parts. Each is hashed while it
arrives, and only if all digests are right do the blobs get their names, and last the manifest. A pull that
was interrupted continues where it stopped.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.files import open_regular
from blobstore.core.mmap import mapped
from blobstore.core.workers import Cancelled, RateLimiter, WorkerPool, check_jobs
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    DamagedSource,
    InvalidManifest,
    ModelNotFound,
    NameTaken,
    UsageError,
)
from blobstore.manifests.reference import Reference
from blobstore.operations.sign.trust import check_trust
from blobstore.operations.transfer.cold import fetch_cold_layers, usable_layers
from blobstore.operations.transfer.notes import PulledNote
from blobstore.operations.transfer.referrers import fetch_referrers
from blobstore.operations.transfer.signatures import fetch_signatures
from blobstore.registry.protocol import DAMAGED_ADVICE
from blobstore.registry.reference import RemoteReference
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from blobstore.compression.base import BaseBlob
    from blobstore.core.digest import BlobId
    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.operations.transfer.cold import ColdLayer
    from blobstore.registry.shapes.files import RemoteFile
    from blobstore.registry.store import RemoteSource
    from blobstore.store.ingest import Ingest
    from blobstore.store.partial import PartialBlob

STREAMS: Final = 8
"""Blobs, or parts of blobs, that are fetched at once by default."""
_BUSY_PAUSE = 0.1
"""Seconds until a blob that another process is fetching is looked at again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """The result of :func:`pull_model`."""

    remote: RemoteReference
    reference: Reference
    digest: Digest
    """Of the manifest in the registry."""
    shape: str
    """How the model lies in the registry: ``oci``, ``ollama``, ``image``, or ``files`` of another tool."""
    blobs: int
    """Blobs of the model."""
    blobs_fetched: int
    """Blobs that the store did not have."""
    bytes_fetched: int
    """Bytes that were transferred, or would be."""
    bytes_resumed: int
    """Bytes of these blobs that an earlier pull had transferred."""
    bytes_saved: int
    """Bytes that were not transferred because blobs came in their compressed form."""
    bytes_present: int
    """Bytes of blobs that the store already had."""
    repaired: dict[Digest, Path | None]
    """The damaged blobs that were replaced, and where the damaged files are now."""
    signatures: int
    """Signatures that came with the model; none of them has to be trusted."""
    replaced: bool
    """Whether the name belonged to another model, which ``restore`` brings back."""
    seconds: float
    notices: tuple[str, ...] = ()
    """What the policy warns about."""


def pull_model(
    remote: str | RemoteReference,
    name: str | Reference | None = None,
    *,
    store: LocalStore | str | os.PathLike[str] | None = None,
    streams: int = STREAMS,
    limit_rate: float | None = None,
    jobs: int | None = None,
    force: bool = False,
    cold: bool = True,
    dry_run: bool = False,
    plain_http: bool | None = None,
    progress: Progress | None = None,
) -> Pulled:
    """Fetch a model from a registry.

    Args:
        remote: the address, ``[oci://]host[:port]/repository[:tag|@sha256:…]``.
        name: the name that the model gets; by default the address.
        store: the store or its folder; by default that of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        streams: number of blobs, or of parts of large blobs, that are fetched at once.
        limit_rate: bytes per second that are fetched at most.
        jobs: number of threads that hash blobs of the store; by default one per processor.
        force: replace another model that has the name. What an earlier pull from this address gave it is
            replaced without.
        cold: fetch compressed forms if the registry has them and the store has the bases of deltas.
        dry_run: fetch nothing but manifests; report what would be fetched.
        plain_http: whether to use HTTP without TLS; by default only for this machine.
        progress: called with the current blob, the bytes done and the total.

    Raises:
        BlobDamaged: the registry sent wrong bytes twice, or another length.
        BlobMissing: the registry does not have a blob of the model.
        InvalidManifest: a manifest breaks its format or contradicts the model.
        ModelNotFound: the registry has no such model.
        NameConflict: the name differs only in case from another one.
        NameTaken: the name belongs to another model.
        NotTrusted: the policy refuses the model.
        InvalidPolicy: the policy cannot be used.
        RemoteError: the registry cannot be reached, refuses access or misbehaves.
        StoreBusy: timed out waiting for the store's lock.
        StoreError: the store cannot be written, or is short of space.
        UnsupportedSource: the address is that of something other than a model.
        UsageError: an argument is invalid.
    """
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.store import RemoteSource

    started = time.monotonic()
    check_jobs(jobs)
    if streams < 1:
        raise UsageError(f"streams must be at least 1, got {streams}")
    limiter = None if limit_rate is None else RateLimiter(limit_rate)
    address = remote if isinstance(remote, RemoteReference) else RemoteReference.parse(remote)
    reference = address.name() if name is None else Reference.of(name)
    store = LocalStore.of(store)
    store.check_root()
    with RegistryClient(address.host, plain_http=plain_http, limiter=limiter) as client:
        source = RemoteSource.resolve(client, address, with_files=True)
        data = source.model.manifest
        _check_name(store, reference, source, force=force)
        # Files that are imported get a manifest of their own, so only that of the registry can be signed.
        signed = source.root.data if source.files else data
        digest = Digest.of(signed)
        referrers = fetch_referrers(client, address.repository, source.root)
        signatures = fetch_signatures(client, address.repository, source.root, digest, referrers)
        verdict = check_trust(store, reference, signed, signatures)

        def fetch_layers() -> dict[Digest, ColdLayer]:
            if not cold or source.files:
                return {}
            blobs = (blob.id for blob in source.model.blobs)
            return fetch_cold_layers(client, address.repository, referrers, blobs)

        if source.files and _is_imported(store, reference, source, dry_run=dry_run):
            done = _Done(0, 0, 0, 0, 0)
        elif dry_run:
            done = _planned(store, source, fetch_layers)
        else:
            kept = [(digest, signature.data) for signature in signatures]
            done = _pull(
                store, reference, source, kept, fetch_layers, streams, jobs, progress, force=force
            )
    return Pulled(
        remote=address,
        reference=reference,
        digest=source.root.digest,
        shape=source.model.shape,
        blobs=len(source.model.blobs),
        blobs_fetched=done.fetched,
        bytes_fetched=done.bytes_fetched,
        bytes_resumed=done.bytes_resumed,
        bytes_saved=done.bytes_saved,
        bytes_present=sum(blob.size for blob in source.model.blobs) - done.size,
        repaired=dict(done.repaired),
        signatures=len(signatures),
        replaced=done.former is not None,
        seconds=time.monotonic() - started,
        notices=(
            *(verdict.notices(reference) if verdict is not None else ()),
            *_replacement(reference, done.former),
            *done.notices,
        ),
    )


def _check_name(
    store: LocalStore, reference: Reference, source: RemoteSource, *, force: bool
) -> None:
    """Check that the model may have its name: it may if an earlier pull from there gave it the name."""
    store.check_name(reference)
    if force or not store.is_taken(reference, source.model.manifest):
        return
    note = PulledNote.read(store, reference)
    if note is None or note.remote != str(source.address):
        raise NameTaken(
            f"another model has the name {quote(reference)}",
            advice="replace it with force=True, or choose another name for the model",
        )


def _is_imported(
    store: LocalStore, reference: Reference, source: RemoteSource, *, dry_run: bool
) -> bool:
    """Return whether a name has what an earlier pull made of these files, and its blobs are intact."""
    note = PulledNote.read(store, reference)
    if note is None or note[:2] != (str(source.address), str(source.root.digest)):
        return False
    blobs = store.resolve(reference).blobs
    if dry_run:
        return store.has_blobs(blobs)
    with store.ingest() as ingest:
        return all(ingest.find(*blob.id) for blob in blobs)


def _replacement(reference: Reference, former: bytes | None) -> Iterable[str]:
    from blobstore.operations.create.create import replacement_notices

    return replacement_notices(reference, former)


class _Done(NamedTuple):
    """What a pull fetched, or would fetch."""

    fetched: int
    size: int
    """Bytes of the blobs that the store did not have."""
    bytes_fetched: int
    bytes_resumed: int
    bytes_saved: int
    repaired: Mapping[Digest, Path | None] = {}
    former: bytes | None = None
    """The manifest that was replaced."""
    notices: tuple[str, ...] = ()


def _planned(
    store: LocalStore, source: RemoteSource, fetch_layers: Callable[[], Mapping[Digest, ColdLayer]]
) -> _Done:
    """Return what a pull would fetch."""

    def is_here(blob: BlobId) -> bool:
        with contextlib.suppress(BlobDamaged):
            return store.exists(*blob)
        return False

    missing = [blob for blob in source.model.blobs if not is_here(blob.id)]
    listed = fetch_layers() if missing else {}
    layers, without_base = usable_layers(store, listed, missing, is_here)
    stored = _stored(missing, layers)
    size, to_fetch = sum(blob.size for blob in missing), sum(item.size for item in stored)
    resumed = sum(map(store.partial_bytes, stored))
    notices = _base_notices(without_base)
    return _Done(len(missing), size, to_fetch - resumed, resumed, size - to_fetch, notices=notices)


def _base_notices(without_base: int) -> tuple[str, ...]:
    notice = (
        f"compressed forms that are of no use because the store lacks their bases: {without_base}; "
        "pull the base model first to fetch less"
    )
    return (notice,) if without_base else ()


def _stored(missing: Iterable[Descriptor], layers: Mapping[Digest, ColdLayer]) -> list[BlobId]:
    """Return what is fetched for each blob: its compressed form, if that is of use."""
    return [layers[blob.digest].stored if blob.digest in layers else blob.id for blob in missing]


def _pull(
    store: LocalStore,
    reference: Reference,
    source: RemoteSource,
    signatures: Iterable[tuple[Digest, bytes]],
    fetch_layers: Callable[[], Mapping[Digest, ColdLayer]],
    streams: int,
    jobs: int | None,
    progress: Progress | None,
    *,
    force: bool,
) -> _Done:
    model = source.model
    former: bytes | None = None
    with store.ingest() as ingest:
        found = WorkerPool(jobs, None, 0).run(model.blobs, lambda blob: ingest.find(*blob.id))
        missing = [blob for blob, item in zip(model.blobs, found, strict=True) if item is None]
        listed = fetch_layers() if missing else {}
        layers, without_base = usable_layers(
            store, listed, missing, lambda base: ingest.find(*base) is not None
        )
        size = sum(blob.size for blob in missing)
        # The compressed forms stay until the blobs have their names.
        to_fetch = sum(item.size - store.partial_bytes(item) for item in _stored(missing, layers))
        decoded = sum(layer.blob.size for layer in layers.values())
        store.check_space(to_fetch + decoded + len(model.manifest))
        workers = WorkerPool(streams, progress, size)
        transfer = _Transfer(source, store, ingest, missing, workers, layers)
        transfer.run(streams)
        if source.files:
            with contextlib.suppress(ModelNotFound, InvalidManifest):
                former = store.read_manifest(reference)
            _import(store, reference, source, transfer, jobs, progress)
            manifest = store.read_manifest(reference)
            PulledNote.of(source, manifest).keep(store, reference)
            return transfer.result(former=None if former == manifest else former)
        ingest.publish()
        transfer.remove_cold_files()
        store.check_manifest(model.manifest, source.manifest)
        for digest, signature in signatures:
            store.keep_signature(digest, signature)
        with ingest.exclusive_lock():
            _check_name(store, reference, source, force=force)
            if not store.has_model(reference) or store.is_taken(reference, model.manifest):
                former = store.place(reference, model.manifest, model.blobs)
            PulledNote.of(source, model.manifest).keep(store, reference)
        done = transfer.result(repaired=dict(ingest.repaired), former=former)
        return done._replace(notices=(*_base_notices(without_base), *done.notices))


def _import(
    store: LocalStore,
    reference: Reference,
    source: RemoteSource,
    transfer: _Transfer,
    jobs: int | None,
    progress: Progress | None,
) -> None:
    """Import the files of another tool, which are in partial files or in the store; remove the former."""
    from blobstore.operations.transfer.import_files import import_files

    def path_of(file: RemoteFile) -> Path | None:
        if file.digest in transfer.paths:
            return transfer.paths[file.digest]
        return Path(store.blob_path(file.digest)) if store.has_hot(file.digest) else None

    def report(what: str, done: int, total: int) -> None:
        if progress is not None:  # it goes on where the transfer ended
            progress(what, transfer.size + done, transfer.size + total)

    import_files(source.files, path_of, reference, store=store, jobs=jobs, progress=report)
    for path in transfer.paths.values():
        path.unlink(missing_ok=True)


class _Fetch:
    """A blob that is being fetched, or its cold form."""

    def __init__(self, blob: Descriptor, cold: ColdLayer | None = None) -> None:
        self.blob = blob
        self.cold = cold
        self.label = quote(blob.name or blob.media_type)
        self.file: PartialBlob | None = None
        self.parts = 0
        """Parts that are not complete yet."""
        self.reported = 0
        """Bytes that the progress counts; fetching damaged bytes again adds nothing."""
        self.resumed = 0
        """Bytes that an earlier pull had fetched."""
        self.is_second = False
        """Whether the bytes were wrong once."""

    @property
    def stored(self) -> BlobId:
        """What is fetched."""
        return self.blob.id if self.cold is None else self.cold.stored


class _Transfer:
    """Fetches blobs on several threads, each with one stream.

    A task is a blob, or a part of a large blob. Who begins a blob adds a task for each of its parts, and
    who ends its last part checks its digest. Blobs that another process is fetching are put back. A delta
    is begun when its base is complete, if that comes too.
    """

    def __init__(
        self,
        source: RemoteSource,
        store: LocalStore,
        ingest: Ingest,
        blobs: Iterable[Descriptor],
        workers: WorkerPool,
        cold: Mapping[Digest, ColdLayer],
    ) -> None:
        self._source = source
        self._store = store
        self._ingest = ingest
        self._workers = workers
        self._fetches = [_Fetch(blob, cold.get(blob.digest)) for blob in blobs]
        self._bytes_fetched = self._bytes_resumed = self._bytes_saved = 0
        self._notices: list[str] = []
        self._tasks: deque[Callable[[], None]] = deque()
        self._deltas: dict[Digest, list[Callable[[], None]]] = {
            fetch.blob.digest: [] for fetch in self._fetches
        }
        """The tasks that wait for a blob."""
        for fetch in self._fetches:
            base = None if fetch.cold is None else fetch.cold.base
            ready = self._tasks if base is None else self._deltas.get(base.digest, self._tasks)
            ready.append(partial(self._begin, fetch))
        self._unfinished = len(self._fetches)
        self._changed = threading.Condition()
        self.size = sum(fetch.blob.size for fetch in self._fetches)
        self.paths: dict[Digest, Path] = {}
        """The complete files of blobs, which have no names yet."""
        self._decoded: list[BlobId] = []
        """The compressed forms whose blobs are complete."""

    def run(self, streams: int) -> None:
        """Fetch all blobs. What an error or an interrupt stops can be continued."""
        try:
            self._workers.run(range(streams), self._work, self._source.client.abort)
        finally:
            for fetch in self._fetches:
                if fetch.file is not None:
                    fetch.file.close()

    def remove_cold_files(self) -> None:
        """Remove the compressed forms of blobs that have their names."""
        for stored in self._decoded:
            file = self._ingest.open_partial(stored)
            if file is not None:  # otherwise another pull decodes it, and will remove it
                file.discard()
                file.close()

    def result(self, **others: Any) -> _Done:
        """Return what was fetched."""
        return _Done(
            len(self._fetches),
            self.size,
            self._bytes_fetched,
            self._bytes_resumed,
            self._bytes_saved,
            notices=tuple(self._notices),
            **others,
        )

    def _work(self, _: int) -> None:
        """Run tasks until none is left and none can come."""
        while True:
            with self._changed:
                while self._unfinished and not self._tasks:
                    if self._workers.stopping.is_set():
                        raise Cancelled("stopped")
                    self._changed.wait(_BUSY_PAUSE)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            task()
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _add(self, tasks: Sequence[Callable[[], None]], *, is_last: bool = False) -> None:
        with self._changed:
            self._unfinished += len(tasks)
            if is_last:
                self._tasks.extend(tasks)
            else:
                self._tasks.extendleft(reversed(tasks))
            self._changed.notify_all()

    def _begin(self, fetch: _Fetch) -> None:
        """Open the partial file of a blob, and fetch the parts that it lacks."""
        self._workers.report(0, fetch.label)
        file = self._ingest.open_partial(fetch.stored)
        if file is None:
            self._workers.stopping.wait(_BUSY_PAUSE)
            self._add([partial(self._begin, fetch)], is_last=True)
            return
        fetch.file = file
        if self._ingest.find(*fetch.blob.id) is not None:  # fetched by another process
            file.discard()
            self._end(fetch, file, resumed=fetch.blob.size)
            return
        fetch.resumed = file.done
        self._count(fetch, file.done)
        parts = file.missing
        fetch.parts = len(parts)
        if not parts:
            self._check(fetch, file)
            return
        self._add([partial(self._fill, fetch, file, part) for part in parts[1:]])
        self._fill(fetch, file, parts[0])

    def _fill(self, fetch: _Fetch, file: PartialBlob, part: int) -> None:
        """Fetch what a part lacks."""
        try:
            missing = file.missing_bytes(part)
            with contextlib.closing(
                self._source.read(*fetch.stored, missing.start, missing.stop)
            ) as pieces:
                for piece in pieces:
                    file.write(part, piece)
                    with self._changed:
                        self._bytes_fetched += len(piece)
                    self._count(fetch, file.done)
        except (BlobDamaged, BlobMissing) as error:
            if fetch.cold is None:
                raise error.at(fetch.label) from None
            # The blob itself is fetched when no part is left.
        file.catch_up()
        with self._changed:
            fetch.parts -= 1
            is_filled = not fetch.parts
        if is_filled:
            self._check(fetch, file)

    def _check(self, fetch: _Fetch, file: PartialBlob) -> None:
        """Take over a filled file whose digest is right; otherwise fetch it once more."""
        if fetch.cold is not None and self._is_decoded(fetch, fetch.cold, file):
            # A pull that is killed before the blob has its name need not fetch it again.
            self._decoded.append(file.blob)
            self._end(fetch, file)
            return
        if fetch.cold is None and file.has_right_digest():
            self._ingest.adopt_partial(file)
            self.paths[file.blob.digest] = file.path
            self._end(fetch, file)
            return
        file.discard()
        file.close()
        fetch.file = None
        if fetch.cold is not None:
            with self._changed:
                self._notices.append(
                    f"{fetch.label}: its compressed form in the registry is damaged, so the blob itself "
                    "was fetched"
                )
            fetch.cold = None
        elif fetch.is_second:
            raise BlobDamaged(
                f"{fetch.label}: the registry sent other bytes than those of blob "
                f"{fetch.blob.digest}, twice",
                advice=DAMAGED_ADVICE,
            )
        else:
            fetch.is_second = True
        self._add([partial(self._begin, fetch)])

    def _is_decoded(self, fetch: _Fetch, cold: ColdLayer, file: PartialBlob) -> bool:
        """Add what a complete cold layer decodes to; return False if that is not the blob."""
        if file.missing or not file.has_right_digest():
            return False
        file.complete()
        try:
            added = self._ingest.add(
                fetch.blob.size, lambda: cold.pieces(str(file.path), self._base_forms), once=True
            )
        except (BlobDamaged, BlobMissing, DamagedSource):
            return False
        if added.file:
            self.paths[fetch.blob.digest] = self._store.folder("temporary") / added.file
        return True

    def _base_forms(self, digest: Digest, size: int) -> Iterator[BaseBlob]:
        """Yield the base of a delta: as it came with this pull, and in the forms that the store has."""
        from blobstore.compression.base import BaseBlob  # imports numpy

        path = self.paths.get(digest)
        if path is not None:
            with contextlib.suppress(FileNotFoundError):  # another process has given it its name
                yield BaseBlob.hot(_mapped(path, size), digest)
        yield from self._store.base_forms(digest, size)

    def _end(self, fetch: _Fetch, file: PartialBlob, resumed: int | None = None) -> None:
        """Close the file of a blob that is done."""
        file.close()
        fetch.file = None
        with self._changed:
            self._bytes_resumed += fetch.resumed if resumed is None else resumed
            self._bytes_saved += fetch.blob.size - fetch.stored.size
            self._tasks.extend(self._deltas.pop(fetch.blob.digest))
            self._changed.notify_all()
        self._count(fetch, fetch.blob.size)

    def _count(self, fetch: _Fetch, done: int) -> None:
        """Report the bytes of a blob that are done, beyond those that were reported before."""
        if fetch.cold is not None:  # the progress counts bytes of the model
            done = min(done * fetch.blob.size // fetch.stored.size, fetch.blob.size)
        with self._changed:
            new = max(done - fetch.reported, 0)
            fetch.reported += new
        self._workers.report(new, fetch.label)


def _mapped(path: Path, size: int) -> memoryview:
    """Return the bytes of a file. Raises FileNotFoundError."""
    descriptor, _ = open_regular(str(path), follow=False)
    try:
        return mapped(descriptor, size)
    finally:
        os.close(descriptor)

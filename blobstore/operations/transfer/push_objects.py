"""The operation ``push`` to object storage: blobs first, the manifest last, only if nobody else wrote it."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from blobstore.core.digest import BlobId, Digest, Digester
from blobstore.core.escape import quote
from blobstore.core.workers import RateLimiter, Steps, WorkerPool, check_jobs
from blobstore.errors import BlobDamaged, ModelNotFound, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.objects.address import ModelAddress, StoreAddress
from blobstore.objects.locks import leased
from blobstore.objects.requests import LOOK_FOR_BLOB, READ_FORMER
from blobstore.objects.store import COLD_INDEXES, ObjectStore
from blobstore.operations.freeze.batches import BlobProgress
from blobstore.operations.remote.cold_layer import ColdLayer, cold_index, parse_cold_index
from blobstore.operations.remote.reader import pack_headers
from blobstore.operations.transfer.cold_forms import ColdForms
from blobstore.safetensors.header import PREFIX_SIZE, header_size
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from blobstore.compression.level import Level
    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.operations.freeze.batches import Report
    from blobstore.registry.reference import RemoteReference
    from blobstore.registry.shapes.plan import Shape

_COLD_WORK = 2
"""Each blob is read and decoded when its compressed form is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """The result of :func:`~blobstore.operations.transfer.push.push_model`."""

    reference: Reference
    remote: RemoteReference | ModelAddress
    digest: Digest
    """Of the remote manifest, which the tag refers to now."""
    shape: Shape | Literal["store"]
    """That of a model in object storage is ``store``."""
    replaced: Digest | None = None
    """Of the manifest that the name had in object storage, where it stays as a blob."""
    is_unchanged: bool
    """Whether the remote had this model under this tag already, so that nothing was done."""
    blobs: int
    """Blobs that the remote needs for the model."""
    bytes_sent: int
    bytes_resumed: int
    """Bytes that an interrupted push had sent."""
    bytes_mounted: int
    """Bytes of blobs that other repositories of the registry had."""
    bytes_present: int
    """Bytes of blobs that the remote had."""
    bytes_verified: int
    """Bytes that were read back."""
    manifests: int
    signatures: int
    """Signatures of the model that the remote has now."""
    cold_blobs: int
    """Blobs whose cold form the remote has too."""
    bytes_cold: int
    """Bytes of these cold forms, which the other numbers include; with ``is_dry_run`` an estimate."""
    fallbacks: int
    """Cold forms without a base, because their delta or their base is not intact."""
    is_dry_run: bool
    seconds: float


def push_objects(
    reference: str | Reference,
    remote: str | StoreAddress,
    *,
    name: str | Reference | None = None,
    store: LocalStore | str | os.PathLike[str] | None = None,
    cold: bool = False,
    level: Level = "fast",
    base: str | Reference | None = None,
    verify: bool = False,
    dry_run: bool = False,
    streams: int = 8,
    limit_rate: float | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """Give a model to a store in object storage. Its name refers to the model only when all of it is there.

    Args:
        reference: the model.
        remote: the address of the other store, ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``file:///``.
        name: the name that the model gets there; by default the same.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        cold: add the compressed forms of the blobs, deltas included. Who has the bases fetches only these.
            The model in the store stays as it is; frozen blobs are sent as they are. A compressed form that
            is there is replaced only by a smaller one of a frozen blob.
        level: how ``cold`` compresses what is not frozen: ``fast``, or as ``small`` as possible.
        base: the model that deltas of ``cold`` are made against; found automatically by default.
        verify: read all blobs back, and compare their digests.
        dry_run: send nothing, and return what would be sent.
        streams: number of blobs to send at once.
        limit_rate: bytes to send per second, at most.
        progress: called with the current blob, bytes done and total bytes.

    Raises:
        ModelNotFound: the store has no such model.
        InvalidManifest, BlobMissing, BlobDamaged: the model is damaged, or ``verify`` found other bytes.
        Conflict: another process gave the name another model in the meantime.
        RemoteRefused: access is denied.
        RemoteError: the object storage cannot be reached, or fails.
        StoreBusy: garbage is being collected there, or may have been because the push took a day.
        UsageError: an argument is invalid.
    """
    started = time.monotonic()
    check_jobs(streams)
    reference, store = Reference.of(reference), LocalStore.of(store)
    address = remote if isinstance(remote, StoreAddress) else StoreAddress.parse(remote)
    name = reference if name is None else Reference.of(name)
    if base is not None and not cold:
        raise UsageError("base is the base of compressed forms, which only cold=True sends")
    forms = None
    if cold:
        forms = ColdForms(store, reference, level, None if base is None else Reference.of(base))
    store.resolve(reference)  # checks it
    data, manifest = store.parse(reference)  # it may be another one by now
    verify = verify and not dry_run
    size = sum(blob.size for blob in manifest.blobs)
    cold_work = 0 if forms is None else _COLD_WORK * forms.size
    steps = Steps(streams, progress)
    to_read = size if verify else 0
    workers = steps.begin(size, cold_work + to_read)
    limiter = None if limit_rate is None else RateLimiter(limit_rate)
    push = _Push(store, ObjectStore(address), workers, limiter)
    former, tag = push.former(name)
    digests = [Digest.of(data), *(blob.digest for blob in manifest.blobs)]
    layers: list[ColdLayer] = []
    signatures = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(store.lease_if_writable(digests[1:]))
        if dry_run:
            sent = sum(workers.run(manifest.blobs, push.missing))
        else:
            check_lease = stack.enter_context(leased(push.target.client, digests))
            sent = sum(workers.run(manifest.blobs, push.send))
            if former != data:
                push.send_headers(digests[0], manifest)
            check_lease()
            signatures = push.publish(name, data, former, tag)
        if forms is not None:
            jobs = min(streams, os.cpu_count() or 1)
            workers = steps.begin(cold_work, to_read, jobs)
            with contextlib.nullcontext() if dry_run else forms.temporary_files(jobs):
                layers, sent_cold = push.send_cold(forms, workers, digests[0], dry_run=dry_run)
            sent += sent_cold
        if verify:
            to_check = [*(blob.id for blob in manifest.blobs), *(layer.stored for layer in layers)]
            push.check(steps.begin(sum(blob.size for blob in to_check)), to_check)
    bytes_cold = sum(layer.stored.size for layer in layers)
    return Pushed(
        reference=reference,
        remote=ModelAddress(address, name),
        digest=digests[0],
        shape="store",
        is_unchanged=former == data and not sent,
        replaced=Digest.of(former) if former is not None and former != data else None,
        blobs=len(manifest.blobs),
        bytes_sent=sent,
        bytes_resumed=0,
        bytes_mounted=0,
        bytes_present=size + bytes_cold - sent,
        bytes_verified=size + bytes_cold if verify else 0,
        manifests=1,
        signatures=signatures,
        cold_blobs=len(layers),
        bytes_cold=bytes_cold,
        fallbacks=0 if forms is None else forms.fallbacks,
        is_dry_run=dry_run,
        seconds=time.monotonic() - started,
    )


class _Push:
    """One push: how blobs and the manifest get there."""

    def __init__(
        self,
        store: LocalStore,
        target: ObjectStore,
        workers: WorkerPool,
        limiter: RateLimiter | None,
    ) -> None:
        self._store = store
        self.target = target
        self._workers = workers
        self._limiter = limiter

    def former(self, name: Reference) -> tuple[bytes | None, str | None]:
        """Return the manifest that a name has, and its ETag."""
        try:
            return self.target.read_version(name, READ_FORMER)
        except ModelNotFound:
            return None, None

    def missing(self, blob: Descriptor) -> int:
        """Return the bytes of a blob if it would be sent."""
        self._workers.report(blob.size, _label(blob))
        return 0 if self._is_there(blob) else blob.size

    def send(self, blob: Descriptor) -> int:
        """Send a blob that is not there; return its bytes if it was sent."""
        if self._is_there(blob):
            self._workers.report(blob.size, _label(blob))
            return 0
        self.target.put_blob(*blob.id, self._pieces(blob))
        return blob.size

    def send_headers(self, digest: Digest, manifest: Manifest) -> None:
        """Send the headers of all tensor blobs, so that readers need one request for them.

        Raises:
            BlobMissing, BlobDamaged: a blob is missing, or its header is damaged.
        """
        starts = {}
        for layer in manifest.layers_of(media_types.TENSOR):
            prefix = bytearray(PREFIX_SIZE)
            self._store.read_into(*layer.id, 0, memoryview(prefix))
            start = bytearray(PREFIX_SIZE + header_size(bytes(prefix), layer.size))
            self._store.read_into(*layer.id, 0, memoryview(start))
            starts[layer.digest] = bytes(start)
        self.target.put_headers(digest, pack_headers(starts))

    def publish(
        self, name: Reference, manifest: bytes, former: bytes | None, tag: str | None
    ) -> int:
        """Give the manifest its name, and send its signatures; return how many there are."""
        digest = Digest.of(manifest)
        if former != manifest:
            self.target.place(name, manifest, tag)
        count = 0
        for signature in self._store.signatures(digest):
            self.target.keep_signature(digest, signature)
            count += 1
        return count

    def send_cold(
        self, forms: ColdForms, workers: WorkerPool, manifest: Digest, *, dry_run: bool
    ) -> tuple[list[ColdLayer], int]:
        """Send the compressed forms that are not there; return all, and how many bytes were sent.

        A dry run estimates their sizes.
        """
        known = parse_cold_index(self.target.read_for_manifest(COLD_INDEXES, manifest) or b"")
        sent: list[ColdLayer] = []

        def send(blob: Descriptor) -> ColdLayer | None:
            progress = BlobProgress(workers.report, blob.name, _COLD_WORK * blob.size)
            there, size = known.get(blob.digest), forms.stored_size(blob)
            if there is not None and (size is None or there.stored.size <= size):
                layer: ColdLayer | None = there
            elif dry_run:
                layer = ColdLayer(blob.id, BlobId(blob.digest, forms.estimate(blob)))
                sent.append(layer)
            else:
                layer = send_encoded(blob, lambda count, _: progress.add(count))
            progress.finish()
            return layer

        def send_encoded(blob: Descriptor, report: Report) -> ColdLayer | None:
            with forms.encoded(blob, report) as file:
                if file is None:
                    return None
                # Not looked for: garbage collection keeps what is new, and may remove what is old.
                self.target.put_blob(*file.layer.stored, file.pieces())
                sent.append(file.layer)
                return file.layer

        layers = [layer for layer in workers.run(forms.blobs, send) if layer is not None]

        def add_new(data: bytes | None) -> bytes:
            listed = parse_cold_index(data or b"")
            for layer in sent:
                there = listed.get(layer.blob.digest)
                if there is None or layer.stored.size < there.stored.size:
                    listed[layer.blob.digest] = layer
            return cold_index(listed.values())

        if sent and not dry_run:
            self.target.change_cold_index(manifest, add_new)
        return layers, sum(layer.stored.size for layer in sent)

    def check(self, workers: WorkerPool, blobs: Iterable[BlobId]) -> None:
        """Read blobs back. Raises BlobDamaged if one has other bytes."""

        def check(blob: BlobId) -> None:
            digester = Digester()
            for piece in self.target.read_pieces(*blob):
                digester.update(piece)
                workers.report(len(piece), f"checking {blob.digest.short}")
            if (found := digester.digest()) != blob.digest:
                raise BlobDamaged(
                    f"{quote(self.target.address)}: blob {blob.digest} has other bytes, with the "
                    f"digest {found}",
                    advice="delete the object and push the model again",
                )

        workers.run(blobs, check)

    def _is_there(self, blob: Descriptor) -> bool:
        with contextlib.suppress(BlobDamaged):  # it has another size, and is replaced
            return self.target.exists(*blob.id, LOOK_FOR_BLOB)
        return False

    def _pieces(self, blob: Descriptor) -> Generator[memoryview, None, None]:
        with contextlib.closing(self._store.read_pieces(*blob.id)) as pieces:
            for piece in pieces:
                if self._limiter is not None:
                    self._limiter.spend(len(piece), self._workers.stopping.wait)
                yield piece
                self._workers.report(len(piece), _label(blob))


def _label(blob: Descriptor) -> str:
    return quote(blob.name or blob.media_type)

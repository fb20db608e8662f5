"""The operation ``push``: sends a model to a registry or to object storage.

Blobs come first, manifests next and the name last, so that a name never refers to a model that is not
complete. Every blob is hashed while it is sent; a damaged one is never completed there. What the target has is
not sent again. :mod:`~blobstore.operations.transfer.push_target` says what a target must be able to do.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal

from blobstore.cold_blobs.batches import BlobProgress
from blobstore.cold_blobs.builder import count_blocks
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.progress import of_passes
from blobstore.core.rate_limit import RateLimiter
from blobstore.core.workers import Steps, WorkerPool, check_jobs
from blobstore.errors import BlobDamaged, BlobMissing, UsageError
from blobstore.manifests.reference import Reference
from blobstore.objects.address import StoreAddress
from blobstore.operations.transfer.object_target import find_target, open_objects
from blobstore.operations.transfer.registry_target import (
    DEFAULT_OPTIONS,
    RegistryOptions,
    check_options,
    check_unused,
    open_registry,
    registry_address,
)
from blobstore.remotes.addresses import is_in_objects, places_of
from blobstore.remotes.checked_pieces import PushedBlob
from blobstore.remotes.cold_layers import ColdLayer, bases_of
from blobstore.remotes.send_cold import ColdBlobs
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.used_remotes import remember_remotes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextlib import AbstractContextManager

    from blobstore.cold_blobs.batches import Report
    from blobstore.compression.level import Level
    from blobstore.core.digest import BlobId
    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.objects.address import ModelAddress
    from blobstore.operations.transfer.push_target import PushTarget, Sent
    from blobstore.registry.layouts.plan import RemoteLayout
    from blobstore.registry.reference import RemoteReference

_NEW: Final = ("sent", "resumed", "mounted")
_COLD_WORK: Final = 4
"""The cold layer of a blob is encoded, decoded, sent, and perhaps read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """The result of :func:`blobstore.push`."""

    reference: Reference
    remote: RemoteReference | ModelAddress
    digest: Digest
    """Of the remote manifest, which the tag refers to now."""
    layout: RemoteLayout | Literal["store"]
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
    """Blobs whose cold layer the remote has too."""
    bytes_cold: int
    """Bytes of these cold layers, which the other numbers include; with ``is_dry_run`` an estimate."""
    fallbacks: int
    """Cold layers without a base, because their delta or their base is not intact."""
    is_dry_run: bool
    seconds: float
    notices: tuple[str, ...] = ()
    """Remarks, for example that a new store lies within another."""


def push_model(
    reference: str | Reference,
    remote: str | RemoteReference | StoreAddress | None = None,
    *,
    store: StoreLike = None,
    registry: RegistryOptions = DEFAULT_OPTIONS,
    cold: bool = False,
    level: Level = "fast",
    base: str | Reference | None = None,
    verify: bool = False,
    dry_run: bool = False,
    expected: Collection[Digest] = (),
    streams: int = 8,
    limit_rate: float | str | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """Push a model to a registry or to object storage. The name is published last.

    Args:
        reference: the model.
        remote: where to push it, ``[oci://]host[:port]/repository[:tag]``, or a store in object storage,
            ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``file:///``, where the model keeps its name unless
            the address ends with another one and its tag, ``s3://bucket/prefix/name:tag``; by default the
            model's name, if that has a host.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        registry: how a registry gets the model; object storage takes none of these options.
        cold: add the compressed forms of the blobs, deltas included. Clients that have the bases fetch only
            these. The model in the store stays as it is; frozen blobs are sent as they are. A compressed
            form that the remote has is replaced only by a smaller one of a frozen blob.
        level: how ``cold`` compresses what is not frozen: ``fast``, or as ``small`` as possible.
        base: the model that deltas of ``cold`` are made against; found automatically by default.
        verify: look for every blob, even if the tag refers to the model already; then read all blobs
            and manifests back, and compare their digests.
        dry_run: send nothing, and return what would be sent.
        expected: blobs that ``dry_run`` takes for present, because other models will have brought them.
        streams: number of blobs to send at once.
        limit_rate: maximum number of bytes per second, or a text such as ``10MB``.
        progress: called with the current blob, bytes done and total bytes. What ``cold`` compresses is
            counted apart, with a total of its own.

    Returns:
        the address, the digest, and the bytes that were sent and present.

    Raises:
        ModelNotFound: the store has no such model.
        InvalidManifest, BlobMissing, BlobDamaged: the model is damaged, or ``verify`` found that the
            remote has other bytes.
        Conflict: another process gave the name in object storage another model in the meantime.
        RemoteRefused: the remote denies access or refuses the model.
        RemoteError: the remote cannot be reached, or misbehaves.
        StoreBusy: garbage is being collected in object storage, or may have been because the push took a day.
        UsageError: an argument is invalid.
    """
    started = time.monotonic()
    check_jobs(streams)
    reference, store = Reference.of(reference), LocalStore.to_read(store)
    if base is not None and not cold:
        raise UsageError("base is the base of compressed forms, which only cold=True sends")
    steps = Steps(streams, progress)
    limiter = None if limit_rate is None else RateLimiter(limit_rate)
    opened = _open_target(store, reference, remote, registry, limiter, steps, dry_run=dry_run)
    with opened as target:
        cold_blobs = None
        if cold:
            base = None if base is None else Reference.of(base)
            cold_blobs = ColdBlobs(store, reference, level, base)
        push = _Push(target, steps, cold_blobs, progress, expected, verify=verify, dry_run=dry_run)
        push.send_blobs()
        # Encoding keeps a processor busy, so more threads would only take memory.
        push.send_cold(min(streams, os.cpu_count() or 1))
        push.publish()
        push.verify()
    if not dry_run:
        remember_remotes(store, *places_of(target.model.address))
    return push.result(reference, started)


def _open_target(
    store: LocalStore,
    reference: Reference,
    remote: str | RemoteReference | StoreAddress | None,
    options: RegistryOptions,
    limiter: RateLimiter | None,
    steps: Steps,
    *,
    dry_run: bool,
) -> AbstractContextManager[PushTarget]:
    """Open the target that an address names. Raises as :func:`push_model`."""
    if isinstance(remote, StoreAddress) or is_in_objects(remote):
        check_unused(options, remote)
        place = remote if isinstance(remote, StoreAddress) else find_target(remote)
        return open_objects(store, reference, place, limiter, dry_run=dry_run)
    check_options(options)
    address = registry_address(reference, remote)
    return open_registry(store, reference, address, options, limiter, steps.begin, dry_run=dry_run)


class _Push:
    """One push: what a target gets, and in which order."""

    def __init__(
        self,
        target: PushTarget,
        steps: Steps,
        cold_blobs: ColdBlobs | None,
        progress: Progress | None,
        expected: Collection[Digest],
        *,
        verify: bool,
        dry_run: bool,
    ) -> None:
        self._target = target
        self._expected = expected if dry_run else ()
        self._steps = steps
        self._progress = progress
        self._cold_blobs = cold_blobs
        # A registry that has accepted the manifest had all blobs then; it may have lost some since.
        self._looks_for_all = verify or not (target.model.is_published and target.checks_manifests)
        self._verify = verify and not dry_run
        self._dry_run = dry_run
        # The largest first, so that none of them is left over for a single stream at the end.
        self._blobs = sorted(target.model.blobs, key=attrgetter("size"), reverse=True)
        self._size = sum(blob.size for blob in self._blobs)
        self._to_read = self._size if self._verify else 0
        self._sent: Counter[Sent] = Counter()
        """Bytes by how the target got them."""
        self._publish: Callable[[], None] | None = None
        self._cold_sizes: list[int] = []
        """Of the cold layers that the target has."""
        self._signatures = self._bytes_verified = 0

    @property
    def _is_unchanged(self) -> bool:
        """Whether the target had all that was to be sent."""
        return self._target.model.is_published and not any(self._sent[how] for how in _NEW)

    def send_blobs(self) -> None:
        """Send the blobs that the target lacks."""
        if not self._looks_for_all:
            self._sent["present"] = self._size
            return
        workers = self._steps.begin(self._size, self._to_read)
        send = partial(self._send, report=workers.report)
        for counts in workers.run(self._blobs, send, self._target.abort):
            # Counted by this thread alone: updating a Counter is not atomic.
            self._sent.update(counts)
        # If a blob was lost, manifests may have been lost too, so these are sent again.
        if not (self._dry_run or self._is_unchanged):
            self._publish = partial(self._target.publish, workers, self._sent)

    def publish(self) -> None:
        """Give the model its name, unless it has that; then send its signatures."""
        if self._publish is not None:
            self._publish()
        # Signatures refer to the manifest, which is there by now.
        if not self._dry_run:
            self._signatures = self._target.send_signatures()

    def _send(self, blob: PushedBlob, report: Report) -> Mapping[Sent, int]:
        """Send a blob unless the target has it; return bytes by how the target got it."""
        progress = BlobProgress(report, blob.label, blob.size)
        # Only a hint: a registry that has lost the blob says so when it is sent the manifest.
        if blob.digest in self._expected or self._target.has(blob):
            counts: Mapping[Sent, int] = {"present": blob.size}
        elif self._dry_run:
            counts = {"sent": blob.size}
        else:
            counts = self._target.send(blob, progress.add)
        progress.finish()
        return counts

    def send_cold(self, jobs: int) -> None:
        """Send the cold layers that the target lacks, or estimate them in a dry run; then list them.

        They come before the name: a client that waits for it asks for them at once.
        """
        if (cold_blobs := self._cold_blobs) is None:
            return
        # Compression is not a transfer: it is counted apart, as bytes of the blobs.
        progress = of_passes(self._progress, _COLD_WORK)
        workers = WorkerPool(jobs, progress, _COLD_WORK * cold_blobs.size)
        known = self._target.read_cold_layers(verify=self._verify)
        new: list[ColdLayer] = []

        def send(blob: Descriptor) -> Mapping[Sent, int]:
            label = f"compressing {blob.name}"
            progress = BlobProgress(workers.report, label, _COLD_WORK * blob.size)
            layer = known.get(blob.digest)
            counts = self._send_cold(
                cold_blobs, blob, layer, new, lambda count, _: progress.add(count)
            )
            progress.finish()
            return counts

        with contextlib.nullcontext() if self._dry_run else cold_blobs.temporary_files(jobs):
            for counts in workers.run(cold_blobs.blobs, send, self._target.abort):
                self._sent.update(counts)
                if size := sum(counts.values()):
                    self._cold_sizes.append(size)
            # Only now: a listed layer must be there.
            if new:
                forms: Mapping[Digest, ColdLayer] = {}
                if cold_blobs.base is not None:
                    forms = self._target.read_forms_with(cold_blobs.base)
                bases = {link.blob: link for layer in new for link in bases_of(layer, forms)}
                self._target.list_cold_layers(new, list(bases.values()))

    def _send_cold(
        self,
        cold_blobs: ColdBlobs,
        blob: Descriptor,
        known: ColdLayer | None,
        new: list[ColdLayer],
        report: Report,
    ) -> Mapping[Sent, int]:
        """Send the cold layer of a blob, unless ``known`` will do; add it to ``new`` after that."""
        size = cold_blobs.stored_size(blob)
        # What is not frozen would have to be encoded first, so the form that the target has is good
        # enough.
        if known is not None and (size is None or known.stored.size <= size):
            # A target may list a layer that it has lost. One that is damaged there is encoded and sent again.
            with contextlib.suppress(BlobDamaged, BlobMissing):
                if self._verify:
                    self._read_back(known.stored, blob.name, report)
                return {"present": known.stored.size}
        if self._dry_run:
            size = cold_blobs.estimate(blob)
            return {"sent": size} if count_blocks(size) < count_blocks(blob.size) else {}
        with cold_blobs.encoded(blob, report) as file:
            if file is None:  # it would not be smaller
                return {}
            stored = PushedBlob(*file.layer.stored, blob.name, file.pieces)
            counts = self._send(stored, report)
            if self._verify:  # before it is listed, or clients would already fetch it
                self._read_back(stored.id, blob.name, report)
            # By several threads at once; the list is read after they have ended.
            new.append(file.layer)
            return counts

    def verify(self) -> None:
        """Read everything back that was not yet, if that is wanted."""
        if not self._verify:
            return
        workers = self._steps.begin(self._to_read)
        self._target.check_manifests()
        workers.run(
            self._blobs,
            lambda blob: self._read_back(blob.id, blob.label, workers.report),
            self._target.abort,
        )
        self._bytes_verified = self._size + sum(self._cold_sizes)

    def result(self, reference: Reference, started: float) -> Pushed:
        """Return the result of a push that began at ``started``, by the monotonic clock."""
        model = self._target.model
        return Pushed(
            reference=reference,
            remote=model.address,
            digest=model.digest,
            layout=model.layout,
            replaced=model.replaced,
            is_unchanged=self._is_unchanged,
            blobs=len(self._blobs),
            bytes_sent=self._sent["sent"],
            bytes_resumed=self._sent["resumed"],
            bytes_mounted=self._sent["mounted"],
            bytes_present=self._sent["present"],
            bytes_verified=self._bytes_verified,
            manifests=model.manifests,
            signatures=self._signatures,
            cold_blobs=len(self._cold_sizes),
            bytes_cold=sum(self._cold_sizes),
            fallbacks=0 if self._cold_blobs is None else self._cold_blobs.fallbacks,
            is_dry_run=self._dry_run,
            seconds=time.monotonic() - started,
            notices=tuple(self._target.notices),
        )

    def _read_back(self, blob: BlobId, label: str, report: Report) -> None:
        """Compare the bytes of a blob that the target has. Raises BlobDamaged."""
        found = Digest.of_pieces(
            self._target.read(blob), lambda count: report(count, f"verifying {label}")
        )
        if found != blob.digest:
            raise BlobDamaged(
                f"{quote(self._target.model.address)}: {self._target.kind} returns bytes with digest "
                f"{found} for {quote(label)}, blob {blob.digest}",
                advice="its storage is damaged; remove the blob there and push again with "
                "verify=True",
            )

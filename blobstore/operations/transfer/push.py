"""The operation ``push``: gives a model to a registry.

Blobs come first, manifests next and the tag last, so that a tag never refers to a model that is not
complete. Every blob is hashed while it is sent; the end of a damaged one is never sent. A blob that the
registry has is not sent again, and one that another repository has is mounted from there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal

from blobstore.core.arguments import local_path
from blobstore.core.digest import Digest, Digester
from blobstore.core.escape import quote
from blobstore.core.workers import RateLimiter, Steps, WorkerPool, check_jobs
from blobstore.errors import BlobDamaged, RemoteError, RemoteRefused, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.reference import DEFAULT_HOST, Reference
from blobstore.objects.address import StoreAddress
from blobstore.operations.freeze.batches import BlobProgress
from blobstore.operations.freeze.compress import count_blocks
from blobstore.operations.remote.reading import is_in_objects
from blobstore.operations.sign.keys import PrivateKey, read_key
from blobstore.operations.transfer.checked_pieces import CheckedPieces, PushedBlob
from blobstore.operations.transfer.cold import fetch_cold_layers
from blobstore.operations.transfer.cold_forms import ColdForms, send_cold_manifests
from blobstore.operations.transfer.facts import model_facts
from blobstore.operations.transfer.notes import PushNotes
from blobstore.operations.transfer.push_objects import Pushed, push_objects
from blobstore.operations.transfer.referrers import fetch_referrers
from blobstore.operations.transfer.signatures import push_signatures
from blobstore.registry import requests
from blobstore.registry.client import RegistryClient
from blobstore.registry.reference import RemoteReference
from blobstore.registry.shapes.image import image_layers, plan_image
from blobstore.registry.shapes.oci import MAX_LAYERS, plan_oci
from blobstore.registry.shapes.ollama import plan_ollama
from blobstore.registry.upload import PART
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from blobstore.compression.level import Level
    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.operations.freeze.batches import Report
    from blobstore.operations.remote.cold_layer import ColdLayer
    from blobstore.operations.sign.keys import Passphrase
    from blobstore.registry.manifest import RemoteManifest
    from blobstore.registry.shapes.image import TarLayer
    from blobstore.registry.shapes.plan import RemotePlan, Shape

Sent = Literal["sent", "resumed", "mounted", "present"]
_NEW: Final = ("sent", "resumed", "mounted")
_COLD_WORK: Final = 4
"""The cold form of a blob is encoded, decoded, sent, and perhaps read back."""
_MANY_LAYERS = 100
"""A registry that refuses a manifest of more layers may have a limit."""


def push_model(
    reference: str | Reference,
    remote: str | RemoteReference | StoreAddress | None = None,
    *,
    store: LocalStore | str | os.PathLike[str] | None = None,
    shape: Shape = "oci",
    max_layers: int = MAX_LAYERS,
    mount_from: Sequence[str] = (),
    mount: bool = True,
    part_size: int | None = None,
    sign_key: str | os.PathLike[str] | None = None,
    passphrase: Callable[[], Passphrase] | None = None,
    cold: bool = False,
    level: Level = "fast",
    base: str | Reference | None = None,
    verify: bool = False,
    dry_run: bool = False,
    plain_http: bool | None = None,
    streams: int = 8,
    limit_rate: float | None = None,
    progress: Progress | None = None,
) -> Pushed:
    """Give a model to a registry or to object storage, where its name appears when all of it is there.

    Args:
        reference: the model.
        remote: where to push it, ``[oci://]host[:port]/repository[:tag]``, or a store in object storage,
            ``s3://bucket/prefix``, ``gs://``, ``az://`` or ``file:///``; by default the model's name, if that
            has a host. The options up to ``sign_key``, and ``plain_http``, are for registries.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        shape: ``oci`` is a ModelPack artifact, ``ollama`` the local manifest byte for byte, ``image`` a
            container image with the files in ``/models``.
        max_layers: layers per manifest of the shape ``oci``; larger models become an index of parts.
        mount_from: repositories of the registry that may have blobs of the model.
        mount: whether to mount blobs of other repositories, those included that the store remembers.
        part_size: bytes of a blob that one request sends at most, for proxies that limit requests; by
            default 64 MiB.
        sign_key: the file of a private key in PEM, to sign the manifest in the registry for cosign.
        passphrase: called if that key is encrypted.
        cold: add the compressed forms of the blobs, deltas included. Clients that have the bases fetch only
            these. The model in the store stays as it is; frozen blobs are sent as they are. A compressed
            form that the registry has is replaced only by a smaller one of a frozen blob.
        level: how ``cold`` compresses what is not frozen: ``fast``, or as ``small`` as possible.
        base: the model that deltas of ``cold`` are made against; found automatically by default.
        verify: look for every blob, even if the tag refers to the model already; then read all blobs
            and manifests back, and compare their digests.
        dry_run: send nothing, and return what would be sent.
        plain_http: use HTTP without TLS; by default only for this machine.
        streams: number of blobs to send at once.
        limit_rate: bytes to send per second, at most.
        progress: called with the current blob, bytes done and total bytes.

    Raises:
        ModelNotFound: the store has no such model.
        InvalidManifest, BlobMissing, BlobDamaged: the model is damaged, or ``verify`` found that the
            registry has other bytes.
        Conflict: another process gave the name in object storage another model in the meantime.
        RemoteRefused: the registry denies access or refuses the model.
        RemoteError: the registry cannot be reached, or misbehaves.
        UsageError: an argument is invalid.
    """
    if isinstance(remote, StoreAddress) or is_in_objects(remote):
        _check_unused(
            remote,
            shape=shape != "oci",
            max_layers=max_layers != MAX_LAYERS,
            mount_from=mount_from,
            mount=not mount,
            part_size=part_size,
            sign_key=sign_key,
            plain_http=plain_http,
        )
        return push_objects(
            reference,
            remote,
            store=store,
            cold=cold,
            level=level,
            base=base,
            verify=verify,
            dry_run=dry_run,
            streams=streams,
            limit_rate=limit_rate,
            progress=progress,
        )
    started = time.monotonic()
    check_jobs(streams)
    reference, store = Reference.of(reference), LocalStore.of(store)
    target = _target(reference, remote)
    _check_options(mount_from, part_size, mount=mount)
    if base is not None and not cold:
        raise UsageError("base is the base of compressed forms, which only cold=True sends")
    key = None
    if sign_key is not None:
        key = PrivateKey.from_pem(read_key(local_path(sign_key)), quote(sign_key), passphrase)
    steps = Steps(streams, progress)
    plan = _plan(store, reference, shape, max_layers, steps.begin)
    forms = None
    if cold:
        forms = ColdForms(store, reference, level, None if base is None else Reference.of(base))
    limiter = RateLimiter(limit_rate) if limit_rate is not None else None
    with (
        RegistryClient(
            target.host, plain_http=plain_http, limiter=limiter, part_size=part_size
        ) as client,
        store.lease_if_writable(blob.digest for blob in plan.blobs),
        PushNotes(store, target) as notes,
    ):
        push = _Push(
            store, client, target, plan, notes, mount_from if mount else None, part_size, shape
        )
        is_there = client.head_manifest(target.repository, target.tag) == plan.root.digest
        to_read = push.size if verify else 0
        cold_work = 0 if forms is None else _COLD_WORK * forms.size
        sent: Counter[Sent] = Counter()
        if verify or not is_there:  # a registry may have lost blobs of a manifest that it has
            workers = steps.begin(push.size, cold_work + to_read)
            sent = push.send_blobs(workers, dry_run=dry_run)
            if not (dry_run or (is_there and not any(sent[how] for how in _NEW))):
                push.send_manifests(workers, sent)
        signatures = 0
        if not dry_run:
            signatures = push_signatures(client, target, plan.root, store, key)
        cold_sizes: list[int] = []
        if forms is not None:
            jobs = min(streams, os.cpu_count() or 1)
            workers = steps.begin(cold_work, to_read, jobs)
            with contextlib.nullcontext() if dry_run else forms.temporary_files(jobs):
                cold_sizes = push.send_cold(forms, workers, sent, verify=verify, dry_run=dry_run)
        verified = 0
        if verify and not dry_run:
            push.verify(steps.begin(push.size))
            verified = push.size + sum(cold_sizes)
    return Pushed(
        reference=reference,
        remote=target,
        digest=plan.root.digest,
        shape=shape,
        is_unchanged=is_there and not any(sent[how] for how in _NEW),
        blobs=len(push.blobs),
        bytes_sent=sent["sent"],
        bytes_resumed=sent["resumed"],
        bytes_mounted=sent["mounted"],
        bytes_present=sent["present"],
        bytes_verified=verified,
        manifests=len(plan.manifests),
        signatures=signatures,
        cold_blobs=len(cold_sizes),
        bytes_cold=sum(cold_sizes),
        fallbacks=0 if forms is None else forms.fallbacks,
        is_dry_run=dry_run,
        seconds=time.monotonic() - started,
    )


def _check_unused(remote: str | StoreAddress, **options: object) -> None:
    """Check that no option for registries was given. Raises UsageError."""
    for option, value in options.items():
        if value:
            raise UsageError(f"{option} is for registries, and {quote(remote)} is object storage")


def _check_options(mount_from: Sequence[str], part_size: int | None, *, mount: bool) -> None:
    """Check how blobs are given to a registry. Raises UsageError."""
    if mount_from and not mount:
        raise UsageError("mount_from cannot be combined with mount=False")
    if part_size is not None and part_size < 1:
        raise UsageError(f"part_size must be at least 1 byte, got {part_size}")


def _target(reference: Reference, remote: str | RemoteReference | None) -> RemoteReference:
    """Return where to push a model."""
    if remote is None:
        if reference.host == DEFAULT_HOST:
            path = f"{reference.namespace}/{reference.model}".lower()
            raise UsageError(
                f"{quote(reference)} has no host to push to",
                advice=f"give a REMOTE such as registry.example.com/{path}",
            )
        return RemoteReference.of(reference)
    target = remote if isinstance(remote, RemoteReference) else RemoteReference.parse(remote)
    if target.digest is not None:
        raise UsageError(f"cannot push to the digest {quote(target)}; give a tag")
    return target


def _plan(
    store: LocalStore,
    reference: Reference,
    shape: Shape,
    max_layers: int,
    hashing: Callable[[int, int], WorkerPool],
) -> RemotePlan:
    """Return what the registry needs, after checking the local manifest.

    ``hashing`` returns the workers that hash so many bytes, given those of later steps too.
    """
    store.resolve(reference)
    data = store.read_manifest(reference)
    if shape == "ollama":
        return plan_ollama(data)
    facts = model_facts(store, reference)
    if shape == "oci":
        return plan_oci(data, facts, max_layers=max_layers)
    if shape == "image":
        layers = image_layers(data, facts)
        return plan_image(data, layers, _tar_digests(store, layers.tars, hashing), facts)
    raise UsageError(f"shape must be 'oci', 'ollama' or 'image', got {quote(shape)}")


def _tar_digests(
    store: LocalStore, tars: Sequence[TarLayer], hashing: Callable[[int, int], WorkerPool]
) -> list[Digest]:
    """Return the digests of tars, which are noted in the store: computing them reads all blobs.

    Raises:
        BlobDamaged: a blob of a tar that was not hashed before is damaged.
    """
    digests: dict[TarLayer, Digest | None] = dict.fromkeys(tars)
    for tar in tars:
        with contextlib.suppress(ValueError):  # as InvalidDigest is: there is no note
            digests[tar] = Digest.parse((store.read_index(tar.key) or b"").decode("ascii"))
    unknown = [tar for tar, digest in digests.items() if digest is None]
    workers = hashing(sum(tar.size for tar in unknown), sum(tar.size for tar in tars))

    def read(digest: Digest, size: int) -> Iterator[memoryview]:
        blob = PushedBlob(digest, size, digest.short, partial(store.read_pieces, digest, size))
        with contextlib.closing(CheckedPieces(blob, lambda *_: None)) as pieces:
            yield from pieces(0)

    def hash_tar(tar: TarLayer) -> Digest:
        digester = Digester()
        for piece in tar.pieces(read):
            digester.update(piece)
            workers.report(len(piece), "hashing layers")
        return digester.digest()

    for tar, digest in zip(unknown, workers.run(unknown, hash_tar), strict=True):
        digests[tar] = digest
        store.write_index(tar.key, str(digest).encode())
    return [digest for digest in digests.values() if digest is not None]


class _Push:
    """One push: what the registry needs, and how it gets it."""

    def __init__(
        self,
        store: LocalStore,
        client: RegistryClient,
        target: RemoteReference,
        plan: RemotePlan,
        notes: PushNotes,
        mount_from: Sequence[str] | None,
        part_size: int | None,
        shape: Shape,
    ) -> None:
        self._store = store
        self._client = client
        self._target = target
        self._repository = target.repository
        self._plan = plan
        self._mount_from = tuple(mount_from or ())
        self._notes = notes
        self._sources = {} if mount_from is None else self._notes.sources()
        self._part_size = part_size or PART
        self._shape = shape
        self._got: dict[Digest, Sent] = {}
        """How the repository got blobs."""
        made = [
            PushedBlob(digest, len(data), "config", partial(_one_piece, data))
            for digest, data in plan.made.items()
        ]
        tars = [
            PushedBlob(digest, tar.size, tar.files[-1].path, partial(_tar_pieces, tar, store))
            for digest, tar in plan.tars.items()
        ]
        stored = [
            PushedBlob(
                blob.digest,
                blob.size,
                blob.name or blob.media_type,
                partial(store.read_pieces, blob.digest, blob.size),
            )
            for blob in (plan.blobs if not tars else ())
            if blob.digest not in plan.made
        ]
        # The largest first, so that none of them is left over for a single stream at the end.
        self.blobs = sorted(made + tars + stored, key=attrgetter("size"), reverse=True)
        """Each once."""
        self.size = sum(blob.size for blob in self.blobs)

    def send_blobs(self, workers: WorkerPool, *, dry_run: bool) -> Counter[Sent]:
        """Send the blobs that the repository does not have; return bytes by how it got them."""

        def send(blob: PushedBlob) -> dict[Sent, int]:
            return self._send(blob, workers.report, dry_run=dry_run)

        sent: Counter[Sent] = Counter()
        for counts in workers.run(self.blobs, send, self._client.abort):
            sent.update(counts)
        return sent

    def _send(self, blob: PushedBlob, report: Report, *, dry_run: bool = False) -> dict[Sent, int]:
        found = self._client.blob_size(self._repository, blob.digest, for_upload=True)
        if found is not None and found != blob.size:
            raise RemoteError(
                f"{quote(self._target.host)} has blob {blob.digest} with {found} bytes instead of "
                f"{blob.size}: its storage is damaged"
            )
        resumed = 0
        with contextlib.closing(CheckedPieces(blob, report)) as pieces:
            if found is not None:
                how: Sent = "present"
            elif not dry_run and self._is_mounted(blob):
                how = "mounted"
            else:
                how = "sent"
                if not dry_run:
                    resumed = self._upload(blob, pieces)
            pieces.note_all()
        self._got[blob.digest] = how
        return {how: blob.size - resumed, "resumed": resumed}

    def send_cold(
        self,
        forms: ColdForms,
        workers: WorkerPool,
        sent: Counter[Sent],
        *,
        verify: bool,
        dry_run: bool,
    ) -> list[int]:
        """Send the cold forms that the repository does not have; return the sizes of all.

        Args:
            forms: the cold forms.
            workers: threads that encode and send.
            sent: bytes by how the repository got them; those of cold forms are added.
            verify: send also those that the repository says to have, and read them back.
            dry_run: send nothing, and estimate.
        """
        listed = fetch_referrers(self._client, self._repository, self._plan.root)
        known = {}
        if not verify:
            blobs = (blob.id for blob in forms.blobs)
            known = fetch_cold_layers(self._client, self._repository, listed, blobs)
        new: list[ColdLayer] = []

        def send(blob: Descriptor) -> dict[Sent, int]:
            progress = BlobProgress(workers.report, blob.name, _COLD_WORK * blob.size)
            there, size = known.get(blob.digest), forms.stored_size(blob)
            if there is not None and (size is None or there.stored.size <= size):
                counts: dict[Sent, int] = {"present": there.stored.size}
            elif dry_run:
                size = forms.estimate(blob)
                counts = {"sent": size} if count_blocks(size) < count_blocks(blob.size) else {}
            else:
                counts = send_encoded(blob, lambda count, _: progress.add(count))
            progress.finish()
            return counts

        def send_encoded(blob: Descriptor, report: Report) -> dict[Sent, int]:
            with forms.encoded(blob, report) as file:
                if file is None:
                    return {}
                stored = PushedBlob(*file.layer.stored, blob.name, file.pieces)
                counts = self._send(stored, report)
                if verify:
                    self._read_back(stored, report)
                new.append(file.layer)
                return counts

        all_counts = workers.run(forms.blobs, send, self._client.abort)
        if new:
            send_cold_manifests(self._client, self._repository, self._plan.root, new)
        for counts in all_counts:
            sent.update(counts)
        return [size for counts in all_counts if (size := sum(counts.values()))]

    def _is_mounted(self, blob: PushedBlob) -> bool:
        """Mount a blob from another repository that may have it; return whether that succeeded."""
        known = self._sources.get(blob.digest.hex)
        sources = dict.fromkeys((*self._mount_from, *([known] if known else ())))
        return any(
            self._client.mount_blob(self._repository, blob.digest, source)
            for source in sources
            if source != self._repository
        )

    def _upload(self, blob: PushedBlob, pieces: CheckedPieces) -> int:
        """Upload a blob, from where an upload that was interrupted ended; return the bytes before that."""
        resumed = self._client.upload_blob(
            self._repository,
            blob.digest,
            blob.size,
            pieces,
            session=self._notes.session(blob.digest) if blob.size > self._part_size else None,
            on_session=partial(self._notes.keep_session, blob.digest),
        )
        self._notes.forget_session(blob.digest)
        return resumed

    def send_manifests(self, workers: WorkerPool, sent: Counter[Sent]) -> None:
        """Send the manifests, the one with the tag last.

        ``sent`` has bytes by how the repository got the blobs; it changes if the registry turns out to lack
        some that it said to have.
        """

        def send_missing(named: frozenset[str]) -> None:
            self._send_missing(named, workers, sent)

        *parts, root = self._plan.manifests
        for part in parts:
            if self._client.head_manifest(self._repository, str(part.digest)) is None:
                self._put(str(part.digest), part, send_missing)
        self._put(self._target.tag, root, send_missing)
        self._notes.add(blob.digest for blob in self.blobs)

    def _send_missing(
        self, named: frozenset[str], workers: WorkerPool, sent: Counter[Sent]
    ) -> None:
        """Send the blobs that the registry names, or if it names none all that it said to have."""
        missing = [blob for blob in self.blobs if str(blob.digest) in named] or [
            blob for blob in self.blobs if self._got[blob.digest] != "sent"
        ]

        def send(blob: PushedBlob) -> None:
            with contextlib.closing(CheckedPieces(blob, lambda *_: None)) as pieces:
                self._upload(blob, pieces)

        workers.run(missing, send, self._client.abort)
        for blob in missing:
            before = self._got[blob.digest]
            if before != "sent":
                sent[before] -= blob.size
                sent["sent"] += blob.size
                self._got[blob.digest] = "sent"

    def _put(
        self,
        reference: str,
        manifest: RemoteManifest,
        send_missing: Callable[[frozenset[str]], object],
    ) -> None:
        try:
            self._client.put_manifest(self._repository, reference, manifest, send_missing)
        except RemoteRefused as error:
            if advice := self._advice(error, manifest):
                raise RemoteRefused(
                    error.message, advice=advice, status=error.status, code=error.code
                ) from None
            raise

    def _advice(self, error: RemoteRefused, manifest: RemoteManifest) -> str:
        """Return what may help if a registry refuses a manifest, or nothing."""
        layers = manifest.data.count(b'"digest"') - 1
        if layers > _MANY_LAYERS:
            is_docker = manifest.media_type == media_types.MANIFEST
            option = "--shape oci" if is_docker else f"--max-layers {_MANY_LAYERS}"
            return (
                f"the manifest has {layers} layers; if that is too many for this registry, "
                f"push with '{option}'"
            )
        if self._shape != "image" and requests.refuses_form(error):
            return "if this registry takes container images only, push with '--shape image'"
        return ""

    def verify(self, workers: WorkerPool) -> None:
        """Read everything back and compare digests."""
        for manifest in self._plan.manifests:
            found = self._client.get_manifest(self._repository, str(manifest.digest))
            if found.data != manifest.data:
                raise BlobDamaged(f"{quote(self._target)}: the registry has another manifest")

        def read(blob: PushedBlob) -> None:
            self._read_back(blob, workers.report)

        workers.run(self.blobs, read, self._client.abort)

    def _read_back(self, blob: PushedBlob, report: Report) -> None:
        digester = Digester()
        for piece in self._client.read_blob(
            self._repository, blob.digest, 0, blob.size, size=blob.size
        ):
            digester.update(piece)
            report(len(piece), f"verifying {blob.label}")
        if digester.digest() != blob.digest:
            raise BlobDamaged(
                f"{quote(self._target)}: the registry returns bytes with digest "
                f"{digester.digest()} for {quote(blob.label)}, blob {blob.digest}",
                advice="its storage is damaged; remove the blob there and push again with "
                "verify=True",
            )


def _tar_pieces(tar: TarLayer, store: LocalStore) -> Generator[bytes | memoryview, None, None]:
    yield from tar.pieces(store.read_pieces)


def _one_piece(data: bytes) -> Generator[bytes | memoryview, None, None]:
    yield data

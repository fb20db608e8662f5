"""The operation ``pull``: fetches a model from a registry into a store.

The manifest is resolved and checked first. Blobs that the store has are hashed, unless they were before;
the others are fetched into partial files, several at a time, large ones in parts. Each is hashed while it
arrives, and only if all digests are right do the blobs get their names, and last the manifest. A pull that
was interrupted continues where it stopped.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.rate_limit import RateLimiter
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import BlobDamaged, NameTaken, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.sign.require_trust import check_trust, read_policy
from blobstore.registry.reference import RemoteReference
from blobstore.remotes.addresses import find_model, is_in_objects, places_of
from blobstore.remotes.choose_cold_layers import usable_layers
from blobstore.remotes.download import Download, Fetched
from blobstore.remotes.fetch_attached import Attached, attached
from blobstore.remotes.signatures import SelectedSignatures
from blobstore.remotes.transfer_cache import PullRecord
from blobstore.store.history import replacement_notices
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.names import NameUpdate, NewModel, NewSignature
from blobstore.store.used_remotes import remember_remotes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from blobstore.core.digest import BlobId
    from blobstore.core.progress import Progress
    from blobstore.errors import RemoteError
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.objects.address import ModelAddress
    from blobstore.objects.source import ObjectSource
    from blobstore.registry.layouts.files import RemoteFile
    from blobstore.registry.store import RemoteSource
    from blobstore.remotes.cold_layers import ColdLayer
    from blobstore.signatures.policy import Verdict
    from blobstore.store.ingest import Ingest
    from blobstore.store.names import Name

WITHOUT_BASES: Final = "compressed forms whose bases are not here"
"""The start of the notice about them."""
STREAMS: Final = 8
"""Blobs, or parts of blobs, that are fetched at once by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """The result of :func:`blobstore.pull`."""

    remote: RemoteReference | ModelAddress
    reference: Reference
    digest: Digest
    """Of the manifest in the registry."""
    layout: str
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
    """Signatures that came with the model and are kept: with a policy that has keys, those by its keys."""
    replaced: bool
    """Whether the name belonged to another model, which ``restore`` brings back."""
    is_new: bool
    """Whether the store had no such name."""
    seconds: float
    notices: tuple[str, ...] = ()
    """Warnings of the policy, and remarks about the remote."""


def pull_model(
    remote: str | RemoteReference,
    name: Name | None = None,
    *,
    store: StoreLike = None,
    prefix: str | None = None,
    streams: int = STREAMS,
    limit_rate: float | str | None = None,
    jobs: int | None = None,
    force: bool = False,
    cold: bool = True,
    dry_run: bool = False,
    expected: Collection[BlobId] = (),
    plain_http: bool | None = None,
    progress: Progress | None = None,
) -> Pulled:
    """Fetch a model from a registry.

    Args:
        remote: the address, ``[oci://]host[:port]/repository[:tag|@sha256:…]``; with ``http://`` or
            ``https://`` that of ``blobstore serve``. Or one in object storage.
        name: the name that the model gets, or its update, which says what it must have had; by default the address.
        store: the store or its folder; by default that of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        prefix: ``[host/]namespace`` that the name gets instead of those of the address.
        streams: number of blobs, or of parts of large blobs, that are fetched at once.
        limit_rate: maximum number of bytes per second, or a text such as ``10MB``.
        jobs: number of threads that hash blobs of the store; by default one per processor.
        force: replace another model that has the name. What an earlier pull from this address gave it is
            replaced without.
        cold: fetch compressed forms if the registry has them and the store has the bases of deltas.
        dry_run: fetch nothing but manifests; report what would be fetched.
        expected: blobs that ``dry_run`` takes for present, because other models will have brought them.
        plain_http: whether to use HTTP without TLS; by default only for this machine.
        progress: called with the current blob, the bytes done and the total.

    Returns:
        the name, the digest, and the bytes that were fetched and present.

    Raises:
        BlobDamaged: the registry sent wrong bytes twice, or another length.
        BlobMissing: the registry does not have a blob of the model.
        InvalidManifest: a manifest breaks its format or contradicts the model.
        ModelNotFound: the registry has no such model.
        NameConflict: the name differs only in case from another one.
        NameTaken: the name belongs to another model, or was given to one in the meantime.
        NotTrusted: the policy refuses the model.
        InvalidPolicy: the policy cannot be used.
        RemoteError: the registry cannot be reached, refuses access or misbehaves.
        StoreBusy: timed out waiting for the store's lock.
        StoreError: the store cannot be written, or is short of space.
        UnsupportedSource: the address is that of something other than a model.
        UsageError: an argument is invalid.
    """
    started = time.monotonic()
    check_jobs(jobs)
    if streams < 1:
        raise UsageError(f"streams must be at least 1, got {streams}")
    limiter = None if limit_rate is None else RateLimiter(limit_rate)
    if name is not None and not isinstance(name, NameUpdate):
        name = Reference.of(name)
    store = LocalStore.of(store)
    store.check_root()
    # An address that gives no valid name fails before the registry is asked.
    if name is None and not is_in_objects(remote):
        address = remote if isinstance(remote, RemoteReference) else RemoteReference.parse(remote)
        name = named_by(address, prefix)
    with find_model(remote, plain_http=plain_http, limiter=limiter, with_files=True) as source:
        name = name or named_by(source.address, prefix)
        reference = name.reference if isinstance(name, NameUpdate) else name
        is_new = not store.has_model(reference)
        # Before anything is fetched: the name is given only if it still has this manifest then.
        update = _claim(store, name, reference, source, force=force)
        pull = _Pull(store, reference, update, source)
        signatures, verdict, with_model = pull.check_trust()
        # Compressed forms are those of a store's blobs, and files of other tools are imported
        # first.
        if source.files or not cold:
            with_model = with_model._replace(fetch_layers=dict)
        if source.files and pull.is_imported(dry_run=dry_run):
            done = Fetched(0, 0, 0, 0, 0)
        elif dry_run:
            done = pull.planned(with_model, expected)
        else:
            done = pull.fetch(signatures, with_model, streams, jobs, progress)
    if not dry_run:
        remember_remotes(store, *places_of(source.address))
    return Pulled(
        remote=source.address,
        reference=reference,
        digest=source.root.digest,
        layout=source.model.layout,
        blobs=len(source.model.blobs),
        blobs_fetched=done.fetched,
        bytes_fetched=done.bytes_fetched,
        bytes_resumed=done.bytes_resumed,
        bytes_saved=done.bytes_saved,
        bytes_present=sum(blob.size for blob in source.model.blobs) - done.size,
        repaired=dict(done.repaired),
        signatures=len(signatures.data),
        replaced=done.replaced,
        is_new=is_new,
        seconds=time.monotonic() - started,
        notices=(
            *(verdict.notices(reference) if verdict is not None else ()),
            *signatures.notices(reference),
            *source.notices,
            *done.notices,
        ),
    )


def named_by(address: RemoteReference | ModelAddress, prefix: str | None) -> Reference:
    """Return the name of a model that is given none. Raises InvalidReference."""
    if prefix is None:
        return address.name()
    return address.nearest_name().under(prefix)


@dataclass(frozen=True, slots=True)
class _Pull:
    """A model that is being pulled, and the name that it gets."""

    store: LocalStore
    reference: Reference
    update: NameUpdate
    source: RemoteSource | ObjectSource

    def check_trust(
        self,
    ) -> tuple[SelectedSignatures, Verdict | None, Attached]:
        """Ask the policy, before any weight is fetched; return what the registry has apart from blobs.

        These are the signatures to keep, the verdict of the policy, and the lists that come with the model.
        """
        source, store = self.source, self.store
        # Files that are imported get a manifest of their own, so only that of the registry can be signed.
        signed = source.root.data if source.files else source.model.manifest
        digest = Digest.of(signed)
        policy = read_policy(store)
        errors: list[RemoteError] = []
        with_model = attached(source, digest, errors.append)
        signatures = SelectedSignatures.of(with_model.signatures, digest, policy)
        verdict = check_trust(store, self.reference, signed, signatures.data, policy, errors)
        return signatures, verdict, with_model

    def is_imported(self, *, dry_run: bool) -> bool:
        """Return whether the name has what an earlier pull made of these files, with intact blobs."""
        source, store = self.source, self.store
        record = PullRecord.read(store, self.reference)
        # The address may have other files by now.
        if record is None or record[:2] != (str(source.address), str(source.root.digest)):
            return False
        if self.update.new is not None and str(self.update.new) != record.manifest:
            return False
        blobs = store.resolve(self.reference).blobs
        if dry_run:
            return store.has_blobs(blobs)
        with store.ingest() as ingest:
            return all(ingest.find(*blob.id) for blob in blobs)

    def planned(self, with_model: Attached, expected: Collection[BlobId]) -> Fetched:
        """Return the result that the pull would have, without fetching blobs."""
        source, store = self.source, self.store

        def is_here(blob: BlobId) -> bool:
            # A damaged blob is fetched again.
            with contextlib.suppress(BlobDamaged):
                return blob in expected or store.exists(*blob)
            return False

        missing = [blob for blob in source.model.blobs if not is_here(blob.id)]
        usable = usable_layers(
            store,
            with_model.fetch_layers() if missing else {},
            missing,
            is_here,
            with_model.fetch_bases,
        )
        stored = _stored(missing, usable.layers)
        stored += [layer.stored for layer in usable.bases.values()]
        size, to_fetch = sum(blob.size for blob in missing), sum(item.size for item in stored)
        resumed = sum(map(store.partial_bytes, stored))
        notices = _base_notices(usable.without_base)
        return Fetched(
            len(missing), size, to_fetch - resumed, resumed, size - to_fetch, notices=notices
        )

    def fetch(
        self,
        signatures: SelectedSignatures,
        with_model: Attached,
        streams: int,
        jobs: int | None,
        progress: Progress | None,
    ) -> Fetched:
        """Fetch the model, and give it its name."""
        store, source, blobs = self.store, self.source, self.source.model.blobs
        with store.ingest() as ingest:
            # Each blob is leased before it is looked for, so what is found stays.
            found = WorkerPool(jobs, None, 0).run(blobs, lambda blob: ingest.find(*blob.id))
            missing = [blob for blob, item in zip(blobs, found, strict=True) if item is None]
            usable = usable_layers(
                store,
                with_model.fetch_layers() if missing else {},
                missing,
                # Leases bases too, so that gc keeps them until the deltas are decoded.
                lambda base: ingest.find(*base) is not None,
                with_model.fetch_bases,
            )
            workers = WorkerPool(streams, progress, sum(blob.size for blob in missing))
            transfer = Download(source, store, ingest, missing, workers, usable)
            transfer.run(streams)
            if source.files:
                # Before blobs get their names: the import makes other blobs of these files.
                return self._import(transfer, jobs, progress)
            ingest.publish()
            # Only now: if this process is killed earlier, the next pull decodes them again.
            transfer.remove_cold_files()
            former = self._publish(ingest, signatures)
            notices = (
                *replacement_notices(self.reference, former),
                *_base_notices(usable.without_base),
            )
            return transfer.result(
                notices, repaired=dict(ingest.repaired), replaced=former is not None
            )

    def _publish(self, ingest: Ingest, signatures: SelectedSignatures) -> bytes | None:
        """Give the model, whose blobs are in the store, its name; return the manifest that had it before."""
        store, manifest = self.store, self.source.model.manifest
        # The config is in the store by now, so it can confirm the manifest.
        store.check_manifest(manifest, self.source.manifest)
        digest = Digest.of(manifest)
        kept = (NewSignature(digest, data, signatures.is_verified) for data in signatures.data)
        model = NewModel(self.update, manifest, self.source.model.blobs)
        (former,) = store.names.install([model], kept, ingest=ingest)
        with interrupts.deferred():  # all is done
            PullRecord.of(self.source, digest).keep(store, self.reference)
        return former

    def _import(self, transfer: Download, jobs: int | None, progress: Progress | None) -> Fetched:
        """Import the files of another tool, which are in partial files or in the store; remove the former."""
        from blobstore.operations.transfer.import_files import import_files

        store, reference = self.store, self.reference

        def path_of(file: RemoteFile) -> Path | None:
            if file.digest in transfer.paths:
                return transfer.paths[file.digest]
            return Path(store.blob_path(file.digest)) if store.has_hot(file.digest) else None

        def report(what: str, done: int, total: int) -> None:
            if progress is not None:  # it goes on where the transfer ended
                progress(what, transfer.size + done, transfer.size + total)

        created = import_files(
            self.source.files, path_of, self.update, store=store, jobs=jobs, progress=report
        )
        # Only now: if the import fails, the next pull continues with these files.
        transfer.remove_files()
        with interrupts.deferred():  # all is done
            PullRecord.of(self.source, created.digest).keep(store, reference)
        return transfer.result(created.notices, replaced=created.replaced)


def _claim(
    store: LocalStore,
    name: Name,
    reference: Reference,
    source: RemoteSource | ObjectSource,
    *,
    force: bool,
) -> NameUpdate:
    """Return the update of a name, which may replace what an earlier pull from there gave it.

    Raises:
        NameTaken: it has another model, from elsewhere.
    """
    # Files of other tools get a manifest when they are imported.
    new = None if source.files else Digest.of(source.model.manifest)
    seen, record = store.names.seen(name), PullRecord.read(store, reference)
    if not force and record is not None and record.remote == str(source.address):
        name = seen
    try:
        return store.names.claim(name, new, force=force)
    except NameTaken as error:
        if record is None:
            raise
        where = f"{error.message}, which came from {quote(record.remote)}"
        raise NameTaken(where, advice=error.advice) from None


def _base_notices(without_base: int) -> tuple[str, ...]:
    notice = f"{WITHOUT_BASES}: {without_base}; pull the base model first to fetch less"
    return (notice,) if without_base else ()


def _stored(missing: Iterable[Descriptor], layers: Mapping[Digest, ColdLayer]) -> list[BlobId]:
    """Return the blob that is fetched for each one: its compressed form, if that is of use."""
    return [layers[blob.digest].stored if blob.digest in layers else blob.id for blob in missing]

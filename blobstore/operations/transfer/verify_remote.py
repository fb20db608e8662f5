"""The operation ``verify --remote``: reads every byte of models in a registry or object storage back and hashes it.

Registries report blobs that they have lost, and send bytes that have changed on their disks, so nothing
less proves that a model can be pulled. Compressed forms are hashed, and not decoded: that may need a base
which only some clients have. A pull decodes them, and fetches the blobs instead if that fails.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.rate_limit import RateLimiter
from blobstore.core.sample import ALL, Sample
from blobstore.core.workers import WorkerPool, check_jobs
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    Damaged,
    InvalidManifest,
    ModelNotFound,
    UnsupportedSource,
)
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.media_types import MANIFEST
from blobstore.objects.address import ModelAddress
from blobstore.objects.source import ObjectSource
from blobstore.operations.transfer.pull import STREAMS
from blobstore.registry.client import RegistryClient
from blobstore.registry.reference import RemoteReference
from blobstore.registry.store import RemoteSource
from blobstore.remotes.addresses import find_model, is_in_objects
from blobstore.remotes.catalog import find_store, has_many_models, read_remote_catalog
from blobstore.remotes.cold_layers import COLD, parse_cold_layers
from blobstore.remotes.cold_manifests import fetch_cold_layers
from blobstore.remotes.referrers import fetch_referrers

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from blobstore.core.progress import Progress
    from blobstore.errors import BlobstoreError
    from blobstore.objects.address import StoreAddress
    from blobstore.objects.store import ObjectStore


class RemoteFault(NamedTuple):
    """A blob that the registry does not send as its manifest lists it."""

    reference: str
    """The address of the model."""
    layer: str
    """The layer's name, or its media type if it has no name."""
    message: str
    blob: Digest | None
    tensor: str = ""
    """Always empty: a blob with wrong bytes is not parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRemote:
    """The result of :func:`verify_remote`."""

    remote: RemoteReference | ModelAddress | StoreAddress | str
    """The address; text for a whole registry, and for repositories."""
    digest: Digest | None
    """Of the manifest there; None for several models."""
    blobs: int
    """Blobs of the model, or of all models together."""
    hashed: int
    """Those of them that were read."""
    cold_blobs: int
    """Blobs of which the registry has a compressed form too."""
    bytes_read: int
    """Of both."""
    faults: tuple[RemoteFault, ...]
    """In the order of the manifest."""
    seconds: float
    models: int = 1


def verify_remote(
    remote: str | RemoteReference,
    *,
    sample: str | None = None,
    streams: int = STREAMS,
    limit_rate: float | str | None = None,
    plain_http: bool | None = None,
    progress: Progress | None = None,
) -> VerifiedRemote:
    """Read every blob of a model in a registry or object storage, and its compressed forms, and hash them.

    Args:
        remote: the address, as for :func:`pull_model`, or that of a store in object storage, a registry or
            repositories: all models there are read then, and each blob once in each repository.
        sample: the blobs to read, and none of the others: ``"5%"`` chooses other blobs each time, ``"2/7"`` the
            second of seven parts.
        streams: number of blobs that are read at once.
        limit_rate: maximum number of bytes per second, or a text such as ``10MB``.
        plain_http: whether to use HTTP without TLS; by default only for this machine.
        progress: called with the current blob, the bytes done and the total.

    Raises:
        InvalidManifest: a manifest breaks its format or contradicts the model.
        ModelNotFound: the registry has no such model.
        RemoteError: the registry cannot be reached, refuses access or misbehaves.
        UnsupportedSource: the address is that of something other than a model.
        UsageError: an argument is invalid.
    """
    started = time.monotonic()
    check_jobs(streams)
    hashed = ALL if sample is None else Sample.parse(sample)
    limiter = None if limit_rate is None else RateLimiter(limit_rate)
    place: ObjectStore | None = None
    is_registry = False
    if is_in_objects(remote):
        place = find_store(remote)
    elif isinstance(remote, str):
        is_registry = has_many_models(remote, plain_http=plain_http)
    with contextlib.ExitStack() as stack:
        faults: list[RemoteFault] = []
        sources: Sequence[RemoteSource | ObjectSource]
        address: str | RemoteReference | ModelAddress | StoreAddress = remote
        digest = None
        if place is not None:
            sources = list(_sources_of(place, limiter, faults))
            address = place.address
        elif is_registry:
            sources = list(_registry_sources(stack, str(remote), plain_http, limiter, faults))
        else:
            source = stack.enter_context(
                find_model(remote, plain_http=plain_http, limiter=limiter, with_files=True)
            )
            sources, address, digest = [source], source.address, source.root.digest
        read = [_blobs_of(source, faults) for source in sources]
        # A blob of several models is read once; but of repositories, one may have lost what another has.
        jobs = {
            (_place(source), blob.id): (source, blob)
            for source, (blobs, layers) in zip(sources, read, strict=True)
            for blob in (*blobs, *layers, *_copies_of_manifest(source))
            if blob.digest in hashed
        }
        workers = WorkerPool(streams, progress, sum(blob.size for _, blob in jobs.values()))

        def abort() -> None:
            for source in sources:
                source.client.abort()

        results = workers.run(list(jobs.values()), lambda job: _verify(*job, workers), abort)
    every = {blob.digest for blobs, _ in read for blob in blobs}
    return VerifiedRemote(
        remote=address,
        digest=digest,
        blobs=len(every),
        hashed=sum(digest in hashed for digest in every),
        cold_blobs=len({blob.digest for _, layers in read for blob in layers}),
        bytes_read=sum(
            blob.size for (_, blob), fault in zip(jobs.values(), results, strict=True) if not fault
        ),
        faults=(*filter(None, results), *faults),
        seconds=time.monotonic() - started,
        models=len(sources),
    )


def _sources_of(
    store: ObjectStore, limiter: RateLimiter | None, faults: list[RemoteFault]
) -> Iterator[ObjectSource]:
    """Yield the models of a store; manifests that cannot be read are faults."""
    for name in store.references():
        place = ModelAddress(store.address, name)
        try:
            yield ObjectSource(store, place, store.read_manifest(name), limiter)
        except InvalidManifest as error:
            faults.append(RemoteFault(str(place), "manifest", error.message, None))


def _registry_sources(
    stack: contextlib.ExitStack,
    address: str,
    plain_http: bool | None,
    limiter: RateLimiter | None,
    faults: list[RemoteFault],
) -> Iterator[RemoteSource]:
    """Yield the models of repositories, each manifest once; those that cannot be read are faults."""
    entries = read_remote_catalog(address, plain_http=plain_http)
    if not entries:
        return
    host = RemoteReference.parse(entries[0].address)
    plain_http = host.uses_plain_http(plain_http)
    client = stack.enter_context(RegistryClient(host.host, plain_http=plain_http, limiter=limiter))
    seen = set()
    for entry in entries:
        place, digest = RemoteReference.parse(entry.address), entry.registry_digest
        if isinstance(entry.error, (Damaged, ModelNotFound)):  # as the registry lists it
            faults.append(RemoteFault(str(place), "manifest", entry.error.message, digest))
        elif entry.error is not None and not isinstance(entry.error, UnsupportedSource):
            raise entry.error
        elif entry.error is None and (place.repository, digest) not in seen:
            seen.add((place.repository, digest))
            found = RemoteSource.resolve(client, replace(place, digest=digest), with_files=True)
            yield found._replace(address=place)  # faults are those of the tag


def _place(source: RemoteSource | ObjectSource) -> str:
    """Return the repository whose blobs a model has, or nothing in object storage, which shares all blobs."""
    return source.address.repository if isinstance(source, RemoteSource) else ""


def _blobs_of(
    source: RemoteSource | ObjectSource, faults: list[RemoteFault]
) -> tuple[Sequence[Descriptor], Sequence[Descriptor]]:
    """Return the blobs of a model and their compressed forms. Lists of these that cannot be read become faults."""

    def report_manifest(digest: Digest, error: BlobstoreError) -> None:
        faults.append(RemoteFault(str(source.address), "compressed forms", error.message, digest))

    return source.model.blobs, _cold_layers(source, report_manifest)


def _copies_of_manifest(source: RemoteSource | ObjectSource) -> list[Descriptor]:
    """Return the manifest as the blob that object storage has of it, so that its digest finds it."""
    if isinstance(source, RemoteSource):
        return []
    return [Descriptor(MANIFEST, source.root.digest, len(source.data), "copy of the manifest")]


def _cold_layers(
    source: RemoteSource | ObjectSource, on_error: Callable[[Digest, BlobstoreError], None]
) -> list[Descriptor]:
    """Return the compressed forms that a pull would use, named after their layers."""
    blobs = source.model.blobs
    if isinstance(source, ObjectSource):
        found = parse_cold_layers(source.cold_index() or b"")
    else:
        client, repository = source.client, source.address.repository
        referrers = fetch_referrers(client, repository, source.root)
        ids = (blob.id for blob in blobs)
        found = fetch_cold_layers(client, repository, referrers, ids, on_error)
    return [
        Descriptor(COLD, *found[blob.digest].stored, f"{blob.name} (compressed)")
        for blob in blobs
        if blob.digest in found
    ]


def _verify(
    source: RemoteSource | ObjectSource, blob: Descriptor, workers: WorkerPool
) -> RemoteFault | None:
    """Return what is wrong with a blob, or None."""
    layer = blob.name or blob.media_type

    def pieces() -> Generator[memoryview, None, None]:
        for piece in source.read(*blob.id, 0, blob.size):
            yield memoryview(piece)

    try:
        found = Digest.of_pieces(pieces(), lambda count: workers.report(count, quote(layer)))
    except (BlobDamaged, BlobMissing) as error:
        return RemoteFault(str(source.address), layer, error.message, blob.digest)
    if found == blob.digest:
        return None
    message = f"the remote sent bytes with digest {found}, expected {blob.digest}"
    return RemoteFault(str(source.address), layer, message, blob.digest)

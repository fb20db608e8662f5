"""The operation ``du`` of addresses: what remote models take, and how much of them a store has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from blobstore.core.arguments import one_or_more
from blobstore.remotes.addresses import is_in_objects, reading_models
from blobstore.remotes.catalog import RemoteEntry, has_many_models, read_remote_catalog
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from blobstore.core.digest import BlobId
    from blobstore.errors import BlobstoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteUsage:
    """The bytes of one or several remote models, and how many of them a store has."""

    address: str
    """Empty for several together."""
    blobs: int
    size: int
    """Bytes of its blobs, each counted once."""
    present: int
    """Bytes of the blobs that the store has too."""
    error: BlobstoreError | None = None
    """Why the model cannot be read."""

    @property
    def missing(self) -> int:
        """Bytes that a pull would fetch."""
        return self.size - self.present


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteUsages:
    """The bytes of remote models."""

    models: tuple[RemoteUsage, ...]
    together: RemoteUsage
    """All of them: a blob that several share counts once."""

    @property
    def without_sharing(self) -> int:
        """Bytes that the models would take if each had its own copy of every blob."""
        return sum(model.size for model in self.models)


def measure_remote(
    addresses: str | Sequence[str],
    *,
    store: StoreLike = None,
    plain_http: bool | None = None,
) -> RemoteUsages:
    """Return the sizes of remote models, and how much of them a store has.

    Args:
        addresses: models in registries or object storage, or whole stores, registries or repositories.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        plain_http: whether to use HTTP without TLS for registries; by default only for this machine.

    Raises:
        InvalidManifest, ModelNotFound, RemoteError: as :func:`describe_model`.
        NotFound: there is no such store.
    """
    local = LocalStore.of(store)
    entries = list(
        chain.from_iterable(_entries(local, one, plain_http) for one in one_or_more(addresses))
    )
    return RemoteUsages(
        models=tuple(_usage(local, entry.address, entry.blobs, entry.error) for entry in entries),
        together=_usage(local, "", chain.from_iterable(entry.blobs for entry in entries)),
    )


def _entries(local: LocalStore, address: str, plain_http: bool | None) -> Iterator[RemoteEntry]:
    if is_in_objects(address) or has_many_models(address, plain_http=plain_http):
        yield from read_remote_catalog(address, plain_http=plain_http, kept_in=local)
        return
    with reading_models(local, address, plain_http=plain_http) as (reader, (name,)):
        yield RemoteEntry(
            address=address, blobs=tuple(blob.id for blob in reader.resolve(name).blobs)
        )


def _usage(
    local: LocalStore,
    address: str,
    blobs: Iterable[BlobId],
    error: BlobstoreError | None = None,
) -> RemoteUsage:
    blobs = {blob.digest: blob for blob in blobs}.values()
    return RemoteUsage(
        address=address,
        blobs=len(blobs),
        size=sum(blob.size for blob in blobs),
        present=sum(blob.size for blob in blobs if local.has_blobs([blob])),
        error=error,
    )

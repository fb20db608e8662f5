"""The models of a whole remote: of a store in object storage, or the tags of a repository in a registry."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from blobstore.core import capacity
from blobstore.core.digest import Digest
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobstoreError, Damaged, ModelNotFound, RemoteRefused
from blobstore.manifests.model import Manifest
from blobstore.remotes.addresses import is_in_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Reference
    from blobstore.objects.client import ObjectInfo
    from blobstore.objects.store import ObjectStore
    from blobstore.registry.reference import RemoteReference

_STREAMS: Final = capacity.CATALOG.most


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEntry:
    """A model of a remote. It has either blobs, or an error."""

    address: str
    digest: Digest | None = None
    """The digest of the manifest that the model has in a store; None if another tool has pushed its files."""
    registry_digest: Digest | None = None
    """The digest of the manifest in the registry, which addresses the model there."""
    modified: float | None = None
    """When the name was written, in seconds since the epoch; a registry does not say."""
    blobs: tuple[Descriptor, ...] = field(default=(), repr=False)
    """Each blob of the model once."""
    error: BlobstoreError | None = None
    """Why the model cannot be read."""

    @property
    def size(self) -> int | None:
        """Bytes of the blobs; None if these are unknown."""
        return None if self.error else sum(blob.size for blob in self.blobs)


def shared_sizes(entries: Sequence[RemoteEntry]) -> list[int]:
    """Return for each entry the bytes of the blobs that others list too."""
    uses = Counter(blob.digest for entry in entries for blob in entry.blobs)
    return [sum(blob.size for blob in entry.blobs if uses[blob.digest] > 1) for entry in entries]


def read_remote_catalog(
    address: str,
    *,
    plain_http: bool | None = None,
    is_chosen: Callable[[str], bool] = lambda _: True,
) -> list[RemoteEntry]:
    """Return the models at an address, sorted by name. Only manifests are read.

    Args:
        address: a store in object storage, or a model there; or a repository in a registry, ``oci://…``,
            the start of several, or a registry alone.
        plain_http: whether to use HTTP without TLS for a registry; by default only for this machine.
        is_chosen: whether the model with an address, as entries have it, is read and returned.

    Raises:
        InvalidReference: the address is not valid.
        NotFound: there is no store, model or repository.
        RemoteError: the remote cannot be reached, refuses access or misbehaves.
    """
    if not is_in_objects(address):
        return _tags(address, plain_http, is_chosen)
    if (store := find_store(address)) is None:
        from blobstore.objects.source import ObjectSource

        _, model, data = ObjectSource.locate(address)
        return [_entry(str(model), data, None)] if is_chosen(str(model)) else []
    names = sorted(one for one in store.list_manifests() if is_chosen(_address(store, one[0])))
    return WorkerPool(_STREAMS, None, 0).run(names, partial(_stored, store))


def find_store(address: str) -> ObjectStore | None:
    """Return the store in object storage at an address; None if it is the address of a model.

    Raises:
        InvalidReference: the address is not valid.
        NotFound: there is neither.
        RemoteError: the object storage cannot be reached, or denies access.
    """
    from blobstore.objects.address import StoreAddress, has_tag
    from blobstore.objects.source import ObjectSource
    from blobstore.objects.store import ObjectStore

    if has_tag(address):
        ObjectSource.locate(address)
        return None
    place = StoreAddress.parse(address)
    store = ObjectStore(place)
    failure: BlobstoreError
    try:
        if store.exists_at_all():
            return store
        failure = store.not_found()
    except RemoteRefused as error:  # a model can be read without the right to list
        failure = error
    if not place.prefix:
        raise failure
    try:
        ObjectSource.locate(address)
    except (ModelNotFound, RemoteRefused):
        raise failure from None
    return None


def has_many_models(address: str, *, plain_http: bool | None = None) -> bool:
    """Return whether an address names a whole registry or several repositories, and not one model.

    Raises:
        InvalidReference: the address is not valid.
        RemoteError: the registry cannot be reached, refuses access or misbehaves.
    """
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.reference import RemoteReference, split_scheme

    path = split_scheme(address)[1].partition("/")[2]
    if not path or path.endswith("/"):
        return True
    place = RemoteReference.parse(address)
    if place.digest is not None or ":" in path:
        return False
    plain_http = place.uses_plain_http(plain_http)
    with RegistryClient(place.host, plain_http=plain_http) as client, contextlib.suppress(Damaged):
        try:
            client.get_manifest(place.repository, place.reference)
        except ModelNotFound:
            return True
    return False


def _address(store: ObjectStore, name: Reference) -> str:
    return f"{store.address}/{name}"


def _stored(store: ObjectStore, named: tuple[Reference, ObjectInfo]) -> RemoteEntry:
    name, item = named
    where, modified = _address(store, name), item.modified.timestamp()
    try:
        return _entry(where, store.read_manifest(name), modified)
    except ModelNotFound as error:  # another process has removed it
        return RemoteEntry(address=where, modified=modified, error=error)


def _entry(address: str, data: bytes, modified: float | None) -> RemoteEntry:
    digest = Digest.of(data)
    try:
        blobs = Manifest.from_bytes(data).blobs
    except BlobstoreError as error:
        return RemoteEntry(address=address, digest=digest, modified=modified, error=error)
    return RemoteEntry(address=address, digest=digest, modified=modified, blobs=tuple(blobs))


def _tags(
    address: str, plain_http: bool | None, is_chosen: Callable[[str], bool]
) -> list[RemoteEntry]:
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.store import RemoteSource, list_tags

    tags = list_tags(address, plain_http=plain_http, is_chosen=is_chosen)
    if not tags:
        return []
    place = tags[0][0]

    def read(place: RemoteReference) -> RemoteEntry:
        try:
            found = RemoteSource.resolve(client, place, with_files=True)
        except BlobstoreError as error:
            return RemoteEntry(address="", registry_digest=place.digest, error=error)
        return RemoteEntry(
            address="",
            digest=Digest.of(found.data) if found.data else None,
            registry_digest=found.root.digest,
            blobs=tuple(found.blobs),
        )

    # Tags of one manifest are read once.
    places = {(tag.repository, digest or tag): replace(tag, digest=digest) for tag, digest in tags}
    with RegistryClient(place.host, plain_http=place.uses_plain_http(plain_http)) as client:
        read_all = WorkerPool(_STREAMS, None, 0).run(list(places.values()), read, client.abort)
    found = dict(zip(places, read_all, strict=True))
    return [replace(found[tag.repository, digest or tag], address=str(tag)) for tag, digest in tags]

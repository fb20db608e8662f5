"""The models of a whole remote: of a store in object storage, or the tags of a repository in a registry.

What a manifest references is kept in the local store, by what the next listing says of it: its digest in a registry,
or the ETag of its object. The file is a cache, as :mod:`blobstore.store.references` is.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from blobstore.core import capacity
from blobstore.core.digest import BlobId, Digest
from blobstore.core.files import FileVersion
from blobstore.core.workers import WorkerPool
from blobstore.errors import (
    BlobstoreError,
    Damaged,
    InvalidManifest,
    ModelNotFound,
    RemoteRefused,
)
from blobstore.manifests.model import Manifest
from blobstore.remotes.addresses import is_in_objects
from blobstore.store.references import KnownManifest, References

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.objects.client import ObjectInfo
    from blobstore.objects.store import ObjectStore
    from blobstore.registry.reference import RemoteReference
    from blobstore.store.local import LocalStore

_STREAMS: Final = capacity.CATALOG.most
_NO_DIGEST: Final = Digest("0" * 64)


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
    blobs: tuple[BlobId, ...] = field(default=(), repr=False)
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
    kept_in: LocalStore | None = None,
) -> list[RemoteEntry]:
    """Return the models at an address, sorted by name. Only manifests are read.

    Args:
        address: a store in object storage, or a model there; or a repository in a registry, ``oci://…``,
            the start of several, or a registry alone.
        plain_http: whether to use HTTP without TLS for a registry; by default only for this machine.
        is_chosen: whether the model with an address, as entries have it, is read and returned.
        kept_in: the store that keeps what manifests reference. Those that it knows are not read again.

    Raises:
        InvalidReference: the address is not valid.
        NotFound: there is no store, model or repository.
        RemoteError: the remote cannot be reached, refuses access or misbehaves.
    """
    manifests = _Manifests(kept_in, address.rstrip("/"))
    if not is_in_objects(address):
        entries = _tags(address, plain_http, is_chosen, manifests)
    elif (store := find_store(address)) is None:
        from blobstore.objects.source import ObjectSource

        _, model, data = ObjectSource.locate(address)
        where = str(model)
        return [_stored(where, None, lambda: data, manifests)] if is_chosen(where) else []
    else:
        names = ((f"{store.address}/{name}", name, item) for name, item in store.list_manifests())
        chosen = sorted((one for one in names if is_chosen(one[0])), key=itemgetter(1))

        def read(one: tuple[str, Reference, ObjectInfo]) -> RemoteEntry:
            address, name, item = one
            return _stored(address, item, partial(store.read_manifest, name), manifests)

        entries = WorkerPool(_STREAMS, None, 0).run(chosen, read)
    manifests.save()
    return entries


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


class _Manifests:
    """What the manifests of a remote reference, by keys that stand for their content. Any number of threads may use it."""

    def __init__(self, store: LocalStore | None, address: str) -> None:
        self._known = store.known_references(address) if store else References()
        self._blobs: dict[int, BlobId] = {}
        """By number, because models have them in common."""
        self._lock = threading.Lock()

    def entry(self, key: str | None, read: Callable[[], tuple[Digest, Manifest]]) -> RemoteEntry:
        """Return the digest and the blobs of a manifest, which is only read if it is not known."""
        version = None if key is None else _version_of(key)
        with self._lock:
            known = None if version is None else self._known.known(version)
        if known is None:
            digest, manifest = read()
            with self._lock:
                known = self._known.add(version, digest, manifest)
        with self._lock:
            return RemoteEntry(
                address="",
                digest=None if known.digest == _NO_DIGEST else known.digest,
                blobs=tuple(self._ids(known)),
            )

    def _ids(self, known: KnownManifest) -> Iterator[BlobId]:
        for number, size in zip(known.blobs, known.sizes, strict=True):
            blob = self._blobs.get(number)
            if blob is None or blob.size != size:
                blob = self._blobs[number] = BlobId(self._known.digest(number), size)
            yield blob

    def save(self) -> None:
        """Keep those manifests that were asked for."""
        self._known.save()


def _version_of(key: str) -> FileVersion:
    """Return what stands for a key in a table that has versions of files."""
    parts = struct.unpack("=3Q8x", hashlib.sha256(key.encode()).digest())
    return FileVersion._make((*parts, 0, 0))


def _stored(
    address: str, item: ObjectInfo | None, read: Callable[[], bytes], manifests: _Manifests
) -> RemoteEntry:
    """Return a model in object storage, which ``item`` of a listing describes."""
    digest = None

    def parse() -> tuple[Digest, Manifest]:
        nonlocal digest
        data = read()
        digest = Digest.of(data)
        return digest, Manifest.from_bytes(data)

    modified = None if item is None else item.modified.timestamp()
    # Without an ETag, nothing says that an object is the one of the last listing.
    key = f"{address} {item.etag} {item.size} {modified}" if item and item.etag else None
    try:
        found = manifests.entry(key, parse)
    except (InvalidManifest, ModelNotFound) as error:  # another process has removed it
        return RemoteEntry(address=address, digest=digest, modified=modified, error=error)
    return replace(found, address=address, modified=modified)


def _tags(
    address: str,
    plain_http: bool | None,
    is_chosen: Callable[[str], bool],
    manifests: _Manifests,
) -> list[RemoteEntry]:
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.store import RemoteSource, list_tags

    tags = list_tags(address, plain_http=plain_http, is_chosen=is_chosen)
    if not tags:
        return []
    place = tags[0][0]

    def read(place: RemoteReference) -> RemoteEntry:
        digest = place.digest

        def parse() -> tuple[Digest, Manifest]:
            nonlocal digest
            found = RemoteSource.resolve(client, place, with_files=True)
            digest = found.root.digest
            return Digest.of(found.data) if found.data else _NO_DIGEST, found.manifest

        try:
            found = manifests.entry(digest and str(digest), parse)
        except BlobstoreError as error:
            return RemoteEntry(address="", registry_digest=digest, error=error)
        return replace(found, registry_digest=digest)

    # Tags of one manifest are read once.
    places = {(tag.repository, digest or tag): replace(tag, digest=digest) for tag, digest in tags}
    with RegistryClient(place.host, plain_http=place.uses_plain_http(plain_http)) as client:
        read_all = WorkerPool(_STREAMS, None, 0).run(list(places.values()), read, client.abort)
    found = dict(zip(places, read_all, strict=True))
    return [replace(found[tag.repository, digest or tag], address=str(tag)) for tag, digest in tags]

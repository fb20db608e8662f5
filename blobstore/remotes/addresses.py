"""Models read by name, whether in a store, a registry or object storage. Clients are imported when needed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, TypeGuard

from blobstore.manifests.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from blobstore.core.digest import BlobId
    from blobstore.core.rate_limit import RateLimiter
    from blobstore.manifests.model import Manifest
    from blobstore.objects.address import ModelAddress
    from blobstore.objects.source import ObjectSource
    from blobstore.registry.reference import RemoteReference
    from blobstore.registry.store import RemoteSource
    from blobstore.remotes.model_reader import RemoteModelSource
    from blobstore.store.local import LocalStore
    from blobstore.store.protocols import BlobAccess, ModelInspector

Cache = Literal["keep", "none"]
"""Whether blobs of a remote model that were read completely are kept in the local store."""
_REGISTRIES = ("oci://", "http://", "https://")
_OBJECTS = ("s3://", "gs://", "az://", "file://")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """What ``blobstore.open(…, plan=True)`` returns."""

    blobs: int
    """Blobs of the model."""
    size: int
    """Bytes of these."""
    blobs_present: int
    """Blobs that the local store has."""
    bytes_present: int
    """Bytes of these."""
    bytes_to_read: int
    """Bytes to read from a remote for the others, compressed where that is of use."""

    @classmethod
    def of(
        cls,
        store: BlobAccess,
        manifest: Manifest,
        stored_size: Callable[[BlobId], int] = attrgetter("size"),
    ) -> ReadPlan:
        """Return the blobs and bytes that reading the model with this ``manifest`` takes.

        Those that ``store`` has locally are not read from a remote. ``stored_size`` returns how many bytes are
        read for each other one.

        Raises:
            BlobMissing, BlobDamaged: a blob is nowhere, or damaged.
        """
        missing = []
        for blob in manifest.blobs:
            if store.is_local(blob.digest):
                store.check_size(*blob.id)
            else:
                missing.append(blob)
        size = sum(blob.size for blob in manifest.blobs)
        return cls(
            blobs=len(manifest.blobs),
            size=size,
            blobs_present=len(manifest.blobs) - len(missing),
            bytes_present=size - sum(blob.size for blob in missing),
            bytes_to_read=sum(stored_size(blob.id) for blob in missing),
        )


def is_address(name: object) -> TypeGuard[str]:
    """Return whether a name is the address of a remote model: ``oci://…``, ``http://…``, ``s3://…`` and so on."""
    return isinstance(name, str) and name.startswith((*_REGISTRIES, *_OBJECTS))


def is_in_objects(name: object) -> TypeGuard[str]:
    """Return whether a name is an address in object storage."""
    return isinstance(name, str) and name.startswith(_OBJECTS)


def places_of(address: RemoteReference | ModelAddress) -> tuple[str, str]:
    """Return the address of a model with its scheme, and that of its repository or store."""
    from blobstore.objects.address import ModelAddress

    if isinstance(address, ModelAddress):
        return str(address), str(address.store)
    start = "" if address.scheme else "oci://"
    return f"{start}{address}", f"{address.scheme or 'oci'}://{address.host}/{address.repository}"


def check_address(text: str) -> None:
    """Check the address of a model.

    Raises:
        InvalidDigest, InvalidReference: it is not valid.
    """
    if is_in_objects(text):
        from blobstore.objects.address import model_addresses

        next(model_addresses(text))
    else:
        from blobstore.registry.reference import RemoteReference

        RemoteReference.parse(text)


@contextlib.contextmanager
def reading_models(
    local: LocalStore, *names: str | Reference, plain_http: bool | None = None
) -> Iterator[tuple[ModelInspector, list[Reference]]]:
    """Yield a reader for models of a store and of remotes, and the names that the models have in it.

    Raises:
        BlobDamaged, BlobMissing, InvalidManifest, UnsupportedSource: a remote model is damaged.
        ModelNotFound: there is no such model.
        RemoteError: a remote cannot be reached, refuses access or misbehaves.
        UsageError: a name is not valid.
    """
    if not any(map(is_address, names)):
        yield local, list(map(Reference.of, names))
        return
    from blobstore.remotes.model_reader import RemoteReader

    with contextlib.ExitStack() as stack:
        sources: dict[Reference, RemoteModelSource] = {}
        found: list[Reference] = []
        for number, name in enumerate(names):
            # Two addresses may give the same name, so each model gets one of its own here.
            own = Reference("remote", "address", "model", str(number))
            if is_address(name):
                sources[own] = stack.enter_context(find_model(name, plain_http=plain_http))
            else:
                own = Reference.of(name)
            found.append(own)
        yield RemoteReader(sources, local), found


@contextlib.contextmanager
def find_model(
    remote: str | RemoteReference,
    *,
    plain_http: bool | None = None,
    limiter: RateLimiter | None = None,
    with_files: bool = False,
) -> Iterator[RemoteSource | ObjectSource]:
    """Find the model at an address; the connection ends with the block.

    Args:
        remote: the address, in a registry or in object storage.
        plain_http: whether to use HTTP without TLS for a registry; by default only for this machine. An
            address that begins with ``http://`` or ``https://`` overrides it.
        limiter: limits what is read.
        with_files: also find models that other tools have pushed as files.

    Raises:
        BlobDamaged, BlobMissing: the remote does not have what the manifest lists.
        InvalidManifest: a manifest breaks its format or contradicts the model.
        ModelNotFound: there is no such model.
        RemoteError: the remote cannot be reached, refuses access or misbehaves.
        UnsupportedSource: the address is that of something other than a model.
        UsageError: the address is not valid.
    """
    if is_in_objects(remote):
        from blobstore.objects.source import ObjectSource

        yield ObjectSource.find(remote, limiter)
        return
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.reference import RemoteReference
    from blobstore.registry.store import RemoteSource

    address = remote if isinstance(remote, RemoteReference) else RemoteReference.parse(remote)
    plain_http = address.uses_plain_http(plain_http)
    with RegistryClient(address.host, plain_http=plain_http, limiter=limiter) as client:
        yield RemoteSource.resolve(client, address, with_files=with_files)

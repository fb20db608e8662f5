"""Models read by name, whether in a store or in a registry. The client is imported only for the latter."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeGuard

from blobstore.manifests.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.store.local import LocalStore
    from blobstore.store.protocols import ModelInspector

_SCHEME = "oci://"


def is_address(name: object) -> TypeGuard[str]:
    """Return whether a name is the address of a model in a registry: whether it begins with ``oci://``."""
    return isinstance(name, str) and name.startswith(_SCHEME)


@contextlib.contextmanager
def reading_models(
    local: LocalStore, *names: str | Reference, plain_http: bool | None = None
) -> Iterator[tuple[ModelInspector, list[Reference]]]:
    """Give a reader of models in a store and in registries, and the names that they have in it.

    Raises:
        BlobDamaged, BlobMissing, InvalidManifest, UnsupportedSource: a model in a registry is damaged.
        ModelNotFound: a registry has no such model.
        RemoteError: a registry cannot be reached, refuses access or misbehaves.
        UsageError: a name is not valid.
    """
    if not any(map(is_address, names)):
        yield local, list(map(Reference.of, names))
        return
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.reference import RemoteReference
    from blobstore.registry.store import RegistryReader, RemoteSource

    with contextlib.ExitStack() as stack:
        sources: dict[Reference, RemoteSource] = {}
        found: list[Reference] = []
        for number, name in enumerate(names):
            own = Reference("registry", "address", "model", str(number))
            if not is_address(name):
                own = Reference.of(name)
            found.append(own)
            if is_address(name):
                address = RemoteReference.parse(name)
                client = stack.enter_context(RegistryClient(address.host, plain_http=plain_http))
                sources[own] = RemoteSource.resolve(client, address)
        yield RegistryReader(sources, local), found

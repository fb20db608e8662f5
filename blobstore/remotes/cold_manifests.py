"""The cold layers of a model in a registry, next to the manifest that it belongs to.

Manifests list cold layers (:mod:`blobstore.remotes.cold_layers`) with the blobs that they decode to,
and name the model's manifest as their subject. Ordinary clients see only the model.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from blobstore.errors import BlobstoreError
from blobstore.registry.manifest import ImageManifest
from blobstore.remotes.cold_layers import COLD, COLD_BASES, MAX_LINKS, ColdLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from blobstore.core.digest import BlobId, Digest
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.manifest import RemoteDescriptor

# A registry may list any number of them, and each takes a request.
_MAX_MANIFESTS: Final = 100


def fetch_cold_layers(
    client: RegistryClient,
    repository: str,
    referrers: Iterable[RemoteDescriptor],
    blobs: Iterable[BlobId],
    on_error: Callable[[Digest, BlobstoreError], None] = lambda *_: None,
) -> dict[Digest, ColdLayer]:
    """Return the smallest cold layer of each blob that a registry lists; none of them is trusted.

    Args:
        client: the registry.
        repository: the repository of the model.
        referrers: the manifests that, as the registry says, refer to the model's manifest.
        blobs: those of the model; layers of others are left out.
        on_error: called with the digest of a manifest that cannot be read, which is left out.
    """
    found: dict[Digest, ColdLayer] = {}
    wanted = set(blobs)
    for layer in _listed(client, repository, referrers, COLD, on_error):
        # By digest and size: what the registry states about the size must fit the model.
        if layer.blob in wanted:
            known = found.setdefault(layer.blob.digest, layer)
            if layer.stored.size < known.stored.size:
                found[layer.blob.digest] = layer
    return found


def fetch_base_layers(
    client: RegistryClient,
    repository: str,
    referrers: Iterable[RemoteDescriptor],
    blobs: int,
) -> dict[Digest, ColdLayer]:
    """Return the cold layers of bases that a registry lists for a model of so many blobs; none is trusted."""
    layers = _listed(client, repository, referrers, COLD_BASES)
    # Nothing says yet which of them are needed. A chain for each blob is what an honest list has.
    return {layer.blob.digest: layer for layer in islice(layers, MAX_LINKS * blobs)}


def _listed(
    client: RegistryClient,
    repository: str,
    referrers: Iterable[RemoteDescriptor],
    kind: str,
    on_error: Callable[[Digest, BlobstoreError], None] = lambda *_: None,
) -> Iterator[ColdLayer]:
    """Yield the cold layers of the manifests of one artifact type."""
    listed = (one for one in referrers if one.artifact_type == kind)
    for item in islice(listed, _MAX_MANIFESTS):
        try:
            content = client.get_manifest(repository, str(item.digest)).parse()
        except BlobstoreError as error:
            on_error(item.digest, error)
            continue
        layers = content.layers if isinstance(content, ImageManifest) else ()
        yield from filter(None, map(ColdLayer.of, layers))

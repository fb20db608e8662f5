"""The cold layers of a model in a registry, next to the manifest that it belongs to.

Manifests list cold layers (:mod:`blobstore.remotes.cold_layers`) with the blobs that they decode to,
and name the model's manifest as their subject. Ordinary clients see only the model.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError
from blobstore.registry.manifest import ImageManifest
from blobstore.remotes.cold_layers import COLD, ColdLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.manifest import RemoteDescriptor
    from blobstore.store.local import LocalStore

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
        referrers: what the registry says refers to the model's manifest.
        blobs: those of the model; layers of others are left out.
        on_error: called with the digest of a manifest that cannot be read, which is left out.
    """
    found: dict[Digest, ColdLayer] = {}
    wanted = set(blobs)
    listed = [one for one in referrers if one.artifact_type == COLD]
    for item in listed[:_MAX_MANIFESTS]:
        try:
            content = client.get_manifest(repository, str(item.digest)).parse()
        except BlobstoreError as error:
            on_error(item.digest, error)
            continue
        for one in content.layers if isinstance(content, ImageManifest) else ():
            layer = ColdLayer.of(one)
            # By digest and size: what the registry states about the size must fit the model.
            if layer is not None and layer.blob in wanted:
                known = found.setdefault(layer.blob.digest, layer)
                if layer.stored.size < known.stored.size:
                    found[layer.blob.digest] = layer
    return found


def usable_layers(
    store: LocalStore,
    layers: Mapping[Digest, ColdLayer],
    missing: Sequence[Descriptor],
    is_intact: Callable[[BlobId], bool],
) -> tuple[dict[Digest, ColdLayer], int]:
    """Return the cold layers of missing blobs that spare bytes, and whose bases are in the store or are fetched too.

    Bases may be deltas. The second result is the number of those whose bases are missing.

    Args:
        store: the store, which may have some of the blobs and bases.
        layers: the cold layers of the registry.
        missing: the blobs to fetch.
        is_intact: whether the store has a blob; asked once for each base.
    """

    def is_base(base: BlobId) -> bool:
        with contextlib.suppress(BlobDamaged, BlobMissing):
            return is_intact(base)
        return False

    found: dict[Digest, ColdLayer] = {}
    bases: dict[BlobId, bool] = {}
    without_base = 0
    fetched = {blob.id for blob in missing}
    for blob in missing:
        layer = layers.get(blob.digest)
        if layer is None:
            continue
        # An earlier pull may have fetched most of either form.
        left = [item.size - store.partial_bytes(item) for item in (layer.stored, blob.id)]
        if left[0] >= left[1]:
            continue
        base = layer.base
        is_usable = True
        if base is not None and base not in fetched:
            if base not in bases:
                bases[base] = is_base(base)
            is_usable = bases[base]
            without_base += not is_usable
        if is_usable:
            found[blob.digest] = layer
    _cut_cycles(found)
    return found, without_base


def _cut_cycles(layers: dict[Digest, ColdLayer]) -> None:
    """Remove layers until no deltas wait for each other."""
    seen: dict[Digest, int] = {}
    """The walk that has first come to a layer; each is walked over once."""
    for walk, start in enumerate(list(layers)):
        digest: Digest | None = start
        while digest in layers and digest not in seen:
            seen[digest] = walk
            base = layers[digest].base
            digest = None if base is None else base.digest
        if digest in layers and seen.get(digest) == walk:
            del layers[digest]

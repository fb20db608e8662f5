"""The choice of what a pull fetches: a blob, its compressed form, or a chain of deltas."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.remotes.cold_layers import ColdLayer, chain_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from blobstore.core.digest import BlobId, Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.local import LocalStore


class UsableLayers(NamedTuple):
    """The compressed forms with which a pull fetches less."""

    layers: dict[Digest, ColdLayer]
    """The forms of blobs to fetch."""
    without_base: int
    """The number of those whose bases are missing."""
    bases: dict[Digest, ColdLayer]
    """The forms from which missing bases are decoded. None of them needs a blob that the pull fetches."""


def usable_layers(
    store: LocalStore,
    layers: Mapping[Digest, ColdLayer],
    missing: Sequence[Descriptor],
    is_intact: Callable[[BlobId], bool],
    fetch_bases: Callable[[], Mapping[Digest, ColdLayer]] = dict,
) -> UsableLayers:
    """Return the cold layers of missing blobs that spare bytes.

    Their bases are in the store, are fetched too, or can be decoded from other forms. Bases may be deltas.

    Args:
        store: the store, which may have some of the blobs and bases.
        layers: the cold layers of the registry.
        missing: the blobs to fetch.
        is_intact: whether the store has a blob; asked once for each base.
        fetch_bases: returns the forms of bases; called once, and only if bases are missing.
    """

    @cache
    def is_base(base: BlobId) -> bool:
        with contextlib.suppress(BlobDamaged, BlobMissing):
            return is_intact(base)
        return False

    def left(item: BlobId) -> int:
        # An earlier pull may have fetched most of either form.
        return item.size - store.partial_bytes(item)

    # By size too: what is stated about a base must fit the file that a delta reads.
    fetched = {blob.id for blob in missing}
    digests = {blob.digest for blob in missing}
    found: dict[Digest, ColdLayer] = {}
    without_base: list[ColdLayer] = []
    for blob in missing:
        layer = layers.get(blob.digest)
        # The list may state another size than the model's manifest, which decides what pays.
        if layer is None or layer.blob != blob.id or left(layer.stored) >= left(blob.id):
            continue
        if layer.base is None or layer.base in fetched or is_base(layer.base):
            found[blob.digest] = layer
        else:
            without_base.append(layer)
    _cut_cycles(found)
    forms = fetch_bases() if without_base else {}
    bases: dict[Digest, ColdLayer] = {}
    alone = 0
    for layer in without_base:
        links = chain_of(layer, forms, is_base)
        if links is None or not digests.isdisjoint(link.blob.digest for link in links):
            alone += 1
            continue
        new = [link for link in links if link.blob.digest not in bases]
        if sum(left(one.stored) for one in (layer, *new)) < left(layer.blob):
            found[layer.blob.digest] = layer
            bases |= {link.blob.digest: link for link in new}
    return UsableLayers(found, alone, bases)


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

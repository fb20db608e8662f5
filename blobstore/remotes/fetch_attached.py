"""Fetches the signatures and the compressed forms that a remote has with a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blobstore.objects.source import ObjectSource
from blobstore.objects.store import COLD_BASES
from blobstore.remotes.cold_layers import parse_cold_layers
from blobstore.remotes.cold_manifests import fetch_base_layers, fetch_cold_layers
from blobstore.remotes.referrers import fetch_referrers
from blobstore.remotes.signatures import fetch_signatures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from blobstore.core.digest import Digest
    from blobstore.errors import RemoteError
    from blobstore.registry.store import RemoteSource
    from blobstore.remotes.cold_layers import ColdLayer


class Attached(NamedTuple):
    """Signatures and compressed forms of a model. None of them is verified."""

    signatures: Iterator[bytes]
    fetch_layers: Callable[[], Mapping[Digest, ColdLayer]]
    """Returns the compressed forms of its blobs."""
    fetch_bases: Callable[[], Mapping[Digest, ColdLayer]]
    """Returns those of the bases of these forms, for clients that do not have them."""


def attached(
    source: RemoteSource | ObjectSource,
    manifest: Digest,
    on_error: Callable[[RemoteError], object],
) -> Attached:
    """Return the signatures and compressed forms that a remote has with the manifest of a model.

    ``on_error`` is called with the error if signatures cannot be fetched.
    """
    if isinstance(source, ObjectSource):
        return Attached(
            source.signatures(on_error),
            lambda: parse_cold_layers(source.cold_index() or b""),
            lambda: parse_cold_layers(source.cold_index(COLD_BASES) or b""),
        )
    client, repository = source.client, source.address.repository
    referrers = fetch_referrers(client, repository, source.root, on_error)
    blobs = [blob.id for blob in source.model.blobs]
    return Attached(
        fetch_signatures(client, repository, source.root, manifest, referrers, on_error),
        lambda: fetch_cold_layers(client, repository, referrers, blobs),
        lambda: fetch_base_layers(client, repository, referrers, len(blobs)),
    )

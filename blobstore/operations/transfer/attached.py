"""What a remote has of a model apart from its blobs: signatures, and compressed forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.objects.source import ObjectSource
from blobstore.operations.transfer.cold_manifests import fetch_cold_layers
from blobstore.operations.transfer.referrers import fetch_referrers
from blobstore.operations.transfer.signatures import fetch_signatures
from blobstore.remotes.cold_layers import parse_cold_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from blobstore.core.digest import Digest
    from blobstore.errors import RemoteError
    from blobstore.registry.store import RemoteSource
    from blobstore.remotes.cold_layers import ColdLayer


def attached(
    source: RemoteSource | ObjectSource,
    manifest: Digest,
    on_error: Callable[[RemoteError], object],
) -> tuple[Iterator[bytes], Callable[[], Mapping[Digest, ColdLayer]]]:
    """Return the signatures of a model, none of them verified, and what fetches its compressed forms.

    ``on_error`` is called with why signatures cannot be fetched.
    """
    if isinstance(source, ObjectSource):
        return source.signatures(on_error), lambda: parse_cold_layers(source.cold_index() or b"")
    client, repository = source.client, source.address.repository
    referrers = fetch_referrers(client, repository, source.root, on_error)
    signatures = fetch_signatures(client, repository, source.root, manifest, referrers, on_error)
    blobs = (blob.id for blob in source.model.blobs)
    return signatures, lambda: fetch_cold_layers(client, repository, referrers, blobs)

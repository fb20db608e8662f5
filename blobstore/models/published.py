"""Models that are kept as published, because their quantization was not understood or should not be."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from blobstore.core import strict_json
from blobstore.errors import BlobstoreError
from blobstore.manifests.layers_digest import MAX_CONFIG_SIZE
from blobstore.manifests.model import PUBLISHED_SCHEME

if TYPE_CHECKING:
    from blobstore.core.digest import BlobId
    from blobstore.manifests.model import Manifest
    from blobstore.store.protocols import BlobDescriber


def published_scheme(store: BlobDescriber, manifest: Manifest) -> str:
    """Return the name of the quantization of a model that is kept as published; empty for other models.

    It is a text of the source, which is not trusted. A config that cannot be read says nothing.
    """
    return scheme_in(store, manifest.config.id)


def scheme_in(store: BlobDescriber, config: BlobId) -> str:
    """Return the same of the model with that config."""
    if config.size > MAX_CONFIG_SIZE:
        return ""
    with contextlib.suppress(BlobstoreError, ValueError):
        value = strict_json.loads_any(store.read_blob(*config))
        scheme = value.get(PUBLISHED_SCHEME) if isinstance(value, dict) else None
        return scheme if isinstance(scheme, str) else ""
    return ""

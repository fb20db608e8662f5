"""The layout ``ollama``: the local manifest, byte for byte, under Docker's media type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.registry.layouts.plan import RemotePlan, checked_manifest

if TYPE_CHECKING:
    from blobstore.manifests.descriptor import Descriptor

LAYER_TYPES = ("application/vnd.ollama.image.", "application/vnd.blobstore.")
"""The start of the media types of a model's layers, which container images do not have."""


def plan_ollama(data: bytes) -> RemotePlan:
    """Return the plan of the model with the local manifest ``data``: the manifests and blobs that a registry needs.

    Raises:
        InvalidManifest: the manifest breaks the format.
        RemoteRefused: it is too large for registries.
    """
    manifest = Manifest.from_bytes(data)
    return RemotePlan(
        manifests=(checked_manifest(media_types.MANIFEST, data),), blobs=manifest.blobs
    )


def is_model(layers: tuple[Descriptor, ...]) -> bool:
    """Return whether layers of a Docker manifest are those of a model, not of a container image."""
    return all(layer.media_type.startswith(LAYER_TYPES) for layer in layers)

"""Manifests in registries that refer to another one, such as that of a model: its signatures, its cold form.

A registry that does not list such manifests has an index of them under a tag.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError
from blobstore.registry.manifest import OCI_INDEX, OCI_MANIFEST, RemoteManifest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blobstore.registry.client import RegistryClient
    from blobstore.registry.manifest import RemoteDescriptor

_EMPTY = b"{}"
_EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"


def fetch_referrers(
    client: RegistryClient, repository: str, root: RemoteManifest
) -> tuple[RemoteDescriptor, ...]:
    """Return what refers to a manifest; nothing if the registry cannot say."""
    with contextlib.suppress(BlobstoreError):
        return client.referrers(repository, root.digest)
    return ()


def send_referrers(
    client: RegistryClient,
    repository: str,
    root: RemoteManifest,
    contents: Iterable[dict[str, Any]],
) -> None:
    """Send manifests that refer to another one, with their type, layers and annotations.

    Raises:
        RemoteError: the registry cannot be reached, or refuses them.
    """
    sent = []
    for content in contents:
        common = {
            "artifactType": content["artifactType"],
            "config": send_blob(client, repository, _EMPTY_TYPE, _EMPTY),
            "layers": content["layers"],
            "subject": _descriptor(root.media_type, root.data),
        }
        manifest = image_manifest(common | content)
        client.put_manifest(repository, str(manifest.digest), manifest)
        described = _descriptor(manifest.media_type, manifest.data)
        sent.append(described | {"artifactType": content["artifactType"]})
    if sent:
        _list_referrers(client, repository, root, sent)


def _list_referrers(
    client: RegistryClient, repository: str, root: RemoteManifest, sent: Iterable[dict[str, Any]]
) -> None:
    """List manifests under the tag of the signed one, if the registry does not list them itself."""
    listed = [item.to_json() for item in client.referrers(repository, root.digest)]
    known = {item["digest"] for item in listed}
    missing = [item for item in sent if item["digest"] not in known]
    if missing:
        value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [*listed, *missing]}
        index = RemoteManifest.of(OCI_INDEX, strict_json.dumps(value).encode())
        client.put_manifest(repository, root.digest.file_name, index)


def send_blob(
    client: RegistryClient, repository: str, media_type: str, data: bytes
) -> dict[str, Any]:
    """Give a registry a small blob; return its descriptor."""
    digest = Digest.of(data)
    if client.blob_size(repository, digest) is None:
        client.upload_blob(repository, digest, len(data), lambda offset: (data[offset:],))
    return _descriptor(media_type, data)


def _descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": str(Digest.of(data)), "size": len(data)}


def image_manifest(value: dict[str, Any]) -> RemoteManifest:
    """Return an OCI image manifest with these fields."""
    whole = {"schemaVersion": 2, "mediaType": OCI_MANIFEST} | value
    return RemoteManifest.of(OCI_MANIFEST, strict_json.dumps(whole).encode())

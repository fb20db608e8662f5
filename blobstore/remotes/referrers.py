"""Manifests in registries that refer to another one, such as that of a model: its signatures, its cold layer.

A registry that does not list such manifests has an index of them under a tag.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from blobstore.core import strict_json
from blobstore.errors import BlobstoreError, ModelNotFound, RemoteError, RemoteRefused
from blobstore.registry.manifest import OCI_INDEX, ImageIndex, RemoteManifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from blobstore.core.digest import Digest
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.layouts.attached import Attached
    from blobstore.registry.manifest import RemoteDescriptor


def fetch_referrers(
    client: RegistryClient,
    repository: str,
    root: RemoteManifest,
    on_error: Callable[[RemoteError], object] = lambda _: None,
) -> tuple[RemoteDescriptor, ...]:
    """Return the manifests that refer to another one. If the registry cannot list them, call ``on_error``."""
    found: list[RemoteDescriptor] = []
    with noting_errors(on_error):
        found += client.referrers(repository, root.digest, on_error)
    return tuple(found)


@contextlib.contextmanager
def noting_errors(on_error: Callable[[RemoteError], object]) -> Iterator[None]:
    """Suppress errors of a block that reads something optional, and report those of the remote."""
    try:
        yield
    except RemoteError as error:
        on_error(error)
    except BlobstoreError:
        pass


def send_referrers(
    client: RegistryClient, repository: str, root: RemoteManifest, referrers: Iterable[Attached]
) -> None:
    """Send manifests that refer to another one, and list them if the registry does not do so.

    Raises:
        RemoteError: the registry cannot be reached, or refuses them.
    """
    sent = []
    for one in referrers:
        send_attached(client, repository, one)
        sent.append(one.listed)
    if sent:
        # After all of them are there: an index must list no manifest that is missing.
        _list_referrers(client, repository, root, sent)


def send_attached(client: RegistryClient, repository: str, one: Attached) -> None:
    """Send a manifest and its small blobs.

    Raises:
        RemoteError: the registry cannot be reached, or refuses them.
    """
    # Before the manifest, which registries refuse if they lack a blob of it.
    for digest, data in one.blobs.items():
        if client.blob_size(repository, digest, for_upload=True) is None:
            _upload(client, repository, digest, data)

    def send_missing(named: frozenset[str]) -> None:
        for digest, data in one.blobs.items():
            # Some registries do not say which blobs they lack.
            if not named or str(digest) in named:
                _upload(client, repository, digest, data)

    client.put_manifest(repository, one.tag or str(one.manifest.digest), one.manifest, send_missing)


def _list_referrers(
    client: RegistryClient, repository: str, root: RemoteManifest, sent: Iterable[RemoteDescriptor]
) -> None:
    """List manifests under the tag of the signed one, if the registry does not list them itself."""
    known: set[str] = set()
    # Then the tag is read below, where a refusal is judged.
    with contextlib.suppress(RemoteRefused):
        known = {str(item.digest) for item in client.referrers(repository, root.digest)}
    missing = [item for item in sent if str(item.digest) not in known]
    if missing:
        # Registries have no conditional requests: if two processes do this at once, the entries of
        # one are lost.
        before = tag_to_extend(client, repository, root.digest.file_name, root)
        content = before.parse() if before is not None else None
        index = content.manifests if isinstance(content, ImageIndex) else ()
        listed = [item.to_json() for item in (*index, *missing)]
        value = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed}
        longer = RemoteManifest.of(OCI_INDEX, strict_json.dumps(value).encode())
        client.put_manifest(repository, root.digest.file_name, longer)


def tag_to_extend(
    client: RegistryClient, repository: str, tag: str, root: RemoteManifest
) -> RemoteManifest | None:
    """Return the manifest of a tag that a longer one will replace, or None if the tag does not exist.

    Some registries refuse to read tags that do not exist. So a refusal counts as absence if the registry lets
    this user read the model's manifest. Otherwise the entries of an existing tag would be lost.

    Raises:
        InvalidManifest: it is malformed.
        RemoteError: the registry cannot be reached, or nothing can be read there.
    """
    try:
        return client.get_manifest(repository, tag)
    except ModelNotFound:
        return None
    except RemoteRefused:
        client.get_manifest(repository, str(root.digest))
        return None


def _upload(client: RegistryClient, repository: str, digest: Digest, data: bytes) -> None:
    client.upload_blob(repository, digest, len(data), lambda offset: (data[offset:],))

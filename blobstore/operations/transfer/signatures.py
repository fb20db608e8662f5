"""Signatures in registries, next to the manifest that they sign.

Signatures for cosign are layers of one image manifest, whose tag is made of the signed digest. An OMS bundle
is a manifest of its own that refers to the signed one. Nothing that a registry returns is trusted: what is
fetched counts only if the policy's keys have signed it.
"""

from __future__ import annotations

import base64
import contextlib
import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, BlobstoreError
from blobstore.operations.sign import cosign
from blobstore.operations.sign.bundle import BUNDLE, PREDICATE, decoded
from blobstore.operations.sign.cosign import ANNOTATION, MAX_PAYLOAD, SIMPLE_SIGNING
from blobstore.operations.sign.trust import parsed
from blobstore.operations.transfer.referrers import (
    image_manifest,
    put_with,
    send_blob,
    send_referrers,
    tag_to_extend,
)
from blobstore.registry.manifest import ImageManifest
from blobstore.registry.shapes.plan import LOCAL_MANIFEST
from blobstore.store.signatures import MAX_SIGNATURE_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blobstore.operations.sign.keys import PrivateKey
    from blobstore.operations.sign.signature import Signature
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.manifest import RemoteDescriptor, RemoteManifest
    from blobstore.registry.reference import RemoteReference
    from blobstore.store.local import LocalStore

MAX_FETCHED: Final = 20
"""Signatures of one manifest that are fetched of each kind."""
_IMAGE_CONFIG: Final = "application/vnd.oci.image.config.v1+json"


def fetch_signatures(
    client: RegistryClient,
    repository: str,
    root: RemoteManifest,
    manifest: Digest,
    referrers: Iterable[RemoteDescriptor],
) -> list[Signature]:
    """Return the signatures that a registry has of a model; none of them is verified.

    Those that are malformed, or cannot be fetched, are left out.

    Args:
        client: the registry.
        repository: the repository of the model.
        root: the model's manifest in the registry.
        manifest: the digest of its manifest in a store.
        referrers: what the registry says refers to ``root``.
    """
    found: list[bytes] = []
    with contextlib.suppress(BlobstoreError):
        content = client.get_manifest(repository, cosign.tag_of(root.digest)).parse()
        if isinstance(content, ImageManifest):
            subject = b"" if root.digest == manifest else root.data
            found += _fetch_cosign(client, repository, content.layers, subject)
    bundles = (item for item in referrers if item.artifact_type == BUNDLE)
    for item in islice(bundles, MAX_FETCHED):
        with contextlib.suppress(BlobstoreError):
            found += _fetch_bundles(client, repository, item)
    return [one for one in parsed(found) if one.manifest == manifest]


def _fetch_cosign(
    client: RegistryClient,
    repository: str,
    layers: Iterable[RemoteDescriptor],
    subject: bytes,
) -> Iterator[bytes]:
    wanted = (one for one in layers if one.media_type == SIMPLE_SIGNING)
    for layer in islice(wanted, MAX_FETCHED):
        with contextlib.suppress(BlobstoreError):
            signature = decoded(layer.annotations.get(ANNOTATION, ""), ANNOTATION)
            payload = _fetch_blob(client, repository, layer, MAX_PAYLOAD)
            yield cosign.write_signature(payload, signature, subject)


def _fetch_bundles(
    client: RegistryClient, repository: str, item: RemoteDescriptor
) -> Iterator[bytes]:
    content = client.get_manifest(repository, str(item.digest)).parse()
    layers = content.layers if isinstance(content, ImageManifest) else ()
    for layer in islice((one for one in layers if one.media_type == BUNDLE), 1):
        yield _fetch_blob(client, repository, layer, MAX_SIGNATURE_SIZE)


def _fetch_blob(
    client: RegistryClient, repository: str, layer: RemoteDescriptor, limit: int
) -> bytes:
    """Return a small blob. Raises BlobDamaged if it is too large, or has another digest."""
    if layer.size > limit:
        raise BlobDamaged(f"blob {layer.digest.short} of {layer.size} bytes is over {limit}")
    pieces = client.read_blob(repository, layer.digest, 0, layer.size, size=layer.size)
    with contextlib.closing(pieces):
        data = b"".join(pieces)
    if Digest.of(data) != layer.digest:
        raise BlobDamaged(f"blob {layer.digest.short} has another digest")
    return data


def push_signatures(
    client: RegistryClient,
    target: RemoteReference,
    root: RemoteManifest,
    store: LocalStore,
    key: PrivateKey | None,
) -> int:
    """Give a registry the signatures that a store has of a model; return how many it has now.

    With ``key``, the manifest in the registry is signed first, unless it was signed with it before.

    Raises:
        RemoteError: the registry cannot be reached, or refuses them.
        StoreError: the new signature cannot be stored.
    """
    spelled = root.parse().annotations.get(LOCAL_MANIFEST)
    manifest = root.digest if spelled is None else Digest.parse(spelled)
    signatures = list(parsed(store.signatures(manifest)))
    own = [one for one in signatures if one.stated == root.digest]
    if key is not None and not any(one.is_by(key.public) for one in own):
        signed = cosign.payload(f"{target.host}/{target.repository}", root.digest, int(time.time()))
        subject = b"" if root.digest == manifest else root.data
        data = cosign.write_signature(signed, key.sign(signed, is_sha256=True), subject)
        store.keep_signature(manifest, data)
        signatures.append(cosign.parse_signature(data))
    return send_signatures(client, target.repository, root, signatures)


def send_signatures(
    client: RegistryClient, repository: str, root: RemoteManifest, signatures: Iterable[Signature]
) -> int:
    """Give a registry the signatures of a model that it does not have; return how many are there.

    A signature for cosign goes there only if it signs the manifest that the registry has.

    Raises:
        RemoteError: the registry cannot be reached, or refuses them.
    """
    listed = list(signatures)
    own = [one for one in listed if one.kind == "cosign" and one.stated == root.digest]
    if own:
        _send_cosign(client, repository, root, own)
    bundles = [one for one in listed if one.kind == "oms"]
    parts = [
        {
            "artifactType": BUNDLE,
            "layers": [send_blob(client, repository, BUNDLE, one.data)],
            "annotations": {
                "dev.sigstore.bundle.content": "dsse-envelope",
                "dev.sigstore.bundle.predicateType": PREDICATE,
            },
        }
        for one in bundles
    ]
    send_referrers(client, repository, root, parts)
    return len(own) + len(bundles)


def _send_cosign(
    client: RegistryClient, repository: str, root: RemoteManifest, signatures: Iterable[Signature]
) -> None:
    """Add signatures to those that the tag of a manifest has."""
    tag = cosign.tag_of(root.digest)
    layers: list[dict[str, Any]] = []
    blobs: dict[Digest, bytes] = {}
    found = tag_to_extend(client, repository, tag, root)
    content = found.parse() if found is not None else None
    if isinstance(content, ImageManifest):
        layers = [layer.to_json() for layer in content.layers]
    before = len(layers)
    for one in signatures:
        annotations = {ANNOTATION: base64.b64encode(one.signature).decode()}
        layer = send_blob(client, repository, SIMPLE_SIGNING, one.signed)
        blobs[Digest.of(one.signed)] = one.signed
        layer["annotations"] = annotations
        if layer not in layers:
            layers.append(layer)
    if len(layers) == before:
        return
    config = {
        "architecture": "",
        "os": "",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
    }
    data = strict_json.dumps(config).encode()
    described = send_blob(client, repository, _IMAGE_CONFIG, data)
    blobs[Digest.of(data)] = data
    manifest = image_manifest({"config": described, "layers": layers})
    put_with(client, repository, tag, manifest, blobs)

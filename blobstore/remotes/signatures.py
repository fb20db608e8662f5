"""Signatures in registries, next to the manifest that they sign.

Signatures for cosign are layers of one image manifest, whose tag is made of the signed digest. An OMS bundle
is a manifest of its own that refers to the signed one. Nothing that a registry returns is trusted: what is
fetched counts only if the policy's keys have signed it, and is not parsed before.
"""

from __future__ import annotations

import base64
import contextlib
import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core import limits, strict_json
from blobstore.core.digest import Digest
from blobstore.core.limits import Budget, gather
from blobstore.errors import (
    BlobDamaged,
    InvalidSignature,
    RemoteError,
)
from blobstore.manifests.media_types import LOCAL_MANIFEST
from blobstore.registry.manifest import ImageManifest
from blobstore.remotes.referrers import (
    image_manifest,
    noting_errors,
    put_with,
    send_blob,
    send_referrers,
    tag_to_extend,
)
from blobstore.signatures import cosign
from blobstore.signatures.bundle import BUNDLE, PREDICATE, decoded
from blobstore.signatures.cosign import (
    ANNOTATION,
    MAX_PAYLOAD,
    SIMPLE_SIGNING,
    envelopes,
    signed_by,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from blobstore.registry.client import RegistryClient
    from blobstore.registry.manifest import RemoteDescriptor, RemoteManifest
    from blobstore.registry.reference import RemoteReference
    from blobstore.signatures.keys import PrivateKey
    from blobstore.signatures.policy import Policy
    from blobstore.signatures.signature import Envelope
    from blobstore.store.local import LocalStore

_IMAGE_CONFIG: Final = "application/vnd.oci.image.config.v1+json"


class SelectedSignatures(NamedTuple):
    """The signatures that came with a model and are kept."""

    data: list[bytes]
    is_verified: bool
    """Whether a key of the policy made each of them."""

    @classmethod
    def of(
        cls, found: Iterable[bytes], manifest: Digest, policy: Policy | None
    ) -> SelectedSignatures:
        """Keep what keys of the policy have signed; without such keys, a few of those that are well-formed."""
        if policy is not None and policy.keys:
            # A valid signature of another model proves nothing about this one.
            trusted = (one for one in signed_by(found, policy.keys) if one.manifest == manifest)
            return cls([one.data for one in trusted], is_verified=True)
        budget = Budget(limits.UNVERIFIED, "signatures")
        kept = []
        for one in envelopes(found):
            with contextlib.suppress(RemoteError):  # smaller ones may follow
                budget.spend(len(one.data))
                kept.append(one.data)
        return cls(kept, is_verified=False)


def fetch_signatures(
    client: RegistryClient,
    repository: str,
    root: RemoteManifest,
    manifest: Digest,
    referrers: Iterable[RemoteDescriptor],
    on_error: Callable[[RemoteError], object] = lambda _: None,
) -> Iterator[bytes]:
    """Yield the signatures that a registry has of a model, one at a time; none of them is parsed or verified.

    Those that cannot be fetched are left out, as are those beyond the limits.

    Args:
        client: the registry.
        repository: the repository of the model.
        root: the model's manifest in the registry.
        manifest: the digest of its manifest in a store.
        referrers: what the registry says refers to ``root``.
        on_error: called with why a signature, or the list of them, cannot be fetched.
    """
    budget = Budget(limits.SIGNATURES, f"signatures of {root.digest.short}")
    with noting_errors(on_error):
        content = client.get_manifest(repository, cosign.tag_of(root.digest)).parse()
        if isinstance(content, ImageManifest):
            # If the registry's manifest differs from the store's, the signature is kept with it,
            # because that is what was signed.
            subject = b"" if root.digest == manifest else root.data
            yield from _fetch_cosign(client, repository, content.layers, subject, budget, on_error)
    bundles = (item for item in referrers if item.artifact_type == BUNDLE)
    for item in islice(bundles, limits.SIGNATURES.count):
        with noting_errors(on_error):
            yield from _fetch_bundles(client, repository, item, budget)


def _fetch_cosign(
    client: RegistryClient,
    repository: str,
    layers: Iterable[RemoteDescriptor],
    subject: bytes,
    budget: Budget,
    on_error: Callable[[RemoteError], object],
) -> Iterator[bytes]:
    wanted = (one for one in layers if one.media_type == SIMPLE_SIGNING)
    for layer in islice(wanted, limits.SIGNATURES.count):
        with noting_errors(on_error):
            signature = decoded(layer.annotations.get(ANNOTATION, ""), ANNOTATION)
            payload = _fetch_blob(client, repository, layer, MAX_PAYLOAD, budget)
            yield cosign.write_signature(payload, signature, subject)


def _fetch_bundles(
    client: RegistryClient, repository: str, item: RemoteDescriptor, budget: Budget
) -> Iterator[bytes]:
    content = client.get_manifest(repository, str(item.digest)).parse()
    layers = content.layers if isinstance(content, ImageManifest) else ()
    # Each bundle is sent with a manifest of its own.
    for layer in islice((one for one in layers if one.media_type == BUNDLE), 1):
        yield _fetch_blob(client, repository, layer, limits.SIGNATURES.one, budget)


def _fetch_blob(
    client: RegistryClient, repository: str, layer: RemoteDescriptor, limit: int, budget: Budget
) -> bytes:
    """Return a small blob. Raises BlobDamaged if it is too large, or has another digest."""
    if layer.size > limit:
        raise BlobDamaged(f"blob {layer.digest.short} of {layer.size} bytes is over {limit}")
    budget.spend(layer.size)
    # No more bytes are read than the registry has stated and the budget allows.
    pieces = client.read_blob(repository, layer.digest, 0, layer.size, size=layer.size)
    with contextlib.closing(pieces):
        data = gather(pieces)
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
    own = signed_by(store.signatures(manifest), [] if key is None else [key.public])
    if key is not None and not any(one.stated == root.digest for one in own):
        signed = cosign.payload(f"{target.host}/{target.repository}", root.digest, int(time.time()))
        subject = b"" if root.digest == manifest else root.data
        data = cosign.write_signature(signed, key.sign(signed, is_sha256=True), subject)
        # Kept before it is sent: if sending fails, the next push sends it and need not sign again.
        store.keep_signature(manifest, data, is_verified=True)
    return send_signatures(client, target.repository, root, store.signatures(manifest))


def send_signatures(
    client: RegistryClient, repository: str, root: RemoteManifest, signatures: Iterable[bytes]
) -> int:
    """Give a registry the signatures of a model that it does not have; return how many are there.

    A signature for cosign goes there only if it signs the manifest that the registry has.

    Raises:
        RemoteError: the registry cannot be reached, or refuses them.
    """
    own, parts = [], []
    for one in envelopes(signatures):
        if one.kind == "oms":
            parts.append(
                {
                    "artifactType": BUNDLE,
                    "layers": [send_blob(client, repository, BUNDLE, one.data)],
                    "annotations": {
                        "dev.sigstore.bundle.content": "dsse-envelope",
                        "dev.sigstore.bundle.predicateType": PREDICATE,
                    },
                }
            )
            continue
        with contextlib.suppress(InvalidSignature):
            if cosign.parse_envelope(one).stated == root.digest:
                own.append(one)
    if own:
        _send_cosign(client, repository, root, own)
    send_referrers(client, repository, root, parts)
    return len(own) + len(parts)


def _send_cosign(
    client: RegistryClient, repository: str, root: RemoteManifest, signatures: Iterable[Envelope]
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
        # An earlier push may have sent it.
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

"""Manifests that belong to another one: its signatures, and lists of compressed forms. Pure.

A referrer names the other manifest as its subject. Signatures for cosign are layers of one image manifest,
which a tag made of the signed digest finds. ``push`` sends what is made here, and ``serve`` keeps it, so both
have the same digests.
"""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.errors import InvalidSignature
from blobstore.registry.layouts.image import IMAGE_CONFIG
from blobstore.registry.manifest import OCI_MANIFEST, RemoteDescriptor, RemoteManifest
from blobstore.signatures import cosign
from blobstore.signatures.bundle import BUNDLE, PREDICATE
from blobstore.signatures.cosign import ANNOTATION, SIMPLE_SIGNING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from blobstore.signatures.signature import Envelope

_EMPTY: Final = b"{}"
_EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"
_NOTHING: Mapping[Digest, bytes] = {}


class Attached(NamedTuple):
    """A manifest that belongs to another one, and its small blobs."""

    manifest: RemoteManifest
    blobs: Mapping[Digest, bytes]
    """Without those that the registry must have before, such as cold layers."""
    artifact_type: str = ""
    tag: str = ""
    """The tag that finds it, if it names no subject."""

    @property
    def listed(self) -> RemoteDescriptor:
        """Its entry in the list of referrers."""
        return _described(
            self.manifest.media_type, self.manifest.data, artifact_type=self.artifact_type
        )


def referrer(
    root: RemoteManifest,
    kind: str,
    layers: Sequence[RemoteDescriptor | Mapping[str, Any]],
    blobs: Mapping[Digest, bytes] = _NOTHING,
    annotations: Mapping[str, str] | None = None,
) -> Attached:
    """Return a manifest of a kind whose subject is ``root``."""
    content = {
        "artifactType": kind,
        "config": _described(_EMPTY_TYPE, _EMPTY).to_json(),
        "layers": [
            layer.to_json() if isinstance(layer, RemoteDescriptor) else layer for layer in layers
        ],
        "subject": _described(root.media_type, root.data).to_json(),
    }
    if annotations:
        content["annotations"] = dict(annotations)
    return Attached(_image_manifest(content), {Digest.of(_EMPTY): _EMPTY, **blobs}, kind)


def bundle_manifest(root: RemoteManifest, bundle: bytes) -> Attached:
    """Return the manifest of an OMS bundle that signs the model of ``root``."""
    annotations = {
        "dev.sigstore.bundle.content": "dsse-envelope",
        "dev.sigstore.bundle.predicateType": PREDICATE,
    }
    layers = [_described(BUNDLE, bundle)]
    return referrer(root, BUNDLE, layers, {Digest.of(bundle): bundle}, annotations)


def cosign_of(
    signatures: Iterable[Envelope], digests: Iterable[Digest]
) -> dict[Digest, list[Envelope]]:
    """Return the signatures for cosign of some manifests, by the digest that they state."""
    found: dict[Digest, list[Envelope]] = {digest: [] for digest in digests}
    for one in signatures:
        with suppress(InvalidSignature):
            stated = None if one.kind == "oms" else cosign.parse_envelope(one).stated
            if stated in found:
                found[stated].append(one)
    return {digest: own for digest, own in found.items() if own}


def cosign_manifest(
    signed: Digest, signatures: Iterable[Envelope], before: Sequence[RemoteDescriptor] = ()
) -> Attached:
    """Return the manifest in which cosign looks for the signatures of the manifest ``signed``.

    Args:
        signed: what they sign.
        signatures: the signatures, as :func:`cosign_of` returns them.
        before: the layers of such a manifest that the registry has; they come first, each once.
    """
    layers, blobs = list(before), {}
    for one in signatures:
        annotations = {ANNOTATION: base64.b64encode(one.signature).decode()}
        layer = _described(SIMPLE_SIGNING, one.signed, annotations)
        blobs[layer.digest] = one.signed
        if layer not in layers:
            layers.append(layer)
    ids = [str(layer.digest) for layer in layers]
    value = {
        "architecture": "",
        "os": "",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": ids},
    }
    data = strict_json.dumps(value).encode()
    config = _described(IMAGE_CONFIG, data)
    blobs[config.digest] = data
    content = {"config": config.to_json(), "layers": [layer.to_json() for layer in layers]}
    return Attached(_image_manifest(content), blobs, tag=cosign.tag_of(signed))


def _image_manifest(value: Mapping[str, Any]) -> RemoteManifest:
    whole = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, **value}
    return RemoteManifest.of(OCI_MANIFEST, strict_json.dumps(whole).encode())


def _described(
    media_type: str,
    data: bytes,
    annotations: Mapping[str, str] | None = None,
    artifact_type: str = "",
) -> RemoteDescriptor:
    return RemoteDescriptor(
        media_type, Digest.of(data), len(data), annotations or {}, artifact_type
    )

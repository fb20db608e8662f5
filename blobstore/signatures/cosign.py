"""Signatures of a manifest's digest in the form that cosign and its verifiers read. Pure.

The payload is a small JSON document of Red Hat's "simple signing" with the digest, signed with ECDSA over
SHA-256. In a registry, it is a layer of an image manifest whose tag is made of the digest that it signs, and
the signature is an annotation of that layer. In a store, payload and signature are one JSON file.
"""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import limits, strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import InvalidDigest, InvalidSignature
from blobstore.manifests.media_types import LOCAL_MANIFEST
from blobstore.signatures.bundle import (
    BUNDLE,
    decoded,
    json_object,
    member,
    parse_statement,
    read_bundle,
    wrong,
)
from blobstore.signatures.signature import Envelope, Signature

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from blobstore.signatures.keys import PublicKey

SIMPLE_SIGNING: Final = "application/vnd.dev.cosign.simplesigning.v1+json"
"""The media type of a payload."""
ANNOTATION: Final = "dev.cosignproject.cosign/signature"
"""The annotation of a layer that holds the signature, in base64."""
MAX_PAYLOAD: Final = 64 * 2**10
"""Bytes of a payload."""
_VALUES_MEMORY: Final = 4 * 2**20
"""Estimated bytes for the values in the JSON of a signature, besides their text; what it signs is one of them."""
_TYPE = "cosign container image signature"
_MAX_TEXT = 500


def payload(identity: str, manifest: Digest, created: int) -> bytes:
    """Return the signed payload: the name of a repository, and the digest of a manifest in it."""
    value = {
        "critical": {
            "identity": {"docker-reference": identity},
            "image": {"docker-manifest-digest": str(manifest)},
            "type": _TYPE,
        },
        "optional": {"creator": "blobstore", "timestamp": created},
    }
    return strict_json.dumps(value).encode()


def tag_of(manifest: Digest) -> str:
    """Return the tag under which cosign looks for the signatures of a manifest."""
    return f"{manifest.file_name}.sig"


def write_signature(signed: bytes, signature: bytes, subject: bytes = b"") -> bytes:
    """Return the file of a payload and its signature.

    If the payload has the digest of a manifest in a registry, which names the manifest of the model, that
    is the ``subject``.
    """
    value = {
        "mediaType": SIMPLE_SIGNING,
        "payload": base64.b64encode(signed).decode(),
        "signature": base64.b64encode(signature).decode(),
    } | ({"subject": base64.b64encode(subject).decode()} if subject else {})
    return strict_json.dumps(value).encode()


def read_envelope(data: bytes) -> Envelope:
    """Return the signature in a file of either kind. It is not verified, and what it signs is not parsed.

    Raises:
        InvalidSignature: it is malformed, too large or of another kind.
    """
    if len(data) > limits.SIGNATURES.one:
        raise InvalidSignature(f"a signature of {len(data)} bytes is over {limits.SIGNATURES.one}")
    value = json_object(data, "the signature", 2 * len(data) + _VALUES_MEMORY)
    kind = value.get("mediaType")
    if kind == BUNDLE:
        return read_bundle(data, value)
    if kind != SIMPLE_SIGNING:
        raise InvalidSignature(f"signatures of type {quote(kind)} are not supported")
    return Envelope(
        kind="cosign",
        signed=_part(value, "payload", MAX_PAYLOAD),
        signature=decoded(member(value, "signature", str), "signature"),
        subject=_part(value, "subject", limits.REGISTRY_MANIFEST.one)
        if "subject" in value
        else None,
        data=data,
    )


def parse_envelope(envelope: Envelope) -> Signature:
    """Return the statement of a signature, which means nothing unless a trusted key made it.

    Raises:
        InvalidSignature: what it signs is malformed, or contradicts itself.
    """
    return parse_statement(envelope) if envelope.kind == "oms" else _parse_payload(envelope)


def parse_signature(data: bytes) -> Signature:
    """Return the statement of the signature in a file, whose key is not checked yet.

    Raises:
        InvalidSignature: as :func:`read_envelope` and :func:`parse_envelope`.
    """
    return parse_envelope(read_envelope(data))


def _part(value: Mapping[str, Any], key: str, limit: int) -> bytes:
    found = decoded(member(value, key, str), key)
    if len(found) > limit:
        raise InvalidSignature(f"{key}: {len(found)} bytes are over {limit}")
    return found


def _parse_payload(envelope: Envelope) -> Signature:
    content = json_object(envelope.signed, "the payload")
    critical = member(content, "critical", dict)
    if critical.get("type") != _TYPE:
        raise wrong("critical.type", _TYPE, critical.get("type"))
    image = member(critical, "image", dict)
    stated = _digest(member(image, "docker-manifest-digest", str), "critical.image")
    manifest, subject = stated, envelope.subject
    if subject is not None:
        if Digest.of(subject) != stated:
            raise InvalidSignature(f"the subject is not the manifest {stated}, which is signed")
        annotations = member(json_object(subject, "the subject"), "annotations", dict)
        manifest = _digest(member(annotations, LOCAL_MANIFEST, str), LOCAL_MANIFEST)
    name = member(member(critical, "identity", dict), "docker-reference", str)
    optional = content.get("optional")
    created = optional.get("timestamp") if isinstance(optional, dict) else None
    return Signature(
        kind="cosign",
        manifest=manifest,
        stated=stated,
        name=name[:_MAX_TEXT],
        created=created if type(created) is int and 0 <= created < 2**40 else None,
        signed=envelope.signed,
        signature=envelope.signature,
        subject=subject,
        data=envelope.data,
    )


def _digest(text: str, place: str) -> Digest:
    try:
        return Digest.parse(text)
    except InvalidDigest as error:
        raise InvalidSignature(f"{place}: {error}") from None


def envelopes(signatures: Iterable[bytes]) -> Iterator[Envelope]:
    """Yield the signatures that are well-formed, one at a time; what they sign is not parsed."""
    for data in signatures:
        with suppress(InvalidSignature):
            yield read_envelope(data)


def signed_by(signatures: Iterable[bytes], keys: Sequence[PublicKey]) -> Iterator[Signature]:
    """Yield the signatures that keys have made, one at a time. The others are not parsed."""
    for one in envelopes(signatures):
        if any(map(one.is_by, keys)):
            with suppress(InvalidSignature):
                yield parse_envelope(one)

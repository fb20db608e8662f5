"""OMS bundles: the signatures that OpenSSF Model Signing v1.0 specifies, read and written. Pure.

A bundle of sigstore holds a DSSE envelope, which holds an in-toto statement. Its predicate lists the files
of a folder with their digests, and its subject is the digest of these digests. The predicate has one more
field, ``manifest``, with the digest of the model's manifest; v1.0 tells verifiers to ignore it. With it,
one signature covers the folder and the model in a store.

Nothing in a bundle is trusted before its signature is verified, and the statement is not even parsed. The
envelope's type is part of what is signed, so a payload of another type never passes for a statement.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import InvalidSignature
from blobstore.manifests.file_names import is_safe_name
from blobstore.signatures.signature import Envelope, Signature

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

BUNDLE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
"""The media type of a bundle."""
PREDICATE: Final = "https://model_signing/signature/v1.0"
IGNORED: Final = (".git", ".gitattributes", ".github", ".gitignore")
"""Files at the top of a folder that the upstream command never hashes, so signatures leave them out."""
_STATEMENT = "https://in-toto.io/Statement/v1"
_PAYLOAD = "application/vnd.in-toto+json"
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_TEXT = 500


def statement(name: str, files: Mapping[str, Digest], manifest: Digest) -> bytes:
    """Return the in-toto statement about a model and the files of its folder."""
    listed = sorted((file, digest.hex) for file, digest in files.items() if not is_ignored(file))
    value = {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": _root(hex_ for _, hex_ in listed)}}],
        "predicateType": PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": list(IGNORED),
            },
            "resources": [
                {"name": file, "algorithm": "sha256", "digest": digest} for file, digest in listed
            ],
            "manifest": {"sha256": manifest.hex},
        },
    }
    return strict_json.dumps(value).encode()


def is_ignored(file: str) -> bool:
    """Return whether signatures leave out a file of a folder."""
    return file.partition("/")[0] in IGNORED


def pre_authentication_encoding(payload: bytes, payload_type: str = _PAYLOAD) -> bytes:
    """Return the bytes that DSSE signs: the type of a payload, the payload, and the lengths of both."""
    head = f"DSSEv1 {len(payload_type.encode())} {payload_type} {len(payload)} "
    return head.encode() + payload


def write_bundle(payload: bytes, signature: bytes, fingerprint: str) -> bytes:
    """Return the bundle of a statement and its signature by the key of that fingerprint."""
    value = {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": fingerprint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": _PAYLOAD,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return strict_json.dumps(value).encode()


def read_bundle(data: bytes, value: Mapping[str, Any]) -> Envelope:
    """Return the envelope of a bundle, whose decoded JSON is ``value``.

    Raises:
        InvalidSignature: it is malformed, or is not made with a key.
    """
    if value.get("mediaType") != BUNDLE:
        raise wrong("mediaType", BUNDLE, value.get("mediaType"))
    material = member(value, "verificationMaterial", dict)
    if "publicKey" not in material:
        raise InvalidSignature(
            f"verificationMaterial has {quote(min(material, default='nothing'))}; only signatures by "
            "keys are supported, not those by certificates"
        )
    hint = member(material, "publicKey", dict).get("hint")
    if hint is not None and (not isinstance(hint, str) or len(hint) > _MAX_TEXT):
        raise wrong("publicKey.hint", "a short text", hint)
    envelope = member(value, "dsseEnvelope", dict)
    if envelope.get("payloadType") != _PAYLOAD:
        raise wrong("payloadType", _PAYLOAD, envelope.get("payloadType"))
    payload = decoded(member(envelope, "payload", str), "payload")
    signatures = member(envelope, "signatures", list)
    if len(signatures) != 1 or not isinstance(signatures[0], dict):
        raise wrong("signatures", "one signature", signatures)
    return Envelope(
        kind="oms",
        signed=pre_authentication_encoding(payload),
        signature=decoded(member(signatures[0], "sig", str), "sig"),
        hint=hint or "",
        data=data,
    )


def parse_statement(envelope: Envelope) -> Signature:
    """Return what a bundle states about a model, its files and its manifest.

    Raises:
        InvalidSignature: the statement is malformed, or contradicts itself.
    """
    payload = envelope.signed.split(b" ", 4)[4]  # see pre_authentication_encoding
    value = json_object(payload, "the statement")
    for key, expected in (("_type", _STATEMENT), ("predicateType", PREDICATE)):
        if value.get(key) != expected:
            raise wrong(key, expected, value.get(key))
    subjects = member(value, "subject", list)
    if len(subjects) != 1 or not isinstance(subjects[0], dict):
        raise wrong("subject", "one subject", subjects)
    name = member(subjects[0], "name", str)
    predicate = member(value, "predicate", dict)
    serialization = member(predicate, "serialization", dict)
    for key, expected in (("method", "files"), ("hash_type", "sha256")):
        if serialization.get(key) != expected:
            raise wrong(f"serialization.{key}", expected, serialization.get(key))
    files: dict[str, Digest] = {}
    for resource in member(predicate, "resources", list):
        file, digest = _parse_resource(resource)
        if files.setdefault(file, digest) is not digest:
            raise InvalidSignature(f"resources: {quote(file)} is listed twice")
    root = _root(digest.hex for digest in files.values())
    if member(subjects[0], "digest", dict).get("sha256") != root:
        raise InvalidSignature(f"the subject's digest is not that of the resources, {root}")
    manifest = None
    if "manifest" in predicate:
        manifest = _digest(member(predicate, "manifest", dict).get("sha256"), "manifest.sha256")
    return Signature(
        kind=envelope.kind,
        hint=envelope.hint,
        signed=envelope.signed,
        signature=envelope.signature,
        data=envelope.data,
        manifest=manifest,
        name=name[:_MAX_TEXT],
        files=files,
    )


def _parse_resource(resource: Any) -> tuple[str, Digest]:
    if not isinstance(resource, dict):
        raise wrong("resources", "objects", resource)
    file = member(resource, "name", str)
    if not is_safe_name(file):
        raise InvalidSignature(f"resources: {quote(file)} must not be the name of a file")
    if resource.get("algorithm") != "sha256":
        raise wrong("resources.algorithm", "sha256", resource.get("algorithm"))
    return file, _digest(resource.get("digest"), "resources.digest")


def _root(digests: Iterable[str]) -> str:
    """Return the digest of digests, whose bytes are concatenated."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def _digest(value: Any, what: str) -> Digest:
    if not isinstance(value, str) or _HEX.fullmatch(value) is None:
        raise wrong(what, "64 lower-case hex digits", value)
    return Digest(value)


def json_object(data: bytes, what: str, max_memory: int = strict_json.MAX_MEMORY) -> dict[str, Any]:
    """Return the JSON object in bytes. Raises InvalidSignature unless they are one."""
    try:
        value = strict_json.loads(data, max_memory)
    except ValueError as error:
        raise InvalidSignature(f"{what} is not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise wrong(what, "an object", value)
    return value


def decoded(text: str, what: str) -> bytes:
    """Return the bytes that a base64 text holds. Raises InvalidSignature unless it is one."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidSignature(f"{what} is not base64") from None


def member(value: Mapping[str, Any], key: str, kind: type) -> Any:
    """Return the value under a key. Raises InvalidSignature unless it is of that kind."""
    found = value.get(key)
    if not isinstance(found, kind):
        names: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
        raise wrong(key, names[kind], found)
    return found


def wrong(key: str, expected: str, value: Any) -> InvalidSignature:
    """Return the error that says what was expected under a key and what was found."""
    return InvalidSignature(f"{key}: expected {expected}, got {quote(value)}")

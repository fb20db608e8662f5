from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidSignature
from blobstore.signatures.bundle import (
    pre_authentication_encoding,
    statement,
    write_bundle,
)
from blobstore.signatures.cosign import parse_signature
from tests.support.signing import CURVES, private_key

MANIFEST = Digest.of(b"manifest")
FILES = {"b.txt": Digest.of(b"b"), "a/c.txt": Digest.of(b"c"), "a.txt": Digest.of(b"a")}
Value = dict[str, Any]


def bundle(payload: bytes | None = None) -> bytes:
    """Return a bundle whose signature is no signature."""
    return write_bundle(payload or statement("model", FILES, MANIFEST), b"signature", "ab" * 32)


def changed(change: Callable[[Value], object]) -> bytes:
    """Return a bundle after a change of its JSON."""
    value = json.loads(bundle())
    change(value)
    return json.dumps(value).encode()


def restated(change: Callable[[Value], object]) -> bytes:
    """Return a bundle after a change of its statement."""
    value = json.loads(statement("model", FILES, MANIFEST))
    change(value)
    return bundle(json.dumps(value).encode())


def test_lists_the_files_by_name_and_the_digest_of_their_digests() -> None:
    value = json.loads(statement("model", FILES, MANIFEST))

    names = [resource["name"] for resource in value["predicate"]["resources"]]
    digests = b"".join(bytes.fromhex(FILES[name].hex) for name in names)
    assert names == ["a.txt", "a/c.txt", "b.txt"]
    assert value["subject"] == [{"name": "model", "digest": {"sha256": Digest.of(digests).hex}}]
    assert value["_type"] == "https://in-toto.io/Statement/v1"
    assert value["predicateType"] == "https://model_signing/signature/v1.0"
    assert value["predicate"]["serialization"]["method"] == "files"


def test_leaves_out_the_files_of_git_that_verifiers_do_not_hash() -> None:
    digest = Digest.of(b"")
    files = {".gitattributes": digest, ".github/x": digest, "a/.gitignore": digest, "x": digest}

    value = json.loads(statement("model", files, MANIFEST))

    assert [one["name"] for one in value["predicate"]["resources"]] == ["a/.gitignore", "x"]


def test_encodes_a_payload_with_its_type_and_the_lengths_of_both() -> None:
    assert pre_authentication_encoding(b"hello", "http://example.com/HelloWorld") == (
        b"DSSEv1 29 http://example.com/HelloWorld 5 hello"
    )


def test_reads_what_it_writes() -> None:
    data = bundle()

    found = parse_signature(data)

    assert (found.kind, found.manifest, found.name) == ("oms", MANIFEST, "model")
    assert found.files == FILES
    assert (found.hint, found.signature, found.data) == ("ab" * 32, b"signature", data)


def test_reads_a_bundle_of_another_program_which_names_no_manifest() -> None:
    found = parse_signature(restated(lambda value: value["predicate"].pop("manifest")))

    assert (found.manifest, found.files) == (None, FILES)


@pytest.mark.parametrize("curve", CURVES)
def test_is_by_the_key_that_signed_it_and_by_no_other(curve: str) -> None:
    key, other = private_key(curve), private_key(curve)
    payload = statement("model", FILES, MANIFEST)
    signature = key.sign(pre_authentication_encoding(payload))

    honest = parse_signature(write_bundle(payload, signature, key.public.fingerprint))
    without_hint = parse_signature(write_bundle(payload, signature, ""))
    forged = parse_signature(write_bundle(payload, signature, other.public.fingerprint))
    altered = statement("model", FILES, Digest.of(b"other"))
    moved = parse_signature(write_bundle(altered, signature, key.public.fingerprint))

    assert honest.is_by(key.public)
    assert without_hint.is_by(key.public)
    assert not any(one.is_by(other.public) for one in (honest, without_hint, forged))
    assert not moved.is_by(key.public)


def test_a_signature_of_the_payload_without_its_type_is_none() -> None:
    key = private_key()
    payload = statement("model", FILES, MANIFEST)

    for signed in (payload, pre_authentication_encoding(payload, "application/json")):
        found = parse_signature(write_bundle(payload, key.sign(signed), ""))
        assert not found.is_by(key.public)


BROKEN: dict[str, Callable[[Value], object]] = {
    "media type": lambda value: value.update(mediaType="application/json"),
    "no material": lambda value: value.pop("verificationMaterial"),
    "certificate": lambda value: value.update(verificationMaterial={"certificate": {}}),
    "hint of a number": lambda value: value["verificationMaterial"]["publicKey"].update(hint=1),
    "long hint": lambda value: value["verificationMaterial"]["publicKey"].update(hint="x" * 9999),
    "no envelope": lambda value: value.pop("dsseEnvelope"),
    "envelope of text": lambda value: value.update(dsseEnvelope="x"),
    "payload type": lambda value: value["dsseEnvelope"].update(payloadType="text/plain"),
    "payload": lambda value: value["dsseEnvelope"].update(payload="!!!"),
    "payload of a number": lambda value: value["dsseEnvelope"].update(payload=5),
    "no JSON": lambda value: value["dsseEnvelope"].update(payload=base64.b64encode(b"{").decode()),
    "no object": lambda value: value["dsseEnvelope"].update(payload="W10="),
    "no signatures": lambda value: value["dsseEnvelope"].update(signatures=[]),
    "two signatures": lambda value: value["dsseEnvelope"]["signatures"].append({"sig": ""}),
    "signature of text": lambda value: value["dsseEnvelope"].update(signatures=["x"]),
    "no sig": lambda value: value["dsseEnvelope"].update(signatures=[{}]),
    "sig": lambda value: value["dsseEnvelope"].update(signatures=[{"sig": "\u00e9"}]),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_rejects_a_malformed_bundle(change: Callable[[Value], object]) -> None:
    with pytest.raises(InvalidSignature) as caught:
        parse_signature(changed(change))
    assert str(caught.value).isprintable()


def resource(value: Value) -> Value:
    first: Value = value["predicate"]["resources"][0]
    return first


RESTATED: dict[str, Callable[[Value], object]] = {
    "type": lambda value: value.update(_type="https://in-toto.io/Statement/v0.1"),
    "predicate type": lambda value: value.update(predicateType="https://slsa.dev/provenance/v1"),
    "no subject": lambda value: value.update(subject=[]),
    "two subjects": lambda value: value["subject"].append(value["subject"][0]),
    "root digest": lambda value: value["subject"][0]["digest"].update(sha256="0" * 64),
    "no root digest": lambda value: value["subject"][0]["digest"].clear(),
    "name of a list": lambda value: value["subject"][0].update(name=[]),
    "no predicate": lambda value: value.pop("predicate"),
    "shards": lambda value: value["predicate"]["serialization"].update(method="shards"),
    "hash type": lambda value: value["predicate"]["serialization"].update(hash_type="blake3"),
    "no resources": lambda value: value["predicate"].pop("resources"),
    "resource of text": lambda value: value["predicate"]["resources"].append("x"),
    "twice": lambda value: value["predicate"]["resources"].append(resource(value)),
    "algorithm": lambda value: resource(value).update(algorithm="md5"),
    "upper case": lambda value: resource(value).update(digest="A" * 64),
    "digest of a number": lambda value: resource(value).update(digest=7),
    "manifest of text": lambda value: value["predicate"].update(manifest="sha256:00"),
    "manifest": lambda value: value["predicate"].update(manifest={"sha256": "../x"}),
    "no manifest digest": lambda value: value["predicate"].update(manifest={}),
}


@pytest.mark.parametrize("change", RESTATED.values(), ids=RESTATED)
def test_rejects_a_malformed_statement(change: Callable[[Value], object]) -> None:
    with pytest.raises(InvalidSignature) as caught:
        parse_signature(restated(change))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/b/c/d", "a\\b", "x\n", "\ud800", "."]
)
def test_rejects_names_of_files_that_lead_elsewhere(name: str) -> None:
    with pytest.raises(InvalidSignature):
        parse_signature(restated(lambda value: resource(value).update(name=name)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        b'{"mediaType":[]}',
        b"[" * 100_000,
        b'{"mediaType":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"mediaType":"x","mediaType":"x"}',
        b'{"a":' * 100_000,
    ],
)
def test_rejects_files_of_other_kinds(data: bytes) -> None:
    with pytest.raises(InvalidSignature) as caught:
        parse_signature(data)
    assert len(str(caught.value)) < 500


def test_rejects_a_signature_over_the_limit_before_it_is_parsed() -> None:
    with pytest.raises(InvalidSignature, match="over"):
        parse_signature(bytes((32 << 20) + 1))

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidSignature
from blobstore.manifests.media_types import LOCAL_MANIFEST
from blobstore.signatures.cosign import (
    MAX_PAYLOAD,
    parse_signature,
    payload,
    tag_of,
    write_signature,
)
from tests.support.signing import CURVES, private_key

MANIFEST = Digest.of(b"manifest")


def test_the_payload_is_that_of_simple_signing() -> None:
    assert json.loads(payload("example.com/team/model", MANIFEST, 1_700_000_000)) == {
        "critical": {
            "identity": {"docker-reference": "example.com/team/model"},
            "image": {"docker-manifest-digest": str(MANIFEST)},
            "type": "cosign container image signature",
        },
        "optional": {"creator": "blobstore", "timestamp": 1_700_000_000},
    }


def test_the_tag_is_made_of_the_digest() -> None:
    assert tag_of(MANIFEST) == f"sha256-{MANIFEST.hex}.sig"


@pytest.mark.parametrize("curve", CURVES)
def test_is_by_the_key_that_signed_it_and_by_no_other(curve: str) -> None:
    key, other = private_key(curve), private_key(curve)
    signed = payload("model", MANIFEST, 7)

    found = parse_signature(write_signature(signed, key.sign(signed, is_sha256=True)))

    assert (found.kind, found.manifest, found.name, found.created) == (
        "cosign",
        MANIFEST,
        "model",
        7,
    )
    assert found.is_by(key.public)
    assert not found.is_by(other.public)


def test_reads_payloads_that_cosign_wrote_itself() -> None:
    value = json.loads(payload("model", MANIFEST, 7))
    value["optional"] = None

    found = parse_signature(write_signature(json.dumps(value, indent=1).encode(), b""))

    assert (found.manifest, found.created) == (MANIFEST, None)


BROKEN: dict[str, Callable[[Any], object]] = {
    "no critical": lambda value: value.pop("critical"),
    "type": lambda value: value["critical"].update(type="atomic container signature"),
    "no image": lambda value: value["critical"].update(image=[]),
    "sha512": lambda value: value["critical"]["image"].update(
        {"docker-manifest-digest": f"sha512:{'0' * 128}"}
    ),
    "no digest": lambda value: value["critical"]["image"].clear(),
    "no identity": lambda value: value["critical"].pop("identity"),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_rejects_a_malformed_payload(change: Callable[[Any], object]) -> None:
    value = json.loads(payload("model", MANIFEST, 7))
    change(value)
    with pytest.raises(InvalidSignature):
        parse_signature(write_signature(json.dumps(value).encode(), b""))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_rejects_a_payload_of_another_form(content: bytes) -> None:
    with pytest.raises(InvalidSignature):
        parse_signature(write_signature(content, b""))


def test_a_subject_names_the_manifest_of_the_model_if_it_is_what_is_signed() -> None:
    subject = json.dumps({"annotations": {LOCAL_MANIFEST: str(MANIFEST)}}).encode()
    signed = payload("model", Digest.of(subject), 7)
    found = parse_signature(write_signature(signed, b"", subject))
    assert (found.manifest, found.stated) == (MANIFEST, Digest.of(subject))
    with pytest.raises(InvalidSignature, match="the subject is not the manifest"):
        parse_signature(write_signature(signed, b"", subject + b" "))


def test_rejects_a_payload_that_is_too_large() -> None:
    with pytest.raises(InvalidSignature, match="payload: 65537 bytes are over 65536"):
        parse_signature(write_signature(bytes(MAX_PAYLOAD + 1), b""))


@pytest.mark.parametrize("created", [-1, 2**60, 1.5, "now", True, None])
def test_ignores_times_that_make_no_sense(created: object) -> None:
    value = json.loads(payload("model", MANIFEST, 7))
    value["optional"]["timestamp"] = created
    found = parse_signature(write_signature(json.dumps(value).encode(), b""))
    assert found.created is None

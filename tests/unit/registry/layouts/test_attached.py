from __future__ import annotations

import json

from blobstore.core.digest import Digest
from blobstore.registry.layouts.attached import (
    bundle_manifest,
    cosign_manifest,
    cosign_of,
    referrer,
)
from blobstore.registry.manifest import OCI_MANIFEST, ImageManifest, RemoteManifest
from blobstore.signatures import cosign
from blobstore.signatures.cosign import read_envelope

ROOT = RemoteManifest.of(OCI_MANIFEST, b'{"schemaVersion":2}')
SUBJECT = f'{{"mediaType":"{OCI_MANIFEST}","digest":"{ROOT.digest}","size":19}}'
EMPTY = (
    '{"mediaType":"application/vnd.oci.empty.v1+json","digest":'
    '"sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a","size":2}'
)


def signature(root: RemoteManifest, number: int) -> bytes:
    """Return a signature for cosign; nobody checks who made it."""
    return cosign.write_signature(cosign.payload("host/model", root.digest, number), b"signed")


def test_a_referrer_names_its_subject_and_has_an_empty_config() -> None:
    made = referrer(ROOT, "a/kind", [{"digest": "one"}])

    assert made.manifest.data.decode() == (
        f'{{"schemaVersion":2,"mediaType":"{OCI_MANIFEST}","artifactType":"a/kind",'
        f'"config":{EMPTY},"layers":[{{"digest":"one"}}],"subject":{SUBJECT}}}'
    )
    assert list(made.blobs.values()) == [b"{}"]
    assert made.listed.to_json() == {
        "mediaType": OCI_MANIFEST,
        "digest": str(made.manifest.digest),
        "size": len(made.manifest.data),
        "artifactType": "a/kind",
    }


def test_a_bundle_is_the_layer_of_a_referrer() -> None:
    made = bundle_manifest(ROOT, b"a bundle")

    content = json.loads(made.manifest.data)
    assert list(content) == [
        *("schemaVersion", "mediaType", "artifactType", "config", "layers", "subject"),
        "annotations",
    ]
    assert content["layers"] == [
        {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "digest": str(Digest.of(b"a bundle")),
            "size": 8,
        }
    ]
    assert made.blobs[Digest.of(b"a bundle")] == b"a bundle"


def test_the_manifest_for_cosign_has_the_layers_of_the_registry_first_and_each_once() -> None:
    one, two = (read_envelope(signature(ROOT, number)) for number in (1, 2))

    alone = cosign_manifest(ROOT.digest, [one])
    first = alone.manifest.parse()
    assert isinstance(first, ImageManifest)
    both = cosign_manifest(ROOT.digest, [one, two], first.layers)
    second = both.manifest.parse()
    assert isinstance(second, ImageManifest)

    assert second.layers[0] == first.layers[0]
    assert [layer.digest for layer in second.layers] == [
        Digest.of(one.signed),
        Digest.of(two.signed),
    ]
    config = json.loads(both.blobs[second.config.digest])
    assert config["rootfs"]["diff_ids"] == [str(layer.digest) for layer in second.layers]
    assert both.tag == f"sha256-{ROOT.digest.hex}.sig"
    assert cosign_manifest(ROOT.digest, [two, one], second.layers).manifest == both.manifest


def test_only_signatures_for_cosign_of_this_manifest_are_sent_with_it() -> None:
    other = RemoteManifest.of(OCI_MANIFEST, b"{}")

    ours, theirs = (read_envelope(signature(one, 1)) for one in (ROOT, other))
    assert cosign_of([theirs, ours], [ROOT.digest]) == {ROOT.digest: [ours]}
    both = cosign_of([theirs, ours], [ROOT.digest, other.digest])
    assert both == {ROOT.digest: [ours], other.digest: [theirs]}

from __future__ import annotations

from typing import Any

import pytest

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.errors import InvalidManifest
from blobstore.registry.manifest import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    MAX_SIZE,
    OCI_INDEX,
    OCI_MANIFEST,
    ImageIndex,
    ImageManifest,
    RemoteDescriptor,
    RemoteManifest,
)

LAYER = RemoteDescriptor("application/raw", Digest.of(b"x"), 1, {"title": "x"}, "application/own")
PLAIN = RemoteDescriptor("application/json", Digest.of(b"{}"), 2)


def parsed(media_type: str, **fields: Any) -> ImageManifest | ImageIndex:
    value = {"schemaVersion": 2, **fields}
    return RemoteManifest.of(media_type, strict_json.dumps(value).encode()).parse()


def image(**fields: Any) -> ImageManifest | ImageIndex:
    content = {"config": PLAIN.to_json(), "layers": [LAYER.to_json()], **fields}
    return parsed(OCI_MANIFEST, **content)


@pytest.mark.parametrize("media_type", [OCI_MANIFEST, DOCKER_MANIFEST])
def test_image_manifest_is_parsed(media_type: str) -> None:
    content = parsed(
        media_type,
        mediaType=media_type,
        config=PLAIN.to_json(),
        layers=[LAYER.to_json()],
        artifactType="application/model",
        subject=PLAIN.to_json(),
        annotations={"a": "b"},
        unknown=[1],
    )

    assert content == ImageManifest(
        config=PLAIN,
        layers=(LAYER,),
        artifact_type="application/model",
        subject=PLAIN,
        annotations={"a": "b"},
    )


@pytest.mark.parametrize("media_type", [OCI_INDEX, DOCKER_LIST])
def test_index_is_parsed(media_type: str) -> None:
    assert parsed(media_type, manifests=[PLAIN.to_json()]) == ImageIndex(manifests=(PLAIN,))


def test_urls_of_a_layer_are_not_read() -> None:
    layer = LAYER.to_json() | {"urls": ["http://elsewhere/"]}

    content = image(layers=[layer])

    assert isinstance(content, ImageManifest)
    assert "elsewhere" not in repr(content.layers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schemaVersion": 1}, r"\$.schemaVersion: expected 2, got '1'"),
        ({"schemaVersion": True}, r"\$.schemaVersion"),
        ({"mediaType": DOCKER_MANIFEST}, r"\$.mediaType: expected .* as it was sent"),
        ({"config": None}, r"\$.config: expected an object"),
        ({"layers": None}, r"\$.layers: expected a list"),
        ({"layers": [LAYER.to_json(), 1]}, r"\$.layers\[1\]: expected an object"),
        ({"layers": [LAYER.to_json() | {"size": -1}]}, r"\$.layers\[0\].size: "),
        ({"layers": [LAYER.to_json() | {"size": 2**63}]}, r"\$.layers\[0\].size: "),
        ({"layers": [LAYER.to_json() | {"digest": "sha256:../../etc"}]}, r"\$.layers\[0\].digest"),
        ({"layers": [LAYER.to_json() | {"annotations": {"a": 1}}]}, r"\$.layers\[0\].annotations"),
        ({"annotations": ["a"]}, r"\$.annotations: expected an object of texts"),
        ({"artifactType": 1}, "artifactType: expected a text"),
        ({"subject": 1}, r"\$.subject: expected an object"),
    ],
)
def test_malformed_manifest_is_refused_with_the_path(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidManifest, match=message):
        image(**fields)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"schemaVersion":2,"schemaVersion":2}']
)
def test_other_text_than_a_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidManifest):
        RemoteManifest.of(OCI_MANIFEST, data).parse()


def test_huge_manifest_is_refused() -> None:
    with pytest.raises(InvalidManifest, match="over the limit"):
        RemoteManifest.of(OCI_MANIFEST, b" " * (MAX_SIZE + 1))


@pytest.mark.parametrize("media_type", ["", "text/html", "application/\x1b[2Jjson"])
def test_unknown_media_type_is_refused_and_escaped(media_type: str) -> None:
    with pytest.raises(InvalidManifest, match="unknown media type") as caught:
        RemoteManifest.of(media_type, b"{}")
    assert "\x1b" not in str(caught.value)

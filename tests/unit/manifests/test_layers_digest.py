from __future__ import annotations

import json
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import InvalidManifest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import check_layers, layers_digest, say_the_same
from blobstore.manifests.model import Manifest, ModelConfig

LAYERS = (
    Descriptor(media_types.TENSOR, Digest("a1" * 32), 105, "path/to/é<&>.weight"),
    Descriptor(media_types.JSON, Digest("b2" * 32), 22, "config.json"),
    Descriptor(media_types.LICENSE, Digest("c3" * 32), 9),
)
CONFIG = ModelConfig(layers_digest=layers_digest(LAYERS)).to_bytes()


def manifest(content: bytes = CONFIG, /, **changes: Any) -> Manifest:
    described = Descriptor(media_types.CONFIG, Digest.of(content), len(content))
    return Manifest(**{"config": described, "layers": LAYERS} | changes)


def test_a_manifest_is_what_its_config_says() -> None:
    assert check_layers(manifest().to_bytes(), CONFIG)
    assert check_layers(manifest().to_bytes().removesuffix(b"\n"), CONFIG)  # as Ollama pulls it


@pytest.mark.slow
def test_finds_every_bit_that_flips() -> None:
    whole = manifest()
    data = whole.to_bytes()
    found = 0
    for place in range(len(data) * 8):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        try:
            parsed = Manifest.from_bytes(bytes(changed))
        except InvalidManifest:
            continue
        if (parsed.config.digest, parsed.config.size) != whole.config[1:3]:
            continue  # the store has no such blob
        with pytest.raises(InvalidManifest, match="was changed since it was written"):
            check_layers(bytes(changed), CONFIG)
        found += 1
    assert found > 500


@pytest.mark.parametrize(
    "changed",
    [
        manifest(media_type="application/vnd.oci.image.manifest.v1+json").to_bytes(),
        manifest(config=manifest().config._replace(media_type="x")).to_bytes(),
        manifest(config=manifest().config._replace(extra={"x": 1})).to_bytes(),
        manifest(extra={"annotations": {}}).to_bytes(),
        manifest(layers=LAYERS[:-1]).to_bytes(),
        manifest(layers=LAYERS[::-1]).to_bytes(),
        manifest(layers=(*LAYERS, LAYERS[0]._replace(name="x"))).to_bytes(),
        json.dumps(json.loads(manifest().to_bytes())).encode(),
        manifest().to_bytes() + b"\n",
        manifest().to_bytes() + b" ",
        manifest().to_bytes()[:-3],
        b"",
    ],
)
def test_refuses_what_was_not_written(changed: bytes) -> None:
    with pytest.raises(InvalidManifest, match=r"create the model again, copy it .* repair NAME"):
        check_layers(changed, CONFIG)


def test_tells_both_digests_of_the_layers() -> None:
    digests = (layers_digest(LAYERS), layers_digest(LAYERS[1:]))
    with pytest.raises(InvalidManifest, match=f"digest {digests[1]}, .* promises '{digests[0]}'"):
        check_layers(manifest(layers=LAYERS[1:]).to_bytes(), CONFIG)


@pytest.mark.parametrize(
    "config",
    [b"", b"\xff", b"[1]", b'{"model_format":"gguf"}', b"[" * 10**5, ModelConfig().to_bytes()],
    ids=["empty", "no text", "a list", "Ollama's", "deep", "older"],
)
def test_a_config_that_says_nothing_of_the_layers_is_content_with_any(config: bytes) -> None:
    assert not check_layers(manifest(config, layers=LAYERS[1:]).to_bytes(), config)
    assert not check_layers(json.dumps(json.loads(manifest().to_bytes())).encode(), config)


@pytest.mark.parametrize("said", [1, "x\x1b", ["sha256"], Digest("a" * 64).hex, True])
def test_a_config_that_says_something_else_is_content_with_none(said: object) -> None:
    config = json.dumps({"layers_digest": said}).encode()
    with pytest.raises(InvalidManifest, match="its config promises") as caught:
        check_layers(manifest(config).to_bytes(), config)
    assert "\x1b" not in str(caught.value)


def test_configs_say_the_same_whatever_the_layers_are() -> None:
    plain, quantized = ModelConfig(), ModelConfig(file_type="int4")
    assert say_the_same(CONFIG, plain.to_bytes())
    assert say_the_same(b"{", b"{")
    assert not say_the_same(CONFIG, quantized.to_bytes())
    assert not say_the_same(b"{", b"[")

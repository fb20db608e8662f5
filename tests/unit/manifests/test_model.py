from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.digest import Digest
from blobstore.errors import InvalidManifest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest, ModelConfig

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")
CONFIG = {"mediaType": media_types.CONFIG, "digest": C, "size": 9}


def layer(digest: str = A, size: Any = 1, **more: Any) -> dict[str, Any]:
    return {"mediaType": media_types.TENSOR, "digest": digest, "size": size} | more


def document(**changes: Any) -> dict[str, Any]:
    whole = {"schemaVersion": 2, "mediaType": media_types.MANIFEST, "config": CONFIG, "layers": []}
    return {key: value for key, value in (whole | changes).items() if value is not ...}


def read(**changes: Any) -> Manifest:
    return Manifest.from_bytes(json.dumps(document(**changes)).encode())


def test_canonical_bytes_are_those_of_ollama() -> None:
    # One line, no spaces, Go's field order and escapes, a line feed at the end.
    data = (
        '{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json",'
        '"config":{"mediaType":"application/vnd.docker.container.image.v1+json",'
        f'"digest":"{C}","size":9}},"layers":['
        f'{{"mediaType":"application/vnd.ollama.image.tensor","digest":"{A}","size":1,'
        '"name":"a\\u003c\\u0026é"},'
        f'{{"mediaType":"application/vnd.ollama.image.json","digest":"{B}","size":2,'
        '"name":"config.json"}]}\n'
    ).encode()
    manifest = Manifest.from_bytes(data)
    assert manifest.to_bytes() == data
    assert [item.name for item in manifest.layers] == ["a<&é", "config.json"]


def test_a_gguf_manifest_of_ollama_survives() -> None:
    data = (
        '{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json",'
        '"config":{"mediaType":"application/vnd.docker.container.image.v1+json",'
        f'"digest":"{C}","size":485}},"layers":['
        f'{{"mediaType":"application/vnd.ollama.image.model","digest":"{A}","size":4661211808,'
        '"from":"/var/lib/ollama/models/blobs/sha256-aaaa"},'
        f'{{"mediaType":"application/vnd.ollama.image.license","digest":"{A}","size":7020}},'
        f'{{"mediaType":"application/vnd.ollama.image.license","digest":"{B}","size":6922}},'
        f'{{"mediaType":"application/vnd.ollama.image.params","digest":"{B}","size":6922}}]}}\n'
    ).encode()
    manifest = Manifest.from_bytes(data)
    assert manifest.to_bytes() == data
    assert len(manifest.layers_of(media_types.LICENSE)) == 2
    assert manifest.layers[0].from_ == "/var/lib/ollama/models/blobs/sha256-aaaa"


def test_keeps_unknown_fields() -> None:
    manifest = read(layers=[layer(name="a", urls=["x"])], subject={"digest": A}, annotations=None)
    assert manifest.extra == {"subject": {"digest": A}, "annotations": None}
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert b'"urls":["x"]' in manifest.to_bytes()


@pytest.mark.parametrize("value", [None, 1, "x", [], [{}]])
def test_refuses_what_is_no_object(value: Any) -> None:
    with pytest.raises(InvalidManifest, match=r"^\$: expected an object"):
        Manifest.from_bytes(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"schemaVersion": ...}, "$.schemaVersion"),
        ({"schemaVersion": 1}, "$.schemaVersion"),
        ({"schemaVersion": "2"}, "$.schemaVersion"),
        ({"schemaVersion": 2.0}, "$.schemaVersion"),
        ({"schemaVersion": True}, "$.schemaVersion"),
        ({"mediaType": ...}, "$.mediaType"),
        ({"mediaType": None}, "$.mediaType"),
        ({"config": ...}, "$.config"),
        ({"config": None}, "$.config"),
        ({"config": []}, "$.config"),
        ({"config": CONFIG | {"digest": "x"}}, "$.config.digest"),
        ({"config": CONFIG | {"size": -1}}, "$.config.size"),
        ({"layers": ...}, "$.layers"),
        ({"layers": None}, "$.layers"),
        ({"layers": {}}, "$.layers"),
        ({"layers": [layer(), 3]}, "$.layers[1]"),
        ({"layers": [layer(), None]}, "$.layers[1]"),
        ({"layers": [layer(), layer(size=2**63)]}, "$.layers[1].size"),
        ({"layers": [layer(digest="sha256:..")]}, "$.layers[0].digest"),
        ({"layers": [layer(), layer(), layer(name=None)]}, "$.layers[2].name"),
        ({"layers": [layer(mediaType=None)]}, "$.layers[0].mediaType"),
        ({"layers": [layer(**{"from": 7})]}, "$.layers[0].from"),  # type: ignore[arg-type]
    ],
)
def test_an_error_begins_with_the_path_to_the_field(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidManifest) as caught:
        read(**changes)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"\xef\xbb\xbf{}",
        b'{"schemaVersion":2,"schemaVersion":2}',
        b"NaN",
        b'{"x":1e999}',
        b'{"x":"\\ud800"}',
        b"[" * 100_000,
        b'{"schemaVersion":' + b"[" * 100_000,
    ],
)
def test_refuses_what_is_not_strict_json(data: bytes) -> None:
    with pytest.raises(InvalidManifest, match="manifest is not readable as JSON"):
        Manifest.from_bytes(data)


def test_a_value_of_any_depth_is_refused_cleanly() -> None:
    for depth in range(850, 1010):
        text = '{"schemaVersion":' + "[" * depth + "]" * depth + "}"
        with pytest.raises(InvalidManifest):
            Manifest.from_bytes(text.encode())


def test_refuses_a_key_that_occurs_twice_in_a_layer() -> None:
    data = json.dumps(document(layers=[layer()])).replace('"size": 1', '"size": 1, "size": 1')
    with pytest.raises(InvalidManifest, match="key 'size' occurs twice"):
        Manifest.from_bytes(data.encode())


def test_a_manifest_over_the_limit_is_not_parsed() -> None:
    data = json.dumps(document()).encode()
    assert Manifest.from_bytes(data.ljust(MAX_MANIFEST_SIZE)).layers == ()
    # No JSON at all, so that parsing it would give another error.
    with pytest.raises(InvalidManifest, match="manifest of 67108865 bytes is over the limit"):
        Manifest.from_bytes(b"\xff" * (MAX_MANIFEST_SIZE + 1))


def test_refuses_two_layers_of_one_type_and_name() -> None:
    with pytest.raises(InvalidManifest) as caught:
        read(layers=[layer(name="b"), layer(name="a\n"), layer(B, name="a\n")])
    assert str(caught.value) == (
        "$.layers[2].name: 'a\\n' is already the name of $.layers[1], of the same media type"
    )


def test_layers_of_different_types_may_share_a_name() -> None:
    other = layer(mediaType=media_types.JSON, name="a")
    assert len(read(layers=[layer(name="a"), other]).layers) == 2


def test_layers_without_a_name_are_no_duplicates() -> None:
    nameless = layer(mediaType=media_types.LICENSE)
    assert len(read(layers=[nameless, nameless, nameless | {"name": ""}]).layers) == 3


def test_lists_each_blob_once() -> None:
    manifest = read(
        layers=[layer(A, name="a"), layer(B, name="b"), layer(A, name="c"), layer(C, 9)]
    )
    assert [str(item.digest) for item in manifest.blobs] == [C, A, B]


def test_finds_layers_by_type_in_order() -> None:
    manifest = read(layers=[layer(name="b"), layer(mediaType="x", name="x"), layer(B, name="a")])
    assert [item.name for item in manifest.layers_of(media_types.TENSOR)] == ["b", "a"]
    assert manifest.layers_of("y") == ()


def test_a_manifest_is_a_value() -> None:
    config = Descriptor(media_type="c", digest=Digest("0" * 64), size=1)
    assert Manifest(config=config, layers=()) == Manifest(config=config, layers=())


def test_the_config_has_the_keys_that_ollama_s_importer_writes() -> None:
    assert ModelConfig(capabilities=("completion", "vision")).to_bytes() == (
        b'{"model_format":"safetensors","model_family":"","model_families":null,"model_type":"",'
        b'"file_type":"","requires":"0.19.0","capabilities":["completion","vision"],'
        b'"architecture":"","os":""}'
    )
    assert b'"file_type":"int4"' in ModelConfig(file_type="int4").to_bytes()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Text with no lone surrogates, which JSON in UTF-8 cannot hold.
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
UNKNOWN = st.dictionaries(st.text(max_size=5).map("x".__add__), VALUES, max_size=3)


@given(UNKNOWN, UNKNOWN, UNKNOWN)
def test_any_unknown_field_survives_anywhere(
    top: dict[str, Any], config: dict[str, Any], of_layer: dict[str, Any]
) -> None:
    manifest = read(config=CONFIG | config, layers=[layer(), layer(B) | of_layer], **top)
    again = Manifest.from_bytes(manifest.to_bytes())
    for found in (manifest, again):
        assert found.extra == top
        assert found.config.extra == config
        assert [item.extra for item in found.layers] == [{}, of_layer]
    assert again.to_bytes() == manifest.to_bytes()

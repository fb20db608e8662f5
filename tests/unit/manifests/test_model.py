from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.errors import InvalidManifest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor, PlainDescriptors
from blobstore.manifests.layers_digest import layers_digest
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
def test_rejects_values_that_are_not_objects(value: Any) -> None:
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
def test_rejects_invalid_json(data: bytes) -> None:
    with pytest.raises(InvalidManifest, match="manifest is not readable as JSON"):
        Manifest.from_bytes(data)


@pytest.mark.slow
def test_a_value_of_any_depth_is_refused_cleanly() -> None:
    for depth in range(850, 1010):
        text = '{"schemaVersion":' + "[" * depth + "]" * depth + "}"
        with pytest.raises(InvalidManifest):
            Manifest.from_bytes(text.encode())


def test_refuses_a_key_that_occurs_twice_in_a_layer() -> None:
    data = json.dumps(document(layers=[layer()])).replace('"size": 1', '"size": 1, "size": 1')
    with pytest.raises(InvalidManifest, match="key 'size' occurs twice"):
        Manifest.from_bytes(data.encode())


@pytest.mark.slow
def test_a_manifest_over_the_limit_is_not_parsed() -> None:
    data = json.dumps(document()).encode()
    assert Manifest.from_bytes(data.ljust(MAX_MANIFEST_SIZE)).layers == ()
    # No JSON at all, so that parsing it would give another error.
    with pytest.raises(InvalidManifest, match="manifest of 67108865 bytes is over the limit"):
        Manifest.from_bytes(b"\xff" * (MAX_MANIFEST_SIZE + 1))


@pytest.mark.parametrize("name", ["a", "a\n"])
def test_refuses_two_layers_of_one_type_and_name(name: str) -> None:
    layers = [layer(name="b"), layer(name=name), layer(B, name=name)]
    for separators in (None, (",", ":")):
        data = json.dumps(document(layers=layers), separators=separators).encode() + b"\n"
        with pytest.raises(InvalidManifest) as caught:
            Manifest.from_bytes(data)
        assert str(caught.value) == (
            f"$.layers[2].name: {name!r} is already the name of $.layers[1], of the same media type"
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


def test_the_config_has_the_digest_of_the_layers_behind_the_keys_of_ollama() -> None:
    digest = Digest("a" * 64)
    data = ModelConfig(layers_digest=digest).to_bytes()
    assert data == ModelConfig().to_bytes()[:-1] + f',"layers_digest":"{A}"}}'.encode()


def test_the_digest_of_the_layers_is_that_of_the_list_in_the_manifest() -> None:
    manifest = read(layers=[layer(name="a<&é"), layer(B, x=1) | {"from": "y"}])
    data = manifest.to_bytes()
    listed = data[data.index(b"[") : data.rindex(b"]") + 1]
    assert layers_digest(manifest.layers) == Digest.of(listed)
    assert layers_digest(()) == Digest.of(b"[]")


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


@pytest.mark.slow
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


# The short cut for manifests of the plain form


def test_the_short_cut_is_taken_for_what_we_write(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer(name="é {}"), layer(B, 0), layer(C, 10**18 - 1, name="config.json")]
    manifest = read(layers=layers)
    monkeypatch.setattr(strict_json, "loads", lambda _: pytest.fail("parsed as JSON"))
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_manifests_that_are_read_together_share_descriptors() -> None:
    known = PlainDescriptors()
    one = Manifest.from_bytes(read(layers=[layer(), layer(B)]).to_bytes(), known)
    two = Manifest.from_bytes(read(layers=[layer(B), layer(C)]).to_bytes(), known)

    assert one.layers[1] is two.layers[0]
    assert one.config is two.config


@pytest.mark.parametrize("name", ["},{", '"},"layers":[{', "}]}\n"])
def test_a_name_like_the_text_between_layers_is_read(name: str) -> None:
    manifest = read(layers=[layer(name=name), layer(B)])
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def check_short_cut(data: bytes) -> None:
    """Check that the short cut leaves the manifest to the parser or tells the same."""
    quick = Manifest._plain(data, None)
    assert quick is None or quick == Manifest._parse(data)


PIECES = [
    *(b"", b'"', b"\\", b",", b":", b"{", b"}", b"[", b"]", b" ", b"\n", b"\0", b"\x1f", b"\x7f"),
    *(b"\xff", b"\xc3\xa9", b"\xef\xbb\xbf", b"\\u0061", b"\\ud800", b"null", b"true", b"x"),
    *(b"-", b"-0", b"0", b"00", b"2", b"2.0", b"1e3", b"9" * 18, b"9" * 19, b"\xd9\xa1"),
    *(b"a" * 63, b"A" * 64, b"sha512", b',"name":""', b',"from":"x"', b',"x":[]', b',"size":1'),
]


def tokens(manifest: Manifest) -> list[bytes]:
    return re.findall(rb"\w+|\W", manifest.to_bytes())


@pytest.mark.slow
def test_no_change_of_a_token_gets_past_the_parser_by_the_short_cut() -> None:
    whole = tokens(read(layers=[layer(name="a"), layer(B)]))
    for place in range(len(whole) + 1):
        for piece in PIECES:
            for end in (place, place + 1):
                check_short_cut(b"".join([*whole[:place], piece, *whole[end:]]))


DESCRIPTORS = st.builds(
    Descriptor,
    st.sampled_from([media_types.TENSOR, media_types.JSON, ""]),
    st.sampled_from([Digest(letter * 64) for letter in "abc"]),
    st.sampled_from([0, 1, 10**18 - 1, 10**18, 2**63 - 1, 2**63]),
    st.sampled_from(["", "a", "a.weight"]) | st.text(max_size=3),
)


@pytest.mark.slow
@given(DESCRIPTORS, st.lists(DESCRIPTORS, max_size=3), st.data())
def test_no_change_of_some_tokens_gets_past_the_parser_by_the_short_cut(
    config: Descriptor, layers: list[Descriptor], data: st.DataObject
) -> None:
    changed = tokens(Manifest(config=config, layers=tuple(layers)))
    places = st.integers(0, len(changed))
    for _ in range(data.draw(st.integers(0, 2))):
        start, source = data.draw(places), data.draw(places)
        end, source_end = (place + data.draw(st.integers(0, 3)) for place in (start, source))
        pieces = st.lists(st.sampled_from(PIECES), max_size=1)
        changed[start:end] = data.draw(st.just(changed[source:source_end]) | pieces)
    check_short_cut(b"".join(changed))

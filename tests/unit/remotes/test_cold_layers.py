"""Lists of cold layers as anyone may write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core.digest import BlobId, Digest
from blobstore.remotes.cold_layers import ColdLayer, format_cold_layers, parse_cold_layers
from tests.support.samples import samples

LAYER = ColdLayer(
    stored=BlobId(Digest.of(b"cold"), 4), blob=BlobId(Digest.of(b"hot"), 30), base=None
)
DELTA = ColdLayer(
    stored=BlobId(Digest.of(b"delta"), 5),
    blob=BlobId(Digest.of(b"tuned"), 31),
    base=BlobId(Digest.of(b"hot"), 30),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def test_a_list_comes_back() -> None:
    layers = {layer.blob.digest: layer for layer in (LAYER, DELTA)}
    assert parse_cold_layers(format_cold_layers(layers.values())) == layers


@given(st.binary(max_size=200))
@settings(max_examples=samples(400), deadline=None)
def test_bytes_of_another_form_are_no_list(data: bytes) -> None:
    assert parse_cold_layers(data) == {}


@pytest.mark.slow
@given(st.data(), VALUES)
@settings(max_examples=samples(2000), deadline=None)
def test_an_entry_with_any_other_value_is_left_out_or_well_formed(
    data: st.DataObject, value: Any
) -> None:
    entry = DELTA.to_json()
    place = data.draw(st.sampled_from([entry, entry["annotations"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = value
    found = parse_cold_layers(json.dumps([LAYER.to_json(), entry]).encode())
    assert found.get(LAYER.blob.digest) == LAYER or not found  # not strict JSON, as a whole
    for digest, layer in found.items():
        assert layer.blob.digest == digest
        assert 0 < layer.stored.size < layer.blob.size
        assert ColdLayer.from_json(layer.to_json()) == layer

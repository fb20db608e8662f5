"""The golden vectors of docs/reference/format.md for blocks of GGUF, computed by ``tests.readers.gguf_blocks``."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from blobstore.gguf.dequantize import DEQUANTIZED, dequantize
from tests.readers.gguf_blocks import RULES, grid_of_peer, read_blocks, vectors

VECTORS = {
    vector["type"]: vector
    for vector in json.loads((Path(__file__).parents[2] / "vectors" / "gguf.json").read_text())
}
PEERS = sorted(kind.name for kind in gguf.quants._type_traits if kind.name != "BF16")


def blocks(name: str) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.frombuffer(bytes.fromhex(VECTORS[name]["blocks"]), np.uint8)[None]


def test_every_type_has_a_vector() -> None:
    assert set(VECTORS) == set(RULES) == DEQUANTIZED
    assert list(VECTORS.values()) == list(vectors())


@pytest.mark.parametrize("name", sorted(VECTORS))
def test_blocks_have_the_bits_of_the_vector(name: str) -> None:
    assert dequantize(name, blocks(name)).tobytes().hex() == VECTORS[name]["plain"]


@pytest.mark.parametrize("name", PEERS)
def test_the_peer_finds_the_bits_of_the_vector(name: str) -> None:
    found = gguf.dequantize(blocks(name), gguf.GGMLQuantizationType[name])
    assert found.tobytes().hex() == VECTORS[name]["plain"]


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_second_reader_agrees_on_any_bytes(name: str) -> None:
    weights, size, _ = RULES[name]
    data = np.random.default_rng(5).integers(0, 256, (2048 // weights, size), np.uint8)
    found = np.frombuffer(read_blocks(name, data.tobytes(), grid_of_peer(name)), "<f4")
    expected = dequantize(name, data.reshape(1, -1))[0]
    numbers = ~np.isnan(expected)
    assert numbers.any()
    np.testing.assert_array_equal(np.isnan(found), ~numbers)
    np.testing.assert_array_equal(found[numbers].view("<u4"), expected[numbers].view("<u4"))

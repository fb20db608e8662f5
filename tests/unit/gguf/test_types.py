from __future__ import annotations

import gguf
import pytest

from blobstore.gguf.types import TYPES

OTHERWISE = {
    9: "the peer counts its two halves as floats",
    41: "newer than the peer",
    42: "newer than the peer",
}


@pytest.mark.parametrize("number", TYPES)
def test_sizes_are_those_of_the_peer(number: int) -> None:
    if number in OTHERWISE and number not in set(gguf.GGMLQuantizationType):
        return
    kind = TYPES[number]
    peer = gguf.GGMLQuantizationType(number)
    assert peer.name == kind.name
    if number not in OTHERWISE:
        assert gguf.GGML_QUANT_SIZES[peer] == (kind.weights, kind.size)


def test_bits_count_scales() -> None:
    assert TYPES[12].bits == 4.5

from __future__ import annotations

import numpy as np
import pytest

from blobstore.compression.base import BaseBlob
from blobstore.compression.coded_blocks import CodedBlocks
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.compression.delta.codec import FAST
from blobstore.compression.quant_rule import QuantRule
from blobstore.compression.spans import Span
from blobstore.core.tensor import DType
from tests.readers.cold_blobs import read_cold
from tests.support.cold import cold, decoded, weights
from tests.support.ladders import CODED, coded_blocks, kind_of

SOURCE = weights(DType.BF16, 1 << 16)
WEIGHTS = np.frombuffer(SOURCE, "<u2")


def blocks_of(name: str) -> bytes:
    return coded_blocks(name, WEIGHTS[None]).tobytes()


def encoded(name: str, data: bytes) -> bytes:
    rule = QuantRule(name, DType.BF16, keeps_scales=True)
    span = Span(len(data), DType.U8, base_begin=0, rule=rule, blocks=kind_of(name))
    return cold(data, spans=[span], base=BaseBlob.hot(SOURCE))


@pytest.mark.parametrize("name", CODED)
def test_blocks_come_back_from_their_scales_and_weights(name: str) -> None:
    data = blocks_of(name)
    stored = encoded(name, data)
    decoder = ColdBlobDecoder(stored)
    decoder.give_base(BaseBlob.hot(SOURCE))
    assert decoded(decoder) == data
    part = bytearray(999)
    decoder.read_into(part, len(data) // 2)
    assert part == data[len(data) // 2 :][:999]
    rule = QuantRule(name, DType.BF16, keeps_scales=True)
    kept = len(data) // rule.kind.size * rule.kept
    assert len(stored) < kept + 300


@pytest.mark.parametrize("name", ["Q3_K", "Q4_K", "IQ4_NL"])
def test_codes_that_do_not_follow_are_listed(name: str) -> None:
    data = bytearray(blocks_of(name))
    data[50::1000] = bytes(byte ^ 1 for byte in data[50::1000])
    stored = encoded(name, bytes(data))
    assert len(encoded(name, blocks_of(name))) < len(stored) < len(data) / 5
    assert read_cold(stored, SOURCE) == data


def test_blocks_of_other_weights_are_compressed_alone() -> None:
    other = np.frombuffer(weights(DType.BF16, 1 << 16, seed=1), "<u2")
    stored = encoded("Q6_K", coded_blocks("Q6_K", other[None]).tobytes())
    assert ColdBlobDecoder(stored).table.base is None


def test_only_whole_blocks_with_weights_have_planes() -> None:
    blocks = CodedBlocks(kind_of("Q4_K"), FAST)
    assert blocks.sizes(288) == (2, 2, 2, 2, 8, 8, 8, -288)
    assert blocks.sizes(287) == ()
    assert blocks.encode(np.zeros(144, np.uint8), None) is None
    assert blocks.encode(np.zeros(143, np.uint8), WEIGHTS[:256]) is None

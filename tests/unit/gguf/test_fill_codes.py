from __future__ import annotations

import struct

import numpy as np
import pytest

from blobstore.compression.quant_rule import QuantRule
from blobstore.core.tensor import DType
from blobstore.gguf.dequantize import dequantize
from blobstore.gguf.fill_codes import CODED, codes_of, fill_codes
from blobstore.gguf.types import TYPES
from tests.readers.coded import fill_blocks
from tests.support.cold import noise, weights
from tests.support.ladders import as_float32, coded_blocks, kind_of

SOURCES = {DType.F32: "<f4", DType.F16: "<f2", DType.BF16: "<u2"}
NAMES = sorted(CODED)


def filled_by_reader(name: str, dtype: DType, data: bytes, blocks: bytes) -> bytes:
    """Return what the second reader makes of blocks, of which it gets the scales."""
    kind, codes = kind_of(name), codes_of(name)
    rows = np.frombuffer(blocks, np.uint8).reshape(-1, kind.size)
    kept = [at for at in range(kind.size) if at not in codes]
    rule = QuantRule(name, dtype, keeps_scales=True)
    planes, at = [], 0
    for size in _fields(name):
        planes.append(rows[:, kept[at : at + size]].tobytes())
        at += size
    return fill_blocks(rule.pack(), data, planes, 0, len(blocks))


def _fields(name: str) -> tuple[int, ...]:
    from tests.readers.coded import _TYPES

    number = next(number for number, kind in TYPES.items() if kind.name == name)
    _, _, _, before, behind = _TYPES[number]
    return (*before, *behind)


@pytest.mark.parametrize("dtype", SOURCES, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("name", NAMES)
def test_a_second_reader_computes_the_same_codes(name: str, dtype: DType) -> None:
    kind = kind_of(name)
    data = weights(dtype, 6 * kind.weights, seed=1)
    blocks = coded_blocks(name, np.frombuffer(data, SOURCES[dtype])[None]).reshape(-1, kind.size)
    blocks = np.concatenate([blocks, blocks])
    blocks[6:] = np.frombuffer(noise(6 * kind.size, 2), np.uint8).reshape(6, -1)
    data *= 2
    fill_codes(name, np.frombuffer(data, SOURCES[dtype]), blocks)
    assert filled_by_reader(name, dtype, data, blocks.tobytes()) == blocks.tobytes()


@pytest.mark.parametrize("scale", [0, 0x8000, 1, 0x7C00, 0xFC00, 0x7E01, 0xFFFF], ids=hex)
@pytest.mark.parametrize("name", NAMES)
def test_any_scales_and_weights_have_codes(name: str, scale: int) -> None:
    kind = kind_of(name)
    ends = [0.0, -0.0, 1e-45, -3e38, float("inf"), -float("inf"), float("nan"), 1.0]
    data = struct.pack("<8f", *ends) * (kind.weights // 8)
    blocks = np.full((1, kind.size), 255, np.uint8)
    half = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(name, 0)
    blocks[:, half : half + 2] = np.frombuffer(struct.pack("<H", scale), np.uint8)
    fill_codes(name, np.frombuffer(data, "<f4"), blocks)
    assert filled_by_reader(name, DType.F32, data, blocks.tobytes()) == blocks.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_codes_stand_for_the_nearest_numbers(name: str) -> None:
    matrix = np.frombuffer(weights(DType.F32, 4096), "<f4").reshape(4, -1)
    blocks = coded_blocks(name, matrix)
    distance = np.abs(dequantize(name, blocks) - matrix).max()
    for change in (1, 255):
        other = blocks.reshape(-1, kind_of(name).size).copy()
        other[:, codes_of(name)] += np.uint8(change)
        found = dequantize(name, other.reshape(blocks.shape))
        assert np.square(found - matrix).sum() > np.square(dequantize(name, blocks) - matrix).sum()
    assert distance < np.abs(as_float32(matrix)).max() / 2


@pytest.mark.parametrize("name", NAMES)
def test_codes_do_not_depend_on_the_blocks_around(name: str) -> None:
    kind = kind_of(name)
    source = np.frombuffer(weights(DType.BF16, 1 << 17), "<u2")
    blocks = coded_blocks(name, source[None]).reshape(-1, kind.size)
    part = blocks[3:70].copy()
    part[:, codes_of(name)] = 0
    fill_codes(name, source[3 * kind.weights : 70 * kind.weights], part)
    assert part.tobytes() == blocks[3:70].tobytes()

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from blobstore.errors import UnsupportedDType, UsageError
from blobstore.gguf.dequantize import DEQUANTIZED, dequantize
from blobstore.gguf.iq_grids import grid
from blobstore.gguf.types import TYPES

Array = np.ndarray[Any, Any]
KINDS = {kind.name: kind for kind in TYPES.values()}
PEERS = sorted(DEQUANTIZED & {kind.name for kind in gguf.quants._type_traits})
SPECIAL_HALVES = [0, 1, 0x3FF, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF]
GRIDS = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]


def random_blocks(name: str, count: int) -> Array:
    return np.random.default_rng(7).integers(0, 256, (count, KINDS[name].size), np.uint8)


def peer(name: str, blocks: Array) -> Array:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])


def assert_same_bits(found: Array, expected: Array) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_all_quantized_types_are_decoded() -> None:
    activations = {"Q8_1", "Q8_K"}
    assert {kind.name for kind in TYPES.values() if kind.weights > 1} - activations == DEQUANTIZED


@pytest.mark.parametrize("name", PEERS)
def test_random_bytes_have_the_bits_of_the_peer(name: str) -> None:
    blocks = random_blocks(name, 3000)
    assert_same_bits(dequantize(name, blocks), peer(name, blocks))


@pytest.mark.parametrize("name", PEERS)
def test_special_halves_at_every_place_have_the_bits_of_the_peer(name: str) -> None:
    size = KINDS[name].size
    halves = [half | sign for half in SPECIAL_HALVES for sign in (0, 0x8000)]
    blocks: Array = random_blocks(name, len(halves) * (size - 1))
    blocks = blocks.reshape(len(halves), size - 1, size)
    for row, half in zip(blocks, halves, strict=True):
        for at, block in enumerate(row):
            block[at : at + 2] = half & 255, half >> 8
    blocks = np.reshape(blocks, (-1, size))
    assert_same_bits(dequantize(name, blocks), peer(name, blocks))


@pytest.mark.parametrize("name", ["Q1_0", "Q2_0"])
def test_types_newer_than_the_peer_follow_their_text(name: str) -> None:
    blocks = random_blocks(name, 300)
    bits = 1 if name == "Q1_0" else 2
    per_byte = 8 // bits
    values = (-1, 1) if bits == 1 else (-1, 0, 1, 2)
    scales = blocks[:, :2].copy().view("<f2").astype(np.float32)[:, 0]
    expected = np.empty((300, KINDS[name].weights), np.float32)
    with np.errstate(all="ignore"):
        for (row, j), _ in np.ndenumerate(expected):
            byte = int(blocks[row, 2 + j // per_byte])
            code = byte >> bits * (j % per_byte) & (1 << bits) - 1
            expected[row, j] = scales[row] * np.float32(values[code])
    assert_same_bits(dequantize(name, blocks), expected)


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_those_of_the_peer(name: str) -> None:
    traits = gguf.quants._type_traits[gguf.GGMLQuantizationType[name]]
    traits.init_grid()
    assert traits.grid is not None
    np.testing.assert_array_equal(grid(name), traits.grid.reshape(traits.grid_shape))


@pytest.mark.parametrize("name", sorted(DEQUANTIZED))
def test_rows_are_decoded_into_parts_of_an_array(name: str) -> None:
    kind = KINDS[name]
    blocks = random_blocks(name, 24).reshape(2, 3, 4 * kind.size)
    whole = dequantize(name, blocks)
    assert whole.shape == (2, 3, 4 * kind.weights)
    out = np.zeros_like(whole)
    for row in (0, 1):
        part = out[row]
        assert dequantize(name, blocks[row], part) is part
    assert_same_bits(out, whole)
    assert_same_bits(dequantize(name, blocks[:, ::2]), np.ascontiguousarray(whole[:, ::2]))
    assert dequantize(name, blocks[:0]).shape == (0, 3, 4 * kind.weights)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K"])
def test_large_tensors_have_the_same_bits(name: str) -> None:
    kind = KINDS[name]
    rows = np.resize(
        random_blocks(name, 80), (4500, 4 * kind.size)
    )  # more than one job, not all full
    whole = dequantize(name, rows := np.tile(rows, (1, 1024 // kind.weights)))
    for start in range(0, 4500, 500):
        assert_same_bits(whole[start : start + 500], dequantize(name, rows[start : start + 500]))


def test_wrong_arguments_are_refused() -> None:
    blocks = np.zeros((2, 36), np.uint8)
    with pytest.raises(UnsupportedDType, match="'Q9' are not dequantized; expected one of IQ1_M"):
        dequantize("Q9", blocks)
    for wrong in (blocks[:, :35], blocks.view(np.int8), np.zeros((), np.uint8)):
        with pytest.raises(UsageError, match="rows of a multiple of 18 bytes"):
            dequantize("Q4_0", wrong)
    for out in (np.zeros((2, 32), np.float32), np.zeros((2, 64)), np.zeros((64, 2), "f4").T):
        with pytest.raises(UsageError, match=r"contiguous float32 \[2, 64\]"):
            dequantize("Q4_0", blocks, out)


def test_a_single_block_more_than_the_jobs_have_is_decoded() -> None:
    kind = KINDS["Q8_0"]
    blocks = np.zeros(((1 << 20) // kind.weights + 1, kind.size), np.uint8)
    blocks[-1] = random_blocks("Q8_0", 1)
    assert_same_bits(dequantize("Q8_0", blocks)[-1], dequantize("Q8_0", blocks[-1]))

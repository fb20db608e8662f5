from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from blobstore.errors import UnsupportedDType, UsageError
from blobstore.gguf.quantize import QUANTIZED, quantize
from blobstore.gguf.types import TYPES

Array = np.ndarray[Any, Any]
KINDS = {kind.name: kind for kind in TYPES.values()}
TYPE_NAMES = sorted(QUANTIZED)


def peer(name: str, weights: Array) -> Array:
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])


def normal(rows: int, columns: int) -> Array:
    generator = np.random.default_rng(3)
    scales = np.exp2(generator.integers(-20, 8, (rows, 1)))
    return (generator.standard_normal((rows, columns)) * scales).astype(np.float32)


def as_bf16(weights: Array) -> Array:
    """Return the upper halves of float32, which are bfloat16."""
    return (weights.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_float32_has_the_bytes_of_the_peer(name: str) -> None:
    weights = normal(300, 1024)
    np.testing.assert_array_equal(quantize(name, weights), peer(name, weights))


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_bfloat16_with_its_many_ties_has_the_bytes_of_the_peer(name: str) -> None:
    bits = as_bf16(normal(300, 1024))
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(quantize(name, bits), peer(name, wide))


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_float16_has_the_bytes_of_the_peer(name: str) -> None:
    weights = normal(300, 1024).astype(np.float16)
    np.testing.assert_array_equal(quantize(name, weights), peer(name, weights.astype(np.float32)))


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_integers_and_halves_have_the_bytes_of_the_peer(name: str) -> None:
    # Weights whose scaled values lie on the borders of codes.
    generator = np.random.default_rng(5)
    for peak in (1, 2, 8, 12, 15, 16, 31, 127, 1000):
        weights = generator.integers(-2 * peak, 2 * peak + 1, (64, 1024)).astype(np.float32) / 2
        np.testing.assert_array_equal(quantize(name, weights), peer(name, weights))


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_blocks_of_one_value_and_of_zeros_have_the_bytes_of_the_peer(name: str) -> None:
    values = np.array([0, 1, -1, 2.0**-14, -(2.0**-30), 70000, 3e38 / 16], np.float32)
    weights = np.repeat(values[:, None], 256, 1)
    np.testing.assert_array_equal(quantize(name, weights), peer(name, weights))


@pytest.mark.parametrize("name", ["Q8_0", "TQ1_0", "TQ2_0"])
def test_halves_are_rounded_away_from_zero_and_what_is_below_a_half_is_not(name: str) -> None:
    most = 127 if name == "Q8_0" else 1
    halves = np.arange(-most, most, dtype=np.float32) + np.float32(0.5)
    near = np.concatenate([halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, 1e9)])
    weights = np.zeros((len(near), 256), np.float32)
    weights[:, ::32], weights[:, 1::32] = most, near[:, None]
    np.testing.assert_array_equal(quantize(name, weights), peer(name, weights))


def test_powers_of_two_are_scales_of_mxfp4_and_so_is_what_rounds_to_them() -> None:
    powers = np.exp2(np.arange(-60, 60)).astype(np.float32)
    weights = np.zeros((3 * len(powers), 32), np.float32)
    weights[:, 5] = np.concatenate(
        [powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))]
    )
    np.testing.assert_array_equal(quantize("MXFP4", weights), peer("MXFP4", weights))


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_of_zeros_with_two_signs_the_first_one_counts(name: str) -> None:
    weights = np.zeros((4, 256), np.float32)
    weights[:2, ::64] = [[1], [-1]]  # the least or the largest element is a zero
    weights[2, 3:] = -0.0
    weights[3, :] = 0.5
    weights[3, 100:110], weights[3, 110:120] = -0.0, 0.0
    found = quantize(name, weights)
    for row, blocks in zip(weights, found, strict=True):
        if name in {"Q4_1", "Q5_1"}:
            parts = row.reshape(-1, 32)
            minima = blocks.reshape(len(parts), -1)[:, 2:4].copy().view("<f2")[:, 0]
            least = parts[np.arange(len(parts)), parts.argmin(1)]
            np.testing.assert_array_equal(minima.view(np.uint16), least.astype("<f2").view("u2"))
    # The reference has no first zero where a block is zeros: the largest element stays 0.
    if name in {"Q4_0", "Q5_0"}:
        assert set(found[2].reshape(8, -1)[:, 1].tolist()) == {0x80}


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_blocks_beyond_the_range_are_quantized_as_zeros(name: str) -> None:
    strange = [np.nan, np.inf, -np.inf, 2.0**126, -(2.0**127), 2.0**-97, -(2.0**-149)]
    weights = np.zeros((len(strange), 256), np.float32)
    weights[:, ::32] = np.array(strange)[:, None]
    zeros = np.zeros_like(weights)
    np.testing.assert_array_equal(quantize(name, weights), quantize(name, zeros))
    mixed = normal(1, 512)
    expected = quantize(name, mixed)
    mixed[0, -1] = np.nan
    size = KINDS[name].size
    np.testing.assert_array_equal(quantize(name, mixed)[0, :-size], expected[0, :-size])


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_rows_are_quantized_into_parts_of_an_array(name: str) -> None:
    weights = normal(6, 1024).reshape(2, 3, 1024)
    whole = quantize(name, weights)
    assert whole.shape == (2, 3, 1024 // KINDS[name].weights * KINDS[name].size)
    out = np.zeros_like(whole)
    for row in (0, 1):
        part = out[row]
        assert quantize(name, weights[row], part) is part
    np.testing.assert_array_equal(out, whole)
    assert quantize(name, weights[:0]).shape == (0, *whole.shape[1:])


def test_more_weights_than_a_piece_are_all_quantized() -> None:
    weights = normal(150, 1024)
    np.testing.assert_array_equal(quantize("Q4_0", weights), peer("Q4_0", weights))


def test_wrong_arguments_are_refused() -> None:
    weights = np.zeros((2, 64), np.float32)
    with pytest.raises(UnsupportedDType, match="to type 'Q4_K'; expected one of MXFP4"):
        quantize("Q4_K", weights)
    square = np.zeros((64, 64), np.float32).T
    for wrong in (weights[:, :63], weights.astype("f8"), square, np.zeros((), np.float32)):
        with pytest.raises(UsageError, match="rows of a multiple of 32"):
            quantize("Q4_0", wrong)
    for out in (np.zeros((2, 18), "u1"), np.zeros((2, 36), "i1"), np.zeros((36, 2), "u1").T):
        with pytest.raises(UsageError, match=r"contiguous uint8 \[2, 36\]"):
            quantize("Q4_0", weights, out)
